"""What the server of forks imports: torch and all that a cell's processes run, the compiled loops of checker and simulator with it.

Nothing is captured, planned or executed here, so that every fork starts alike.
"""

from __future__ import annotations

import torchvision  # noqa: F401

import vramlab.measure  # noqa: F401
from vramlab.check import check_schedule
from vramlab.device import load_profile, profile_names
from vramlab.schedule import Schedule
from vramlab.simulate import simulate
from vramlab.tape import Tape

_NOTHING = Tape(ops=(), tensors=(), storages=(), loss=0, device_type="cpu", batch_size=0)
_EMPTY = check_schedule(_NOTHING, Schedule(instructions=(), tape_digest=_NOTHING.digest))
simulate(_EMPTY, load_profile(profile_names()[0]))  # loads the loops
