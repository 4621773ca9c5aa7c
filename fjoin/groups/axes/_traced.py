"""Collectives in operations that torch.compile traces."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

from ...transforms.axes._order import from_order, to_order


def traced(op: str, x: Tensor, arg: Any, group: dist.ProcessGroup, rank: int, size: int) -> Tensor:
    """A collective of a group, of which this rank is one, in operations that torch.compile traces."""
    if op == "psum":
        return functional.wait_tensor(functional.all_reduce(x, "sum", group))
    if op in ("pmax", "pmin"):
        order = functional.all_reduce(to_order(x, op == "pmax"), op.removeprefix("p"), group)
        return from_order(functional.wait_tensor(order), x.dtype)
    if op == "pbroadcast":
        return functional.wait_tensor(functional.broadcast(x, arg, group))
    if op == "all_gather":
        return functional.wait_tensor(functional.all_gather_tensor(x.unsqueeze(0), 0, group))
    if op == "psum_scatter":
        return functional.wait_tensor(functional.reduce_scatter_tensor(x, "sum", 0, group)).squeeze(0)
    if op == "all_to_all":
        return functional.wait_tensor(functional.all_to_all_single(x, None, None, group))
    if op == "all_to_all_single":
        give, take = arg
        return functional.wait_tensor(functional.all_to_all_single(x, list(take), list(give), group))
    send = dict(arg).get(rank)
    receive = {target: source for source, target in arg}.get(rank)
    flat = x.reshape(-1)
    inputs = [flat.numel() if r == send else 0 for r in range(size)]
    outputs = [flat.numel() if r == receive else 0 for r in range(size)]
    out = functional.all_to_all_single(flat if send is not None else flat[:0], outputs, inputs, group)
    out = functional.wait_tensor(out)
    return out.view(x.shape) if receive is not None else torch.zeros_like(x) + out.sum()


def refuse_traced_vmap(op: str, x: Tensor) -> None:
    """Raise where torch.compile traces a vmap around a collective.

    Dynamo drops the vmap rule of an autograd.Function, and torch's functional collectives have none:
    the result would silently be an unreduced or partly reduced tensor. A tensor that is wrapped twice
    cannot be inspected while tracing, so a derivative of a derivative is refused as well.
    """
    if torch._C._functorch.is_batchedtensor(x) or _transform_level() > 1:
        raise RuntimeError(
            f"{op} inside torch.func.vmap, or inside nested torch.func transforms, inside torch.compile: the compiler "
            f"would drop the batching rule and return wrong sums. Call {op} outside the vmap (it takes batched tensors "
            f"as they are), or do not compile this part."
        )


def _transform_level() -> int:
    """How many torch.func transforms are active, in calls that Dynamo traces."""
    if not torch._C._are_functorch_transforms_active():
        return 0
    return retrieve_current_functorch_interpreter().level()
