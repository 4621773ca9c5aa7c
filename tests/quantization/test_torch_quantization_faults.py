"""Faults of torch's auto_quantize that ours does not have, on two ranks. Where a row fails, torch has fixed it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._quantization import quantization
from torch.distributed.algorithms._quantization.quantization import DQuantType

import fjoin
from tests.helpers import raises_text

FP16, BFP16 = DQuantType.FP16, DQuantType.BFP16
THEIRS, OURS = quantization.auto_quantize, fjoin.auto_quantize


def test_a_type_still_cannot_be_printed() -> None:
    """FP16 is a tuple, by a comma too many."""
    assert FP16.value == ("fp16",), "torch has mended it"
    raises_text(TypeError, lambda: str(FP16), "returned non-string")


def gathered(qtype: Any, shape: tuple[int, ...], value: Any, dtype: Any = None, loss: Any = None, **given: Any) -> Any:
    """A call of all_gather: the sums of what is in the list afterwards, and of the tensors that were in it."""

    def run(quantize: Any, rank: int) -> Any:
        x = torch.full(shape, value(rank) if callable(value) else value)
        mine = [torch.zeros_like(x, dtype=dtype) for _ in range(2)]
        listed = list(mine)
        quantize(dist.all_gather, qtype, loss)(listed, x, **given)
        return [t.sum().item() for t in listed], [t.sum().item() for t in mine], listed[1].dtype

    return run


def by_position(quantize: Any, rank: int) -> Any:
    return quantize(dist.all_gather, FP16)([torch.zeros(1, 1) for _ in range(2)], torch.ones(1, 1), None, True)


def group_of_one(quantize: Any, rank: int) -> Any:
    """Each rank passes its own group."""
    group = [dist.new_group([r]) for r in range(2)][rank]
    out = [torch.zeros(1, 1) for _ in range(2 if quantize is THEIRS else 1)]
    quantize(dist.all_gather, FP16)(out, torch.full((1, 1), rank + 1.0), group)
    return [t.item() for t in out]


def split(quantize: Any, rank: int, **other: Any) -> Any:
    sizes, x, out = [1, 3] if rank == 0 else [3, 1], torch.arange(4.0) + 10 * rank, torch.zeros(4)
    quantize(dist.all_to_all_single, FP16)(out, x, output_split_sizes=sizes, input_split_sizes=sizes, **other)
    return out.tolist() if rank == 0 else None


def exchanged(qtype: Any) -> Any:
    def run(quantize: Any, rank: int) -> Any:
        out = torch.zeros(2, 2)
        quantize(dist.all_to_all_single, qtype, 2.0)(out, torch.ones(2, 2))
        return out.sum().item()

    return run


def summed(quantize: Any, rank: int) -> Any:
    x = torch.full((4,), rank + 1.0)
    quantize(dist.all_reduce, FP16)(x)
    return x.tolist()


def rank_1(rank: int) -> float:
    return rank + 1.0


F32, F64 = torch.float32, torch.float64
TWO_DIMS = "must have 2 dimension(s)"
# The call, what torch does, and what we do: a result, or words of an error.
ROWS: dict[str, tuple[Callable[[Any, int], Any], Any, Any]] = {
    "tensors in a list are not filled": (gathered(FP16, (2, 2), rank_1, F64), ([4.0, 8.0], [0.0, 0.0], F32),
    ([4.0, 8.0], [4.0, 8.0], F64)),
    "nor in bfloat16": (gathered(BFP16, (2, 2), rank_1), ([4.0, 8.0], [0.0, 0.0], F32), ([4.0, 8.0], [4.0, 8.0], F32)),
    "bfloat16 takes only float32": (gathered(BFP16, (2, 2), rank_1, F64), "expected scalar type Float", ([4.0, 8.0], [4.0, 8.0], F64)),
    "a handle by name": (gathered(FP16, (2, 2), 1.0, async_op=True), "async_op=True mode is not supported", "async_op=True"),
    "a handle by position is ignored": (by_position, None, "async_op=True"),
    "a group by position is ignored": (group_of_one, [1.0, 2.0], lambda rank: [rank + 1.0]),
    "split sizes are ignored": (split, lambda rank: None if rank else [0.0, 1.0, 10.0, 11.0], lambda rank: None if rank else [0.0, 10.0,
        11.0, 12.0]),
    "names are ignored": (lambda q, rank: split(q, rank, nonsense=3), lambda rank: None if rank else [0.0, 1.0, 10.0, 11.0], "'nonsense'"),
    "quant_loss of lists": (gathered(FP16, (2, 2), 1.0, loss=2.0), ([4.0, 4.0], [0.0, 0.0], F32), ([2.0, 2.0], [2.0, 2.0], F32)),
    "quant_loss of lists, bfloat16": (gathered(BFP16, (2, 2), 1.0, loss=2.0), ([4.0, 4.0], [0.0, 0.0], F32),
    ([2.0, 2.0], [2.0, 2.0], F32)),
    "quant_loss of tensors": (exchanged(FP16), 2.0, 2.0), "quant_loss of tensors, bfloat16": (exchanged(BFP16), 4.0, 2.0),
    "bfloat16 of one number": (gathered(BFP16, (), 0.5), TWO_DIMS, ([0.5, 0.5], [0.5, 0.5], F32)),
    "bfloat16 of three dimensions": (gathered(BFP16, (2, 2, 2), 0.5), TWO_DIMS, ([4.0, 4.0], [4.0, 4.0], F32)),
    "what is large": (gathered(FP16, (1, 1), -1e5), ([-65504.0] * 2, [0.0, 0.0], F32), ([-1e5] * 2, [-1e5] * 2, F32)),
    "infinity": (gathered(FP16, (1, 1), math.inf), ([65504.0] * 2, [0.0, 0.0], F32), ([math.nan] * 2, [math.nan] * 2, F32)),
    "whole numbers": (gathered(FP16, (1, 1), 2049), ([2048.0, 2048.0], [0, 0], F32), "torch.int64"),
    "sums": (summed, "not supported", [3.0] * 4),
}  # fmt: skip


def both(name: str) -> list[Any]:
    found: list[Any] = []
    for quantize in (THEIRS, OURS):
        try:
            found.append(ROWS[name][0](quantize, dist.get_rank()))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def same(got: Any, want: Any) -> bool:
    if isinstance(want, str):
        return want in got
    if isinstance(want, float):
        return got == pytest.approx(want, rel=5e-4) or (not math.isfinite(got) and not math.isfinite(want))
    return all(map(same, got, want)) and len(got) == len(want) if isinstance(want, (list, tuple)) else got == want


@pytest.mark.parametrize("name", ROWS)
def test_faults(pool: Any, name: str) -> None:
    for rank, found in enumerate(pool.run(2, both, name)):
        for who, got, want in zip(("torch", "fjoin"), found, ROWS[name][1:], strict=True):
            assert same(got, want(rank) if callable(want) else want), (who, got)
