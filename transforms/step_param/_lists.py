"""Steps of lists of parameters: one kernel for all parameters of one optimizer, kind and age.

Parameters are of one age where the states share their 0-d tensors, such as the count of steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from ..tree._tree import State, fields, with_fields
from ._checked import unchecked

if TYPE_CHECKING:
    from ._optimizer import Optimizer

Item: TypeAlias = "tuple[Any, Optimizer, Tensor, Any]"  # (key, optimizer, parameter, gradient)


def sharing(part: Optimizer, state: State, like: State) -> State:
    """A state with the 0-d fields of another one, so one kernel can step both."""
    pairs = zip(fields(state), fields(like), part.common, strict=True)
    return with_fields(state, [other if common else own for own, other, common in pairs])


def apart(part: Optimizer, state: State) -> State:
    """A state with copies of its 0-d fields, which then has an age of its own."""
    pairs = zip(fields(state), part.common, strict=True)
    return with_fields(state, [field.clone() if common else field for field, common in pairs])


class Ages:
    """Makes states share their 0-d fields with the first state of their optimizer, dtype, device and age."""

    def __init__(self) -> None:
        self._first: dict[Any, State] = {}

    def __call__(self, part: Optimizer, param: Tensor, state: State, *age: Any) -> State:
        return sharing(part, state, self._first.setdefault((id(part), param.dtype, param.device, *age), state))


def age_of(part: Optimizer, found: Sequence[Any]) -> tuple[int, ...]:
    """The identities of a state's 0-d fields, from its fields."""
    return tuple(map(id, itertools.compress(found, part.forms.common)))


def stepped_together(items: Sequence[Item], ages: Sequence[Any]) -> list[list[Item]]:
    """The parameters that one kernel may step, by optimizer, dtype, device and age."""
    groups: dict[Any, list[Item]] = {}
    for item, age in zip(items, ages, strict=True):
        _, part, param, _ = item
        groups.setdefault((id(part), param.dtype, param.device, age), []).append(item)
    return list(groups.values())


def step_in_place(
    part: Optimizer, params: list[Tensor], grads: list[Tensor], states: list[Any], **guards: Tensor | None
) -> None:
    """Step checked lists with the in-place function that the optimizer has.

    States that share 0-d fields have equal step counts, which are incremented once.
    """
    if part.step_params_ is not None:
        unchecked(part.step_params_)(params, grads, states, **guards)
        return
    before = apart(part, states[0])
    for i, (param, grad, state) in enumerate(zip(params, grads, states, strict=True)):
        own = sharing(part, state, apart(part, before)) if i else state
        unchecked(part.step_param_)(param, grad, own, **guards)


def step_lists_(
    part: Optimizer, params: list[Tensor], grads: list[Tensor], states: list[Any], **guards: Tensor | None
) -> None:
    """`step_in_place` for parameters that a graph may need; the guards may lie on another device."""
    here = {name: None if guard is None else guard.to(params[0].device) for name, guard in guards.items()}
    with torch.no_grad():
        step_in_place(part, params, grads, states, **here)
    # Fused kernels do not increment the version: a graph that needs the old values would silently use the new ones.
    torch.autograd.graph.increment_version(params)
