"""Lifts steps on one parameter to trees of parameters.

`step` is pure. Where nothing differentiates through it, it copies parameters and state and runs the
in-place kernel on the copies: one fused kernel for the whole tree. Under torch.func transforms and
where a gradient is wanted it runs `step_param` leaf by leaf.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import optree
import torch
from torch import Tensor

from ..schedules._rates import watched
from ..spec._spec import Spec
from ..tree._check_tree import check_dense, check_same
from ..tree._tree import State, Tree, fields, map_with_path, path_string, plain, with_fields
from ._checked import check_count, unchecked
from ._formula import copy_like, like
from ._lists import Ages, age_of, apart, step_in_place, step_lists_, stepped_together

if TYPE_CHECKING:
    from ._optimizer import Optimizer


def init(optimizer: Optimizer, params: Tree) -> State:
    if optimizer.check:
        optimizer.check(params)
    ages = Ages()

    def one(name: str, param: Tensor) -> State:
        check_dense(f"params[{name!r}]", param)
        part = optimizer.at(name)
        watched(part.spec)  # raises for a schedule that is never read
        return ages(part, param, part.init_param(param.detach()))

    return map_with_path(one, params)


def matched(optimizer: Optimizer, params: Tree, state: State) -> tuple[list[str], list[Any], list[Any], Any, list[Any]]:
    """As `states_of`, and the fields of each state.

    Raises:
        ValueError: a state of other parameters, or of another optimizer.
    """
    names, leaves, states, structure = states_of(params, state)
    found = [
        optimizer.at(name).forms.check_state(param, own, lambda name=name: f"state[{name!r}]")  # type: ignore[misc]
        for name, param, own in zip(names, leaves, states, strict=True)
    ]
    return names, leaves, states, structure, found


def states_of(params: Tree, state: State) -> tuple[list[str], list[Any], list[Any], Any]:
    """The paths of the parameters, the parameters, their states, and the structure of the tree.

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
    names, leaves, states, structure, found = matched(optimizer, params, state)
    given = zip(names, leaves, optree.tree_leaves(grads), strict=True)
    items = [(i, optimizer.at(name), param, grad) for i, (name, param, grad) in enumerate(given)]
    new_leaves, new_states = list(leaves), list(states)
    for some in stepped_together(items, [age_of(part, found[i]) for i, part, *_ in items]):
        first, part, *_ = some[0]
        check_count(states[first], lambda name=names[first]: f"state[{name!r}]")  # type: ignore[misc]
        chosen = [param for *_, param, _ in some], [grad for *_, grad in some], [states[i] for i, *_ in some]
        if donate and plain(*chosen):
            step_lists_(part, *chosen, found_inf=found_inf)
            continue
        hyper = dict(part.tensors)
        # Kernels take numbers, and for the learning rate a tensor too; they do not run on meta tensors.
        with_kernels = plain(*chosen, hyper) and hyper.keys() <= {"lr"} and not leaves[first].is_meta
        run = _on_copies if with_kernels else _leafwise
        for (i, *_), (param, new) in zip(some, run(part, *chosen), strict=True):
            new_leaves[i], new_states[i] = param, new
    return optree.tree_unflatten(structure, new_leaves), optree.tree_unflatten(structure, new_states)


def tensor_arguments(spec: Spec) -> list[tuple[str, Tensor]]:
    """The tensors among an optimizer's arguments, also of optimizers and schedules inside, with the names of the arguments."""
    own = [(name, leaf) for name, value in spec.args for leaf in optree.tree_leaves(value)]
    return [(name, leaf) for name, leaf in own if isinstance(leaf, Tensor)] + [
        pair for child in spec.children for pair in tensor_arguments(child.spec)
    ]


def _leafwise(
    part: Optimizer, params: list[Tensor], grads: list[Tensor], states: list[Any]
) -> list[tuple[Tensor, Any]]:
    return [like(p, s, *unchecked(part.step_param)(p, g, s)) for p, g, s in zip(params, grads, states, strict=True)]


def _on_copies(
    part: Optimizer, params: list[Tensor], grads: list[Tensor], states: list[Any]
) -> list[tuple[Tensor, Any]]:
    alone = part.step_params_ is None
    if alone and len(params) > 1:  # each by itself, since the parameters may come to differ in 0-d fields
        return [_on_copies(part, [p], [g], [s])[0] for p, g, s in zip(params, grads, states, strict=True)]
    # Leaf by leaf: one large buffer would be returned to the system after every step, and allocating its pages again
    # takes longer than the step itself. A clone closes gaps in memory, and keeps the strides where there are none.
    new_params = [p.detach().clone() for p in params]
    with torch.no_grad():
        shared = fields(apart(part, states[0]))
        new_states = [
            with_fields(
                s,
                [
                    one if c else None if f is None else copy_like(p, f)
                    for f, one, c in zip(fields(s), shared, part.common, strict=True)
                ],
            )
            for p, s in zip(new_params, states, strict=True)
        ]
        new_grads = [copy_like(p, g) for p, g in zip(new_params, grads, strict=True)] if alone else grads
        step_in_place(part, new_params, new_grads, new_states)
    return list(zip(new_params, new_states, strict=True))
