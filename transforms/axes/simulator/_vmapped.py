"""N ranks as one level of torch.func.vmap per axis: hundreds of ranks at the cost of a few."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from ..._axis_env import Axis, bind_axes
from ..._errors import NotVmappable


class VmappedAxis(Axis):
    """An axis that is a level of vmap; the token holds the ranks, batched at that level only."""

    def __init__(self, size: int, token: Tensor) -> None:
        self.size, self.token = size, token

    def index(self) -> Tensor:
        assert self.token is not None
        return self.token

    def run(self, op: str, x: Tensor, arg: Any) -> Tensor:
        raise RuntimeError(
            f"{op} was reached below the vmapped axis that it runs over. torch.compile drops the rule that "
            f"would have caught it: simulate eagerly, or with torch.fx's make_fx."
        )


def vmapped(function: Callable[..., Any], shape: dict[str, int], args: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Run `function` on all ranks at once; values that are no tensors must be equal on all ranks.

    Raises:
        ValueError: arguments that differ in more than the values of tensors.
        NotVmappable: torch.func.vmap cannot run the function, since it reads a value, say.
    """
    sizes = tuple(shape.values())
    n = len(args)
    flat: list[Any] = [optree.tree_flatten(a) for a in args]  # type: ignore[arg-type]
    structure = flat[0][1]
    for rank, (_, other) in enumerate(flat):
        if other != structure:
            raise ValueError(
                f"the vmap engine needs arguments of one structure: rank 0 has {structure}, rank {rank} has {other}; "
                f"use engine='lockstep'"
            )
    columns = list(zip(*(leaves for leaves, _ in flat), strict=True))
    tensors: list[Tensor] = []
    constants: dict[int, Any] = {}
    for i, column in enumerate(columns):
        if all(isinstance(v, (Tensor, float)) for v in column):
            values = [torch.as_tensor(v) for v in column]
            if any(v.shape != values[0].shape or v.dtype != values[0].dtype for v in values):
                raise ValueError(
                    f"the vmap engine needs arguments of one shape and dtype on all ranks, argument leaf {i} has "
                    f"{sorted({(str(v.dtype), tuple(v.shape)) for v in values})}; use engine='lockstep'"
                )
            tensors.append(torch.stack(values).reshape(*sizes, *values[0].shape))
        elif all(v is column[0] or v == column[0] for v in column):
            constants[i] = column[0]
        else:
            raise ValueError(
                f"the vmap engine needs host values that are equal on all ranks, argument leaf {i} has {column!r}; "
                f"pass tensors or use engine='lockstep'"
            )
    out_structure: Any = None
    out_constants: dict[int, Any] = {}

    def body(*given: Tensor) -> tuple[Tensor, ...]:
        nonlocal out_structure
        rest = iter(given)
        leaves = [constants[i] if i in constants else next(rest) for i in range(len(columns))]
        out = function(*optree.tree_unflatten(structure, leaves))
        out_leaves, out_structure = optree.tree_flatten(out)
        out_constants.update({i: v for i, v in enumerate(out_leaves) if not isinstance(v, Tensor)})
        return tuple(v for v in out_leaves if isinstance(v, Tensor))

    def nest(run: Callable[..., Any], name: str, size: int) -> Callable[..., Any]:
        def level(token: Tensor, *given: Tensor) -> Any:
            axis: Axis = VmappedAxis(size, token)
            with bind_axes({name: axis}):
                return run(*given)

        return lambda *given: torch.func.vmap(level, randomness="different")(torch.arange(size), *given)

    run: Callable[..., Any] = body
    for name, size in reversed(list(shape.items())):
        run = nest(run, name, size)
    try:
        out_tensors = [t.reshape(n, *t.shape[len(sizes) :]).unbind(0) for t in run(*tensors)]
    except RuntimeError as error:
        if not str(error).startswith("vmap: "):
            raise
        raise NotVmappable(
            "the function reads a value of a tensor, branches on one, or writes one into a tensor that all ranks have in common; use "
            "simulate(..., engine='lockstep')"
        ) from error
    results = []
    for rank in range(n):
        rest = iter(out_tensors)
        count = len(out_tensors) + len(out_constants)
        leaves = [out_constants[i] if i in out_constants else next(rest)[rank] for i in range(count)]
        results.append(optree.tree_unflatten(out_structure, leaves))
    return results
