"""Third round, second part: tapes, schedules and everything simulated. Schedules are checked again and simulated again, without torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from vramlab import in_place, split
from vramlab.check import CheckedSchedule, check_schedule
from vramlab.counted import count_of
from vramlab.crowd.findings import Severity
from vramlab.crowd.rules.agreeing import RELATIVE, agree, disagreements
from vramlab.crowd.rules.asking import Examination, Fault, Round, rule
from vramlab.device import DeviceProfile, load_profile, profile_names
from vramlab.errors import ScheduleError
from vramlab.flops import with_flops
from vramlab.layers import basic_layers
from vramlab.liveness import lower_bound_bytes, replay_schedule
from vramlab.parallel import share_of, simulate_parallel
from vramlab.planner import Budget, parse_bytes, parse_percent
from vramlab.predicted import predicted_of, swap_against_recompute
from vramlab.record import Outcome, RunRecord
from vramlab.roofline import roofline_costs
from vramlab.runs import SCHEDULE_FILE, TAPE_FILE
from vramlab.schedule import Schedule
from vramlab.tape import Role, Tape
from vramlab.variants import with_variants

_SIM = "sim:"
# Of `predicted`: what is not of the schedule and its device.
_BESIDE = ("eager_step_seconds", "least_step_seconds", "proof", "swap_vs_recompute", "infeasible", "split_convolutions",
           "inplace_gradients", "sensitivity", "devices", "parallel", "one_device_step_seconds", "speedup_over_one_device")
_COUNTS = ("recomputes", "offloads", "prefetches")
_ANY_BOARD = "v100-32gb"  # for what does not depend on a device


@dataclass(frozen=True)
class Planned:
    """A record with its tape and, where it has one, its schedule."""

    name: str  # of the record's file
    record: RunRecord
    tape: Tape
    schedule: Schedule | None

    @property
    def tape_sha256(self) -> str:
        """Of the tape's file."""
        return self.record.files[TAPE_FILE]

    @property
    def is_simulated(self) -> bool:
        """Does nothing of it run?"""
        return self.record.config["target"].startswith(_SIM)

    @property
    def devices(self) -> int:
        """Over which the batch is shared."""
        return self.record.config.get("devices") or 1

    @property
    def is_plain(self) -> bool:
        """Is the tape that of eager, too: neither prepared for the method nor cut into passes or shares?"""
        changed = {split.NEED, in_place.NEED} & set(self.record.predicted)
        return not self.tape.micro_batches and self.devices == 1 and not changed and self.record.kind != "max_batch"

    def profile(self) -> DeviceProfile | None:
        """What it was planned for; None where the record does not say, or says what no device is."""
        if self.is_simulated:
            name = self.record.config["target"].removeprefix(_SIM)
            return load_profile(name) if name in profile_names() else None
        if (device := self.record.predicted.get("device")) is None:
            return None
        try:
            return DeviceProfile(**device)
        except (TypeError, ValueError):
            return None


def planned(e: Examination) -> Iterator[Planned]:
    """The records that have a tape in the bundle."""
    for name, record in e.contents.records.items():
        if TAPE_FILE in record.files:
            schedule = e.contents.schedule(record.cell_id) if SCHEDULE_FILE in record.files else None
            yield Planned(name, record, e.contents.tape(record.files[TAPE_FILE]), schedule)


@rule(Round.DERIVATION, "known-device", "a simulated target is a profile that ships with vramlab; other targets state theirs in full")
def _known_device(e: Examination) -> Iterator[Fault]:
    for name, record in e.contents.records.items():
        e.count()
        target = record.config["target"]
        if target.startswith(_SIM) and target.removeprefix(_SIM) not in profile_names():
            yield f"{name}:config.target", f"there is no profile {target.removeprefix(_SIM)!r}"
        for key in {"profile", "perturbation"} & set(record.config):
            yield f"{name}:config.{key}", "a cell of a workflow has none"
    for found in planned(e):
        if found.schedule is not None and found.record.kind != "max_batch" and found.profile() is None:
            yield f"{found.name}:predicted.device", "is no device; without it nothing can be simulated again"


@rule(Round.DERIVATION, "tape", "the tape is the one that the record names, with the FLOP, roles and layers that it says")
def _tape(e: Examination) -> Iterator[Fault]:
    for name, record in e.contents.records.items():
        if record.outcome is Outcome.OK and record.kind != "max_batch" and TAPE_FILE not in record.files and record.predicted:
            yield f"{name}:files", "a prediction without a tape"
    for found in planned(e):
        e.count()
        tape, provenance, where = found.tape, found.record.provenance, f"{found.name}:provenance"
        derived: dict[str, Any] = {"tape_digest": tape.digest, "bytes_by_role": {str(r): tape.bytes_of(r) for r in Role}}
        if found.is_plain:
            layers, bound = e.once(("sizes", found.tape_sha256), lambda t=tape: (basic_layers(t), lower_bound_bytes(t)))
            library = found.record.measured.get("library_bytes") or 0
            derived |= {"basic_layers": layers, "ops": len(tape.ops), "lower_bound_bytes": bound + library}
        for key, value in derived.items():
            yield from disagreements(f"{where}.{key}", provenance.get(key), value)
        yield from _preparation(found)
        if [op.flops for op in tape.ops] != e.once(("flops", found.tape_sha256), lambda t=tape: [op.flops for op in with_flops(t).ops]):
            yield f"{found.name}:files.{TAPE_FILE}", "the FLOP of its ops are not those of their shapes"
        yield from _batch(found)


def _preparation(found: Planned) -> Iterator[Fault]:
    """A tape that is said to be prepared for its method is: to prepare it once more changes nothing, and it has as many such ops as said.

    Of a prepared tape less can be derived than of eager's, so that a false word would hide what else is false.
    """
    predicted, where, tape = found.record.predicted, f"{found.name}:predicted", found.tape
    if tape.micro_batches or found.record.kind == "max_batch":
        return
    if (said := predicted.get(split.NEED)) is not None:
        whole = split.splittable_ops(tape)
        derived = {"split_ops": sum(map(split.is_data_half, tape.ops)), "unsplit_ops": len(whole)}
        claimed = {"split_ops": said.get("split_ops"), "unsplit_ops": len(said["unsplit_ops"]) if "unsplit_ops" in said else None}
        yield from disagreements(f"{where}.{split.NEED}", claimed, derived)
        if split.split_convolutions(tape, {op.id for op in whole}).digest != tape.digest:
            yield f"{where}.{split.NEED}", "is claimed of a tape that is not prepared so"
    if (said := predicted.get(in_place.NEED)) is not None:
        yield from disagreements(f"{where}.{in_place.NEED}", said, {"ops": len(in_place.inplace_ops(tape))})
        if in_place.with_inplace_gradients(tape).digest != tape.digest:
            yield f"{where}.{in_place.NEED}", "is claimed of a tape that is not prepared so"


def _batch(found: Planned) -> Iterator[Fault]:
    stated = found.record.config["batch_size"]
    if found.record.kind == "max_batch" or stated is None:
        return
    allowed = {stated} if found.devices == 1 else {stated, share_of(stated, min(found.devices, stated))}
    if found.tape.batch_size not in allowed:
        yield f"{found.name}:config.batch_size", f"{stated}; the tape is of a batch of {found.tape.batch_size}"


@rule(Round.DERIVATION, "roofline", "op times of a simulated target follow from the shapes and the profile")
def _roofline(e: Examination) -> Iterator[Fault]:
    for found in planned(e):
        profile = found.profile()
        if not found.is_simulated or profile is None:
            continue
        e.count()
        derived = e.once(("roofline", found.tape_sha256, profile.name), partial(_costs, found.tape, profile))
        for ours, theirs in zip(found.tape.ops, derived.ops):
            claimed, known = ([op.seconds, op.workspace_bytes, [[v.name, v.seconds, v.workspace_bytes] for v in op.variants]]
                              for op in (ours, theirs))
            if not agree(claimed, known):
                told = f"{found.tape.op_name(ours.id)} takes {ours.seconds!r} s; it comes to {theirs.seconds!r}"
                yield f"{found.name}:files.{TAPE_FILE}", told
                break


def _costs(tape: Tape, profile: DeviceProfile) -> Tape:
    """With the costs that the profile gives it."""
    plain = roofline_costs(tape, profile)
    return with_variants(plain, profile) if any(op.variants for op in tape.ops) else plain


@rule(Round.DERIVATION, "budget", "the budget in bytes is that of the config")
def _budget(e: Examination) -> Iterator[Fault]:
    for name, record in e.contents.records.items():
        if record.kind == "max_batch" or record.budget_bytes is None and not record.predicted:
            continue
        e.count()
        stated, where = record.config["budget"], f"{name}:budget_bytes"
        if stated == "auto":
            if not record.budget_bytes:
                yield where, "auto is a number of bytes"
            continue
        try:
            share = None if stated is None else parse_percent(stated)
            derived = None if stated is None else parse_bytes(stated) if share is None else int(share * (record.eager_peak_bytes or 0))
        except ValueError as error:
            yield f"{name}:config.budget", str(error)
            continue
        yield from disagreements(where, record.budget_bytes, derived)


@rule(Round.DERIVATION, "schedule-legal", "every schedule is legal on its tape and within its budget, and eager's is eager's own order")
def _legal(e: Examination) -> Iterator[Fault]:
    for found in planned(e):
        if found.schedule is None:
            continue
        e.count()
        where = f"{found.name}:files.{SCHEDULE_FILE}"
        stated = found.record.provenance.get("schedule_digest")
        if stated != found.schedule.digest:
            yield f"{found.name}:provenance.schedule_digest", f"{stated}; the schedule's is {found.schedule.digest}"
        try:
            checked_of(e, found)
        except ScheduleError as error:
            yield where, str(error)
            continue
        if found.record.config["method"] == "eager" and found.schedule.instructions != replay_schedule(found.tape).instructions:
            yield where, "is not what plain PyTorch does"


def checked_of(e: Examination, found: Planned) -> CheckedSchedule:
    """The record's schedule, proved legal within its budget; ScheduleError where it is not."""
    budget = found.record.budget_bytes
    limit = None if budget is None else Budget(device_bytes=budget)
    return e.once(("checked", found.name), lambda: check_schedule(found.tape, found.schedule, limit))


@rule(Round.DERIVATION, "simulated", "every prediction is what its schedule, simulated again on its device, comes to")
def _simulated(e: Examination) -> Iterator[Fault]:
    for name, record in e.contents.records.items():
        if SCHEDULE_FILE not in record.files and set(record.predicted) - set(_BESIDE) - {"micro_batches"}:
            yield f"{name}:predicted", "a prediction without a schedule"
        if SCHEDULE_FILE in record.files and TAPE_FILE not in record.files:
            yield f"{name}:files", "a schedule without its tape"
    for found in planned(e):
        if found.schedule is None:
            continue
        try:
            checked = checked_of(e, found)
        except ScheduleError:  # told by the rule `schedule-legal`
            continue
        e.count()
        yield from _search_faults(found, checked) if found.record.kind == "max_batch" else _prediction_faults(found, checked)


def _prediction_faults(found: Planned, checked: CheckedSchedule) -> Iterator[Fault]:
    profile, where = found.profile(), f"{found.name}:predicted"
    if profile is None:  # told by the rule `known-device`
        return
    claimed = {key: value for key, value in found.record.predicted.items() if key not in _BESIDE}
    derived = predicted_of(checked, profile)
    yield from disagreements(where, {key: claimed.get(key) for key in derived}, derived)
    yield from _bound_faults(found, derived["step_seconds"])
    if found.devices > 1:
        many = simulate_parallel(checked, profile, found.devices).to_json()
        yield from disagreements(f"{where}.parallel", found.record.predicted.get("parallel"), many)
    yield from _count_faults(found, checked, derived)


def _bound_faults(found: Planned, step_seconds: float) -> Iterator[Fault]:
    """The time that no schedule is below: not under the ops' own least seconds, not above a step that is. The program that it is the
    optimum of is not solved again: a submitted tape may make it as hard as it likes."""
    claimed = found.record.predicted.get("least_step_seconds")
    own = sum(min([op.seconds, *(v.seconds for v in op.variants)]) for op in found.tape.ops)
    if claimed is not None and not own * (1 - RELATIVE) <= claimed <= step_seconds * (1 + RELATIVE):
        yield f"{found.name}:predicted.least_step_seconds", f"{claimed!r} is not between {own!r} of the ops and {step_seconds!r}"


def _count_faults(found: Planned, checked: CheckedSchedule, derived: dict[str, Any]) -> Iterator[Fault]:
    """What ran is what was planned, and a step that ran says what ran; eager's own counts nothing."""
    record = found.record
    is_executed = record.kind == "step" and record.config["method"] != "eager"
    blocks = [("measured", record.measured, record.measured.get("peak_bytes") is not None)]
    if not checked.tape.micro_batches:  # else the gate counts over all passes
        blocks.append(("truth_detail", record.truth_detail, bool(record.truth_detail)))
    for name, block, has_run in blocks:
        claimed = {key: block.get(key) for key in _COUNTS}
        if is_executed and has_run or any(n is not None for n in claimed.values()):
            yield from disagreements(f"{found.name}:{name}", claimed, {key: derived[key] for key in _COUNTS})


def _search_faults(found: Planned, checked: CheckedSchedule) -> Iterator[Fault]:
    """Of a measured search: the plan of the largest value, of which only what no device changes is kept."""
    derived = predicted_of(checked, load_profile(_ANY_BOARD))
    search, where = found.record.search, f"{found.name}:search"
    yield from disagreements(f"{where}.simulated_peak_bytes", search.get("simulated_peak_bytes"), derived["peak_bytes"])
    yield from disagreements(f"{where}.at_peak", search.get("at_peak"), derived["at_peak"])


@rule(Round.DERIVATION, "against-eager", "eager's simulated peak and time, and swapping against recomputing, follow from the tape")
def _against_eager(e: Examination) -> Iterator[Fault]:
    for found in planned(e):
        if not found.is_plain or (profile := found.profile()) is None:
            continue
        e.count()
        record = found.record
        if record.eager_peak_is_simulated:
            peak = e.once(("eager", found.tape_sha256), lambda t=found.tape: check_schedule(t, replay_schedule(t)).peak_bytes)
            yield from disagreements(f"{found.name}:eager_peak_bytes", record.eager_peak_bytes, peak)
        if found.schedule is not None:
            seconds = sum(op.seconds for op in found.tape.ops)
            yield from disagreements(f"{found.name}:predicted.eager_step_seconds", record.predicted.get("eager_step_seconds"), seconds)
        key = "swap", found.tape_sha256, repr(profile)
        swap = e.once(key, partial(swap_against_recompute, found.tape, profile))
        yield from disagreements(f"{found.name}:predicted.swap_vs_recompute", record.predicted.get("swap_vs_recompute"), swap)


@rule(Round.DERIVATION, "simulated-stays-simulated",
      "what runs nowhere has no measured number and no truth; eager's peak is said to be simulated where no step of eager's was measured")
def _stays_simulated(e: Examination) -> Iterator[Fault]:
    for name, record in e.contents.records.items():
        is_simulated = record.config["target"].startswith(_SIM)
        if is_simulated or record.kind != "step":  # the peak of a step that runs is its baseline's
            whose = None if record.eager_peak_bytes is None else True
            yield from disagreements(f"{name}:eager_peak_is_simulated", record.eager_peak_is_simulated, whose)
        if not is_simulated:
            continue
        e.count()
        for key in set(record.measured) - {"capture_seconds", "seed_seconds", "plan_seconds"}:
            yield f"{name}:measured.{key}", "is claimed to be measured on a simulated target"
        if record.truth != "not_run":
            yield f"{name}:truth", f"{record.truth} is claimed of a simulated target"
        if record.search and record.search.get("is_simulated") is not True:
            yield f"{name}:search.is_simulated", "a search on a simulated target is simulated"


@rule(Round.DERIVATION, "not-derived", "what follows from more than a bundle holds", Severity.NOTE)
def _not_derived(e: Examination) -> Iterator[Fault]:
    """Says what the other rules of this file cannot, once for all cells that it is so for."""
    counts = Counter[tuple[str, str]]()
    for found in planned(e):
        e.count()
        if found.record.predicted.get("least_step_seconds") is not None:
            counts["predicted.least_step_seconds", "held within its limits; the program that it is the optimum of is not solved again"] += 1
        if found.record.predicted.get("proof"):
            counts["predicted.proof", "how far from the best its plan is, only its solver says"] += 1
        if found.record.predicted.get("sensitivity"):
            counts["predicted.sensitivity", "needs the method's plans on perturbed devices"] += 1
        if found.record.predicted.get("infeasible"):
            counts["predicted.infeasible", "a refusal leaves no schedule"] += 1
        if not found.is_plain and found.record.kind != "max_batch":
            why = "eager's own tape is not in the bundle: this one is prepared, cut or shared"
            counts["predicted.eager_step_seconds", why] += 1
    for record in e.contents.records.values():
        if record.config["method"] != "eager" and SCHEDULE_FILE not in record.files and record.measured.get("peak_bytes") is not None:
            counts["measured.peak_bytes", "without a schedule nothing says how much has to be held"] += record.kind == "step"
        if record.kind == "max_batch" and record.search.get("is_simulated"):
            why = "trials that were simulated leave no schedule; the search itself is run again over their log"
            counts["search.trials", why] += 1
    for (field, why), count in (+counts).items():
        yield f"{count_of(count, 'record')}:{field}", why
