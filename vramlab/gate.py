"""The truth gate: does a tested step compute what plain eager PyTorch computes, bit for bit?

Both sides take three optimizer steps from the same seed in deterministic mode; after each the loss, every gradient with its strides,
the whole state_dict, the buffers outside it, the optimizer's state and the generators are compared. There is no tolerance: a NaN
equals a NaN of the same bits, 0.0 does not equal -0.0, a missing gradient does not equal zeros.

A step of PyTorch's own may run other kernels than eager, whose roundings differ. Such a step is held, with eager, against the same step
in float64: it is within noise where it is no farther from that than twice eager's own distance. A planner's step has no such excuse.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from vramlab.record import Truth

GATE_STEPS = 3
NOISE_FACTOR = 2.0  # times eager's own distance to float64: as far as other kernels may be off
ROUNDING = 2.0**-23  # relative, of float32: where eager is nearer than this by luck, twice this is near enough
NOTHING_BUT_NOISE = 0.1  # relative: a gradient of eager's that is farther off says nothing of its parameter's new value
LARGEST_NOISE = 1e-3  # relative: where eager itself may be farther off, a wrong gradient of this size would pass, so nothing is judged
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two that are compared: a model of its own and how it takes a step."""

    model: torch.nn.Module
    step: Callable[[int], torch.Tensor]  # step number from 0 -> loss; zeroes gradients, runs forward, backward and optimizer
    optimizer: torch.optim.Optimizer | None = None
    inputs: Sequence[torch.Tensor] = ()  # batch tensors whose gradients count too


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One value that is not the same on both sides."""

    name: str  # "loss", "gradient layer1.weight", "state bn.running_mean", "optimizer 0.exp_avg", "generator cpu"
    what: str  # one clause for a person
    max_abs_distance: float | None = None  # None where values have no distance (missing, other shape, generators)


@dataclass(frozen=True, kw_only=True)
class StepNoise:
    """How far one step is from the same step in float64, over float64's norm. Per group of values, each as one vector: loss, gradients,
    parameters, buffers, optimizer state.

    A gradient that is nothing but rounding (of a bias before BatchNorm) sends its parameter anywhere where an optimizer divides by the
    gradient's size: such a parameter is left out.
    """

    eager: Mapping[str, float]
    tested: Mapping[str, float]

    @property
    def drowned(self) -> str:
        """In what eager itself is so far off that being as near as eager proves nothing, "" where there is no such group."""
        return next((name for name, distance in self.eager.items() if not NOISE_FACTOR * distance <= LARGEST_NOISE), "")

    @property
    def excess(self) -> tuple[str, ...]:
        """What the tested step is too far off in.

        A loss is one number, whose distance may be nothing by luck: it may be as far off as the gradients are.
        """
        allowed = {**self.eager, "loss": max(self.eager["loss"], self.eager["gradients"])}
        return tuple(name for name, distance in allowed.items() if not self.tested[name] <= NOISE_FACTOR * max(distance, ROUNDING))

    def to_json(self) -> dict[str, Any]:
        """`{"eager": {...}, "tested": {...}}`; what is not finite is None."""
        return {side: {name: value if math.isfinite(value) else None for name, value in distances.items()}
                for side, distances in (("eager", self.eager), ("tested", self.tested))}


@dataclass(frozen=True, kw_only=True)
class GateResult:
    """The gate's answer. It stops at the first step that differs, because later differences only follow from it."""

    truth: Truth  # exact, within_noise or wrong; not_run, with the reason, where eager is too far off itself for a judgement
    differing: tuple[Difference, ...]  # at the first step that differs
    steps: int  # steps that ran
    first_step_that_differs: int | None  # from 1; 0: the sides differed before their first step
    noise: tuple[StepNoise, ...] = ()  # of each step, where both sides were held against float64
    reason: str = ""  # of not_run

    def to_json(self) -> dict[str, Any]:
        """A JSON-able dict; `noise` only where there is one."""
        body = asdict(self) | {"truth": str(self.truth), "differing": [asdict(d) for d in self.differing]}
        del body["noise"], body["reason"]
        body |= {"reason": self.reason} if self.reason else {}
        return body | ({"noise": [noise.to_json() for noise in self.noise]} if self.noise else {})


def run_gate(reference: Callable[[], Side], tested: Callable[[], Side], *, steps: int = GATE_STEPS, seed: int = 0,
             in_float64: Callable[[], Side] | None = None) -> GateResult:
    """Build both sides from `seed` and compare them after each of `steps` steps.

    `in_float64` builds eager's side in double precision, from the same weights and batches. Where bits differ, and only there, both sides
    are built anew and each of the steps is held against it, all three of them starting from eager's state.
    A side's `step` runs with its own generator states, so that neither sees the other's draws. The caller's generators and determinism
    settings are restored. Whatever a side raises passes through, as do torch's refusals of operators without a deterministic form.
    """
    caller = _generator_states()
    try:
        with deterministic():
            exact = _compare_steps(_Runner(reference, seed), _Runner(tested, seed), steps)
            if exact.truth is Truth.EXACT or in_float64 is None:
                return exact
            return _compare_noise(exact, *(_Runner(build, seed) for build in (reference, tested, in_float64)), steps)
    finally:
        _set_generator_states(caller)


def distance_between(reference: Callable[[], Side], tested: Callable[[], Side], *, seed: int = 0) -> dict[str, float]:
    """How far apart one step of two sides that compute different things takes them, in deterministic mode from the same seed.

    `loss`: of the losses, absolute; `gradient`: the norm of the difference of all gradients over the norm of the reference's.
    """
    caller = _generator_states()
    try:
        with deterministic():
            pair = [_Runner(build, seed) for build in (reference, tested)]
            for side in pair:
                side.step(0)
    finally:
        _set_generator_states(caller)
    wanted, found = (_gradients(side.side.model) for side in pair)
    norm = float(wanted.norm())
    return {"loss": abs(float(pair[0].loss) - float(pair[1].loss)),
            "gradient": float((wanted - found).norm()) / norm if norm else float((wanted - found).norm())}


def _gradients(model: torch.nn.Module) -> torch.Tensor:
    """All of them as one vector, in double precision."""
    return torch.cat([p.grad.detach().double().flatten().cpu() for p in model.parameters() if p.grad is not None])


GROUPS = ("loss", "gradients", "parameters", "buffers", "optimizer state")


def _compare_noise(exact: GateResult, reference: _Runner, tested: _Runner, wide: _Runner, steps: int) -> GateResult:
    """Each step from eager's state. Whatever is no floating number has to be equal still, and so has every tensor's layout; the stride of a
    dimension of one element, which other kernels set as they like, is none of it.
    """
    noise: list[StepNoise] = []
    for index in range(steps):
        for side in (reference, tested, wide):
            side.step(index)
        expected, found, true = reference.values(), tested.values(), wide.values()
        differing = _compare(expected, found, form=_layout)
        lost = _without_gradient(expected, true)
        noise.append(StepNoise(eager=_distances(expected, true, lost), tested=_distances(found, true, lost)))
        firm = [d for d in differing if d.max_abs_distance is None or not _is_floating(expected[d.name])]
        if noise[-1].drowned and not firm:
            return GateResult(truth=Truth.NOT_RUN, differing=exact.differing, steps=index + 1, first_step_that_differs=index + 1,
                              noise=tuple(noise), reason=_drowned(noise[-1]))
        beyond = [d for d in differing if d.name not in lost and _group(d.name, true) in noise[-1].excess]
        if firm or beyond:
            return GateResult(truth=Truth.WRONG, differing=tuple(firm or beyond), steps=index + 1, first_step_that_differs=index + 1,
                              noise=tuple(noise))
        for side in (tested, wide):
            _adopt(side.side, reference.side)
    return GateResult(truth=Truth.WITHIN_NOISE, differing=exact.differing, steps=steps,
                      first_step_that_differs=exact.first_step_that_differs, noise=tuple(noise))


def _drowned(noise: StepNoise) -> str:
    group = noise.drowned
    return (f"not judged: bits differ from eager's, and eager itself is {noise.eager[group]:.2g} of the {group} off float64 here, "
            f"the tested step {noise.tested[group]:.2g}; nearness proves something only up to {LARGEST_NOISE / NOISE_FACTOR:g}")


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _group(name: str, values: Mapping[str, Any]) -> str | None:
    """Which of the groups a value belongs to; None of a generator."""
    kind, _, rest = name.partition(" ")
    if kind == "state":
        return "parameters" if f"gradient {rest}" in values else "buffers"
    return {"loss": "loss", "gradient": "gradients", "optimizer": "optimizer state"}.get(kind)


def _without_gradient(found: Mapping[str, Any], true: Mapping[str, Any]) -> frozenset[str]:
    """The parameters, as `state <name>`, whose gradients are nothing but noise."""
    names = [name for name, value in true.items() if name.startswith("gradient ") and _is_floating(value)]
    return frozenset(f"state {name.removeprefix('gradient ')}" for name in names
                     if not _relative(*_squares(found.get(name), true[name])) <= NOTHING_BUT_NOISE)


def _distances(found: Mapping[str, Any], true: Mapping[str, Any], lost: frozenset[str]) -> dict[str, float]:
    """Per group: the norm of the difference over the norm of the true values. Infinite where a value is missing or has another shape."""
    sums = {group: [0.0, 0.0] for group in GROUPS}
    for name, value in true.items():
        group = _group(name, true)
        if group is not None and name not in lost and _is_floating(value):
            off, norm = _squares(found.get(name), value)
            sums[group][0] += off
            sums[group][1] += norm
    return {group: _relative(*squares) for group, squares in sums.items()}


def _squares(found: Any, true: torch.Tensor) -> tuple[float, float]:
    """Squared norms of a difference and of the true value."""
    true = true.detach().double()
    if not _is_floating(found) or found.shape != true.shape:
        return float("inf"), float(true.square().sum())
    return float((found.detach().double() - true).square().sum()), float(true.square().sum())


def _relative(off: float, norm: float) -> float:
    if norm:
        return (off / norm) ** 0.5
    return float("inf") if off else 0.0


def _adopt(side: Side, source: Side) -> None:
    """Parameters, buffers and optimizer state of another side, each in the precision that it has here."""
    with torch.no_grad():
        for tensors in (torch.nn.Module.parameters, torch.nn.Module.buffers):
            for ours, theirs in zip(tensors(side.model), tensors(source.model), strict=True):
                ours.copy_(theirs)
        if side.optimizer and source.optimizer:
            for ours, theirs in zip(side.optimizer.state.values(), source.optimizer.state.values(), strict=True):
                for name, value in ours.items():
                    if isinstance(value, torch.Tensor):
                        value.copy_(theirs[name])


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Deterministic algorithms, cuDNN's included, without its search; everything as before on the way out."""
    cudnn = torch.backends.cudnn
    before = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
              cudnn.deterministic, cudnn.benchmark, os.environ.get(_CUBLAS))
    os.environ.setdefault(_CUBLAS, ":4096:8")  # without it cuBLAS refuses to promise equal bits
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        cudnn.deterministic, cudnn.benchmark = before[2:4]
        if before[4] is None:
            del os.environ[_CUBLAS]


class _Runner:
    """A side and the generator states that belong to it."""

    def __init__(self, build: Callable[[], Side], seed: int) -> None:
        torch.manual_seed(seed)
        self.side = build()
        self.generators = _generator_states()
        self.loss: torch.Tensor | None = None

    def step(self, index: int) -> None:
        _set_generator_states(self.generators)
        self.loss = self.side.step(index).detach()
        self.generators = _generator_states()

    def values(self) -> dict[str, Any]:
        """Everything that must be equal, by name."""
        side, found = self.side, {"loss": self.loss}
        found |= {f"gradient {n}": p.grad for n, p in side.model.named_parameters()}
        found |= {f"gradient input.{i}": t.grad for i, t in enumerate(side.inputs)}
        found |= {f"state {n}": v for n, v in (dict(side.model.named_buffers()) | side.model.state_dict()).items()}
        found |= _leaves("optimizer", side.optimizer.state_dict() if side.optimizer else {})
        return found | {f"generator {n}": s for n, s in self.generators.items()}


def _compare_steps(reference: _Runner, tested: _Runner, steps: int) -> GateResult:
    for done in range(steps + 1):
        if done:
            reference.step(done - 1)
            tested.step(done - 1)
        differing = _compare(reference.values(), tested.values())
        if differing:
            return GateResult(truth=Truth.WRONG, differing=differing, steps=done, first_step_that_differs=done)
    return GateResult(truth=Truth.EXACT, differing=(), steps=steps, first_step_that_differs=None)


def _compare(expected: Mapping[str, Any], found: Mapping[str, Any],
             form: Callable[[torch.Tensor], tuple] | None = None) -> tuple[Difference, ...]:
    names = dict.fromkeys([*expected, *found])
    differences = (difference(n, expected.get(n), found.get(n), form or _form) for n in names)
    return tuple(d for d in differences if d is not None)


def _form(tensor: torch.Tensor) -> tuple:
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device


def _layout(tensor: torch.Tensor) -> tuple:
    """The form without strides that no address depends on."""
    strides = tuple(stride for size, stride in zip(tensor.shape, tensor.stride()) if size > 1)
    return tensor.dtype, tuple(tensor.shape), strides, tensor.device


def difference(name: str, expected: Any, found: Any, form: Callable[[torch.Tensor], tuple] = _form) -> Difference | None:
    """What distinguishes two values, None when nothing does. `form` is what of a tensor beside its values has to be equal."""
    if not isinstance(expected, torch.Tensor) or not isinstance(found, torch.Tensor):
        same = type(expected) is type(found) and expected == found
        return None if same else Difference(name=name, what=f"eager has {_describe(expected)}, the tested step has {_describe(found)}")
    if form(expected) != form(found):
        return Difference(name=name, what=f"eager has {_describe(expected)}, the tested step has {_describe(found)}")
    if torch.equal(_bits(expected), _bits(found)):
        return None
    if name.startswith("generator"):
        return Difference(name=name, what="the generator is in another state")
    return Difference(name=name, what="other values", max_abs_distance=_distance(expected, found))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of the elements in logical order."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)  # one expanded element is contiguous with stride 0


def _distance(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Largest absolute difference; infinite where one is NaN and the other is not."""
    wide = torch.complex128 if expected.is_complex() else torch.float64
    distance = (expected.detach().to(wide) - found.detach().to(wide)).abs()
    both_nan = expected.detach().isnan() & found.detach().isnan()
    return float(distance.masked_fill(both_nan, 0.0).nan_to_num(nan=float("inf"), posinf=float("inf")).max())


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype} {list(value.shape)} with strides {list(value.stride())} on {value.device}"
    return "nothing" if value is None else repr(value)


def _leaves(prefix: str, value: Any) -> dict[str, Any]:
    """Nested dictionaries and lists as one level, names joined by dots."""
    if isinstance(value, Mapping):
        pairs = value.items()
    elif isinstance(value, list | tuple):
        pairs = enumerate(value)
    else:
        return {prefix: value}
    glue = "." if " " in prefix else " "
    return {name: leaf for key, child in pairs for name, leaf in _leaves(f"{prefix}{glue}{key}", child).items()}


def _generator_states() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states |= {f"cuda:{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    return states


def _set_generator_states(states: Mapping[str, torch.Tensor]) -> None:
    for name, state in states.items():
        if name == "cpu":
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, name)
