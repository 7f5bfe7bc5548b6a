"""A step as an environment with the call shapes of Gymnasium: `reset`, `step`, an observation, an action mask.

One episode is one training step within one budget. A decision is due only where the budget presses, or where the idle link could
fetch something. The reward is minus the time that an action adds to the step, in units of the price of memory. The cost of bringing
a storage back comes much later than the decision, and so does the use of having made much room, so the reward is shaped with the
potential `pending_seconds` (Ng, Harada, Russell, ICML 1999; undiscounted, so that waiting earns nothing).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from vramlab.device import DeviceProfile
from vramlab.planner import Budget
from vramlab.player import StepFacts
from vramlab.rollout import Stuck
from vramlab.schedule import Schedule
from vramlab.tape import Tape

from .observation import ACTIONS, FEATURES, Observation, Observer, pending_seconds
from .play import Answer, Move, Play, Question

# The unit of the reward: the price of this share of the memory that the budget leaves beside the state.
UNIT_SHARE = 0.01
# What a step that cannot go on costs, in units, and how much more the earlier that is.
STUCK_PENALTY, STUCK_EARLY_PENALTY = 50.0, 100.0
# Shaped rewards are clipped here: how bad a bad stall is teaches nothing.
MOST_REWARD = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Freedom:
    """What the agent may do: the ablations switch one off."""

    swaps: bool = True
    drops: bool = True


@dataclass
class MemoryEnvironment:
    """One tape on one device; the budget is given to `reset`. `is_shaped`: rewards carry the potential, which takes time to compute."""

    tape: Tape
    device: DeviceProfile
    freedom: Freedom = Freedom()
    is_shaped: bool = False
    scorer: Any = field(default=None, init=False)  # what the player keeps from episode to episode
    action_count: int = field(default=ACTIONS, init=False)
    feature_count: int = field(default=FEATURES, init=False)

    @cached_property
    def peak_bytes(self) -> int:
        """Of a step without memory actions."""
        return int(StepFacts.of(self.tape).inner_bytes.max(initial=0))

    def reset(self, budget: Budget) -> tuple[Observation | None, dict[str, Any]]:
        """Start a step. No observation where it needs no decision (or cannot even start: `info["is_stuck"]`)."""
        self.play = Play(self.tape, self.device, budget, swaps=self.freedom.swaps, drops=self.freedom.drops)
        self.observer = Observer(self.play)
        self._decisions = self.play.decisions()
        self.is_stuck, self.stuck_op, self.decisions = False, 0, 0
        self._paid = 0.0
        self.observation = self._advance(None)
        self._promised = self._pending()
        return self.observation, self._info()

    def step(self, action: int) -> tuple[Observation | None, float, bool, bool, dict[str, Any]]:
        """Answer the decision: (next observation, reward, terminated, truncated, info). ValueError for a masked action."""
        if self.observation is None or not self.observation.mask[action]:
            raise ValueError(f"action {action} is not possible now; possible are {self.action_mask().nonzero()[0].tolist()}")
        self.decisions += 1
        self.observation = self._advance(self.observation.answers[action])
        return self.observation, self._reward(), self.observation is None, False, self._info()

    def action_mask(self) -> np.ndarray:
        """bool [ACTIONS]: what is possible now; nothing after the end."""
        return np.zeros(ACTIONS, np.bool_) if self.observation is None else self.observation.mask

    def schedule(self, method: str) -> Schedule:
        """What was played."""
        return self.play.schedule(method)

    # --- inside ------------------------------------------------------------------------------------------------------------
    def _advance(self, answer: Answer | None) -> Observation | None:
        try:
            question = self._decisions.send(answer)
            while question.choices == 1:
                question = self._decisions.send(_only_answer(question))
            return self.observer.observe(question)
        except StopIteration:
            return None
        except Stuck as stuck:
            self.is_stuck, self.stuck_op = True, stuck.op
            return None

    def _reward(self) -> float:
        play, observer = self.play, self.observer
        added = play.clock_seconds - float(observer.until_op[play.next_op])
        promised = self._pending()
        cost = (added - self._paid) + (promised - self._promised)
        self._paid, self._promised = added, promised
        reward = -cost / (UNIT_SHARE * observer.price * observer.room)
        if self.is_stuck:
            reward -= STUCK_PENALTY + STUCK_EARLY_PENALTY * (1.0 - play.next_op / play.facts.end)
        return float(np.clip(reward, -MOST_REWARD, MOST_REWARD)) if self.is_shaped else reward

    def _pending(self) -> float:
        return 0.0 if self.observation is None or not self.is_shaped else pending_seconds(self.observer)

    def _info(self) -> dict[str, Any]:
        return {"added_seconds": self._paid, "is_stuck": self.is_stuck, "stuck_op": self.stuck_op, "decisions": self.decisions}


def _only_answer(question: Question) -> Answer:
    if question.swappable:
        return Answer(Move.SWAP, question.swappable[0])
    return Answer(Move.DROP, question.droppable[0])
