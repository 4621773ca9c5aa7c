"""torch's optimizer classes as optimizers of ours."""

from __future__ import annotations

from typing import Any

import torch

from ...transforms.optimizers.wrappers._as_functional import OF_TORCH, as_functional_optim
from ...transforms.spec._spec import Spec
from ...transforms.step_param._optimizer import Optimizer as StepParamOptimizer
from .._param_groups import own_by_group

# Classes whose states have a momentum of another name, and those whose states count no steps.
_WITH_BUFFER = (torch.optim.SGD, torch.optim.RMSprop, torch.optim.Muon)
_WITHOUT_STEP = (torch.optim.SGD, torch.optim.Muon)


def torchs_state(optimizer_class: Any, state: dict[str, Any]) -> dict[str, Any]:
    """A state of ours by torch's names."""
    if optimizer_class not in _WITH_BUFFER:
        return state
    left_out = "step" if optimizer_class in _WITHOUT_STEP else None
    names = {"momentum": "momentum_buffer"}
    return {names.get(name, name): value for name, value in state.items() if name != left_out}


def our_state(optimizer_class: Any, state: dict[str, Any]) -> dict[str, Any]:
    """A state of torch by our names."""
    if optimizer_class not in _WITH_BUFFER or not state:
        return state
    step = {"step": torch.ones(())} if optimizer_class in _WITHOUT_STEP else {}
    names = {"momentum_buffer": "momentum"}
    return {**step, **{names.get(name, name): value for name, value in state.items() if value is not None}}


class WholeLeaves:
    """Stands for an optimizer of which only its class is known: it needs whole parameters."""

    select, spec, check = None, Spec(""), None
    elementwise = flattens = False
    cost = staticmethod(torch.Size.numel)

    def at(self, path: str) -> WholeLeaves:
        return self


def optimizer_of(optimizer_class: Any, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The optimizer of ours for a class of torch, or for one of our factories, and its hyperparameters by name.

    A class that is not known gives a `WholeLeaves`.

    Raises:
        TypeError: it makes no optimizer; arguments that it does not take.
        ValueError: values that it refuses.
    """
    if isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer):
        if issubclass(optimizer_class, torch.optim.LBFGS):
            raise TypeError(
                f"{optimizer_class.__name__} searches along a direction of all parameters, so no rank can step its own share of them; "
                f"use it without ZeroRedundancyOptimizer"
            )
        probe = torch.zeros(1, 1, requires_grad=True)
        defaults = optimizer_class([probe], **arguments).defaults  # type: ignore[arg-type]
        known = optimizer_class in OF_TORCH
        return as_functional_optim(optimizer_class, **arguments) if known else WholeLeaves(), defaults
    makes = callable(optimizer_class) and not isinstance(optimizer_class, type)
    made = optimizer_class(**arguments) if makes else optimizer_class
    if not isinstance(made, StepParamOptimizer):
        raise TypeError(
            f"optimizer_class must be a class of torch.optim, or a function such as tx.lion that makes an optimizer, got "
            f"{optimizer_class!r}"
        )
    if made.select is not None:
        raise TypeError(
            f"{made!r} differs by path; pass parameter groups with their own hyperparameters, or register tx.zero(...) with "
            f"the module"
        )
    return made, own_by_group(made)
