"""DELTA's director: swap or recompute, storage by storage, by comparing what each costs."""

from __future__ import annotations

from dataclasses import dataclass

from vramlab.rollout import Action, Rollout
from vramlab.tape import Phase

# The released code compares microseconds of transfer with nanoseconds of recompute, so recompute looks this much dearer.
RELEASED_UNITS_FACTOR = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Director:
    """Chooses the action for a storage that the filter picked."""

    action: str  # director | swap-only | recompute-only | swap-first
    units_bug: bool  # T_rec x 1000, as released
    own_cost_only: bool  # T_rec without the producers that are absent too

    def choose(self, storage: int, rollout: Rollout) -> Action | None:
        """The action, None when none is possible (host memory full, or not recomputable)."""
        swap, recompute = rollout.can_offload(storage), self._can_recompute(storage, rollout)
        if self.action == "swap-only" or (self.action == "swap-first" and swap):
            return Action.SWAP if swap else None
        if self.action == "recompute-only":
            return Action.RECOMPUTE if recompute else None
        if swap and recompute:
            return self._cheaper(storage, rollout)
        return Action.SWAP if swap else Action.RECOMPUTE if recompute else None

    def _can_recompute(self, storage: int, rollout: Rollout) -> bool:
        """Maps only: to compute a gradient again is to run the network and its backward up to there again."""
        made_by = rollout.tape.producer[storage]
        return rollout.tape.ops[made_by].phase is Phase.FORWARD and rollout.can_recompute(storage)

    def _cheaper(self, storage: int, rollout: Rollout) -> Action:
        """Recompute if T_swap > T_rec; ties go to swap."""
        swap = swap_seconds(storage, rollout)
        return Action.RECOMPUTE if swap > self.recompute_seconds(storage, rollout, swap) else Action.SWAP

    def recompute_seconds(self, storage: int, rollout: Rollout, limit_seconds: float) -> float:
        """T_rec, exact up to the limit."""
        factor = RELEASED_UNITS_FACTOR if self.units_bug else 1.0
        if self.own_cost_only:
            return factor * rollout.tape.ops[rollout.tape.producer[storage]].seconds
        return factor * rollout.recompute_seconds(storage, limit_seconds)


def swap_seconds(storage: int, rollout: Rollout) -> float:
    """T_swap: out and back; only back where the host has a copy already."""
    nbytes = int(rollout.nbytes[storage])
    back = rollout.device.copy_seconds(nbytes, to_host=False)
    return back if rollout.has_host_copy(storage) else rollout.device.copy_seconds(nbytes, to_host=True) + back
