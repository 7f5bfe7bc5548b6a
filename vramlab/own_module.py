"""A training step of the user's own, named on a command line as `my_pkg.my_module:build`, where

    def build(batch_size):
        return model, loss_fn, example              # or model, loss_fn, example, optimizer

is what `vramlab.train_step` gets: a module, `loss_fn(model, *example) -> scalar`, and an example batch of `batch_size` samples. `build` is
called with several sizes; nothing that it makes is trained or run, so weights and values may be anything.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from vramlab.capture import Captured, capture
from vramlab.counted import count_of
from vramlab.data import Batch
from vramlab.errors import WorkflowError
from vramlab.step import over_inputs
from vramlab.workload import TrainingStep
from vramlab.yaml_nodes import offer

RETURNED = "(model, loss_fn, example) or (model, loss_fn, example, optimizer)"


@dataclass(frozen=True)
class OwnModule:
    """What stands behind `my_pkg.my_module:build`."""

    name: str

    def step(self, batch_size: int) -> TrainingStep:
        """The step at this batch size. WorkflowError says in one line what is wrong with the module, the function or what it returned."""
        build = self._build
        try:
            found = build(batch_size)
        except (Exception, SystemExit) as error:  # whatever the user's own code raises is told, with the call that raised it
            raise WorkflowError(f"{self.name}({batch_size}) raised {type(error).__name__}: {_first_line(error)}") from error
        model, loss_fn, example, optimizer = self._checked(found, batch_size)
        inputs, structure = tree_flatten(tuple(example) if isinstance(example, tuple | list) else (example,))
        return TrainingStep(make_model=lambda: model, loss_fn=over_inputs(loss_fn, structure), batch=tuple(inputs),
                            make_optimizer=lambda: optimizer, seed=0, classes=0)

    def batch(self, batch_size: int) -> Batch:
        """An example of any size, shaped as those of 2 and 3 samples foretell; no page of memory backs it before something is written."""
        two, three = self._small
        return tuple(_foretold(low, high, batch_size) for low, high in zip(two.batch, three.batch, strict=True))

    @cached_property
    def _small(self) -> tuple[TrainingStep, TrainingStep]:
        return self.step(2), self.step(3)

    def captured(self, batch_size: int) -> Captured:
        """The step's tape without costs. Raises CaptureError, and WorkflowError where the example has another number of samples."""
        step = self.step(batch_size)
        captured = capture(step.model, step.loss_fn, step.batch, optimizer=step.make_optimizer())
        if captured.tape.batch_size != batch_size:
            raise WorkflowError(f"{self.name}({batch_size}) returned an example of {count_of(captured.tape.batch_size, 'sample')}: the "
                                "first dimension of its first tensor must be the batch size")
        return captured

    @cached_property
    def _build(self) -> Callable[[int], Any]:
        module_name, _, function = self.name.partition(":")
        if not all(word.isidentifier() for word in (*module_name.split("."), function)):
            raise WorkflowError(f"--model {self.name}: a function of a module is written my_pkg.my_module:build")
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is not None and not (module_name + ".").startswith(error.name + "."):
                raise WorkflowError(f"--model {self.name}: {module_name} imports {error.name}, which is not installed") from error
            raise WorkflowError(f"--model {self.name}: there is no module {module_name}, seen from this directory or installed") from error
        except (Exception, SystemExit) as error:
            raised = f"{type(error).__name__}: {_first_line(error)}"
            raise WorkflowError(f"--model {self.name}: importing {module_name} raised {raised}") from error
        found = getattr(module, function, None)
        if not callable(found):
            known = [name for name, value in vars(module).items() if inspect.isfunction(value) and not name.startswith("_")]
            raise WorkflowError(f"--model {self.name}: {module_name} has no function {function!r}{offer(function, known, 'there are')}")
        return found

    def _checked(self, found: Any, batch_size: int) -> tuple[torch.nn.Module, Callable[..., torch.Tensor], Any, Any]:
        def refuse(what: str) -> WorkflowError:
            return WorkflowError(f"{self.name}({batch_size}) must return {RETURNED}; {what}")

        if not isinstance(found, tuple | list):
            raise refuse(f"it returned {type(found).__name__}")
        if len(found) not in (3, 4):
            raise refuse(f"it returned {count_of(len(found), 'value')}")
        model, loss_fn, example, optimizer = (*found, None)[:4]
        if not isinstance(model, torch.nn.Module):
            raise refuse(f"its model is a {type(model).__name__}, no torch.nn.Module")
        if not callable(loss_fn):
            raise refuse(f"its loss_fn is a {type(loss_fn).__name__} and cannot be called")
        if not any(isinstance(value, torch.Tensor) for value in tree_flatten(example)[0]):
            raise refuse("there is no tensor in its example")
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise refuse(f"its optimizer is a {type(optimizer).__name__}, no torch.optim.Optimizer")
        if optimizer is not None and (strange := _not_of(model, optimizer)):
            raise refuse(f"its optimizer updates {count_of(strange, 'tensor')} that the model does not have as a parameter: build it from "
                         "model.parameters()")
        return model, loss_fn, example, optimizer


def is_own(model: str) -> bool:
    """Is a model named as a function of a module, rather than by its card?"""
    return ":" in model


def _not_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """How many tensors the optimizer updates that are no parameters of the model."""
    own = {id(parameter) for parameter in model.parameters()}
    return sum(id(updated) not in own for group in optimizer.param_groups for updated in group["params"])


def _foretold(two: Any, three: Any, batch_size: int) -> Any:
    """An input at a batch of so many samples."""
    if not isinstance(two, torch.Tensor):
        return two
    shape = [low + (high - low) * (batch_size - 2) for low, high in zip(two.shape, three.shape, strict=True)]
    order = sorted(range(two.dim()), key=lambda d: -two.stride(d))
    return torch.empty_permuted(shape, order, dtype=two.dtype, device=two.device)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")
