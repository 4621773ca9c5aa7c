"""Steps in place, by torch's kernels or by the formula, and wrappers of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..base import Spec, devices, trees
from ._checks import guarded
from ._optimizer import Optimizer, Tensors, copy_like, first_rate, in_float32, widened_state
from ._schedules import ScalarOrSchedule, value_at

Kernel: TypeAlias = Callable[[Tensors, Tensors, list[Any]], None]  # (params, grads, states), in place


def kernel_lr(lr: ScalarOrSchedule, step: Tensor) -> Any:
    """The learning rate for a fused kernel: a number, or a tensor where reading it would wait for the device."""
    value = value_at(lr, step)
    if isinstance(value, Tensor):
        return value.item() if value.device.type == "cpu" else value.to(torch.float32)
    return value


def run_fused(
    kernel: Callable[..., None], given: list[Tensors], guards: dict[str, Tensor | None], settings: dict[str, Any]
) -> None:
    """Call a fused kernel of torch with tensors of their parameters' memory layout, without gaps.

    Other tensors are replaced by copies, and the results are written back from the copies.

    Args:
        given: Parameters, gradients, and lists of state tensors, each as long as the first or empty.
        guards: `grad_scale` and `found_inf`, see `Optimizer`.
        settings: The kernel's other arguments.
    """
    laid, scale = given, guards.get("grad_scale")
    if not all([tensor.is_contiguous() for tensors in given for tensor in tensors]):
        # A tensor made like one without gaps gets its strides.
        dense = [p if torch.empty_like(p, device="meta").stride() == p.stride() else p.contiguous() for p in given[0]]
        laid = [
            [t if t.stride() == p.stride() else copy_like(p, t) for p, t in zip(dense, ts, strict=False)]
            for ts in given
        ]
    if scale is not None and given[0][0].dtype is torch.float64:  # kernels take a float32 scale
        torch._foreach_div_(laid[1], scale)
        scale = None
    scale = scale if scale is None else scale.to(torch.float32)
    kernel(*laid, grad_scale=scale, found_inf=guards.get("found_inf"), **settings)
    if laid is not given:
        for i in (0, *range(2, len(given))):
            for old, new in zip(given[i], laid[i], strict=True):
                if new is not old:
                    old.copy_(new)


def in_place(kernel: Kernel, common: tuple[str, ...] = ("step",)) -> Callable[..., None]:
    """`step_params_` from a kernel without `grad_scale` and `found_inf`.

    Args:
        kernel: `(params, grads, states) -> None`, in place, where no two states share a tensor.
        common: The names of the states' 0-d fields.
    """

    def step_params_(params: Tensors, grads: Tensors, states: list[Any]) -> None:
        counts = zip(*(torch.stack([getattr(s, name) for s in states]).unbind(0) for name in common), strict=True)
        apart = [s._replace(**dict(zip(common, own, strict=True))) for s, own in zip(states, counts, strict=True)]
        kernel(params, grads, apart)
        for name in common:
            getattr(states[0], name).copy_(getattr(apart[0], name))

    return guarded(step_params_)


def by_formula(step_param: Callable[..., Any], common: tuple[str, ...] = ("step",)) -> Callable[..., None]:
    """`step_params_` that computes the pure step and writes it back, for optimizers without a kernel in torch."""

    def step_params_(params: Tensors, grads: Tensors, states: list[Any], *, found_inf: Tensor | None = None) -> None:
        bad, after = None if found_inf is None else found_inf != 0, states[0]

        def put(old: Tensor, new: Tensor) -> None:
            old.copy_(new) if bad is None else torch.where(bad, old, new, out=old)

        for param, grad, state in zip(params, grads, states, strict=True):
            new, after = step_param(param, grad, state)
            put(param, new)
            for name, old in state._asdict().items():
                if old is not None and name not in common:
                    put(old, getattr(after, name))
        for name in common:  # at the end, since all parameters begin with the old ones
            put(getattr(states[0], name), getattr(after, name))

    return guarded(step_params_)


def in_float32_(step_params_: Callable[..., None], on_devices: bool = True) -> Callable[..., None]:
    """`step_params_` through float32 copies of 16-bit parameters, on devices too or on CPUs alone; see `in_float32`."""

    def wide(params: Tensors, grads: Tensors, states: list[Any], **guards: Tensor | None) -> None:
        if not params or params[0].dtype.itemsize >= 4 or not (on_devices or params[0].device.type == "cpu"):
            return step_params_(params, grads, states, **guards)
        new_params = [param.float() for param in params]
        new_states = [widened_state(state) for state in states]
        step_params_(new_params, [grad.float() for grad in grads], new_states, **guards)
        torch._foreach_copy_(params, new_params)
        for state, new in zip(states, new_states, strict=True):
            for old, field in zip(trees.fields(state), trees.fields(new), strict=True):
                if field is not old:
                    old.copy_(field)

    return wide


def zeros(kind: Callable[..., Any], **filled: bool) -> Callable[[Tensor], Any]:
    """`init_param` of states that have a count and tensors like the parameter.

    Args:
        kind: The class of the states.
        filled: By name, the fields that may be None, and whether they are not.
    """
    names = kind._fields[1:]  # type: ignore[attr-defined]

    def init_param(param: Tensor) -> Any:
        return kind(new_step(param), *(torch.zeros_like(param) if filled.get(n, True) else None for n in names))

    return init_param


def slots(states: list[Any], *names: str) -> list[Tensors]:
    """Fields of all states, as torch's functions take them; an empty list where a field is None."""
    columns = dict(zip(states[0]._fields, map(list, zip(*states, strict=True)), strict=True))
    return [[] if columns[name][0] is None else columns[name] for name in names]


def one_param(step_params_: Callable[..., None]) -> Callable[..., None]:
    """`step_param_` from `step_params_`."""

    def step_param_(param: Tensor, grad: Tensor, state: Any, **guards: Tensor | None) -> None:
        step_params_([param], [grad], [state], **guards)

    return step_param_


def new_step(param: Tensor) -> Tensor:
    """The count of a new state; raises TypeError for a complex parameter, which no formula is made for."""
    if param.is_complex():
        raise TypeError(f"the parameter has complex dtype {param.dtype}; pass torch.view_as_real(tensor) instead")
    return torch.zeros((), dtype=torch.float32, device=param.device)


def from_kernel(
    init_param: Callable[..., Any],
    step_param: Callable[..., Any],
    step_params_: Callable[..., None] | None = None,
    numbers: Iterable[Any] = (),
    common: tuple[str, ...] = ("step",),
    elementwise: bool = True,
    maximize: bool = False,
    widens: bool = False,
    on_devices: bool = True,
    **settings: Any,
) -> Optimizer:
    """An optimizer of a pure formula and a kernel; the formula gets 16-bit parameters in float32.

    Args:
        step_params_: The kernel, for parameters of all dtypes. None: the formula runs.
        numbers: The hyperparameters that the kernel takes as numbers only: with a tensor among them the formula runs.
        common: See `in_place`.
        widens: Whether the formula gets parameters of all dtypes.
        on_devices: Whether the kernel runs on devices; on others than the CPU the formula then runs.
        elementwise, settings: Of `Optimizer`.
    """

    def ascent(param: Tensor, grad: Tensor, state: Any) -> tuple[Tensor, Any]:
        return step_param(param, -grad, state)

    formula = ascent if maximize else step_param
    formula = formula if widens else in_float32(formula)
    in_lists = by_formula(formula, common)

    def chosen(params: Tensors, grads: Tensors, states: list[Any], **guards: Tensor | None) -> None:
        step = kernel if states[0].step.device.type == "cpu" else in_lists
        step(params, grads, states, **guards)

    traced = any(isinstance(number, Tensor) for number in numbers)
    kernel: Callable[..., None] = in_lists if step_params_ is None or traced else step_params_
    lists = kernel if on_devices else chosen
    return Optimizer(init_param, formula, one_param(lists), lists, elementwise, **settings)


def from_torch(
    init_param: Callable[..., Any],
    step_param: Callable[..., Any],
    function: Callable[..., None],
    lr: ScalarOrSchedule | None,
    settings: dict[str, Any],
    *,
    names: tuple[str, ...] = (),
    common: tuple[str, ...] = ("step",),
    first: tuple[ScalarOrSchedule, str] | None = None,
    foreach: bool | None = True,
) -> Optimizer:
    """An optimizer of a pure formula and one of the functions of torch.optim, which takes all settings as numbers.

    Args:
        function, names: The function, and the fields of the states in the order in which it takes them; by default
            theirs, with the count at the end.
        lr: The learning rate, where the function takes one.
        settings: Its other arguments.
        first: The learning rate, and the field that keeps that of the first step.
    """

    def kernel(params: Tensors, grads: Tensors, states: list[Any]) -> None:
        step = states[0].step
        if first is not None and (not trees.readable_without_sync(step) or step == 0):
            for state in states:
                kept = getattr(state, first[1])
                kept.copy_(first_rate(first[0], state.step, kept))
        rate = {} if lr is None else {"lr": kernel_lr(lr, step)}
        count, *others = map(list, zip(*states, strict=True))
        lists = slots(states, *names) or [*others, count]
        capturable = devices.is_accelerator(step.device)
        function(params, grads, *lists, foreach=foreach, capturable=capturable, **rate, **settings)

    step_params_ = in_float32_(in_place(kernel, common))
    return from_kernel(init_param, step_param, step_params_, settings.values(), common, maximize=settings["maximize"])


def each_part(optimizer: Optimizer, wrap: Callable[[Optimizer], Optimizer], name: str, **args: Any) -> Optimizer:
    """An optimizer wrapped, or each part of one that differs by path.

    Args:
        name, args: The name and the arguments of the wrapping factory, for the specs of the parts.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"expected an Optimizer, got {optimizer!r}")
    if optimizer.select is None:
        return wrap(optimizer)
    select = optimizer.select
    wrapped: dict[int, tuple[Optimizer, Optimizer]] = {}  # each part is wrapped once; the originals are kept alive

    def at(path: str) -> Optimizer:
        part = select(path)
        if id(part) not in wrapped:
            spec = Spec(name, (("optimizer", part), *args.items()))
            wrapped[id(part)] = part, replace(wrap(part), spec=spec)
        return wrapped[id(part)][1]

    return replace(optimizer, select=at, spec=Spec(""))  # whose factory gives it a spec


def around(
    part: Optimizer, init_param: Callable[..., Any], step_param: Callable[..., Any], step_params_: Callable[..., None]
) -> Optimizer:
    """An optimizer that runs another one, which is no partition, with the same requirements on parameters."""
    lists = None if part.step_params_ is None else step_params_
    one = one_param(step_params_)
    return Optimizer(init_param, step_param, one, lists, part.elementwise, check=part.check, cost=part.cost)
