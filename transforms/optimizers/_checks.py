"""Checks of the tensors and the states that a step is given."""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from ..base import State, trees


class _StateForm(NamedTuple):
    """The form of a state for parameters of one shape and dtype."""

    structure: Any
    names: list[str]
    fields: list[tuple[torch.Size, torch.dtype, bool] | None]  # shape, dtype, whether it is on the parameter's device


class Passed:
    """Parameters and states that have passed the checks, by what these look at. The tensors that a step has returned
    need no look.

    Attributes:
        names: The paths of the parameters.
        alike: Whether all of them have one optimizer, one dtype and one device.
    """

    def __init__(self, structure: Any, leaves: list[Any], states: list[Any], names: list[str], alike: bool) -> None:
        self.structure, self.names, self.alike = structure, names, alike
        self._types, self._nested = list(map(type, states)), any(isinstance(x, tuple) for own in states for x in own)
        self._kinds = list(map(_kind, (*leaves, *self._slots(states))))
        self._refs: list[Any] = []  # weak: an optimizer outlives what it trains

    def _slots(self, states: Any) -> list[Any]:
        return optree.tree_leaves(states, none_is_leaf=True) if self._nested else list(itertools.chain(*states))

    def take(self, leaves: list[Any], states: Any) -> None:
        """Take these as known: the results of a step."""
        self._refs = [x if x is None else weakref.ref(x) for x in (*leaves, *self._slots(states))]
        self._starts = [x.data_ptr() for x in leaves]

    def again(self, params: Any, grads: Any, state: Any) -> tuple[list[Any], list[Any], list[Any], bool] | None:
        """Parameters, gradients and states, if they are of this form, and whether `take` has seen them; otherwise None."""
        try:
            leaves, given, states = map(self.structure.flatten_up_to, (params, grads, state))
            held = [*leaves, *self._slots(states)]
            known = len(held) == len(self._refs) and all(map(operator.is_, [r and r() for r in self._refs], held))
            known = known and [x.data_ptr() for x in leaves] == self._starts
            right = known or (list(map(type, states)) == self._types and _are(held, self._kinds))
            return (leaves, given, states, known) if right and _are(given, self._kinds[: len(leaves)]) else None
        except (AttributeError, TypeError, ValueError):
            return None


def _kind(x: Any) -> Any:
    return x if x is None else (x.shape, x.dtype, x.device, x.layout)


def _are(leaves: list[Any], kinds: list[Any]) -> bool:
    """Whether tensors are of these kinds.

    It keeps no tuple for each: those start Python's garbage collector in every step.
    """
    return len(leaves) == len(kinds) and all(
        [
            x is k or (x.shape == k[0] and x.dtype is k[1] and x.device == k[2] and x.layout is k[3])
            for x, k in zip(leaves, kinds, strict=True)
        ]
    )


class Forms:
    """The forms of an optimizer's states, by the shape and dtype of the parameter.

    Attributes:
        last: What has passed the checks of a step in place.
    """

    def __init__(self, init_param: Callable[[Tensor], State]) -> None:
        self.init_param = init_param
        self.last: Passed | None = None
        self._known: dict[Any, _StateForm] = {}
        self._seen: State = None  # the state of a parameter, without data

    @functools.cached_property
    def probe(self) -> State:
        """A state: of a parameter, without data, or of a vector while none is known, which `init_param` may not take."""
        # On the CPU, since operations on the meta device import sympy, which takes a third of a second.
        return self.init_param(torch.zeros(3, device="cpu")) if self._seen is None else self._seen

    @functools.cached_property
    def common(self) -> tuple[bool, ...]:
        """For each field of a state, whether one value serves all elements of a flat buffer."""
        return tuple(field is not None and field.dim() == 0 for field in trees.fields(self.probe))

    def of_one_age(self, states: list[Any]) -> bool:
        """Whether states without states inside share all 0-d fields."""
        places = [j for j, common in enumerate(self.common) if common]
        return len(self.common) == len(states[0]) and all([s[j] is states[0][j] for j in places for s in states])

    def of(self, param: Tensor) -> _StateForm:
        # What is made while a compiler traces is not of use outside.
        known: dict[Any, _StateForm] = {} if torch.compiler.is_compiling() else self._known
        key = param.shape, param.dtype
        if key not in known:
            state = self.init_param(torch.empty(param.shape, dtype=param.dtype, device="meta"))
            self._seen = state if self._seen is None and param.dim() else self._seen
            accessors, found, structure = optree.tree_flatten_with_accessor(state, none_is_leaf=True)
            names = [".".join(str(getattr(entry, "field", entry.entry)) for entry in path) for path in accessors]
            kinds = [f if f is None else (f.shape, f.dtype, f.is_meta and f.dim() > 0) for f in found]
            known[key] = _StateForm(structure, names, kinds)
        return known[key]

    def check_state(self, param: Tensor, state: State, where: Callable[[], str]) -> list[Any]:
        """The fields of a state, if it is of the form that `init_param` gives it.

        Args:
            where: Gives the name of the state for the message.

        Raises:
            ValueError: other fields, another shape or device.
            TypeError: another dtype, or no tensor.
        """
        form = self.of(param)
        found, structure = optree.tree_flatten(state, none_is_leaf=True)
        if structure != form.structure:
            raise ValueError(f"{where()} is {_shown(state)}, expected one that init makes, with {form.names}")
        for field, kind, name in zip(found, form.fields, form.names, strict=True):
            if field is kind:  # both are None
                continue
            shape, dtype, beside = kind or (None, None, False)
            right = isinstance(field, Tensor) and field.layout is torch.strided and field.is_meta == param.is_meta
            right = right and field.dtype is dtype
            if not right or field.shape != shape or (beside and field.device != param.device):
                want = kind and f"a tensor of shape {tuple(kind[0])}, {dtype}, on {param.device}"
                remedy = "pass the state that init(params) or the last step of these parameters returned"
                text = f"{where()}.{name} is {_shown(field)}, expected {want}; {remedy}"
                raise (ValueError if right else TypeError)(text)
        return found


def _shown(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"a tensor of shape {tuple(x.shape)}, {x.dtype}, {x.layout}, on {x.device}"
    return "None" if x is None else f"a {type(x).__name__}"


def check_grad(param: Tensor, grad: Tensor, where: Callable[[], str]) -> None:
    """Raise unless a gradient is a dense tensor of its parameter's shape, dtype and device.

    Raises:
        ValueError: another shape or device.
        TypeError: another dtype, or no dense tensor.
    """
    trees.check_dense(where(), grad)
    have, want = ((x.dtype, tuple(x.shape), x.device) for x in (grad, param))
    if have != want:
        kind = ValueError if grad.dtype is param.dtype else TypeError
        raise kind(f"{where()} is of {', '.join(map(str, have))}, but its parameter of {', '.join(map(str, want))}")


def checked(forms: Forms, kernel: Callable[..., None]) -> Callable[..., None]:
    """A kernel, of one parameter or of lists, that checks its arguments before it changes anything.

    `unchecked` returns the original kernel, with the keywords `grad_scale` and `found_inf`.
    """
    kernel = guarded(unchecked(kernel))

    def made(params: Any, grads: Any, states: Any, **guards: Tensor | None) -> None:
        given = (params, grads, states) if isinstance(params, list) else ([params], [grads], [states])
        for i, (param, grad, state) in enumerate(zip(*given, strict=True)):
            trees.check_dense("param", param)
            check_grad(param, grad, lambda: "grad")
            found = forms.check_state(param, state, lambda: "state")
            shared = zip(found, trees.fields(given[2][0]), forms.common, strict=True)
            if any(common and own is not first for own, first, common in shared):
                others = "states that are stepped in one call share those of states[0], as those of init(params) do"
                raise ValueError(f"states[{i}] has counts of its own, but {others}")
        if given[0]:
            unrecorded(lambda: kernel(params, grads, states, **guards), given[0])

    made.unchecked = kernel  # type: ignore[attr-defined]
    return made


def unrecorded(step: Callable[[], None], params: list[Tensor]) -> None:
    """Step parameters that a graph may need."""
    with torch.no_grad():
        step()
    # Fused kernels do not increment the version: a graph that needs the old values would silently use the new ones.
    torch.autograd.graph.increment_version(params)


def guarded(step: Callable[..., None]) -> Callable[..., None]:
    """A kernel, of one parameter or of lists, with the keywords `grad_scale` and `found_inf`, from one that lacks some."""
    known = inspect.signature(step).parameters
    if {"grad_scale", "found_inf"} <= known.keys() or any(p.kind is p.VAR_KEYWORD for p in known.values()):
        return step
    chooses = "found_inf" in known

    def with_guards(
        params: Any, grads: Any, states: Any, *, grad_scale: Tensor | None = None, found_inf: Tensor | None = None
    ) -> None:
        if grad_scale is not None:
            # An expanded gradient, such as that of a sum, cannot be divided in place.
            grads = optree.tree_map(lambda grad: grad.contiguous() if 0 in grad.stride() else grad, grads)
            torch._foreach_div_(optree.tree_leaves(grads), grad_scale)
        if found_inf is None:
            step(params, grads, states)
        elif chooses:
            step(params, grads, states, found_inf=found_inf)
        else:
            _unless(found_inf != 0, step, params, grads, states)

    return with_guards


def _unless(bad: Tensor, step: Callable[..., None], params: Any, grads: Any, states: Any) -> None:
    """Step, and take the old values back where `bad`; a NaN in the new ones is left behind."""
    given: Any = (params, states)
    held = list({id(x): x for x in optree.tree_leaves(given)}.values())  # states share their counts
    old = [torch.empty_like(x) for x in held]
    torch._foreach_copy_(old, held)
    step(params, grads, states)
    for now, before in zip(held, old, strict=True):
        torch.where(bad, before, now, out=now)


def unchecked(step: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel or formula alone, for arguments that have been checked."""
    return getattr(step, "unchecked", step)
