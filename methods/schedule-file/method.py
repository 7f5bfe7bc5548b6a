"""A schedule that was saved before, by whatever method or by hand, runs as a method: to look closer, to time again, to edit.

A schedule belongs to one tape. Another model, batch size, optimizer or device gives another tape, and the file is refused.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from vramlab.device import DeviceProfile
from vramlab.errors import Unsupported
from vramlab.planner import Budget
from vramlab.rollout import fixed_plan
from vramlab.schedule import Schedule
from vramlab.tape import Tape

UID = "7404018681296038"


@dataclass(frozen=True)
class ScheduleFile:
    """The planner."""

    path: str

    @property
    def needs(self) -> tuple[str, ...]:
        """What the schedule's tape was prepared for. Unsupported where the file is no schedule."""
        return self._schedule.needs

    @property
    def _schedule(self) -> Schedule:
        return read(Path(self.path).expanduser())

    def micro_batches(self, at: Callable[[int], Tape], batch_size: int, budget: Budget) -> tuple[int, ...]:
        """The passes that the schedule takes over its batch; another batch stays whole, and is refused."""
        sizes = self._schedule.micro_batches
        return sizes if sum(sizes) == batch_size else (batch_size,)

    def plan(self, tape: Tape, device: DeviceProfile, budget: Budget) -> Schedule:
        """The file's schedule. Unsupported where the file is no schedule or one for another tape; PlanInfeasible below its peak."""
        schedule = self._schedule
        if schedule.tape_digest != tape.digest:
            raise Unsupported(f"{self.path} was made for the tape {schedule.tape_digest[:12]}, this step is the tape {tape.digest[:12]} "
                              f"(batch {tape.batch_size}, {tape.device_type}); plan it for the same model, batch, optimizer and device")
        return fixed_plan(tape, replace(schedule, method=UID), budget, "schedule-file")


def read(path: Path) -> Schedule:
    """The schedule in a file. Unsupported says in one sentence why there is none."""
    try:
        return Schedule.load(path)
    except OSError as error:  # gzip's BadGzipFile too, which has no strerror
        reason = error.strerror or str(error)
    except (EOFError, zlib.error) as error:
        reason = f"it is cut short or damaged ({error})"
    except (json.JSONDecodeError, UnicodeDecodeError):
        reason = "it holds no JSON"
    except ValueError as error:
        reason = str(error)
    except (KeyError, TypeError, AttributeError, IndexError):
        reason = "it holds JSON that is no schedule"
    raise Unsupported(f"{path} cannot be read as a schedule: {reason}")


def build(path: str) -> ScheduleFile:
    """The planner for this file."""
    return ScheduleFile(path)
