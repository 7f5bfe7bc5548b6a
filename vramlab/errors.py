"""Every exception that vramlab raises on purpose. One base, so that a caller can catch the lot."""

from __future__ import annotations

from typing import Any


class VramlabError(Exception):
    """Base of all errors that vramlab raises on purpose."""


class WorkflowError(VramlabError):
    """A workflow, a card or an argument is wrong. The text is `file:line:column: what, and what is allowed`."""


class EnvironmentUnable(VramlabError):
    """The machine at hand cannot do what was asked (no GPU, no driver, too little memory)."""


class CaptureError(VramlabError):
    """A training step cannot be captured faithfully.

    `op` is the operator ("aten._local_scalar_dense.default", or "" when none is to blame), `module` the dotted path of
    the module that was running ("" for the root), `reason` says why in one sentence.
    """

    def __init__(self, reason: str, *, op: str = "", module: str = "") -> None:
        self.op, self.module, self.reason = op, module, reason
        where = f" in module '{module}'" if module else ""
        what = f" at {op}" if op else ""
        super().__init__(f"cannot capture this training step{what}{where}: {reason}")


class ScheduleError(VramlabError):
    """A schedule breaks a rule of legality. Names instruction index, op, storage and rule."""

    def __init__(self, rule: str, *, index: int, detail: str, op: str = "", storage: str = "") -> None:
        self.rule, self.index, self.op, self.storage, self.detail = rule, index, op, storage, detail
        names = "".join([f", op {op}" if op else "", f", storage {storage}" if storage else ""])
        super().__init__(f"instruction {index}{names}: [{rule}] {detail}")


class PlanInfeasible(VramlabError):
    """A method cannot reach the budget.

    `budget_bytes` is what was asked, `smallest_bytes` the smallest budget found that the method can reach on this tape (None when it was
    not searched); one a little below may do too, where a method's peaks jump from budget to budget. `op` is the op that binds: at which the
    plan within that smallest budget has its peak, the one with the largest working set where it comes near it more than once; without
    such a budget, the op at which the refused try got stuck. `eager_peak_bytes` is there where the budget was asked as a share of it: the
    message then tells bytes as shares, too. `note`, a sentence, ends the message.
    """

    def __init__(self, *, method: str, budget_bytes: int, smallest_bytes: int | None, op: str, eager_peak_bytes: int | None = None,
                 note: str = "") -> None:
        self.method, self.budget_bytes, self.smallest_bytes, self.op = method, budget_bytes, smallest_bytes, op
        self.eager_peak_bytes, self.note = eager_peak_bytes, note
        if smallest_bytes is None:
            told = f"it got stuck at {op}"
        else:
            told = f"the smallest budget found that it can reach is {sized(smallest_bytes, eager_peak_bytes)}; there {op} binds"
        within = sized(budget_bytes, eager_peak_bytes)
        super().__init__(f"method '{method}' cannot keep this step within {within}; {told}" + (f". {note}" if note else ""))

    def told(self, **more: Any) -> PlanInfeasible:
        """The same refusal with another budget_bytes, smallest_bytes, eager_peak_bytes or note: what the planner could not know."""
        return PlanInfeasible(**self._state() | more)

    def _state(self) -> dict[str, Any]:
        return {"method": self.method, "budget_bytes": self.budget_bytes, "smallest_bytes": self.smallest_bytes, "op": self.op,
                "eager_peak_bytes": self.eager_peak_bytes, "note": self.note}

    def __reduce__(self):  # keyword-only arguments do not survive the default pickling
        return (_rebuild_plan_infeasible, (self._state(),))


def _rebuild_plan_infeasible(state: dict) -> PlanInfeasible:
    return PlanInfeasible(**state)


def sized(nbytes: int, eager_peak_bytes: int | None = None) -> str:
    """`306,820,920 bytes (292.6 MiB)`, as a share too where eager's peak is given: `(292.6 MiB, 50.0 % of eager's peak)`."""
    unit, size = next(((unit, size) for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)) if nbytes >= size), ("", 1))
    beside = [f"{nbytes / size:.4g} {unit}"] if unit else []
    beside += [f"{100 * nbytes / eager_peak_bytes:.1f} % of eager's peak"] if eager_peak_bytes else []
    return f"{nbytes:,} {'byte' if nbytes == 1 else 'bytes'}" + (f" ({', '.join(beside)})" if beside else "")


class WrongResult(VramlabError):
    """A planned step did not compute what eager PyTorch computes. `differing` names what differs."""

    def __init__(self, differing: tuple[str, ...]) -> None:
        self.differing = tuple(differing)
        more = f" and {len(self.differing) - 5} more" if len(self.differing) > 5 else ""
        names = ", ".join(self.differing[:5]) + more
        super().__init__(f"this step differs from eager PyTorch in {names}; everything is as it was before the call")

    def __reduce__(self):
        return (type(self), (self.differing,))


class Disturbed(VramlabError):
    """Another thread drew from the generator that a step's random ops draw from, so that what was recomputed is not what ran first."""


class Unsupported(VramlabError):
    """A method's `needs` are not met by this tape, or a method does not exist on this device."""


class SubmissionRefused(VramlabError):
    """A run may not be submitted as it is. `problems` holds one sentence for each reason; the command line exits with 4."""

    exit_code = 4

    def __init__(self, problems: tuple[str, ...]) -> None:
        self.problems = problems
        super().__init__("refused: " + "; ".join(problems))

    def __reduce__(self):
        return (type(self), (self.problems,))


class BundleRefused(VramlabError):
    """What was given away is not taken in: it breaks a named rule. `where` is a path, with a dotted field where one is to blame."""

    exit_code = 4

    def __init__(self, rule: str, where: str, detail: str) -> None:
        self.rule, self.where, self.detail = rule, where, detail
        super().__init__(f"{where or 'the bundle'}: [{rule}] {detail}")

    def __reduce__(self):
        return (type(self), (self.rule, self.where, self.detail))
