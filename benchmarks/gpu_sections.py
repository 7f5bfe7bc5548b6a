"""What gpu_check.py asks, one function a section. Each runs in a process of its own and reports rows as it goes.

    report(name, ok, text, **data)      ok: True holds, False does not, None: a finding, or not to be had here, as the text says
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gpu_steps as steps
import gpu_streams as streams
import torch
from gpu_steps import Planned, Step, Workload

from vramlab.check import check_schedule
from vramlab.costs import measure_profile
from vramlab.errors import PlanInfeasible, ScheduleError
from vramlab.finder import find_largest
from vramlab.nvml import GPU_COLUMNS, Nvml
from vramlab.planner import UNLIMITED
from vramlab.prepare import free_bytes, simulated_eager_peak
from vramlab.record import Truth
from vramlab.schedule import Offload, Prefetch, Recompute, Wait
from vramlab.simulate import simulate
from vramlab.statistics import DISTINGUISHABLE_IN_WORDS, distinguishable, drift, paired_ratio
from vramlab.telemetry import Sampler, read_telemetry
from vramlab.tape import Tape

Report = Callable[..., None]
GiB, MiB = 2**30, 2**20
BUDGETS = (0.8, 0.5)  # of eager's measured peak
TOLERANCE_SHARE, TOLERANCE_BYTES = 0.005, MiB  # of a predicted peak
TRUE = (Truth.EXACT, Truth.SEMANTICS_CHANGED)


@dataclass(frozen=True, kw_only=True)
class Context:
    """What every section is told."""

    device_name: str  # "cuda:0" or "cpu"
    is_small: bool
    folder: Path  # shared by the sections of one run
    methods: tuple[str, ...]  # whose truth is asked
    workload_name: str = ""
    seconds: float = 60.0  # what the section may take

    @property
    def device(self) -> torch.device:
        """As torch names it."""
        return torch.device(self.device_name)

    @property
    def is_cuda(self) -> bool:
        """Does it run on a GPU?"""
        return self.device.type == "cuda"

    @property
    def workloads(self) -> dict[str, Workload]:
        """By name."""
        return steps.workloads(self.is_small)

    @property
    def first(self) -> Workload:
        """The residual network."""
        return next(iter(self.workloads.values()))


class Late(Exception):
    """A part of a section took longer than it may."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Late after so many seconds. Main thread only."""

    def ring(_signal: int, _frame: Any) -> None:
        raise Late(f"not done in {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def guarded(report: Report, name: str, seconds: float) -> Iterator[None]:
    """One part of a section: what it raises becomes its row, and the section goes on."""
    try:
        with limited(seconds):
            yield
    except Exception as wrong:  # a check must survive whatever it finds
        report(name, False, f"{type(wrong).__name__}: {_first_line(wrong)}", traceback=traceback.format_exc())


def _first_line(wrong: BaseException) -> str:
    return (str(wrong).splitlines() or ["no message"])[0][:200]


# --- capture, costs, profile ----------------------------------------------------------------------------------------------
def capture(context: Context, report: Report) -> None:
    """Capture on the device; costs of every op; the device's profile."""
    device = context.device
    with guarded(report, "profile", context.seconds / 2):
        profile = measure_profile(device)
        rates = profile.flops_per_second, profile.memory_bytes_per_second, profile.d2h_bytes_per_second, profile.h2d_bytes_per_second
        flops, memory, to_host, to_device = (rate / 1e9 for rate in rates)
        said = f"{flops:,.0f} GFLOP/s, memory {memory:.0f} GB/s, to host {to_host:.2f} GB/s, to device {to_device:.2f} GB/s"
        report("profile", all(r > 0 for r in rates), f"{said}, launch {profile.launch_seconds * 1e6:.1f} us", profile=profile.to_json())
    for workload in context.workloads.values():
        with guarded(report, workload.name, context.seconds / 2):
            _capture_one(context, report, workload)


def _capture_one(context: Context, report: Report, workload: Workload) -> None:
    device = context.device
    library_bytes = steps.warm_libraries(workload, device)
    step = steps.build(workload, device)
    found = steps.kept_costed(step, device, context.folder)
    tape = found.captured.tape
    del step
    eager = steps.peaks(workload, device)
    measured_seconds = steps.step_seconds(workload, device)
    predicted_bytes, op_seconds = simulated_eager_peak(tape), sum(op.seconds for op in tape.ops)
    error = predicted_bytes - eager.warm
    said = f"{len(tape.ops)} ops, {found.capture_seconds:.1f} s, costs {found.costs_seconds:.1f} s"
    if found.mismatch:
        said += f"; captured with data, because {found.mismatch}"
    report(f"{workload.name} tape", tape.device_type == device.type, said, mismatch=found.mismatch, ops=len(tape.ops),
           capture_seconds=found.capture_seconds, costs_seconds=found.costs_seconds, digest=tape.digest,
           targets=sorted({op.target for op in tape.ops}))
    report(f"{workload.name} eager", _is_predicted(predicted_bytes, eager.warm),
           f"eager's peak {eager.warm / MiB:.1f} MiB, predicted {error:+,} bytes; ops are {op_seconds / measured_seconds:.2f} of its step",
           predicted_bytes=predicted_bytes, peaks=eager.raw, peak_bytes=eager.warm, cold_peak_bytes=eager.cold,
           library_bytes=library_bytes, op_seconds=op_seconds, step_seconds=measured_seconds)


def _is_predicted(predicted: int, measured: int) -> bool:
    return abs(predicted - measured) <= max(TOLERANCE_SHARE * measured, TOLERANCE_BYTES)


# --- truth and budgets ----------------------------------------------------------------------------------------------------
def truth(context: Context, report: Report) -> None:
    """Every method that plans, on one model, under two budgets: truth, hard budget, predicted peak."""
    workload, device = context.workloads[context.workload_name], context.device
    steps.warm_libraries(workload, device)
    step = steps.build(workload, device)
    whole = steps.kept_costed(step, device, context.folder)
    eager_bytes = steps.peaks(workload, device).warm
    cell_seconds = context.seconds / 3
    for name in _cheap_first(context.methods):
        shares = BUDGETS if steps.method(name).card["takes_budget"] else (None,)
        for share in shares:
            where = f"{workload.name} {name}" + (f" {share:.0%}" if share else "")
            with guarded(report, where, cell_seconds):
                budget = int(share * eager_bytes) if share else UNLIMITED
                _judge(context, report, where, workload, _planned_or_smallest(step, whole, name, device, budget, where), eager_bytes)
    with guarded(report, f"{workload.name} schedule-file", cell_seconds):
        options = steps.saved(steps.replayed(whole, device))
        planned = steps.plan(step, whole, "schedule-file", device, UNLIMITED, options)
        _judge(context, report, f"{workload.name} schedule-file", workload, (planned, UNLIMITED, ""), eager_bytes)


def _cheap_first(names: Sequence[str]) -> list[str]:
    return sorted(names, key=lambda name: (name in ("dtr", "modnn", "dqn"), name))


def _planned_or_smallest(step: Step, whole: steps.Costed, name: str, device: torch.device, budget: int,
                         where: str) -> tuple[Planned, int, str]:
    """(plan, its budget, note): at the smallest budget that the method can reach where the asked one is below."""
    try:
        return steps.plan(step, whole, name, device, budget), budget, ""
    except PlanInfeasible as refusal:
        if refusal.smallest_bytes is None:
            raise
        smallest = refusal.smallest_bytes
        return steps.plan(step, whole, name, device, smallest), smallest, f"out of reach, so at its smallest, {smallest / MiB:.1f} MiB; "


def _judge(context: Context, report: Report, where: str, workload: Workload, asked: tuple[Planned, int, str], eager_bytes: int) -> None:
    (planned, budget, note), device = asked, context.device
    schedule, predicted = planned.checked.schedule, planned.checked.peak_bytes
    found = steps.peaks(workload, device, lambda step: steps.runner(step, planned, device))
    answer, detail = steps.gate(workload, device, lambda step: steps.runner(step, planned, device), planned)
    over = 0 if budget >= UNLIMITED else max(0, found.highest - budget)
    holds = {"truth": answer in TRUE, "budget": over == 0, "prediction": _is_predicted(predicted, found.warm)}
    counts = {kind.__name__.lower() + "s": schedule.count(kind) for kind in (Recompute, Offload, Prefetch)}
    differs = "" if answer in TRUE else f" at step {detail.first_step_that_differs}: {', '.join(d.name for d in detail.differing[:3])}"
    figures = f"peak {found.highest / eager_bytes:.1%} of eager's, {over:,} bytes over, predicted {predicted - found.warm:+,}"
    report(where, all(holds.values()), f"{note}{answer}{differs}; {figures}", truth=str(answer), holds=holds,
           budget_bytes=None if budget >= UNLIMITED else budget, over_budget_bytes=over, predicted_bytes=predicted, peak_bytes=found.warm,
           cold_peak_bytes=found.cold, peaks=found.raw, eager_bytes=eager_bytes, plan_seconds=planned.plan_seconds, gate=detail.to_json(),
           micro_batches=planned.checked.tape.micro_batches, **counts)


# --- replay against eager -------------------------------------------------------------------------------------------------
def replay(context: Context, report: Report) -> None:
    """Our executor with no method against eager, in turns in one process, with eager against eager beside it."""
    for workload in context.workloads.values():
        with guarded(report, workload.name, context.seconds / 2):
            device = context.device
            one, other, tested = (steps.build(workload, device) for _ in range(3))
            run = steps.runner(tested, steps.replayed(steps.kept_costed(tested, device, context.folder), device), device)
            takers = [s.whole(r) for s, r in ((tested, run), (one, one.eager), (other, other.eager))]
            seconds = steps.alternated([_bound(t, s) for t, s in zip(takers, (tested, one, other))], _rounds(context), device)
            _report_ratio(report, workload.name, *seconds)
            del one, other, tested, run, takers
            steps.settle(device)


def _bound(taker: steps.Run, step: Step) -> Callable[[], Any]:
    return lambda: taker(*step.batch)


def _rounds(context: Context) -> int:
    return 5 if context.is_small else 20


def _report_ratio(report: Report, name: str, tested: list[float], eager: list[float], again: list[float], **data: Any) -> None:
    ratio, noise = paired_ratio(tested, eager), drift(again, eager)
    said = f"{ratio} x eager, drift {noise}: {DISTINGUISHABLE_IN_WORDS[distinguishable(ratio, noise)]}"
    report(name, True, data.pop("note", "") + said, ratio=ratio.to_json(), drift=noise.to_json(), seconds=tested, eager_seconds=eager,
           eager_again_seconds=again, **data)


# --- predicted step times -------------------------------------------------------------------------------------------------
PREDICTED = ("replay", "checkpoint", "delta", "vdnn")


def prediction(context: Context, report: Report) -> None:
    """Step times at 60 % of eager's peak, simulated and executed, both over replay's own: what a method adds."""
    device, errors = context.device, []
    for workload in (w for name, w in context.workloads.items() if not name.startswith("densenet")):
        step = steps.build(workload, device)
        whole = steps.kept_costed(step, device, context.folder)
        budget, base = int(0.6 * simulated_eager_peak(whole.captured.tape)), None
        for name in PREDICTED[:3] if context.is_small else PREDICTED:
            where = f"{workload.name} {name}"
            with guarded(report, where, context.seconds / 3):
                limit = budget if steps.method(name).card["takes_budget"] else UNLIMITED
                planned, _, note = _planned_or_smallest(step, whole, name, device, limit, where)
                metrics = simulate(planned.checked, planned.profile).metrics
                executed = steps.step_seconds(workload, device, _by(planned, device), rounds=_rounds(context) // 2)
                base = base or (metrics.step_seconds, executed)
                error = metrics.step_seconds / base[0] / (executed / base[1]) - 1
                errors += [error] if name != "replay" else []
                said = f"{note}executed {executed * 1e3:.2f} ms, simulated {metrics.step_seconds * 1e3:.2f} ms; over replay {error:+.1%}"
                report(where, True, said, executed_seconds=executed, predicted=metrics.to_json(),
                       relative_error=error)
    if errors:
        report("median error", None, f"{statistics.median(abs(e) for e in errors):.1%} of the step time relative to replay's",
               median_error=statistics.median(abs(e) for e in errors))


def _by(planned: Planned, device: torch.device) -> Callable[[Step], steps.Run]:
    return lambda step: steps.runner(step, planned, device)


# --- overlap --------------------------------------------------------------------------------------------------------------
def overlap(context: Context, report: Report) -> None:
    """Copies that have time to hide, and the same copies in the open: what the compute stream stands still, against the copies' total."""
    device, workload = context.device, context.first
    step = steps.build(workload, device)
    whole = steps.kept_costed(step, device, context.folder)
    tape, profile = whole.captured.tape, measure_profile(device)
    if not context.is_cuda:
        profile = _quick_link(tape, profile)
    found = streams.trips(tape, profile, 0.25)
    if not found:
        report("hidden", False, "no activation has time to leave and come back")
        return
    shares = {}
    for name, chosen in (("hidden", found), ("in the open", [streams.in_the_open(t) for t in found])):
        with guarded(report, name, context.seconds / 2):
            checked = check_schedule(tape, streams.schedule_of(tape, chosen))
            planned = Planned(whole.captured, checked, profile, 0.0)
            copies, stalls, nbytes = _timed_copies(context, workload, planned)
            shares[name] = stalls / copies
            simulated = simulate(checked, profile).metrics.stall_seconds
            holds = shares[name] <= 0.5 if name == "hidden" else shares[name] >= 0.5
            said = f"{len(chosen)} storages, {nbytes / MiB:.1f} MiB: copies {copies * 1e3:.2f} ms, stalls {stalls * 1e3:.2f} ms"
            report(name, holds, f"{said}, simulated {simulated * 1e3:.2f} ms", copies_seconds=copies, stall_seconds=stalls,
                   moved_bytes=nbytes, simulated_stall_seconds=simulated, gb_per_second=nbytes / copies / 1e9)
    with guarded(report, "bits", context.seconds / 2):
        planned = Planned(whole.captured, check_schedule(tape, streams.schedule_of(tape, found)), profile, 0.0)
        answer, _ = steps.gate(workload, device, lambda s: steps.runner(s, planned, device, streams.timed_link(device, profile)), planned)
        report("bits", answer is Truth.EXACT, f"with the copies hidden the step is {answer}")


def _quick_link(tape: Tape, profile: Any) -> Any:
    """A link on which a CPU's small step has copies to hide: all activations in as long as the step takes."""
    rate = sum(s.nbytes for s in tape.storages if s.role == "activation") / sum(op.seconds for op in tape.ops)
    return replace(profile, h2d_bytes_per_second=rate, d2h_bytes_per_second=rate, copy_latency_seconds=0.0)


def _timed_copies(context: Context, workload: Workload, planned: Planned) -> tuple[float, float, int]:
    """Seconds of copies and of stalls, and bytes, of the median step by stalls."""
    device = context.device
    step, link = steps.build(workload, device), streams.timed_link(device, planned.profile)
    one = step.whole(steps.runner(step, planned, device, link))
    taken = []
    for _ in range(steps.WARMUP + _rounds(context)):
        one(*step.batch)
        taken.append(link.take())
    return sorted(taken[steps.WARMUP:], key=lambda t: t[1])[_rounds(context) // 2]


# --- streams --------------------------------------------------------------------------------------------------------------
def stream_controls(context: Context, report: Report) -> None:
    """What orders copies and compute is left out, one thing at a time, behind slow copies: the gate must say wrong, and only then."""
    device, workload = context.device, context.first
    step = steps.build(workload, device)
    whole = steps.kept_costed(step, device, context.folder)
    tape, profile = whole.captured.tape, measure_profile(device)
    if not context.is_cuda:
        profile = _quick_link(tape, profile)
    found = streams.trips(tape, profile, 0.25)[:12]
    checked = check_schedule(tape, streams.schedule_of(tape, found))
    with guarded(report, "a plan without a Wait", context.seconds / 3):
        _without_waits(report, tape, checked.schedule)
    for cheat, must_be_found in streams.CHEATS.items():
        with guarded(report, f"left out: {cheat}", context.seconds / 3):
            _cheat(context, report, cheat, must_be_found, Planned(whole.captured, checked, profile, 0.0))


def _without_waits(report: Report, tape: Tape, schedule: Any) -> None:
    """The checker refuses a schedule that lacks any one of its waits."""
    waits = [i for i, x in enumerate(schedule.instructions) if isinstance(x, Wait)]
    accepted = []
    for i in waits:
        try:
            check_schedule(tape, replace(schedule, instructions=schedule.instructions[:i] + schedule.instructions[i + 1:]))
            accepted.append(i)
        except ScheduleError:
            continue
    report("a plan without a Wait", bool(waits) and not accepted, f"refused for each of {len(waits)} waits", accepted=accepted)


def _cheat(context: Context, report: Report, cheat: str, must_be_found: bool, planned: Planned) -> None:
    device, where = context.device, f"left out: {cheat}"
    if streams.cheating_link(device, planned.profile, cheat) is None:
        report(where, None, "not on a CPU, which has no streams")
        return

    def make_run(step: Step) -> steps.Run:
        link = streams.cheating_link(device, planned.profile, cheat)
        run = steps.runner(step, planned, device, link)

        def one(*batch: torch.Tensor) -> torch.Tensor:
            link.start_step()
            loss = run(*batch)
            steps.synchronize(device)
            return loss

        return one

    answer, detail = steps.gate(context.first, device, make_run)
    expected = Truth.WRONG if must_be_found else Truth.EXACT
    report(where, answer is expected, f"{answer}, as it must be" if answer is expected else f"{answer}, and must be {expected}",
           differing=[d.name for d in detail.differing[:5]], first_step=detail.first_step_that_differs)


# --- telemetry ------------------------------------------------------------------------------------------------------------
def telemetry(context: Context, report: Report) -> None:
    """NVML's fields, or why there is none; NVML against torch; the sampler in its own process."""
    with guarded(report, "nvml", context.seconds / 2):
        _nvml(context, report)
    with guarded(report, "sampler", context.seconds / 2):
        _sampler(context, report)


def _nvml(context: Context, report: Report) -> None:
    nvml = Nvml.open()
    if nvml.failure:
        report("nvml", None if not context.is_cuda else False, nvml.failure)
        return
    with nvml:
        index = context.device.index or 0
        gpu, reason = nvml.find_cuda(index, os.environ) if context.is_cuda else (None, "the run is on a CPU")
        if gpu is None:
            report("nvml", None if not context.is_cuda else False, reason)
            return
        missing: dict[str, str] = {}
        torch.zeros(1, device=context.device)
        before = nvml.sample(gpu, [os.getpid()], missing)
        ballast = torch.zeros(2 * GiB, dtype=torch.uint8, device=context.device)
        torch.cuda.synchronize(context.device)
        after = nvml.sample(gpu, [os.getpid()], missing)
        silent = [name for name in GPU_COLUMNS if after[name] is None and name not in missing]
        facts = nvml.describe_handle(gpu)
        report("nvml fields", not silent, f"{facts['name']}, driver {facts['driver']}: {sum(after[n] is not None for n in GPU_COLUMNS)} of "
               f"{len(GPU_COLUMNS)} fields, {len(missing)} null with a reason", sample=after, missing=missing, silent=silent, gpu=facts)
        risen = after["gpu_memory_used_bytes"] - before["gpu_memory_used_bytes"]
        report("nvml used", abs(risen - 2 * GiB) <= 128 * MiB, f"2 GiB taken, NVML sees {risen / GiB:.3f} GiB", risen_bytes=risen)
        reserved = torch.cuda.memory_reserved(context.device)
        _outside_torch(report, after["gpu_process_memory_bytes"], reserved, missing.get("gpu_process_memory_bytes", ""))
        del ballast


def _outside_torch(report: Report, process_bytes: int | None, reserved: int, reason: str) -> None:
    if process_bytes is None:
        report("outside torch", None, f"null: {reason}", reserved_bytes=reserved)
        return
    outside = process_bytes - reserved
    report("outside torch", 0 <= outside <= 4 * GiB, f"process {process_bytes / MiB:.0f} MiB, torch reserved {reserved / MiB:.0f}, "
           f"outside {outside / MiB:.0f} MiB", process_bytes=process_bytes, reserved_bytes=reserved, outside_bytes=outside)


def _sampler(context: Context, report: Report) -> None:
    step = steps.build(context.first, context.device)
    one = step.whole(step.eager)
    path = context.folder / "telemetry.csv.gz"
    with Sampler(path, target=context.device_name, period_seconds=0.05) as sampler:
        end = time.monotonic() + (2.0 if context.is_small else 5.0)
        while time.monotonic() < end:
            one(*step.batch)
        steps.synchronize(context.device)
    summary = sampler.summary
    if summary["failure"]:
        report("sampler", False, summary["failure"])
        return
    columns = read_telemetry(path).columns
    empty = [name for name, values in columns.items() if all(v is None for v in values)]
    silent = [name for name in empty if name not in summary["missing"]]
    report("sampler", summary["rows"] >= 5 and not silent, f"{summary['rows']} rows, {summary['missed']} missed, "
           f"{len(columns) - len(empty)} of {len(columns)} columns, {len(empty)} null with a reason", summary=summary, silent=silent,
           highest={name: max((v for v in values if v is not None), default=None) for name, values in columns.items()})


# --- PyTorch's own --------------------------------------------------------------------------------------------------------
PEERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("torch-checkpoint", {"policy": "block"}),
    ("torch-checkpoint", {"policy": "selective"}),
    ("torch-offload", {}),
    ("torch-compile-budget", {"backend": "aot_eager"}),
)
NOISE = 1e-3  # a gradient's relative distance, beyond which other kernels are no explanation


def peers(context: Context, report: Report) -> None:
    """PyTorch's own savers: truth, measured peak, step time in turns with eager."""
    device, workload = context.device, context.first
    eager_bytes = steps.peaks(workload, device).warm
    for name, options in PEERS:
        where = " ".join([name, *(str(v) for v in options.values())])
        if name == "torch-offload" and not context.is_cuda:
            report(where, None, "not on a CPU: the saved tensors are on the host already")
            continue
        with guarded(report, where, context.seconds * 0.6):
            _peer(context, report, where, workload, name, options, eager_bytes)
    report("torch-compile-budget inductor", None, "not run: it compiles for minutes; benchmarks/peers.py has it")


def _peer(context: Context, report: Report, where: str, workload: Workload, name: str, options: dict[str, Any], eager_bytes: int) -> None:
    device = context.device

    def make_run(step: Step) -> steps.Run:
        return steps.method(name).build(step.model, workload.loss_fn, step.optimizer, **options)

    found = steps.peaks(workload, device, make_run)
    answer, detail = steps.gate(workload, device, make_run)
    apart = {} if answer is Truth.EXACT else steps.distance(workload, device, make_run)
    is_noise = bool(apart) and apart["gradient"] <= NOISE and name == "torch-compile-budget"
    if is_noise:
        answer = Truth.WITHIN_NOISE
    one, other, tested = (steps.build(workload, device) for _ in range(3))
    takers = [s.whole(r) for s, r in ((tested, make_run(tested)), (one, one.eager), (other, other.eager))]
    seconds = steps.alternated([_bound(t, s) for t, s in zip(takers, (tested, one, other))], _rounds(context) // 2, device)
    _report_ratio(report, where, *seconds, note=f"{answer}, peak {found.warm / eager_bytes:.1%} of eager's, ", truth=str(answer),
                  distance=apart, peak_bytes=found.warm, eager_bytes=eager_bytes, peaks=found.raw, options=options)
    if answer not in (Truth.EXACT, Truth.WITHIN_NOISE):
        report(f"{where} truth", False, f"{answer} at step {detail.first_step_that_differs}: {detail.differing[0].name}", distance=apart)


# --- largest batch --------------------------------------------------------------------------------------------------------
CAP_BYTES = 12 * GiB
SMALL_CAP_BYTES = 10 * MiB  # on a CPU: a budget, held against the meter


def trial(context: Context, report: Report, *, method: str, batch_size: int) -> None:
    """Three full steps at a batch size, in this process alone."""
    device = context.device
    workload = _capped_workload(context, batch_size)
    try:
        if context.is_cuda:
            report("trial", True, "", **_gpu_trial(context, workload, method))
        else:
            report("trial", True, "", **_metered_trial(workload, device, method))
    except PlanInfeasible as refusal:
        report("trial", True, "", fits=False, outcome="plan_infeasible", message=_first_line(refusal))
    except RuntimeError as wrong:
        if not any(word in str(wrong) for word in ("out of memory", "ALLOC_FAILED")):  # torch's own, cuDNN's, cuBLAS's
            raise
        report("trial", True, "", fits=False, outcome="oom", message=_first_line(wrong))


def _capped_workload(context: Context, batch_size: int) -> Workload:
    """ResNet-50 at 224 pixels, as workflows/resnet50-delta.yaml has it on a GPU."""
    if context.is_small:
        return replace(context.first, batch_size=batch_size)
    from torchvision import models

    return steps.images("resnet50", models.resnet50, batch_size, 224)


def _gpu_trial(context: Context, workload: Workload, method: str) -> dict[str, Any]:
    device = context.device
    steps.warm_libraries(replace(workload, batch_size=2), device)
    step = steps.build(workload, device)
    run, budget = step.eager, None
    resident = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in step.live()}.values())
    if method != "eager":
        whole = steps.costed_at_any_size(step, device, context.folder)
        steps.settle(device)
        budget = free_bytes("cuda") + resident
        run = steps.runner(step, steps.plan(step, whole, method, device, budget), device)
    one, seconds = step.whole(run), []
    steps.settle(device)
    outside = torch.cuda.memory_stats(device)["requested_bytes.all.current"] - resident  # libraries, and what measuring costs keeps
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(3):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        loss = float(one(*step.batch))
        seconds.append(time.perf_counter() - started)
    stats = torch.cuda.memory_stats(device)
    whole_step = all(p.grad is not None for p in step.model.parameters()) and loss == loss
    peak = stats["requested_bytes.all.peak"] - outside
    return {"fits": whole_step, "outcome": "ok" if whole_step else "wrong", "seconds": seconds[-1], "retries": stats["num_alloc_retries"],
            "budget_bytes": budget, "over_budget_bytes": 0 if budget is None else max(0, peak - budget), "peak_bytes": peak,
            "outside_bytes": outside, "reserved_bytes": stats["reserved_bytes.all.peak"]}


def _metered_trial(workload: Workload, device: torch.device, method: str) -> dict[str, Any]:
    make_run, budget = None, SMALL_CAP_BYTES
    if method != "eager":
        step = steps.build(workload, device)
        planned = steps.plan(step, steps.costed(step, device), method, device, budget)
        make_run = lambda s: steps.runner(s, planned, device)  # noqa: E731
    found = steps.peaks(workload, device, make_run)
    seconds = steps.step_seconds(workload, device, make_run, rounds=1)
    return {"fits": found.highest <= budget, "outcome": "ok" if found.highest <= budget else "over_cap", "seconds": seconds,
            "budget_bytes": budget, "peak_bytes": found.highest, "over_budget_bytes": max(0, found.highest - budget) if make_run else 0}


def ballast(context: Context, report: Report) -> None:
    """Takes GPU memory until `CAP_BYTES` are left, and holds it until it is ended."""
    device = context.device
    torch.zeros(1, device=device)
    free, total = torch.cuda.mem_get_info(device)
    blocks = [torch.empty(free - CAP_BYTES, dtype=torch.uint8, device=device)] if free > CAP_BYTES else []
    left, _ = torch.cuda.mem_get_info(device)
    report("ballast", True, "", held_bytes=sum(b.numel() for b in blocks), free_bytes=left, total_bytes=total)
    time.sleep(context.seconds)


class _TimeUp(Exception):
    """No time is left for another trial."""


@dataclass
class Search:
    """The finder of workflows, while there is time: the largest fits twice, the next fails twice, a few beyond are tried."""

    fits: Callable[[int], bool]
    granule: int
    until: float  # monotonic time

    def largest(self, low: int, ceiling: int) -> tuple[int | None, int | None, bool]:
        """(largest that fits, smallest above it that does not, was there time for all trials?)"""
        answers: dict[int, bool] = {}

        def ask(size: int) -> bool:
            if time.monotonic() > self.until:
                raise _TimeUp
            answers[size] = self.fits(size) and answers.get(size, True)
            return answers[size]

        try:
            good, is_done = find_largest(ask, range(self.granule, ceiling + 1, self.granule), first=low, confirm=ask).largest, True
        except _TimeUp:
            good, is_done = max((size for size, fitted in answers.items() if fitted), default=None), False
        return good, min((size for size, fitted in answers.items() if not fitted and size > (good or 0)), default=None), is_done


Ask = Callable[..., dict[str, Any]]  # (section, **what it is told) -> the data of its only row; {"fits": False, ...} where it died


def largest_batch(context: Context, report: Report, ask: Ask, hold: Callable[[str], Any]) -> None:
    """Eager's and DELTA's largest batch of ResNet-50 under a cap: emulated on a GPU by a ballast, in a fresh process a trial."""
    granule, low, ceiling = (4, 4, 16) if context.is_small else (8, 64, 2048)
    end = time.monotonic() + context.seconds
    found: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        if context.is_cuda:
            held = stack.enter_context(hold("ballast"))
            taken, total, left = (held[name] / GiB for name in ("held_bytes", "total_bytes", "free_bytes"))
            report("ballast", held["free_bytes"] <= CAP_BYTES + 64 * MiB, f"emulated: another process holds {taken:.1f} of {total:.1f} GiB"
                   f", {left:.2f} GiB are left for all that a trial needs, its context included", **held)
        else:
            report("ballast", None, f"none on a CPU: the cap is {SMALL_CAP_BYTES / MiB:.0f} MiB, held against the meter",
                   cap_bytes=SMALL_CAP_BYTES)
        for name, share in (("eager", 0.35), ("delta", 1.0)):
            until = time.monotonic() + share * (end - time.monotonic()) - 5
            _search_one(report, ask, name, Search(lambda _: False, granule, until), found, low, ceiling)


def _search_one(report: Report, ask: Ask, name: str, search: Search, found: dict[str, int], low: int, ceiling: int) -> None:
    trials: list[dict[str, Any]] = []

    def fits(size: int) -> bool:
        trials.append({"batch_size": size} | ask("trial", method=name, batch_size=size))
        return bool(trials[-1]["fits"])

    search.fits = fits
    good, bad, is_done = search.largest(found.get("eager") or low, ceiling)
    broken = [t for t in trials if t["outcome"] not in ("ok", "oom", "plan_infeasible", "over_cap") or t.get("over_budget_bytes")]
    if good:
        found[name] = good
    times = f", {good / found['eager']:.2f} x eager's" if name != "eager" and good and "eager" in found else ""
    state = "; each tried twice" if is_done else "; the time was up before all was tried"
    trouble = "".join(f"; batch {t['batch_size']}: {t['outcome']} {t.get('message', '')}" for t in broken[:2])
    said = f"largest batch {good} (granule {search.granule}), {bad} does not fit{times}{state}; {len(trials)} trials{trouble}"
    report(name, good is not None and not broken, said, largest=good, smallest_failure=bad, is_done=is_done, trials=trials,
           ratio=good / found["eager"] if good and "eager" in found else None)
