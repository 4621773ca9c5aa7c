"""Lifts steps on one parameter to trees of parameters.

`step` is pure. Where nothing differentiates through it, it copies parameters and state and runs the
in-place kernel on the copies: one fused kernel for the whole tree. Under torch.func transforms and
where a gradient is wanted it runs `step_param` leaf by leaf.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import optree
import torch
from torch import Tensor

from .._spec import Spec
from .._tree import State, Tree, check_dense, check_same, fields, map_with_path, path_string, plain, with_fields
from ..schedules._rates import watched
from ._checked import check_count, unchecked
from ._formula import copy_like, like

if TYPE_CHECKING:
    from ._optimizer import Optimizer


def sharing(part: Optimizer, state: State, like: State) -> State:
    """A state with the 0-d fields of another one, so one kernel can step both."""
    pairs = zip(fields(state), fields(like), part.common, strict=True)
    return with_fields(state, [other if common else own for own, other, common in pairs])


def init(optimizer: Optimizer, params: Tree) -> State:
    if optimizer.check:
        optimizer.check(params)
    shared: dict[Any, State] = {}

    def one(name: str, param: Tensor) -> State:
        check_dense(f"params[{name!r}]", param)
        part = optimizer.at(name)
        watched(part.spec)  # raises for a schedule that is never read
        state = part.init_param(param.detach())
        return sharing(part, state, shared.setdefault((id(part), param.dtype, param.device), state))

    return map_with_path(one, params)


def matched(optimizer: Optimizer, params: Tree, state: State) -> tuple[list[str], list[Any], list[Any], Any]:
    """The paths of the parameters, the parameters, their states, and the structure of the tree.

    Raises:
        ValueError: a state of other parameters, or of another optimizer.
    """
    names, leaves, states, structure = states_of(params, state)
    for name, param, own in zip(names, leaves, states, strict=True):
        optimizer.at(name).forms.check_state(param, own, lambda name=name: f"state[{name!r}]")  # type: ignore[misc]
    return names, leaves, states, structure


def states_of(params: Tree, state: State) -> tuple[list[str], list[Any], list[Any], Any]:
    """As `matched`, without a look into the states.

    Raises:
        ValueError: a state of other parameters.
    """
    paths, leaves, structure = optree.tree_flatten_with_path(params)
    try:
        states = structure.flatten_up_to(state)
    except ValueError as error:
        raise ValueError(f"state does not fit params, it is of another tree or another pipeline: {error}") from None
    return list(map(path_string, paths)), leaves, states, structure


def step(
    optimizer: Optimizer, params: Tree, grads: Tree, state: State, donate: bool = False, found_inf: Tensor | None = None
) -> tuple[Tree, State]:
    """See `Optimizer.step`.

    Args:
        donate: Whether the step may be in place on `params` and `state`, with `grads` as scratch. No two leaves share memory.
        found_inf: 0-d, with `donate`: change nothing where it is 1.
    """
    check_same("grads", grads, "params", params)
    names, leaves, states, structure = matched(optimizer, params, state)
    grad_leaves = optree.tree_leaves(grads)
    groups: dict[Any, list[int]] = {}
    for i, (name, param) in enumerate(zip(names, leaves, strict=True)):
        part = optimizer.at(name)
        common = tuple(id(field) for field, c in zip(fields(states[i]), part.common, strict=True) if c)
        groups.setdefault((id(part), param.dtype, param.device, *common), []).append(i)
    new_leaves, new_states = list(leaves), list(states)
    for members in groups.values():
        name = names[members[0]]
        part = optimizer.at(name)
        check_count(states[members[0]], lambda name=name: f"state[{name!r}]")  # type: ignore[misc]
        chosen = [leaves[i] for i in members], [grad_leaves[i] for i in members], [states[i] for i in members]
        hyper = dict(_tensor_arguments(part))
        # Kernels take numbers, and for the learning rate a tensor too; they do not run on meta tensors.
        with_kernels = plain(*chosen, hyper) and hyper.keys() <= {"lr"} and not leaves[members[0]].is_meta
        run: Any = _on_copies if with_kernels else _leafwise
        if donate and plain(*chosen):
            run = functools.partial(_in_place, found_inf=found_inf)
        for i, (param, new) in zip(members, run(part, *chosen), strict=True):
            new_leaves[i], new_states[i] = param, new
    return optree.tree_unflatten(structure, new_leaves), optree.tree_unflatten(structure, new_states)


def _tensor_arguments(part: Optimizer) -> Iterator[tuple[str, Tensor]]:
    for name, value in part.spec.args:
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, (tuple, list)):
            yield from ((f"{name}[{i}]", item) for i, item in enumerate(value) if isinstance(item, Tensor))
        elif isinstance(getattr(value, "spec", None), Spec):
            yield from _tensor_arguments(value)


def _leafwise(
    part: Optimizer, params: list[Tensor], grads: list[Tensor], states: list[Any]
) -> list[tuple[Tensor, Any]]:
    return [like(p, s, *unchecked(part.step_param)(p, g, s)) for p, g, s in zip(params, grads, states, strict=True)]


def step_in_place(
    part: Optimizer, params: list[Tensor], grads: list[Tensor], states: list[Any], **guards: Tensor | None
) -> None:
    """Step checked lists with the in-place function that the optimizer has.

    States that share 0-d fields have equal step counts, which are incremented once.
    """
    if part.step_params_ is not None:
        unchecked(part.step_params_)(params, grads, states, **guards)
        return
    step_param_ = unchecked(part.step_param_)
    before = [field.clone() if c else None for field, c in zip(fields(states[0]), part.common, strict=True)]
    for i, (param, grad, state) in enumerate(zip(params, grads, states, strict=True)):
        if i:
            pairs = zip(fields(state), before, strict=True)
            state = with_fields(state, [own if old is None else old.clone() for own, old in pairs])
        step_param_(param, grad, state, **guards)


def _in_place(
    part: Optimizer, params: list[Tensor], grads: list[Tensor], states: list[Any], found_inf: Tensor | None
) -> list[tuple[Tensor, Any]]:
    with torch.no_grad():
        step_in_place(
            part, [p.detach() for p in params], [g.detach() for g in grads], states,
            found_inf=None if found_inf is None else found_inf.to(params[0].device),
        )  # fmt: skip
    # Fused kernels do not increment the version: a graph that needs the old values would silently use the new ones.
    torch.autograd.graph.increment_version(params)
    return list(zip(params, states, strict=True))


def _on_copies(
    part: Optimizer, params: list[Tensor], grads: list[Tensor], states: list[Any]
) -> list[tuple[Tensor, Any]]:
    # Leaf by leaf: one large buffer would be returned to the system after every step, and allocating its pages again
    # takes longer than the step itself. A clone closes gaps in memory, and keeps the strides where there are none.
    new_params = [p.detach().clone() for p in params]
    with torch.no_grad():
        if part.step_params_ is None:
            new_states = [
                with_fields(s, [None if f is None else f.detach().clone() if c else copy_like(p, f)
                                for f, c in zip(fields(s), part.common, strict=True)])
                for p, s in zip(new_params, states, strict=True)
            ]  # fmt: skip
            for p, g, s in zip(new_params, grads, new_states, strict=True):
                unchecked(part.step_param_)(p, copy_like(p, g), s)
        else:
            # The 0-d fields stay shared: one kernel counts them once.
            shared = [f.clone() if c else None for f, c in zip(fields(states[0]), part.common, strict=True)]
            new_states = [
                with_fields(s, [one if c else None if f is None else copy_like(p, f)
                                for f, one, c in zip(fields(s), shared, part.common, strict=True)])
                for p, s in zip(new_params, states, strict=True)
            ]  # fmt: skip
            unchecked(part.step_params_)(new_params, [g.detach() for g in grads], new_states)
    return list(zip(new_params, new_states, strict=True))
