"""Questions that every method must answer, put to one method: its imports, its options, and its plans on a small tape.

For an author who has dropped a folder into a collection. The tape is a chain of convolution-like layers with a backward
phase, small enough to follow by hand; the budgets run from no limit over what eager needs down to what no method can reach.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Callable

from vramlab.check import check_schedule
from vramlab.collection import Method, built_in_collection, read_method, source_files
from vramlab.device import load_profile
from vramlab.errors import PlanInfeasible, ScheduleError, Unsupported
from vramlab.layers import NEEDS
from vramlab.liveness import lower_bound_bytes, replay_schedule
from vramlab.planner import UNLIMITED, Budget
from vramlab.schedule import Schedule
from vramlab.tape import Op, Phase, Role, Storage, Tape, Tensor
from vramlab.yaml_nodes import offer, one_of

PURE = frozenset({"vramlab"} | {f"vramlab.{name}" for name in (
    "errors", "device", "tape", "schedule", "trace", "liveness", "layers", "check", "simulate", "planner", "player", "rollout", "bounds",
    "kernels", "edits", "gaps", "occupancy", "copying", "residence", "annealing", "record", "family", "micro_batches",
    "batch_mean", "parallel",
)})
TRAINING_FILE = "training.py"  # of an agent, before any planning
SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)  # of what replay needs
_MAP, _WEIGHT = 1 << 20, 1 << 16
_DEVICE = "v100-32gb"


@dataclass(frozen=True)
class Check:
    """One question; no faults: it is answered well."""

    what: str
    faults: list[str]


def check_method(method: Method) -> list[Check]:
    """All questions in order; later ones are left out when the method does not even load."""
    checks = [Check("imports only the standard library, numpy, its own files and vramlab's pure modules", list(_import_faults(method)))]
    try:
        build = method.load().build
    except (Exception, SystemExit) as error:  # whatever an author's module raises while it is imported is the answer
        return [*checks, Check("loads", [f"{type(error).__name__}: {error}"])]
    checks.append(Check("build() has the card's options with the card's defaults", list(_option_faults(method, build))))
    checks.append(Check("the card's needs are known", [f"need {need!r} is unknown{offer(need, NEEDS, 'there are')}"
                                                       for need in method.card.needs if need not in NEEDS]))
    if method.card.required:
        return [*checks, Check(f"is asked for no plan: it needs the option {one_of(method.card.required)}", [])]
    if method.card.kind == "planner" and not any(check.faults for check in checks[1:]):
        had_torch = "torch" in sys.modules
        checks += _plan_checks(method)
        if "torch" in sys.modules and not had_torch:
            checks[0].faults.append("torch was imported while it planned")
    return checks


def check_folder(folder: str) -> list[Check]:
    """`check_method` of the method in a folder, for a process of its own."""
    return check_method(read_method(Path(folder)))


def check_contract_of_folder(folder: str) -> list[Check]:
    """`check_contract`, likewise."""
    return check_contract(read_method(Path(folder)))


# ------------------------------------------------------------------------------------------------ imports and options


def _import_faults(method: Method) -> Iterator[str]:
    """What a planner may not import. A native method, and what trains an agent before any planning, have torch inside their functions."""
    is_native = method.card.kind == "native"
    for path in source_files(method.folder):
        if path.suffix != ".py":
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        except (SyntaxError, ValueError) as error:  # no UTF-8, a null byte
            yield f"{path.name} cannot be read as Python: {error}"
            continue
        may_defer = is_native or path.name == TRAINING_FILE
        inner = _below(tree, lambda n: isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
        for_types = _below(tree, lambda n: isinstance(n, ast.If) and ast.unparse(n.test).endswith("TYPE_CHECKING"))
        for node in ast.walk(tree):
            for name in _imported(node):
                may = name.partition(".")[0] in sys.stdlib_module_names | {"numpy", "numba"} or name in PURE
                if not may and not (may_defer and id(node) in inner | for_types):
                    yield f"{path.name}:{node.lineno} imports {name}" + (" outside a function" if may_defer else "")


def _below(tree: ast.AST, is_root: Callable[[ast.AST], bool]) -> set[int]:
    """Identities of all nodes that stand inside a node of this kind."""
    return {id(node) for root in ast.walk(tree) if is_root(root) for node in ast.walk(root)}


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "vramlab" else [node.module or ""]
    return []


def _option_faults(method: Method, build: Callable[..., Any]) -> Iterator[str]:
    parameters = dict(inspect.signature(build).parameters)
    for name in ("model", "loss_fn", "optimizer") if method.card.kind == "native" else ():
        if parameters.pop(name, None) is None:
            yield f"build() has no parameter {name!r}"
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {name: p for name, p in parameters.items() if p.kind is not p.VAR_KEYWORD}
    for name, option in method.card.options.items():
        if name not in named and not takes_any:
            yield f"build() has no parameter for option {name!r}"
        elif name in named and named[name].default is not inspect.Parameter.empty and named[name].default != option.read(option.default):
            yield f"option {name!r} defaults to {option.default!r} in the card and to {named[name].default!r} in build()"
    for name in set(named) - set(method.card.options):
        yield f"build() has a parameter {name!r} that the card does not declare"


# ------------------------------------------------------------------------------------------------ plans


def _plan_checks(method: Method) -> list[Check]:
    tape = chain(8)
    needed = check_schedule(tape, replay_schedule(tape)).peak_bytes
    least = lower_bound_bytes(tape)
    budgets = [Budget(device_bytes=UNLIMITED), *(Budget(device_bytes=int(needed * share)) for share in SHARES)]
    plans = [_plan(method, tape, budget) for budget in budgets]
    unsupported = [plan for plan in plans if isinstance(plan, Unsupported)]
    if unsupported:
        return [Check(f"plans a chain of convolutions, or says what it needs: {unsupported[0]}", [])]
    legal = [fault for plan, budget in zip(plans, budgets) for fault in _legality(tape, plan, budget)]
    checks = [
        Check("every plan is legal and within its budget", legal),
        Check("a refused budget names a larger one that can be reached", [f for p, b in zip(plans, budgets) for f in _refusal(p, b)]),
        Check("the same question gets the same plan, and a plan survives JSON", list(_repeatability(method, tape, plans, budgets))),
    ]
    if method.card.takes_budget:
        below = _plan(method, tape, Budget(device_bytes=least - 1))
        checks.append(Check("a budget below what any schedule can reach is refused",
                            [] if isinstance(below, PlanInfeasible) else [f"{least - 1:,} bytes: {_said(below)}"]))
    return checks


def _plan(method: Method, tape: Tape, budget: Budget) -> Schedule | Exception:
    """A fresh planner's answer; what it raises is an answer, too."""
    try:
        return method.build().plan(tape, load_profile(_DEVICE), budget)
    except (Exception, SystemExit) as error:
        return error


def _said(plan: Schedule | Exception) -> str:
    return "it gave a plan" if isinstance(plan, Schedule) else f"{type(plan).__name__}: {plan}{_raised_at(plan)}"


def _raised_at(plan: Any) -> str:
    """` (method.py:17)`: the innermost line outside vramlab of an error that nobody meant to raise."""
    if not isinstance(plan, Exception) or isinstance(plan, PlanInfeasible | Unsupported):
        return ""
    own = [f for f in traceback.extract_tb(plan.__traceback__) if not Path(f.filename).is_relative_to(Path(__file__).parent)]
    return f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""


def _legality(tape: Tape, plan: Any, budget: Budget) -> list[str]:
    if isinstance(plan, PlanInfeasible) and budget.device_bytes < UNLIMITED:
        return []
    if not isinstance(plan, Schedule):
        return [f"{budget.device_bytes:,} bytes: {_said(plan)}"]
    try:
        check_schedule(tape, plan, budget)
    except ScheduleError as error:
        return [f"{budget.device_bytes:,} bytes: {error}"]
    return []


def _refusal(plan: Any, budget: Budget) -> list[str]:
    if isinstance(plan, PlanInfeasible) and plan.smallest_bytes is not None and plan.smallest_bytes <= budget.device_bytes:
        return [f"{budget.device_bytes:,} bytes are refused, although {plan.smallest_bytes:,} are said to be enough"]
    return []


def _repeatability(method: Method, tape: Tape, plans: list[Any], budgets: list[Budget]) -> Iterator[str]:
    for plan, budget in zip(plans, budgets):
        if not isinstance(plan, Schedule):
            continue
        again = _plan(method, tape, budget)
        if not isinstance(again, Schedule) or again.to_json() != plan.to_json():
            yield f"{budget.device_bytes:,} bytes: a second call gave another plan"
        if Schedule.from_json(plan.to_json()).to_json() != plan.to_json():
            yield f"{budget.device_bytes:,} bytes: the plan changes on its way through JSON"


# ------------------------------------------------------------------------------------------------ the contract


def check_contract(method: Method) -> list[Check]:
    """Every rule that all methods keep, on every toy tape, with the method's default options. Exemptions of the card are named.

    The rules are those of the repository's own tests, tests/contract.py; an installed vramlab brings them along.
    """
    contract = load_contract()
    inquiries = [contract.Inquiry(method, {}, toy) for toy in contract.TAPES]
    checks = []
    for name, rule in contract.RULES.items():
        what = f"contract: {name.replace('-', ' ')}"
        if name in method.card.exemptions:
            checks.append(Check(f"{what} (exempt: {method.card.exemptions[name]})", []))
        else:
            checks.append(Check(what, list(_breaches(rule, inquiries))))
    unknown = sorted(set(method.card.exemptions) - set(contract.EXEMPTIBLE))
    faults = [f"{name!r} is not allowed{offer(name, contract.EXEMPTIBLE)}" for name in unknown]
    return [*checks, Check("exemptions are of rules that a published method may break", faults)]


def load_contract() -> ModuleType:
    """The module contract.py: in the wheel beside the built-in collection, in a checkout among the tests."""
    packaged = built_in_collection() / "contract"
    folder = packaged if packaged.is_dir() else built_in_collection() / "tests"
    sys.path.insert(0, str(folder))  # its neighbours oracle.py and tapes.py are found beside it
    try:
        return importlib.import_module("contract")
    finally:
        sys.path.remove(str(folder))


def _breaches(rule: Callable[[Any], None], inquiries: list[Any]) -> Iterator[str]:
    """One line for each toy on which the rule is broken; a toy that the method refuses by its needs breaks none."""
    for inquiry in inquiries:
        try:
            rule(inquiry)
        except Unsupported as error:
            if not inquiry.method.card.needs:
                yield f"{inquiry.toy}: refused without a need in the card: {error}"
        except Exception as error:  # an assertion, an illegal step, or whatever the method raises
            where = traceback.extract_tb(error.__traceback__)[-1]
            yield f"{inquiry.toy}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else where.line}"


# ------------------------------------------------------------------------------------------------ the tape


def chain(layers: int) -> Tape:
    """A chain of `layers` convolutions and its backward phase: forward ops take 1 ms, backward ops 2 ms; each map is 1 MiB."""
    return _Chain(layers).tape()


class _Chain:
    def __init__(self, layers: int) -> None:
        self.storages: list[Storage] = []
        self.ops: list[Op] = []
        x = self._storage(_MAP, Role.INPUT, "x", stays=True)
        weights = [self._storage(_WEIGHT, Role.PARAMETER, f"conv{i}.weight", stays=True) for i in range(layers)]
        maps = [x]
        for i, weight in enumerate(weights):
            maps.append(self._op("aten.convolution.default", [maps[-1], weight], [(_MAP, Role.ACTIVATION)], f"conv{i}")[0])
        self.loss = self._op("aten.mean.default", [maps[-1]], [(4, Role.ACTIVATION)], "", at_end=True)[0]
        (gradient,) = self._op("aten.expand_copy.default", [self.loss], [(_MAP, Role.TEMPORARY)], "", Phase.BACKWARD)
        for i in reversed(range(layers)):
            outputs = [(_WEIGHT, Role.GRADIENT)] + ([(_MAP, Role.TEMPORARY)] if i else [])
            made = self._op("aten.convolution_backward.default", [gradient, maps[i], weights[i]], outputs, f"conv{i}", Phase.BACKWARD)
            gradient = made[-1]

    def _storage(self, nbytes: int, role: Role, name: str = "", *, stays: bool = False, at_end: bool = False) -> int:
        index = len(self.storages)
        self.storages.append(Storage(id=index, nbytes=nbytes, role=role, name=name or f"%{index}", at_start=stays,
                                     at_end=stays or at_end or role is Role.GRADIENT))
        return index

    def _op(self, target: str, inputs: list[int], outputs: list[tuple[int, Role]], layer: str, phase: Phase = Phase.FORWARD, *,
            at_end: bool = False) -> list[int]:
        made = [self._storage(nbytes, role, at_end=at_end) for nbytes, role in outputs]
        self.ops.append(Op(id=len(self.ops), target=target, args=[{"tensor": t} for t in inputs], kwargs={}, inputs=tuple(inputs),
                           outputs=tuple(made), phase=phase, layer=layer, seconds=0.002 if phase is Phase.BACKWARD else 0.001, flops=10**9))
        return made

    def tape(self) -> Tape:
        tensors = tuple(Tensor(id=s.id, storage=s.id, dtype="uint8", shape=(s.nbytes,), strides=(1,), offset=0) for s in self.storages)
        return Tape(ops=tuple(self.ops), tensors=tensors, storages=tuple(self.storages), loss=self.loss, device_type="cpu", batch_size=1)
