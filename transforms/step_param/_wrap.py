"""Common functions of optimizers that run another one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..spec._spec import Spec
from ._inplace import one_param
from ._optimizer import Optimizer


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
            wrapped[id(part)] = part, wrap(part).with_spec(spec)
        return wrapped[id(part)][1]

    return replace(optimizer, select=at, spec=Spec(""))  # whose factory gives it a spec


def around(
    part: Optimizer, init_param: Callable[..., Any], step_param: Callable[..., Any], step_params_: Callable[..., None]
) -> Optimizer:
    """An optimizer that runs another one, which is no partition, with the same requirements on parameters."""
    return Optimizer(
        init_param,
        step_param,
        one_param(step_params_),
        step_params_,
        part.elementwise,
        check=part.check,
        cost=part.cost,
    )
