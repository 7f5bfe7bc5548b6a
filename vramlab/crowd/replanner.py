"""Plans again what the records of a bundle say was planned, in a process of its own, since a stranger's tape may make it long.

    python -m vramlab.crowd.replanner FOLDER      one cell_id a line comes in, one answer a line goes out, as JSON

Planners are pure: the same tape, profile, budget and options give the same schedule. Torch is never loaded.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from vramlab import __version__
from vramlab.collection import Library, Method, UnknownName, built_in_collection
from vramlab.counted import count_of
from vramlab.crowd.layout import LIMITS
from vramlab.crowd.rules.asking import Examination
from vramlab.crowd.rules.schedules import Planned, planned
from vramlab.errors import PlanInfeasible, VramlabError
from vramlab.planner import UNLIMITED, Budget, SubBatchPlanner, ask
from vramlab.schedule import Schedule
from vramlab.seeds import seeds_for

MOST_BYTES = 2**32  # of memory, for one process
_WITHOUT_TORCH = "it plans with torch, which the checker does without"


@dataclass(frozen=True)
class Answer:
    """What came of one cell. `is_same` None: it was not planned again, or that says nothing; `why` tells."""

    is_same: bool | None
    why: str = ""


def plan_again(e: Examination, found: Planned, library: Library) -> Answer:
    """Ask the record's method for its schedule once more, and hold it against the one in the bundle."""
    config = found.record.config
    try:
        method = library.method(config["method"])
    except UnknownName:
        return Answer(None, f"this vramlab has no method {config['method']!r}")
    if why := _why_not(found, method):
        return Answer(None, why)
    library_bytes = _library_bytes(e, found)
    try:
        planner = method.build(**config["options"])
        schedule = _schedule(planner, found, method, library, library_bytes)
    except PlanInfeasible as refusal:
        return _told(_of_refusal(found, refusal, library_bytes), method, library)
    except ImportError:
        return Answer(None, _WITHOUT_TORCH)
    except (VramlabError, ValueError, MemoryError) as error:
        return Answer(None, f"{type(error).__name__}: {str(error)[:200]}")
    answer = _told(_of_schedule(found, schedule), method, library)
    if answer.is_same and isinstance(planner, SubBatchPlanner):
        return Answer(True, "the sizes of its passes were not chosen again: that takes tapes of other batches")
    return answer


def _why_not(found: Planned, method: Method) -> str:
    """Why planning again would say nothing; "" when it says something."""
    record, config = found.record, found.record.config
    if method.card.kind == "native":
        return "a native method plans nothing"
    if record.kind == "max_batch":
        return "of a search the device that it planned for is not kept"
    if config["sources"]["method"] != method.sha256:
        return f"its method's source is {config['sources']['method'][:12]}, this vramlab's is {method.sha256[:12]}"
    if config["sources"]["harness"] != __version__:
        return f"it was planned by vramlab {config['sources']['harness']}, this is {__version__}"
    if files := [name for name, value in config["options"].items()
                 if value is not None and name in method.card.options and method.card.options[name].type == "file"]:
        return f"its option {files[0]} names a file, which is not in the bundle"
    if found.profile() is None:
        return "the record names no device that it was planned for"
    if found.schedule is None and not record.predicted.get("infeasible"):
        return "it has neither a schedule nor a refusal"
    return ""


def _library_bytes(e: Examination, found: Planned) -> int:
    """What of the budget no plan may use: libraries keep it (vramlab.measure.make_plan)."""
    if found.is_simulated or found.record.kind != "step":
        return 0
    return ((e.contents.baseline(found.record.config) or {}).get("peaks") or {}).get("library_bytes") or 0


def _schedule(planner: object, found: Planned, method: Method, library: Library, library_bytes: int) -> Schedule:
    limit, profile = found.record.budget_bytes, found.profile()
    budget = Budget(device_bytes=UNLIMITED if limit is None else limit - library_bytes)
    is_seeded = found.devices == 1 and method.card.seeds
    seeds = tuple(seeds_for(library, method, found.tape, profile, budget).schedules.values()) if is_seeded else ()
    return ask(planner, found.tape, profile, budget, method.name, seeds)


def _of_schedule(found: Planned, schedule: Schedule) -> Answer:
    claimed = found.schedule
    if claimed is None:
        return Answer(False, "the record says that there is no plan; its method makes one")
    if (schedule.method, schedule.instructions) == (claimed.method, claimed.instructions):
        return Answer(True)
    pairs = list(zip(schedule.instructions, claimed.instructions))
    first = next((index for index, (ours, theirs) in enumerate(pairs) if ours != theirs), len(pairs))
    counts = f"{count_of(len(schedule.instructions), 'instruction')}, not {len(claimed.instructions):,}"
    return Answer(False, f"its method plans another one: {counts}, and the first that differs is number {first}")


def _of_refusal(found: Planned, refusal: PlanInfeasible, library_bytes: int) -> Answer:
    claimed = found.record.predicted.get("infeasible")
    if claimed is None:
        return Answer(False, f"its method refuses: {str(refusal)[:200]}")
    smallest = None if refusal.smallest_bytes is None else refusal.smallest_bytes + library_bytes
    if smallest != claimed["smallest_bytes"]:
        return Answer(False, f"the smallest budget that its method reaches is {smallest}, not {claimed['smallest_bytes']}")
    return Answer(True)


def _told(answer: Answer, method: Method, library: Library) -> Answer:
    """A difference proves nothing of a method whose plans hang on the machine that it plans on."""
    if answer.is_same is False and (why := _hangs_on(method, library)):
        return Answer(None, f"{answer.why}; that proves nothing: {why}")
    return answer


def _hangs_on(method: Method, library: Library) -> str:
    """Why another machine may plan otherwise; "" when none does."""
    if "learned" in method.card.tags:
        return f"the sums of {method.name}'s network depend on the machine's arithmetic library"
    if "exact" in method.card.tags:
        return f"the solver of {method.name} chooses among schedules that are equally fast"
    of_seeds: Sequence[str] = [_hangs_on(library.method(name), library) for name in method.card.seeds]
    return next((f"it begins with schedules of others, and {why}" for why in of_seeds if why), "")


def main() -> None:
    """Answer until there is no more line."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # whoever imports it hears an ImportError
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a method prints is no answer
    examination, library = Examination(Path(sys.argv[1]), LIMITS), Library([built_in_collection()])
    found = {each.record.cell_id: each for each in planned(examination)}
    print("ready", file=out)
    for line in sys.stdin:
        print(json.dumps(asdict(plan_again(examination, found[line.strip()], library))), file=out)


if __name__ == "__main__":
    main()
