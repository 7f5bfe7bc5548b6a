"""Which methods fit a training step on a device that need not be at hand, how fast they are there, and up to what batch: all *simulated*.

    question = Question.of(library, model="resnet50", batch=256, host=Host("sim:rtx-4090"), budget="24GiB")
    advice = advise(question, seconds=60, tell=print)

The step is captured once: at 2 and 3 samples and at the batch that was asked about, which proves the line through the two. Each method then
plans in a process of its own, two at a time, and is asked for its largest batch; who is not through in time is told with what was known.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from vramlab.collection import Library, Method
from vramlab.environment import cache_dir
from vramlab.errors import EnvironmentUnable, VramlabError, WorkflowError
from vramlab.finder import BATCH
from vramlab.isolate import Call, CallResult, Settings, run_isolated
from vramlab.planner import parse_bytes, parse_percent
from vramlab.record import Outcome
from vramlab.report.words import bytes_in_words
from vramlab.workflow import Host, single_cell

EAGER = "eager"
WORTH_A_METHOD = 0.001  # the share of eager's step that a method has to save to be named in its place where both fit
HIGHEST = 2**16  # the largest batch that is tried
AT_ONCE = 2  # methods that plan at the same time
CAPTURE_SECONDS = 600.0
# Which option of the command line sets which key of a workflow.
_OPTIONS = {"model": "--model", "batch_sizes": "--batch", "methods": "--methods", "budgets": "--budget", "targets": "--device"}
NATIVE = "PyTorch decides while the step runs, and nothing predicts it"
BASELINE = "a baseline of papers, no way to save memory; --methods asks it"


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked: one resolved cell a method, eager's first, and why others have none."""

    configs: Mapping[str, Mapping[str, Any]]
    roots: Sequence[str]  # of the collections
    batch: int
    budget: str | None  # as it was given; None: all of the device's memory
    skipped: Mapping[str, str] = field(default_factory=dict)  # method -> why it is not asked

    @classmethod
    def of(cls, library: Library, *, model: str, batch: int, host: Host, budget: str | None = None, methods: Sequence[str] = (),
           overrides: Sequence[str] = ()) -> Question:
        """WorkflowError where a name, a size or an override is wrong. `methods` empty: all that save memory and need no option."""
        _check_budget(budget)
        asked, skipped = (list(methods), {}) if methods else _choose(library)
        asked = [EAGER, *(name for name in asked if name not in (EAGER, *library.method(EAGER).card.alias))]
        is_module = ":" in model
        if is_module and (wrong := [text for text in overrides if not text.startswith("methods.")]):
            raise WorkflowError(f"{wrong[0]}: --model {model} says itself what it is; of a module's own step only methods.* can be set")
        settings = {"model": next(iter(library.model_paths)) if is_module else model, "batch_sizes": [batch], "methods": asked,
                    "targets": ["auto"], "budgets": [budget or "auto"], "measure": {"time": False, "peak": False}}
        plan = single_cell(library, settings, overrides, host, _OPTIONS)
        for name in asked[1:]:
            if library.method(name).card.kind == "native":
                raise WorkflowError(f"--methods: {name!r} cannot be asked: {NATIVE}")
        if plan.left_out:
            raise EnvironmentUnable(f"--device {host.auto}: {plan.left_out[0].reason}")
        own = {"model": model, "model_options": {}} if is_module else {}
        search = {"search": {"over": BATCH, "low": 1, "high": max(HIGHEST, batch), "step": 1, "slowdown": None}}
        configs = {cell.config["method"]: {**cell.config, **own, **search, "budget": budget or "auto"} for cell in plan.cells}
        return cls(configs=configs, roots=[str(root) for root in library.roots], batch=batch, budget=budget, skipped=skipped)

    def spec(self, method: str, **changes: Any) -> dict[str, Any]:
        """What a process of its own is handed."""
        return {"config": {**self.configs[method], **changes}, "collections": self.roots, "workflow": {"name": "advise"}}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one method comes to. All numbers are simulated; None where there is none, and `why` says why."""

    method: str
    options: Mapping[str, Any]
    fits: bool = False
    why: str = ""  # it does not fit, or was not through in time
    peak_bytes: int | None = None
    smallest_bytes: int | None = None  # the smallest budget found that it can reach, where this one is too small
    step_seconds: float | None = None
    overhead: float | None = None  # of the step over eager's: 0.1 is 10 % longer
    above_bound: float | None = None  # of the step over what no schedule of its step within the budget is below
    least_step_seconds: float | None = None  # that bound; a method's step may have other convolution algorithms than eager's, or split ops
    least_peak_bytes: int | None = None  # likewise, of any schedule of its step
    plan_seconds: float | None = None
    changes_semantics: bool = False  # it cuts the batch, and BatchNorm or dropout make that another step
    largest_batch: int | None = None  # None: nothing fits, or nothing is known
    is_at_least: bool = False  # a larger batch may fit: the search was not through, or came to the largest batch that is tried


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Everything that is known at the end."""

    step: Mapping[str, Any]  # of the step itself: ops, eager's peak and time, the bounds, the budget in bytes
    answers: Sequence[Answer]  # fastest first, then those that do not fit
    skipped: Mapping[str, str]

    @property
    def least_peak_bytes(self) -> int:
        """What no schedule is below, of eager's step or of a step that a method plans on: the lowest of their bounds."""
        return min([self.step["least_peak_bytes"], *(a.least_peak_bytes for a in self._whole if a.least_peak_bytes is not None)])

    @property
    def least_step_seconds(self) -> float | None:
        """Likewise the step within the budget; None where no schedule is within it."""
        known = [self.step["least_step_seconds"], *(a.least_step_seconds for a in self._whole)]
        return min((seconds for seconds in known if seconds is not None), default=None)

    @property
    def _whole(self) -> list[Answer]:
        """Those that take the batch whole."""
        return [a for a in self.answers if not a.changes_semantics]

    @property
    def best(self) -> Answer | None:
        """The fastest that fits and computes the step that was asked about; eager where it fits and nobody is faster by more than a
        thousandth, since it needs no vramlab."""
        fastest = next((a for a in self.answers if a.fits and not a.changes_semantics), None)
        eager = next((a for a in self.answers if a.fits and a.method == EAGER), None)
        is_no_faster = fastest and eager and fastest.step_seconds > (1 - WORTH_A_METHOD) * eager.step_seconds
        return eager if is_no_faster else fastest

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        bound = {"peak_bytes": self.least_peak_bytes, "step_seconds": self.least_step_seconds}
        return {"is_simulated": True, "step": dict(self.step), "bound": bound, "methods": [asdict(a) for a in self.answers],
                "skipped": dict(self.skipped), "best": self.best and self.best.method}


def advise(question: Question, *, seconds: float, tell: Callable[[str, int, int], None] = lambda text, done, total: None) -> Advice:
    """Ask. `seconds`: the most that one method may take. `tell(text, done, total)` is called as it goes on.

    Raises WorkflowError where the user's own module is wrong, VramlabError where its step cannot be captured.
    """
    total = len(question.configs)
    with tempfile.TemporaryDirectory(prefix="advise-", dir=_scratch()) as folder:
        asker = _Asker(question, Path(folder), seconds)
        tell("capturing the step ...", 0, total)
        step = asker.survey()
        tell(f"{step['ops']} ops", 0, total)
        answers = []
        for answer in asker.answers(step):
            answers.append(answer)
            tell(in_words(answer), len(answers), total)
    answers.sort(key=_rank)
    return Advice(step=step, answers=tuple(answers), skipped=question.skipped)


def _rank(answer: Answer) -> tuple[bool, float, bool, str]:
    """Those that fit first, the fastest first; where a method gains nothing on plain PyTorch, that is simpler and comes before it."""
    return not answer.fits, answer.step_seconds or 0.0, answer.method != EAGER, answer.method


def in_words(answer: Answer) -> str:
    """One line of progress."""
    if not answer.fits:
        return f"{answer.method}: {answer.why}"
    return f"{answer.method}: fits, {answer.overhead:+z.1%} on eager's step, simulated; largest batch {largest_in_words(answer)}"


def largest_in_words(answer: Answer) -> str:
    """`310`, `310 or more`, `none`, `unknown`."""
    if answer.largest_batch is None:
        return "unknown" if answer.is_at_least else "none"
    return f"{answer.largest_batch} or more" if answer.is_at_least else str(answer.largest_batch)


# --- which methods --------------------------------------------------------------------------------------------------------
def _choose(library: Library) -> tuple[list[str], dict[str, str]]:
    """Those that are asked when none is named, and why the others are not."""
    why = {name: reason for name in library.method_paths if (reason := _why_not(library.method(name)))}
    return [name for name in library.method_paths if name not in why], {name: why[name] for name in why if name != EAGER}


def _why_not(method: Method) -> str:
    card = method.card
    if card.kind == "native":
        return NATIVE
    if card.required:
        name = card.required[0]
        return f"it needs the option {name!r}; --methods {method.name} methods.{method.name}.options.{name}=... asks it"
    return BASELINE if "baseline" in card.tags else ""


def _check_budget(budget: str | None) -> None:
    try:
        if budget not in (None, "auto") and parse_percent(budget) is None:
            parse_bytes(budget)
    except ValueError as wrong:
        raise WorkflowError(f"--budget: {wrong}, or a share of eager's peak such as 60%") from wrong


# --- answers --------------------------------------------------------------------------------------------------------------
def _answer(method: str, options: Mapping[str, Any], folder: Path, result: CallResult, step: Mapping[str, Any]) -> Answer:
    """From what the process left behind, whether it came to its end or not."""
    facts, trials, found = (_read(folder / f"{name}.json") for name in ("plan", "trials", "found"))
    answer = Answer(method=method, options=options, why="" if facts else _why_no_answer(result),
                    least_peak_bytes=facts["lower_bound_bytes"] if facts else None)
    if facts and "infeasible" in facts:
        smallest, message = facts["infeasible"]["smallest_bytes"], facts["infeasible"]["message"]
        why = message if smallest is None else f"does not fit: it reaches {bytes_in_words(smallest)} at the least"
        answer = replace(answer, why=why, smallest_bytes=smallest, plan_seconds=facts["plan_seconds"])
    elif facts:
        answer = _fitting(answer, facts, step)
    if found:
        return replace(answer, largest_batch=found["largest"], is_at_least=found["hit_upper_end"])
    largest = max((t["value"] for t in trials or () if t["fits"]), default=None)
    return replace(answer, largest_batch=largest, is_at_least=bool(facts) or result.outcome is Outcome.TIMEOUT)


def _fitting(answer: Answer, facts: Mapping[str, Any], step: Mapping[str, Any]) -> Answer:
    predicted = facts["predicted"]
    seconds, least = predicted["step_seconds"], predicted.get("least_step_seconds")
    return replace(
        answer, fits=True, peak_bytes=predicted["peak_bytes"], step_seconds=seconds, overhead=seconds / step["eager_step_seconds"] - 1,
        least_step_seconds=least, above_bound=seconds / least - 1 if least else None, plan_seconds=facts["plan_seconds"],
        changes_semantics=bool(facts.get("changes_semantics")),
    )


def _why_no_answer(result: CallResult) -> str:
    if result.outcome is Outcome.TIMEOUT:
        return f"no plan {result.message.removeprefix('no answer ')}"
    return result.message.splitlines()[0] if result.message else str(result.outcome)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except OSError:
        return None


def _value(result: CallResult) -> Any:
    """Of the captures. What went wrong there went wrong for every method."""
    if result.outcome is Outcome.OK:
        return result.value
    if result.error_type in ("WorkflowError", "UnknownName", "InvalidFile"):
        raise WorkflowError(result.message)
    if result.error_type == "CaptureError":
        raise VramlabError(result.message)
    raise EnvironmentUnable(f"the step could not be captured: {result.message}")


# --- processes ------------------------------------------------------------------------------------------------------------
class _Asker:
    """Asks one process after the other, and methods several at a time; an interrupt ends those that run, so that nobody waits for them."""

    def __init__(self, question: Question, folder: Path, seconds: float) -> None:
        self._question, self._folder, self._seconds = question, folder, seconds
        self._tapes = {"tapes": str(folder / "tapes")}
        self._running: dict[str, int] = {}  # method -> its process

    def survey(self) -> dict[str, Any]:
        """Of the step itself."""
        return _value(self._run("survey", EAGER, CAPTURE_SECONDS, self._question.spec(EAGER, **self._tapes)))

    def answers(self, step: Mapping[str, Any]) -> Iterator[Answer]:
        """One of each method, as they come."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            try:
                for asked in as_completed([pool.submit(self._ask, method, step) for method in self._question.configs]):
                    yield asked.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for pid in list(self._running.values()):
                    with suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
                raise

    def _ask(self, method: str, step: Mapping[str, Any]) -> Answer:
        out = self._folder / method
        out.mkdir()
        spec = self._question.spec(method, budget=step["budget_bytes"], **self._tapes)
        result = self._run("advise", method, self._seconds, spec, str(out))
        return _answer(method, self._question.configs[method]["options"], out, result, step)

    def _run(self, what: str, method: str, seconds: float, *args: Any) -> CallResult:
        def started(pid: int) -> None:
            self._running[method] = pid

        try:
            return run_isolated(Call(function=f"vramlab.measure.{what}", args=args), timeout_seconds=seconds,
                                settings=Settings(is_forked=True, on_start=started))
        finally:
            self._running.pop(method, None)


def _scratch() -> Path:
    folder = cache_dir()
    folder.mkdir(parents=True, exist_ok=True)
    return folder
