"""What the backend "fjoin" refuses as gloo does, and does not convert."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.helpers import raises_text


def converted() -> None:
    fjoin, gloo = dist.new_group(backend="fjoin"), dist.new_group(backend="gloo")
    halves, long = torch.tensor([1.5, 2.5]), torch.int64
    whole = torch.zeros(4, dtype=long)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    calls: dict[str, Any] = {
        "all_gather_into_tensor": lambda g: gather(whole, halves, group=g),
        "reduce_scatter_tensor": lambda g: scatter(whole[:1], halves, group=g),
        "reduce": lambda g: dist.reduce(torch.tensor([2, 3]), 0, dist.ReduceOp.AVG, group=g),
        "all_reduce": lambda g: dist.all_reduce(torch.tensor([2, 3]), dist.ReduceOp.AVG, group=g),
        "bits of floats": lambda g: dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND, group=g),
    }
    for call in calls.values():
        for group in gloo, fjoin:
            raises_text(RuntimeError, lambda call=call, group=group: call(group))
    raises_text(
        RuntimeError, lambda: dist.all_reduce(torch.tensor([2, 3]), dist.ReduceOp.AVG, group=fjoin), "AVG", "int64"
    )
    raises_text(
        ValueError, lambda: dist.all_reduce(torch.ones(2), dist._make_nccl_premul_sum(2.0), group=fjoin), "PREMUL_SUM"
    )
    for group in gloo, fjoin:  # one place for all elements
        one = torch.ones(1)
        dist.all_reduce(one.expand(4), group=group)
        rows = torch.arange(3.0)
        dist.all_reduce(rows.expand(2, 3), group=group)
        if group is fjoin:  # not where its places would differ
            if dist.get_rank():
                dist.all_reduce(torch.arange(4.0), group=fjoin)
            else:
                call = lambda: dist.all_reduce(torch.ones(1).expand(4), group=fjoin)  # noqa: E731
                raises_text(RuntimeError, call, "single memory location")
        assert one.tolist() == [2.0] and rows.tolist() == [0.0, 2.0, 4.0], (one, rows)


def test_dtypes_are_not_converted_and_expanded_tensors_are_served(pool: Any) -> None:
    pool.run(2, converted)
