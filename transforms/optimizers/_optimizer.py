"""`Optimizer`: its functions, their lifting to trees and lists, what formulas have in common."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import optree
import torch
from torch import Tensor

from ..base import Spec, Specified, State, Tree, devices, state_dicts, trees
from ._checks import Forms, Passed, checked, unchecked, unrecorded
from ._schedules import ScalarOrSchedule, value_at, watched

Tensors: TypeAlias = list[Tensor]


def state_fields(states: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Path -> name -> tensor, of the states of some parameters.

    An optimizer inside another one is looked at alone: master copies change with the parameters, and hyperparameters
    are not trained. Tensors in containers, as in the states of torch's functional optimizers, have their own names.

    >>> import torch
    >>> from fjoin import transforms as tx
    >>> state_fields(tx.sgd(0.1, momentum=0.9).init({"w": torch.zeros(2)}))
    {'w': {'step': tensor(0.), 'momentum': tensor([0., 0.])}}
    """
    return {path: _named(state) for path, state in states.items()}


def with_state_fields(states: Mapping[str, Any], new: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Any]:
    """The states with other tensors in place of the result of `state_fields`."""
    return {path: _with(state, new[path]) for path, state in states.items()}


def _named(state: Any) -> dict[str, Tensor]:
    """The tensors by a name without a dot."""
    if hasattr(state, "inner"):
        return _named(state.inner)
    return {name.replace(".", "/"): leaf for name, leaf in state_dicts.to_state_dict(state).items()}


def _with(state: Any, new: Mapping[str, Tensor]) -> Any:
    if hasattr(state, "inner"):
        return state._replace(inner=_with(state.inner, new))
    return optree.tree_unflatten(optree.tree_structure(state), [new[name] for name in _named(state)])


def rate_at(lr: ScalarOrSchedule, step: Tensor) -> Tensor:
    """The learning rate of a step, 0-d float64."""
    if step.is_meta:  # where only the form of a state is computed
        return torch.zeros((), dtype=torch.float64)
    return torch.as_tensor(value_at(lr, step), dtype=torch.float64)


def first_rate(lr: ScalarOrSchedule, step: Tensor, kept: Tensor) -> Tensor:
    """What a state keeps of the learning rate, or before the first step the rate itself, which may have changed since."""
    return torch.where(step == 0, rate_at(lr, step).to(kept.dtype), kept)


def used(value: Any) -> bool:
    """Whether a hyperparameter may have an effect; True for tensors, since they may be traced."""
    return isinstance(value, Tensor) or bool(value)


def penalized(param: Tensor, grad: Tensor, weight_decay: Any) -> Tensor:
    """The gradient with an L2 penalty."""
    return grad + weight_decay * param if used(weight_decay) else grad


def decayed(param: Tensor, rate: Tensor, weight_decay: Any) -> Tensor:
    """The parameter after a decay that does not enter the gradient."""
    return param * (1 - rate * weight_decay).to(param.dtype)


def regularized(param: Tensor, grad: Tensor, rate: Tensor, weight_decay: Any, decoupled: bool) -> tuple[Tensor, Tensor]:
    """Parameter and gradient, of which one has the decay."""
    if decoupled:
        return decayed(param, rate, weight_decay), grad
    return param, penalized(param, grad, weight_decay)


def root(x: Tensor) -> Tensor:
    """The square root with derivative 1 at 0, where it has none, to allow differentiation through training."""
    zero = x == 0
    return torch.where(zero, x, torch.where(zero, torch.ones_like(x), x).sqrt())


def lerp(start: Tensor, end: Tensor, share: Any) -> Tensor:
    """start + share (end - start), without cancellation if one of them is much smaller than the other."""
    return torch.lerp(start, end, share.to(start.dtype) if isinstance(share, Tensor) else share)


def wide_root(x: Tensor, reduced: Callable[[Tensor], Tensor]) -> Tensor:
    """The root of the sum, or the mean, of squares, taken in at least float32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return root(reduced(wide * wide))


def like(param: Tensor, state: Any, new: Tensor, fields_of: Any) -> tuple[Tensor, Any]:
    """The result of a step in the dtypes before it; type promotion with 0-d hyperparameters changes 0-d tensors."""
    pairs = zip(trees.fields(state), trees.fields(fields_of), strict=True)
    return new.to(param.dtype), trees.with_fields(fields_of, [b if a is None else b.to(a.dtype) for a, b in pairs])


def in_float32(step_param: Callable[..., tuple[Tensor, Any]]) -> Callable[..., tuple[Tensor, Any]]:
    """A formula that computes with 16-bit parameters in float32 and rounds parameter and state once.

    In 16 bits an eps of 1e-8 and the square of a small gradient are 0, and their quotients NaN.
    """

    def wide(param: Tensor, grad: Tensor, state: Any) -> tuple[Tensor, Any]:
        if param.dtype.itemsize >= 4:
            return step_param(param, grad, state)
        new, after = step_param(param.float(), grad.float(), widened_state(state))
        return like(param, state, new, after)

    return wide


def widened_state(state: Any) -> Any:
    """A state with its 16-bit fields in float32."""
    wide = [None if field is None else devices.widened(field) for field in trees.fields(state)]
    return trees.with_fields(state, wide)


def copy_like(param: Tensor, value: Tensor) -> Tensor:
    """A copy of `value` with the parameter's memory layout: kernels iterate over memory, not over indices."""
    value = value.detach()
    if value.stride() == param.stride() or value.shape != param.shape:
        return value.clone()
    return torch.empty_like(param, dtype=value.dtype).copy_(value)


StepItem: TypeAlias = "tuple[Any, Optimizer, Tensor, Any]"  # (key, optimizer, parameter, gradient)


def sharing(part: Optimizer, state: State, like: State) -> State:
    """A state with the 0-d fields of another one, so one kernel can step both."""
    pairs = zip(trees.fields(state), trees.fields(like), part.common, strict=True)
    return trees.with_fields(state, [other if common else own for own, other, common in pairs])


def apart(part: Optimizer, state: State) -> State:
    """A state with copies of its 0-d fields, which then has an age of its own."""
    pairs = zip(trees.fields(state), part.common, strict=True)
    return trees.with_fields(state, [field.clone() if common else field for field, common in pairs])


class Ages:
    """Makes states share their 0-d fields with the first state of their optimizer, dtype, device and age.

    States that are stepped one by one keep their own, since each of these steps counts.
    """

    def __init__(self) -> None:
        self._first: dict[Any, State] = {}

    def __call__(self, part: Optimizer, param: Tensor, state: State, *age: Any) -> State:
        if part.step_params_ is None:
            return state
        return sharing(part, state, self._first.setdefault((id(part), param.dtype, param.device, *age), state))


def age_of(part: Optimizer, found: Sequence[Any]) -> tuple[int, ...]:
    """The identities of a state's 0-d fields, from its fields."""
    return tuple(map(id, itertools.compress(found, part.forms.common)))


def stepped_together(items: Sequence[StepItem], ages: Sequence[Any]) -> list[list[StepItem]]:
    """The parameters that one kernel may step, by optimizer, dtype, device and age."""
    groups: dict[Any, list[StepItem]] = {}
    for i, (item, age) in enumerate(zip(items, ages, strict=True)):
        _, part, param, _ = item
        key = i if part.step_params_ is None else (id(part), param.dtype, param.device, age)
        groups.setdefault(key, []).append(item)
    return list(groups.values())


def step_in_place(part: Optimizer, params: Tensors, grads: Tensors, states: list[Any], **guards: Tensor | None) -> None:
    """Step checked lists with the in-place function that the optimizer has.

    States that share 0-d fields have equal step counts, which are incremented once.
    """
    if part.step_params_ is not None:
        unchecked(part.step_params_)(params, grads, states, **guards)
        return
    for one in zip(params, grads, states, strict=True):
        unchecked(part.step_param_)(*one, **guards)


def step_lists_(part: Optimizer, params: Tensors, grads: Tensors, states: list[Any], **guards: Tensor | None) -> None:
    """`step_in_place` for parameters that a graph may need; the guards may lie on another device."""
    here = {name: None if guard is None else guard.to(params[0].device) for name, guard in guards.items()}
    unrecorded(lambda: step_in_place(part, params, grads, states, **here), params)


class Matched(NamedTuple):
    """Parameters, their gradients and states as lists.

    structure: that of the tree.
    groups: the places of the parameters that one kernel may step.
    passed: what has passed the checks; None if a compiler traces.
    known: whether the parameters and states are those that the last step has returned.
    """

    params: list[Any]
    grads: list[Any]
    states: list[Any]
    structure: Any
    groups: list[tuple[Optimizer, list[int]]]
    passed: Passed | None
    known: bool


def matched(optimizer: Optimizer, params: Tree, grads: Tree, state: State) -> Matched:
    """Parameters, gradients and states, if the states are of the form that `init` gives them.

    Those of the form of the last call need no further check.

    Raises:
        ValueError, TypeError: gradients of other parameters, or a state of others, or of another optimizer.
    """
    traced = torch.compiler.is_compiling()  # what a compiler makes is not of use outside
    passed = None if traced else optimizer.forms.last
    found = None if passed is None else passed.again(params, grads, state)
    if found is not None and passed is not None:
        (leaves, given, states, known), structure, names, alike = found, passed.structure, passed.names, passed.alike
    else:
        trees.check_same("grads", grads, "params", params)
        known = False
        names, leaves, states, structure = states_of(params, state)
        given = structure.flatten_up_to(grads)
        for name, param, own in zip(names, leaves, states, strict=True):
            optimizer.at(name).forms.check_state(param, own, lambda name=name: f"state[{name!r}]")  # type: ignore[misc]
        alike = optimizer.select is None and not traced and len({(x.dtype, x.device) for x in leaves}) == 1
        if not traced:
            passed = optimizer.forms.last = Passed(structure, leaves, states, names, alike)
    if alike and optimizer.step_params_ is not None and optimizer.forms.of_one_age(states):
        return Matched(leaves, given, states, structure, [(optimizer, list(range(len(leaves))))], passed, known)
    parts = [optimizer.at(name) for name in names]
    items: list[StepItem] = [(i, part, param, None) for i, (part, param) in enumerate(zip(parts, leaves, strict=True))]
    ages = [age_of(part, trees.fields(own)) for part, own in zip(parts, states, strict=True)]
    groups = [(some[0][1], [i for i, *_ in some]) for some in stepped_together(items, ages)]
    return Matched(leaves, given, states, structure, groups, passed, known)


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
    return list(map(trees.path_string, paths)), leaves, states, structure


def step(optimizer: Optimizer, held: Matched, donate: bool = False, **guards: Tensor | None) -> tuple[Tree, State]:
    """See `Optimizer.step`.

    Args:
        donate: Whether the step may be in place on parameters and states, with the gradients as scratch. No two leaves
            share memory.
        guards: With `donate`, `grad_scale` and `found_inf` as of `Optimizer`.
    """
    leaves, given, states, structure, groups, passed, known = held
    new_leaves, new_states = list(leaves), list(states)
    for part, places in groups:
        chosen: list[list[Any]] = [[of[i] for i in places] for of in (leaves, given, states)]
        hyper = dict(part.tensors)
        if not trees.plain(*chosen) or not (
            donate or (trees.plain(hyper) and hyper.keys() <= {"lr"} and not chosen[0][0].is_meta)
        ):
            # Kernels take numbers, and for the learning rate a tensor too; they do not run on meta tensors.
            if (scale := guards.get("grad_scale")) is not None:
                chosen[1] = [g / scale.to(g.device) for g in chosen[1]]
            made = [like(p, s, *part.step_param(p, g, s)) for p, g, s in zip(*chosen, strict=True)]
            chosen[0], chosen[2] = map(list, zip(*made, strict=True))
        else:
            chosen = chosen if donate else _copies(part, *chosen)
            step_lists_(part, chosen[0], chosen[1], chosen[2], **guards)
        for i, param, own in zip(places, chosen[0], chosen[2], strict=True):
            new_leaves[i], new_states[i] = param, own
    if passed is not None and not (donate and known) and all([type(x) is Tensor for x in new_leaves]):
        if trees.plain(new_leaves):
            passed.take(new_leaves, new_states)
    return optree.tree_unflatten(structure, new_leaves), optree.tree_unflatten(structure, new_states)


def _copies(part: Optimizer, params: Tensors, grads: Tensors, states: list[Any]) -> list[list[Any]]:
    """Parameters, gradients and states for a step in place that leaves the given ones as they are.

    Leaf by leaf: one large buffer would be returned to the system after every step, and allocating its pages again
    takes longer than the step itself. A clone closes gaps in memory, and keeps the strides where there are none.
    """
    nested = any([isinstance(field, tuple) for field in states[0]])
    rows, columns = map(trees.fields, states) if nested else states, list[Any]()
    with torch.no_grad():
        new_params = [p.clone() for p in params]
        strides = [p.stride() for p in new_params]
        for common, column in zip(part.common, zip(*rows, strict=True), strict=True):
            if common:  # those that are stepped together share it
                column = (column[0].clone(),) * len(params)
            elif all([x is not None and x.stride() == own for x, own in zip(column, strides, strict=True)]):
                column = tuple([x.clone() for x in column])
            else:
                pairs = zip(new_params, column, strict=True)
                column = tuple([None if x is None else copy_like(p, x) for p, x in pairs])
            columns.append(column)
    filled = zip(states, zip(*columns, strict=True), strict=True)
    new_states: list[Any] = [trees.with_fields(own, row) if nested else type(own)(*row) for own, row in filled]
    if part.step_params_ is None:  # a kernel from elsewhere may write into the gradient
        grads = [copy_like(p, g) for p, g in zip(new_params, grads, strict=True)]
    return [new_params, grads, new_states]


def tensor_arguments(spec: Spec) -> list[tuple[str, Tensor]]:
    """The tensors among an optimizer's arguments, also of optimizers and schedules inside, with the names of the
    arguments.
    """
    own = [(name, leaf) for name, value in spec.args for leaf in optree.tree_leaves(value)]
    inside = [pair for child in spec.children for pair in tensor_arguments(child.spec)]
    return [(name, leaf) for name, leaf in own if isinstance(leaf, Tensor)] + inside


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
            then scratch. `found_inf`, 0-d float32: change nothing where it is 1. Autograd does not record it, as a step
            of torch.optim. Gradient and state are checked before it runs: ValueError or TypeError for another shape,
            dtype or device than the parameter's.
        step_params_: The same for lists of parameters, gradients and states, in one kernel, which counts the step once:
            the states share their 0-d fields, as those of `init(params)` do. None: `step_param_` is called for each
            parameter.
        elementwise: Whether it may be called on a flat buffer of many parameters, since it steps each element by
            itself. It is taken at its word; `fjoin.testing.check_optimizer` tries it.
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
    elementwise: bool = False
    select: Callable[[str], Optimizer] | None = None
    check: Callable[[Tree], Any] | None = None
    cost: Callable[[torch.Size], float] = torch.Size.numel
    spec: Spec = Spec("")
    forms: Forms = field(init=False)
    tensors: list[tuple[str, Tensor]] = field(init=False)  # the tensors among its arguments, see `tensor_arguments`

    instead_of_transform = "an optimizer comes last: write fuse(hook, optimizer)"

    def __post_init__(self) -> None:
        self.identify(function=self.step_param)
        forms = Forms(self.init_param)
        object.__setattr__(self, "forms", forms)
        object.__setattr__(self, "tensors", tensor_arguments(self.spec))
        object.__setattr__(self, "step_param_", checked(forms, self.step_param_))
        if self.step_params_ is not None:
            object.__setattr__(self, "step_params_", checked(forms, self.step_params_))

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

    def init(self, params: Tree) -> State:
        """The states of all parameters: the tree of `params` with a state at every leaf."""
        if self.check:
            self.check(params)
        ages = Ages()

        def one(name: str, param: Tensor) -> State:
            trees.check_dense(f"params[{name!r}]", param)
            part = self.at(name)
            watched(part.spec)  # raises for a schedule that is never read
            return ages(part, param, part.init_param(param.detach()))

        return trees.map_with_path(one, params)

    def step(self, params: Tree, grads: Tree, state: State) -> tuple[Tree, State]:
        """One step of every parameter: `(params, state)`, new tensors; the arguments stay as they are.

        Raises:
            ValueError, TypeError: `grads` or `state` has not the structure, shapes, dtypes and devices that belong to
                `params`.
        """
        return step(self, matched(self, params, grads, state))
