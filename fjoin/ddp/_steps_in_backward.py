"""Guards around a module whose backward pass steps its parameters: against spent gradients, and a second optimizer."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from ..transforms.optimizers._frozen import frozen
from ._hook import DDPRun

_STEPPED: Any = WeakIdKeyDictionary()  # parameter -> its path, of all registered modules
_SEEN: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
_watch: Any = None


def guard(model: DistributedDataParallel, run: DDPRun) -> None:
    """Guard the parameters that a registered pipeline steps.

    Gradients that a step has used are dropped when the next forward pass begins, so that a loop without zero_grad does
    not add to them. An optimizer that steps the same parameters again is warned of.
    """
    global _watch
    assert run.pipeline_step is not None
    at, still = run.pipeline_step.pipeline.optimizer.at, frozen()
    stepped = {path: p for path, p in run.leaves.items() if at(path) != still}
    for path, p in stepped.items():
        _STEPPED[p] = path
    if _watch is None:
        _watch = register_optimizer_step_pre_hook(_warn_of_second_step)
    model.register_forward_pre_hook(_DropSpent(run, list(stepped.values())))


class _DropSpent:
    """Before a forward pass: drops the gradients that the last step has used. In a copy of the module it does nothing."""

    def __init__(self, run: DDPRun, params: list[Tensor]) -> None:
        self._run, self._params, self._used = weakref.ref(run), params, run.step

    def __call__(self, module: Any, args: Any) -> None:
        run = self._run()
        if run is None or run.step == self._used or not torch.is_grad_enabled():
            return
        self._used = run.step
        for p in self._params:
            p.grad = None

    def __reduce__(self) -> Any:
        return _nothing_to_drop, ()


def _nothing_to_drop() -> Any:
    return _nothing


def _nothing(module: Any, args: Any) -> None:
    """The hook of a copy, in which nothing is registered."""


def _warn_of_second_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if _SEEN.get(optimizer) == len(_STEPPED):
        return
    _SEEN[optimizer] = len(_STEPPED)
    paths = [_STEPPED[p] for group in optimizer.param_groups for p in group["params"] if p in _STEPPED]
    if paths:
        warnings.warn(
            f"this {type(optimizer).__name__} steps {paths[0]!r}, which a pipeline registered by fjoin.ddp.register has stepped in "
            f"the backward pass already; remove optimizer.step(), or register only the hook",
            stacklevel=3,
        )
