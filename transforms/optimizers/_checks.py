"""Checks of the tensors and the states that a step is given."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from ..base import State, check_dense, fields, is_finite, plain, readable_without_sync


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
            if kind is None and field is None:
                continue
            if kind is None or not isinstance(field, Tensor):
                want = "None" if kind is None else f"a tensor of shape {tuple(kind[0])}"
                raise TypeError(f"{where()}.{name} is {_brief(field)}, expected {want}; start from init(params)")
            shape, dtype, beside = kind
            if field.layout is not torch.strided or field.is_meta != param.is_meta:
                raise TypeError(
                    f"{where()}.{name} has layout {field.layout} and lies on {field.device}, expected a dense tensor beside its "
                    f"parameter, on {param.device}"
                )
            if field.shape != shape:
                raise ValueError(
                    f"{where()}.{name} has shape {tuple(field.shape)}, expected {tuple(shape)}: the parameter has shape "
                    f"{tuple(param.shape)}; pass the state that init(params) or the last step of these parameters returned"
                )
            if field.dtype is not dtype:
                raise TypeError(
                    f"{where()}.{name} has dtype {field.dtype}, expected {dtype}; convert it with .to(dtype)"
                )
            if beside and field.device != param.device:
                raise ValueError(f"{where()}.{name} lies on {field.device}, but its parameter on {param.device}")
        return found

    def check_ages(self, states: list[State]) -> None:
        """Raise ValueError unless states share the tensors that count steps, which a kernel counts once for all."""
        names = self.of(torch.empty(3, device="meta")).names
        leaves = [optree.tree_leaves(state, none_is_leaf=True) for state in states]
        for i, other in enumerate(leaves[1:], 1):
            for name, common, a, b in zip(names, self.common, leaves[0], other, strict=True):
                if common and a is not b:
                    raise ValueError(
                        f"states[{i}].{name} is another tensor than states[0].{name}; states that are stepped in one call share it, as "
                        f"those of init(params) do; step the others in a call of their own"
                    )


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 200 else type(value).__name__


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


def acts_elementwise(
    init_param: Callable[[Tensor], Any], step_param: Callable[[Tensor, Tensor, Any], tuple[Tensor, Any]]
) -> bool:
    """Whether the step of a small parameter is that of its parts; True where that cannot be found out.

    It cannot for a step that draws random numbers, or that raises.
    """
    param = torch.linspace(-1.0, 1.0, 8, dtype=torch.float32, device="cpu")
    grad = torch.linspace(0.5, -2.0, 8, dtype=torch.float32, device="cpu")
    if not plain(param):
        return True
    before = torch.get_rng_state()
    try:
        with torch.no_grad():
            whole = step_param(param, grad, init_param(param))[0]
            pairs = zip(param.split([3, 5]), grad.split([3, 5]), strict=True)
            parts = torch.cat([step_param(p, g, init_param(p))[0] for p, g in pairs])
        random = not torch.equal(torch.get_rng_state(), before)
        return random or torch.allclose(whole, parts, rtol=1e-4, atol=1e-6, equal_nan=True)
    except Exception:
        return True
    finally:
        torch.set_rng_state(before)
