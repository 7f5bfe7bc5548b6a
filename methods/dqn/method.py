"""A deep Q-network that manages memory, after the abstract of "GPU Memory Management for Deep Neural Networks Using Deep Q-Network".

Only the abstract of that withdrawn submission (ICLR 2020, OpenReview BJxg7eHYvB) is public: variables are swapped to the host, feature
maps are dropped and computed again, and a deep Q-network plans which is treated how. State, actions, reward and network are ours:

    environment.py   one step as an environment: reset, step, observation, action mask
    play.py          the step itself, stopping where a decision is due
    observation.py   candidates, and what the network sees of each action
    network.py       the Q-network: message passing over the tape, then a score an action
    algorithms.py    convolution algorithms: by a price of memory before a play, the fastest that fit after it
    training.py      double DQN with replay (torch)
    agent-*.json     trained agents, with how each came about

To plan, the agent plays the step `episodes` times. The first play is the network's own; every other is that of a variant: noise
is added to the weights of the linear path with which the fastest play so far was made (noise on parameters explores more consistently
than noise on actions; Plappert et al., ICLR 2018). Then the variant of the fastest play plays the step by other convolution algorithms,
those that are cheapest at a few prices of memory. The fastest play wins.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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

from .algorithms import Algorithms, at_price, least_seconds, named, of_library, played_by, with_fastest
from .environment import Freedom, MemoryEnvironment
from .network import Network, Scorer, fresh_weights, step_digest
from .observation import Observation

UID = "ab404c5fe0dd6719"
NEEDS = ("timings", "variants")
HERE = Path(__file__).parent
# The observation's estimate of what a byte costs is rough: algorithms are chosen by it, by less and by more.
PRICES = (0.25, 1.0, 4.0)
FREEDOMS = {"both": Freedom(), "swap-only": Freedom(drops=False), "recompute-only": Freedom(swaps=False)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """As card.yaml declares them."""

    agent: str = "graph"
    weights: str | None = None
    actions: str = "both"
    algorithms: str = "fastest"
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
class Stage:
    """A step as it is played: by these algorithms, as if they were the library's. What is played is a schedule of `tape`."""

    tape: Tape
    algorithms: Algorithms
    environment: MemoryEnvironment

    @classmethod
    def of(cls, tape: Tape, device: DeviceProfile, freedom: Freedom, algorithms: Algorithms) -> Stage:
        """The same tape where the algorithms are the library's."""
        played = tape if algorithms == of_library(tape) else played_by(tape, algorithms)
        return cls(tape, algorithms, MemoryEnvironment(played, device, freedom))


@dataclass(frozen=True, slots=True)
class Found:
    """A play, its simulated step, and the network that played it; none where the agent is random."""

    checked: CheckedSchedule
    device: DeviceProfile
    seconds: float
    scorer: Scorer | None

    @classmethod
    def of(cls, checked: CheckedSchedule, device: DeviceProfile, scorer: Scorer | None) -> Found:
        """Simulated."""
        return cls(checked, device, simulate(checked, device).metrics.step_seconds, scorer)


def _faster(one: Found | None, other: Found) -> Found:
    return other if one is None or other.seconds < one.seconds else one


@dataclass(frozen=True, slots=True)
class DqnPlanner:
    """Plays the step with the agent."""

    options: Options

    def plan(self, tape: Tape, device: DeviceProfile, budget: Budget) -> Schedule:
        """The fastest of the plays. PlanInfeasible where none keeps the budget, Unsupported where the tape has no op times."""
        check_needs(tape, NEEDS, "dqn")
        stage = Stage.of(tape, device, FREEDOMS[self.options.actions], of_library(tape))
        found = [self._search(stage, budget)]
        if self._chooses(tape) and not self._is_least(found[0], tape):
            found += self._at_prices(stage, budget, found[0])
        best = min([play for play in found if play], key=lambda play: play.seconds, default=None)
        if best is not None:
            return best.checked.schedule
        # A budget counts as reached when the first play by the library's algorithms keeps it.
        raise refusal(lambda at: self._first_play(stage, at), tape, budget, "dqn", stage.environment.stuck_op)

    def _first_play(self, stage: Stage, budget: Budget) -> CheckedSchedule | None:
        play = self._play(stage, budget, self._agent(stage.environment, 0))
        return None if play is None else play.checked

    def _search(self, stage: Stage, budget: Budget) -> Found | None:
        """The fastest of all episodes, by the algorithms that fit then; None where all got stuck."""
        best, varied, varied_seconds = None, None, float("inf")
        for episode in range(self.options.episodes):
            play = self._play(stage, budget, self._agent(stage.environment, episode, varied))
            if play is not None:
                if play.seconds < varied_seconds:
                    varied, varied_seconds = play.scorer, play.seconds
                best = _faster(best, self._by_algorithms(play, budget))
            if stage.environment.decisions == 0 or self._is_least(best, stage.tape):
                break  # every play is the same, or none can be faster
        return best

    def _at_prices(self, library: Stage, budget: Budget, found: Found | None) -> list[Found]:
        """A play at each price of memory, with the network as it was in the fastest play. The price is that of the observation."""
        tape, environment = library.tape, library.environment
        prices = [multiple * environment.observer.price for multiple in PRICES]
        others = dict.fromkeys(algorithms for price in prices if (algorithms := at_price(tape, price)) != library.algorithms)
        stages = [Stage.of(tape, environment.device, environment.freedom, algorithms) for algorithms in others]
        plays = [self._play(stage, budget, self._agent_like(found, stage.environment)) for stage in stages]
        return [self._by_algorithms(play, budget) for play in plays if play is not None]

    def _by_algorithms(self, play: Found, budget: Budget) -> Found:
        """With those that there is room for."""
        if not self._chooses(play.checked.tape):
            return play
        return Found.of(with_fastest(play.checked, budget), play.device, play.scorer)

    def _chooses(self, tape: Tape) -> bool:
        return self.options.algorithms == "fastest" and any(op.variants for op in tape.ops)

    def _is_least(self, play: Found | None, tape: Tape) -> bool:
        """Can no schedule be faster?"""
        least = least_seconds(tape) if self._chooses(tape) else sum(op.seconds for op in tape.ops)
        return play is not None and play.seconds <= least * (1 + 1e-12)

    def _play(self, stage: Stage, budget: Budget, agent: Agent) -> Found | None:
        """One step; None where it got stuck."""
        environment = stage.environment
        observation, _ = environment.reset(budget)
        while observation is not None:
            observation, *_ = environment.step(agent.act(observation))
        if environment.is_stuck:
            return None
        played = environment.schedule(UID)
        if environment.tape is not stage.tape:
            played = named(played, stage.tape, stage.algorithms)
        return Found.of(check_schedule(stage.tape, played, budget), environment.device, agent.scorer)

    def _agent(self, environment: MemoryEnvironment, episode: int, fastest: Scorer | None = None) -> Agent:
        """The first is the network itself; the others are varied from the fastest so far."""
        random = np.random.default_rng([self.options.seed, episode])
        if self.options.agent == "random":
            return Agent(None, 1.0, random)
        scorer = self._scorer(environment)
        if episode == 0:
            return Agent(scorer, 0.0, random)
        return Agent((fastest or scorer).varied(self.options.sigma, random), self.options.epsilon, random)

    def _agent_like(self, found: Found | None, environment: MemoryEnvironment) -> Agent:
        """The network as it was in that play, on another step."""
        agent = self._agent(environment, 0)
        if agent.scorer is None or found is None:
            return agent
        return Agent(replace(agent.scorer, tilt=found.scorer.tilt), agent.epsilon, agent.random)

    def _scorer(self, environment: MemoryEnvironment) -> Scorer:
        """The network on this tape and device, made once for all plays."""
        if environment.scorer is None:
            weights = self.options.weights
            digest = step_digest(environment.tape) if weights and Path(weights).expanduser().is_dir() else ""
            network = load_network(self.options.agent, weights, digest, self.options.seed)
            environment.scorer = network.for_episode(environment.tape, environment.device, environment.peak_bytes)
        return environment.scorer


@cache
def load_network(agent: str, weights: str | None, digest: str, seed: int) -> Network:
    """The network that the options name. `weights` is a file, or a folder with one a tape, named by its `step_digest`.

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
