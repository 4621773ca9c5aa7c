"""Kernels that check their arguments: they trust shapes, and would write past the end of a smaller tensor."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from .._check import is_finite
from ..tree._check_tree import check_dense
from ..tree._tree import State, readable_without_sync
from ._forms import Forms


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
    if grad.dtype is not param.dtype:
        raise TypeError(
            f"{where()} has dtype {grad.dtype}, but its parameter {param.dtype}; convert one with .to(dtype)"
        )
    if grad.shape != param.shape:
        raise ValueError(f"{where()} has shape {tuple(grad.shape)}, but its parameter {tuple(param.shape)}")
    raise ValueError(f"{where()} lies on {grad.device}, but its parameter on {param.device}")


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


def check_written(tensor: Tensor, where: Callable[[], str]) -> None:
    """Raise ValueError where a tensor cannot be written in place: an inference tensor, or elements that share memory."""
    _check_inference(tensor, where)
    if tensor.is_contiguous():
        return
    reach = 0  # of the dims with smaller strides
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride <= reach:
            raise ValueError(
                f"{where()} has shape {tuple(tensor.shape)} and strides {tensor.stride()}: its elements overlap in memory, so "
                f"that it cannot be stepped in place; give it .clone(memory_format=torch.contiguous_format)"
            )
        reach += stride * (size - 1)


def checked(forms: Forms, kernel: Callable[..., None], lists: bool) -> Callable[..., None]:
    """A kernel that checks its arguments before it changes anything; `unchecked` returns the original kernel.

    Args:
        lists: Whether it takes lists of parameters, gradients and states.
    """
    kernel = guarded(unchecked(kernel), lists)

    def check(param: Tensor, grad: Tensor, state: State, guards: dict[str, Tensor | None]) -> None:
        check_dense("param", param)
        check_grad(param, grad, lambda: "grad")
        fields = forms.check_state(param, state, lambda: "state")
        for i, changed in enumerate((param, *fields)):
            if changed is not None:
                _check_changed(changed, lambda i=i: f"state.{forms.of(param).names[i - 1]}" if i else "param")  # type: ignore[misc]
        if guards.get("grad_scale") is not None:
            _check_inference(grad, lambda: "grad")

    def step_param_(param: Tensor, grad: Tensor, state: State, **guards: Tensor | None) -> None:
        check(param, grad, state, guards)
        check_count(state, lambda: "state")
        kernel(param, grad.detach() if grad.requires_grad else grad, state, **guards)

    def step_params_(params: list[Tensor], grads: list[Tensor], states: list[State], **guards: Tensor | None) -> None:
        for param, grad, state in zip(params, grads, states, strict=True):
            check(param, grad, state, guards)
        forms.check_ages(states)
        if params:
            check_count(states[0], lambda: "states[0]")
            kernel(params, [grad.detach() if grad.requires_grad else grad for grad in grads], states, **guards)

    made: Any = step_params_ if lists else step_param_
    made.unchecked = kernel
    return made  # type: ignore[no-any-return]


def guarded(step: Callable[..., None], lists: bool) -> Callable[..., None]:
    """A kernel with the keywords `grad_scale` and `found_inf`, from one that has them or not.

    Args:
        lists: Whether it takes lists of parameters, gradients and states.

    Raises:
        TypeError: it does not take a parameter, a gradient and a state.
    """
    words = _keywords(step, "step_params_" if lists else "step_param_")
    if words is None or {"grad_scale", "found_inf"} <= words:
        return step

    def with_guards(
        params: Any, grads: Any, states: Any, *, grad_scale: Tensor | None = None, found_inf: Tensor | None = None
    ) -> None:
        if grad_scale is not None:
            # An expanded gradient, such as that of a sum, cannot be divided in place.
            divided = [grad.contiguous() if 0 in grad.stride() else grad for grad in (grads if lists else [grads])]
            torch._foreach_div_(divided, grad_scale)
            grads = divided if lists else divided[0]
        if found_inf is None:
            step(params, grads, states)
        elif lists:
            _step_copies(step, params, grads, states, found_inf != 0)
        else:
            _step_copies(lambda *one: step(*(x for (x,) in one)), [params], [grads], [states], found_inf != 0)

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


def _keywords(step: Callable[..., Any], name: str) -> set[str] | None:
    """The keywords of a function of a parameter, a gradient and a state; None where it takes any.

    Raises:
        TypeError: it is none.
    """
    try:
        signature = inspect.signature(step)
    except (TypeError, ValueError):  # a builtin
        return None
    try:
        signature.bind(None, None, None)
    except TypeError as error:
        raise TypeError(
            f"Optimizer: {name} is called as {name}(param, grad, state), but {step!r} takes {signature}: {error}"
        ) from None
    if any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        return None
    return set(signature.parameters)


def counted(step_param: Callable[..., Any]) -> Callable[..., Any]:
    """A formula that first checks the dtypes and the state's count of steps; `unchecked` returns the original formula."""
    step_param = unchecked(step_param)
    _keywords(step_param, "step_param")

    def checked_step_param(param: Tensor, grad: Tensor, state: State) -> tuple[Tensor, State]:
        if not param.is_floating_point():
            check_dense("param", param)
        if grad.is_complex():
            check_dense("grad", grad)
        check_count(state, lambda: "state")
        return step_param(param, grad, state)  # type: ignore[no-any-return]

    made: Any = checked_step_param
    made.unchecked = step_param
    return made  # type: ignore[no-any-return]


def unchecked(step: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel or formula alone, for arguments that have been checked."""
    return getattr(step, "unchecked", step)


def _check_inference(tensor: Tensor, where: Callable[[], str]) -> None:
    """Raise ValueError for a tensor made in inference mode, which torch does not allow to be written in place."""
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            f"{where()} was made under torch.inference_mode() and cannot be changed outside of it; pass a .clone() of it"
        )


def _check_changed(tensor: Tensor, where: Callable[[], str]) -> None:
    """Raise ValueError if a tensor cannot be changed in place, or autograd would record the change."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{where()} requires grad, but a step in place is not recorded by autograd; call it under torch.no_grad(), pass "
            f"{where()}.detach(), or take step, which returns new tensors"
        )
    check_written(tensor, where)
