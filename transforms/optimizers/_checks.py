"""Checks of the tensors and the states that a step is given."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from ..base import State, check_dense, fields, is_finite, readable_without_sync


class _Form(NamedTuple):
    """The form of a state for parameters of one shape and dtype."""

    structure: Any
    names: list[str]
    fields: list[tuple[torch.Size, torch.dtype, bool] | None]  # shape, dtype, whether it is on the parameter's device

    def filled(self) -> list[str]:
        """The names of the fields that are tensors."""
        return [name for name, field in zip(self.names, self.fields, strict=True) if field is not None]


class Forms:
    """The forms of an optimizer's states, by the shape and dtype of the parameter."""

    def __init__(self, init_param: Callable[[Tensor], State]) -> None:
        self.init_param = init_param
        self._known: dict[Any, _Form] = {}

    @functools.cached_property
    def probe(self) -> State:
        """A state without data."""
        return self.init_param(torch.empty(3, device="meta"))

    @functools.cached_property
    def common(self) -> tuple[bool, ...]:
        """For each field of a state, whether one value serves all elements of a flat buffer."""
        return tuple(field is not None and field.dim() == 0 for field in fields(self.probe))

    def of(self, param: Tensor) -> _Form:
        key = param.shape, param.dtype
        compiles = torch.compiler.is_compiling()  # what is made while a compiler traces is not of use outside
        form = None if compiles else self._known.get(key)
        if form is None:
            state = self.init_param(torch.empty(param.shape, dtype=param.dtype, device="meta"))
            accessors, fields, structure = optree.tree_flatten_with_accessor(state, none_is_leaf=True)
            names = [
                ".".join(str(getattr(entry, "field", entry.entry)) for entry in accessor) for accessor in accessors
            ]
            kinds = [None if f is None else (f.shape, f.dtype, f.is_meta and f.dim() > 0) for f in fields]
            form = _Form(structure, names, kinds)
            if not compiles:
                self._known[key] = form
        return form

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
            raise ValueError(f"{where()} is a {_brief(state)}, expected one that init makes, with {form.names}")
        for field, kind, name in zip(found, form.fields, form.names, strict=True):
            if kind is None or not isinstance(field, Tensor):
                if kind is not field:
                    want = "None" if kind is None else f"a tensor of shape {tuple(kind[0])}"
                    raise TypeError(f"{where()}.{name} is {_brief(field)}, expected {want}; start from init(params)")
                continue
            shape, dtype, beside = kind
            right = field.layout is torch.strided and field.is_meta == param.is_meta and field.dtype is dtype
            if not right or field.shape != shape or (beside and field.device != param.device):
                raise (ValueError if right else TypeError)(
                    f"{where()}.{name} is {_shown(field.shape, field.dtype, field.layout, field.device)}, expected "
                    f"{_shown(shape, dtype, torch.strided, param.device)}; pass the state that init(params) or the last step of these "
                    f"parameters returned"
                )
        return found


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 200 else type(value).__name__


def _shown(shape: torch.Size, dtype: torch.dtype, layout: torch.layout, device: torch.device) -> str:
    return f"a tensor of shape {tuple(shape)}, {dtype}, {layout}, on {device}"


def check_grad(param: Tensor, grad: Tensor, where: Callable[[], str]) -> None:
    """Raise unless a gradient is a dense tensor of its parameter's shape, dtype and device.

    Raises:
        ValueError: another shape or device.
        TypeError: another dtype, or no dense tensor.
    """
    fine = isinstance(grad, Tensor) and grad.layout is torch.strided and grad.is_floating_point()
    if fine and grad.shape == param.shape and grad.dtype is param.dtype and grad.device == param.device:
        return
    check_dense(where(), grad)
    have, want = ((x.dtype, tuple(x.shape), x.device) for x in (grad, param))
    kind = ValueError if grad.dtype is param.dtype else TypeError
    raise kind(f"{where()} is of {', '.join(map(str, have))}, but its parameter of {', '.join(map(str, want))}")


def check_count(state: State, where: Callable[[], str]) -> None:
    """Raise ValueError if a state's `step` is no count of steps; it does not wait for a device."""
    step = getattr(state, "step", None)
    if isinstance(step, Tensor) and readable_without_sync(step) and step.numel() == 1:
        refuse_count(float(step), lambda: f"{where()}.step")


def refuse_count(count: float, where: Callable[[], str]) -> None:
    """Raise ValueError if a number is no count of steps; with it Adam would divide by zero, or by NaN."""
    if not (count >= 0 and is_finite(count)):
        raise ValueError(
            f"{where()} is {count}, expected the number of steps taken, finite and at least 0; start from init(params), or go on with "
            f"the state that the last step returned"
        )


def checked(forms: Forms, kernel: Callable[..., None], lists: bool) -> Callable[..., None]:
    """A kernel that checks its arguments before it changes anything; `unchecked` returns the original kernel.

    Args:
        lists: Whether it takes lists of parameters, gradients and states.
    """
    kernel = guarded(unchecked(kernel), lists)

    def made(params: Any, grads: Any, states: Any, **guards: Tensor | None) -> None:
        given = zip(params, grads, states, strict=True) if lists else [(params, grads, states)]
        for i, (param, grad, state) in enumerate(given):
            check_dense("param", param)
            check_grad(param, grad, lambda: "grad")
            _check_unrecorded("param", param)
            for field in forms.check_state(param, state, lambda: "state"):
                _check_unrecorded("state", field)
            check_count(state, lambda i=i: f"states[{i}]" if lists else "state")  # type: ignore[misc]
            pairs = zip(fields(state), fields(states[0] if lists else state), forms.common, strict=True)
            if any(common and a is not b for a, b, common in pairs):
                raise ValueError(
                    f"states[{i}] has counts of its own, and states that are stepped in one call share those of states[0], as the states "
                    f"of init(params) do; step the others in a call of their own"
                )
        if not lists or params:
            kernel(params, [grad.detach() for grad in grads] if lists else grads.detach(), states, **guards)

    made.unchecked = kernel  # type: ignore[attr-defined]
    return made


def _check_unrecorded(name: str, tensor: Tensor | None) -> None:
    """Raise ValueError if autograd would record the change of a tensor; torch's fused kernels would change it silently."""
    if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} requires grad, but a step in place is not recorded by autograd; call it under torch.no_grad(), pass "
            f"a .detach() of it, or take step, which returns new tensors"
        )


def guarded(step: Callable[..., None], lists: bool) -> Callable[..., None]:
    """A kernel with the keywords `grad_scale` and `found_inf`, from one that has them or not.

    Args:
        lists: Whether it takes lists of parameters, gradients and states.
    """
    known = inspect.signature(step).parameters
    if {"grad_scale", "found_inf"} <= known.keys() or any(p.kind is p.VAR_KEYWORD for p in known.values()):
        return step
    run: Callable[..., None] = step if lists else lambda params, grads, states: step(params[0], grads[0], states[0])

    def with_guards(
        params: Any, grads: Any, states: Any, *, grad_scale: Tensor | None = None, found_inf: Tensor | None = None
    ) -> None:
        if not lists:
            params, grads, states = [params], [grads], [states]
        if grad_scale is not None:
            # An expanded gradient, such as that of a sum, cannot be divided in place.
            grads = [grad.contiguous() if 0 in grad.stride() else grad for grad in grads]
            torch._foreach_div_(grads, grad_scale)
        if found_inf is None:
            run(params, grads, states)
        else:
            _step_copies(run, params, grads, states, found_inf != 0)

    return with_guards


_PORTION = 2**26  # bytes of parameters that are copied at a time


def _step_copies(
    step: Callable[..., None], params: list[Tensor], grads: list[Tensor], states: list[State], bad: Tensor
) -> None:
    """Step copies of parameters and states, some at a time, and take them unless `bad`: NaN in a copy stays there.

    Counts that states share are written at the end, since all portions begin with them.
    """
    counts: dict[int, tuple[Tensor, Tensor]] = {}
    start = size = 0
    for end, param in enumerate(params, 1):
        size += param.numel() * param.dtype.itemsize
        if size < _PORTION and end < len(params):
            continue
        given: Any = (params[start:end], states[start:end])
        leaves = {id(x): x for x in optree.tree_leaves(given) if isinstance(x, Tensor)}
        copies = {key: torch.empty_like(x) for key, x in leaves.items()}
        torch._foreach_copy_(list(copies.values()), list(leaves.values()))
        new_params, new_states = optree.tree_map(lambda x, of=copies: of.get(id(x), x), given)
        step(new_params, grads[start:end], new_states)
        del new_params, new_states
        for key, old in leaves.items():
            new = copies.pop(key)
            if old.dim():
                torch.where(bad, old, new, out=old)
            else:
                counts[key] = old, new
        start, size = end, 0
    for old, new in counts.values():
        torch.where(bad, old, new, out=old)


def counted(step_param: Callable[..., Any]) -> Callable[..., Any]:
    """A formula that first checks the dtypes and the state's count of steps; `unchecked` returns the original formula."""
    step_param = unchecked(step_param)

    def made(param: Tensor, grad: Tensor, state: State) -> tuple[Tensor, State]:
        if not param.is_floating_point() or grad.is_complex():
            check_dense("param", param)
            check_dense("grad", grad)
        check_count(state, lambda: "state")
        return step_param(param, grad, state)  # type: ignore[no-any-return]

    made.unchecked = step_param  # type: ignore[attr-defined]
    return made


def unchecked(step: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel or formula alone, for arguments that have been checked."""
    return getattr(step, "unchecked", step)
