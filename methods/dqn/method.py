"""A deep Q-network that manages memory, after the abstract of "GPU Memory Management for Deep Neural Networks Using Deep Q-Network".

Only the abstract of that withdrawn submission (ICLR 2020, OpenReview BJxg7eHYvB) is public: variables are swapped to the host, feature
maps are dropped and computed again, and a deep Q-network plans which is treated how. State, actions, reward and network are ours:

    environment.py   one step as an environment: reset, step, observation, action mask
    play.py          the step itself, stopping where a decision is due
    observation.py   candidates, and what the network sees of each action
    network.py       the Q-network: message passing over the tape, then a score an action
    training.py      double DQN with replay (torch)
    agent-*.json     trained agents, with how each came about

To plan, the agent plays the step `episodes` times. The first play is the network's own; every other is that of a variant: noise
is added to the weights of the linear path with which the fastest play so far was made (noise on parameters explores more consistently
than noise on actions; Plappert et al., ICLR 2018). The fastest play wins.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np

from vramlab.check import CheckedSchedule, check_schedule
from vramlab.device import DeviceProfile
from vramlab.errors import Unsupported
from vramlab.layers import check_needs
from vramlab.planner import Budget
from vramlab.rollout import refusal
from vramlab.schedule import Schedule
from vramlab.simulate import simulate
from vramlab.tape import Tape

from .environment import Freedom, MemoryEnvironment
from .network import Network, Scorer, fresh_weights
from .observation import Observation

UID = "ab404c5fe0dd6719"
NEEDS = ("timings",)
HERE = Path(__file__).parent
FREEDOMS = {"both": Freedom(), "swap-only": Freedom(drops=False), "recompute-only": Freedom(swaps=False)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """As card.yaml declares them."""

    agent: str = "graph"
    weights: str | None = None
    actions: str = "both"
    episodes: int = 8
    sigma: float = 0.7
    epsilon: float = 0.0
    seed: int = 0


class Agent:
    """Picks actions: the best by the network, now and then the second best; or any, where the agent is random."""

    def __init__(self, scorer: Scorer | None, epsilon: float, random: np.random.Generator) -> None:
        self.scorer, self.epsilon, self.random = scorer, epsilon, random

    def act(self, observation: Observation) -> int:
        """One of the possible actions."""
        possible = np.flatnonzero(observation.mask)
        if self.scorer is None:
            return int(self.random.choice(possible))
        order = np.argsort(-self.scorer.q(observation.features[possible], observation.storages[possible]), kind="stable")
        second = len(possible) > 1 and self.epsilon > 0 and self.random.random() < self.epsilon
        return int(possible[order[1 if second else 0]])


@dataclass(frozen=True, slots=True)
class DqnPlanner:
    """Plays the step with the agent."""

    options: Options

    def plan(self, tape: Tape, device: DeviceProfile, budget: Budget) -> Schedule:
        """The fastest of the plays. PlanInfeasible where none keeps the budget, Unsupported where the tape has no op times."""
        check_needs(tape, NEEDS, "dqn")
        environment = MemoryEnvironment(tape, device, FREEDOMS[self.options.actions])
        best, best_seconds, stuck_op = None, float("inf"), 0
        fastest: Scorer | None = None
        plain_seconds = sum(op.seconds for op in tape.ops)
        for episode in range(self.options.episodes):
            agent = self._agent(environment, episode, fastest)
            checked = self._play(environment, budget, agent)
            if checked is None:
                stuck_op = environment.stuck_op
            else:
                seconds = simulate(checked, device).metrics.step_seconds
                if seconds < best_seconds:
                    best, best_seconds, fastest = checked, seconds, agent.scorer
            if environment.decisions == 0 or best_seconds <= plain_seconds * (1 + 1e-12):
                break  # every play is the same, or none can be faster
        if best is not None:
            return best.schedule
        # A budget counts as reached when the first play keeps it.
        raise refusal(lambda at: self._play(environment, at, self._agent(environment, 0)), tape, budget, "dqn", stuck_op)

    def _play(self, environment: MemoryEnvironment, budget: Budget, agent: Agent) -> CheckedSchedule | None:
        """One step; None where it got stuck."""
        observation, _ = environment.reset(budget)
        while observation is not None:
            observation, *_ = environment.step(agent.act(observation))
        return None if environment.is_stuck else check_schedule(environment.tape, environment.schedule(UID), budget)

    def _agent(self, environment: MemoryEnvironment, episode: int, fastest: Scorer | None = None) -> Agent:
        """The first is the network itself; the others are varied from the fastest so far."""
        random = np.random.default_rng([self.options.seed, episode])
        if self.options.agent == "random":
            return Agent(None, 1.0, random)
        scorer = self._scorer(environment)
        if episode == 0:
            return Agent(scorer, 0.0, random)
        return Agent((fastest or scorer).varied(self.options.sigma, random), self.options.epsilon, random)

    def _scorer(self, environment: MemoryEnvironment) -> Scorer:
        """The network on this tape and device, made once for all plays."""
        if environment.scorer is None:
            network = load_network(self.options.agent, self.options.weights, environment.tape.digest, self.options.seed)
            environment.scorer = network.for_episode(environment.tape, environment.device, environment.peak_bytes)
        return environment.scorer


@cache
def load_network(agent: str, weights: str | None, digest: str, seed: int) -> Network:
    """The network that the options name. `weights` is a file, or a folder with one a tape, named by its digest.

    Unsupported where it holds none.
    """
    if agent == "untrained":
        return Network("graph", fresh_weights("graph", seed), {})
    if weights is None:
        return Network.load(HERE / f"agent-{agent}.json")
    path = Path(weights).expanduser()
    path = path / f"{digest}.json" if path.is_dir() else path
    if not path.is_file():
        raise Unsupported(f"method 'dqn': there are no weights at {path}; train them with the command `train dqn`")
    try:
        return Network.load(path)
    except (ValueError, KeyError, TypeError, AttributeError) as wrong:  # JSON of another kind, or none
        raise Unsupported(f"method 'dqn': {path} holds no weights: {wrong}") from wrong


def training() -> ModuleType:
    """How agents are trained; needs torch when it is used."""
    from . import training as module

    return module


def build(**options: object) -> DqnPlanner:
    """The planner for these options."""
    return DqnPlanner(Options(**options))
