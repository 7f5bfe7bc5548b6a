"""DELTA's filter: which storage to release. The biggest and stalest one, argmax of bytes x staleness."""

from __future__ import annotations

import numpy as np

from vramlab.rollout import Rollout

# A storage that was used this very moment counts as one tick old: of those, the biggest goes.
TICK_SECONDS = 1e-9


class Filter:
    """Ranks the candidates. `small_tensor_switch`: those under 1 % of the mean size seen so far go only when nothing else can."""

    def __init__(self, small_tensor_switch: bool) -> None:
        self.small_tensor_switch = small_tensor_switch

    def rank(self, candidates: np.ndarray, rollout: Rollout) -> np.ndarray:
        """The candidates, first choice first; ties go to the lower id."""
        nbytes = rollout.nbytes[candidates].astype(np.float64)
        staleness = np.maximum(rollout.clock_seconds - rollout.last_access_seconds[candidates], TICK_SECONDS)
        order = np.argsort(-nbytes * staleness, kind="stable")
        if self.small_tensor_switch:
            is_small = nbytes < 0.01 * self._mean_bytes(rollout)
            order = order[np.argsort(is_small[order], kind="stable")]
        return candidates[order]

    def _mean_bytes(self, rollout: Rollout) -> float:
        made_from = rollout.facts.there_from
        return float(rollout.nbytes[(made_from >= 0) & (made_from < rollout.next_op)].mean())
