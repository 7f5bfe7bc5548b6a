"""vramlab: a reproducibility benchmark harness for GPU-memory management in DNN training."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Names that need torch or pandas are imported on first use: `vramlab --help` answers at once.
_LAZY = {
    "train_step": "vramlab.step",
    "results": "vramlab.runs",
    "PlanInfeasible": "vramlab.errors",
    "CaptureError": "vramlab.errors",
    "ScheduleError": "vramlab.errors",
    "WrongResult": "vramlab.errors",
    "VramlabError": "vramlab.errors",
}
__all__ = ["__version__", *_LAZY]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'vramlab' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
