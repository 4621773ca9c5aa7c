"""Optimizers: pairs of functions on one parameter, lifted to trees."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..schedules._rates import watched
from ..spec._spec import Spec, spec_of_function
from ..spec._specified import Specified
from ..tree._tree import State, Tree
from ._checked import checked, counted, unchecked
from ._elementwise import acts_elementwise
from ._forms import Forms
from ._lift import init, step, tensor_arguments


@dataclass(frozen=True, eq=False, repr=False)
class Optimizer(Specified):
    """An optimizer in step_param style: its step on one parameter, pure and in place.

    Args:
        init_param: `param -> state`, a NamedTuple of tensors, of None and of such NamedTuples: each tensor has
            the parameter's shape or is 0-d. `state.step`, float32, 0-d, counts the steps taken.
        step_param: `(param, grad, state) -> (param, state)`, pure, in differentiable and vmappable
            operations.
        step_param_: `(param, grad, state, *, grad_scale=None, found_inf=None) -> None`, the same in
            place on `param` and on the state's tensors. `grad_scale`, 0-d: divide the gradient by it first; `grad` is
            then scratch. `found_inf`, 0-d float32: change nothing where it is 1. Gradient and state are checked before
            it runs: ValueError or TypeError for another shape, dtype or device than the parameter's, and for tensors
            that cannot be written, such as a parameter that requires grad outside `torch.no_grad`.
        step_params_: The same for lists of parameters, gradients and states, in one kernel; states that share 0-d
            fields have equal step counts. None: `step_param_` is called for each parameter.
        elementwise: Whether it may be called on a flat buffer of many parameters, since it steps each element by itself.
        select: `path -> Optimizer`, for an optimizer that differs between parameters (see `partition`).
        check: `params -> None`, raises for parameters that it does not support.
        cost: `shape -> float`, the relative time of a step on one parameter, by which whole parameters are shared out
            among ranks; see `scatter_mean`. By default the number of elements.
        spec: The optimizer as data; `factory` fills it in.
    """

    init_param: Callable[[Tensor], State]
    step_param: Callable[[Tensor, Tensor, State], tuple[Tensor, State]]
    step_param_: Callable[..., None]
    step_params_: Callable[..., None] | None = None
    elementwise: bool = True
    select: Callable[[str], Optimizer] | None = None
    check: Callable[[Tree], Any] | None = None
    cost: Callable[[torch.Size], float] = torch.Size.numel
    spec: Spec = Spec("")
    forms: Forms = field(init=False)
    tensors: list[tuple[str, Tensor]] = field(init=False)  # the tensors among its arguments, see `tensor_arguments`

    instead_of_transform = "an optimizer comes last: write fuse(hook, optimizer)"

    def __post_init__(self) -> None:
        forms = Forms(self.init_param)
        object.__setattr__(self, "forms", forms)
        object.__setattr__(self, "tensors", tensor_arguments(self.spec))
        object.__setattr__(self, "step_param", counted(self.step_param))
        object.__setattr__(self, "step_param_", checked(forms, self.step_param_, lists=False))
        if self.step_params_ is not None:
            object.__setattr__(self, "step_params_", checked(forms, self.step_params_, lists=True))

    def with_spec(self, spec: Spec) -> Optimizer:
        return replace(self, spec=spec)

    @property
    def _spec(self) -> Spec:
        return self.spec if self.spec.name else spec_of_function(unchecked(self.step_param))

    def at(self, path: str) -> Optimizer:
        """The optimizer of the parameter at `path`."""
        return self.select(path) if self.select else self

    @property
    def common(self) -> tuple[bool, ...]:
        """For each field of the state, whether one value serves all elements of a flat buffer."""
        return self.forms.common

    @functools.cached_property
    def watched(self) -> tuple[tuple[str, Any], ...]:
        """Its hyperparameters that may become non-finite while training."""
        return watched(self.spec)

    @functools.cached_property
    def flattens(self) -> bool:
        """Whether it may be called on a flat buffer.

        Raises:
            ValueError: `elementwise` says so, but the step of a parameter is not that of its parts.
        """
        if self.elementwise and not acts_elementwise(self.init_param, unchecked(self.step_param)):
            raise ValueError(
                f"{self!r} is said to be elementwise, but its step of a parameter is not that of the parameter's parts; pass "
                f"elementwise=False, and it gets whole parameters"
            )
        return self.elementwise

    def init(self, params: Tree) -> State:
        """The states of all parameters: the tree of `params` with a state at every leaf."""
        return init(self, params)

    def step(self, params: Tree, grads: Tree, state: State) -> tuple[Tree, State]:
        """One step of every parameter: `(params, state)`, new tensors; the arguments stay as they are.

        Raises:
            ValueError, TypeError: `grads` or `state` has not the structure, shapes, dtypes and devices that belong to
                `params`; a state's `step` is negative or not finite, where looking at it waits for no device.
        """
        return step(self, params, grads, state)
