"""Faults of torch's auto_quantize that ours does not have. Where one of these fails, torch has fixed it."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms._quantization import quantization
from torch.distributed.algorithms._quantization.quantization import DQuantType

import fjoin
from tests.helpers import raises_text

FP16, BFP16 = DQuantType.FP16, DQuantType.BFP16
THEIRS, OURS = quantization.auto_quantize, fjoin.auto_quantize
BOTH = (THEIRS, OURS)


def gathered(
    quantize: Any, qtype: Any, x: Tensor, *args: Any, loss: float | None = None, dtype: Any = None, **kwargs: Any
) -> Any:
    """The contents of the list after all_gather, and of the tensors that were in it, on two ranks."""
    mine = [torch.zeros_like(x, dtype=dtype) for _ in range(2)]
    listed = list(mine)
    quantize(dist.all_gather, qtype, loss)(listed, x, *args, **kwargs)
    return [t.sum().item() for t in listed], [t.sum().item() for t in mine], listed[1].dtype


def test_a_type_still_cannot_be_printed() -> None:
    """FP16 is a tuple, by a comma too many."""
    assert FP16.value == ("fp16",), "torch has mended it"
    raises_text(TypeError, lambda: str(FP16), "returned non-string")


def lists() -> Any:
    x = torch.full((2, 2), dist.get_rank() + 1.0)
    raises_text(RuntimeError, lambda: gathered(THEIRS, BFP16, x, dtype=torch.float64), "expected scalar type Float")
    kinds = ((FP16, torch.float64), (BFP16, torch.float32))
    return [[gathered(quantize, qtype, x, dtype=dtype) for quantize in BOTH] for qtype, dtype in kinds]


def test_torch_still_does_not_fill_tensors_in_a_list(pool: Any) -> None:
    """The list gets other tensors, of float32 for any given dtype; bfloat16 takes only float32."""
    for rank in pool.run(2, lists):
        for (theirs, ours), dtype in zip(rank, (torch.float64, torch.float32), strict=True):
            assert theirs == ([4.0, 8.0], [0.0, 0.0], torch.float32), "torch fills the caller's tensors now"
            assert ours == ([4.0, 8.0], [4.0, 8.0], dtype)


def started() -> Any:
    out, x = [torch.zeros(2, 2) for _ in range(2)], torch.ones(2, 2)
    reported = raises_text(RuntimeError, lambda: THEIRS(dist.all_gather, FP16)(out, x, async_op=True))
    ignored = THEIRS(dist.all_gather, FP16)(list(out), x, None, True)  # by position
    return reported, ignored, raises_text(ValueError, lambda: OURS(dist.all_gather, FP16)(out, x, None, True))


def test_a_handle_is_still_refused_by_name_and_ignored_by_position(pool: Any) -> None:
    for reported, ignored, ours in pool.run(2, started):
        assert "async_op=True mode is not supported" in reported and ignored is None, "torch returns a handle now"
        assert "async_op=True" in ours


def alone() -> Any:
    groups = [dist.new_group([rank]) for rank in range(2)]
    group, x = groups[dist.get_rank()], torch.full((1, 1), dist.get_rank() + 1.0)
    two, one = [torch.zeros(1, 1) for _ in range(2)], [torch.zeros(1, 1)]
    THEIRS(dist.all_gather, FP16)(two, x, group)
    OURS(dist.all_gather, FP16)(one, x, group)
    reported = raises_text(ValueError, lambda: OURS(dist.all_gather, FP16)(two, x, group))
    return [t.item() for t in two], [t.item() for t in one], reported


def test_a_group_by_position_is_still_ignored(pool: Any) -> None:
    """Each rank passes its own group of one, and gets the values of all ranks."""
    for rank, (theirs, ours, reported) in enumerate(pool.run(2, alone)):
        assert theirs == [1.0, 2.0], "torch heeds the group now"
        assert ours == [rank + 1.0] and "2 come in, on 1 ranks" in reported


def split() -> Any:
    rank = dist.get_rank()
    given, taken = ([1, 3], [1, 3]) if rank == 0 else ([3, 1], [3, 1])
    x = torch.arange(4.0) + 10 * rank
    outs = []
    for f in (dist.all_to_all_single, *(quantize(dist.all_to_all_single, FP16) for quantize in BOTH)):
        outs.append(torch.zeros(4))
        f(outs[-1], x, output_split_sizes=taken, input_split_sizes=given)
    THEIRS(dist.all_gather, FP16)([torch.zeros(1) for _ in range(2)], torch.ones(1), nonsense=3)
    raises_text(TypeError, lambda: OURS(dist.all_to_all_single, FP16)(outs[0], x, nonsense=3), "'nonsense'")
    return [out.tolist() for out in outs]


def test_split_sizes_are_still_ignored(pool: Any) -> None:
    """Torch reads only `out_splits` and `in_splits`, which no collective has, and ignores other names silently."""
    (plain, theirs, ours), (other, *_) = pool.run(2, split)
    assert plain == ours == [0.0, 10.0, 11.0, 12.0] and other == [1.0, 2.0, 3.0, 13.0]
    assert theirs == [0.0, 1.0, 10.0, 11.0], "torch knows the split sizes by their names now"


def divided() -> Any:
    x, out = torch.ones(2, 2), {}
    for qtype in (FP16, BFP16):
        for quantize in BOTH:
            exchanged = torch.zeros(2, 2)
            quantize(dist.all_to_all_single, qtype, 2.0)(exchanged, x)
            out[qtype.name, quantize is OURS] = gathered(quantize, qtype, x, loss=2.0)[0], exchanged.sum().item()
    return out


def test_quant_loss_is_still_ignored_for_lists_and_for_bfloat16(pool: Any) -> None:
    """Four ones divided by two."""
    for out in pool.run(2, divided):
        assert out["FP16", False] == ([4.0, 4.0], 2.0), "torch divides lists now"
        assert out["BFP16", False] == ([4.0, 4.0], 4.0), "torch divides in bfloat16 now"
        assert out["FP16", True] == out["BFP16", True] == ([2.0, 2.0], 2.0)


def shaped() -> Any:
    out = []
    for shape in ((), (3,), (2, 2, 2)):
        x = torch.full(shape, 0.5)
        reported = raises_text(RuntimeError, lambda: gathered(THEIRS, BFP16, x))  # noqa: B023
        out.append((reported, gathered(OURS, BFP16, x)[1] == [0.5 * x.numel()] * 2))
    return out


def test_bfloat16_still_has_two_dimensions(pool: Any) -> None:
    for rank in pool.run(2, shaped):
        assert all("must have 2 dimension(s)" in reported and ours for reported, ours in rank), (
            "torch takes any shape now"
        )


def large() -> Any:
    return [
        [gathered(quantize, FP16, torch.full((1, 1), value))[0][0] for quantize in BOTH]
        for value in (1e5, -1e5, math.inf)
    ]


def test_float16_is_still_cut_off_at_its_largest(pool: Any) -> None:
    """Infinity too, so an overflow stays undetected."""
    for at, minus, inf in pool.run(2, large):
        assert at[0] == 65504.0 and minus[0] == -65504.0 and inf[0] == 65504.0, "torch keeps what is large now"
        assert abs(at[1] - 1e5) < 50 and abs(minus[1] + 1e5) < 50 and not math.isfinite(inf[1])


def counts() -> Any:
    x = torch.tensor([[2049]])
    theirs = gathered(THEIRS, FP16, x)[0]
    return theirs, raises_text(TypeError, lambda: gathered(OURS, FP16, x))


def test_whole_numbers_are_still_rounded(pool: Any) -> None:
    for theirs, reported in pool.run(2, counts):
        assert theirs == [2048.0, 2048.0], "torch refuses whole numbers now"
        assert "torch.int64" in reported


def sums() -> Any:
    x = torch.full((4,), dist.get_rank() + 1.0)
    reported = raises_text(RuntimeError, lambda: THEIRS(dist.all_reduce, FP16)(x))
    OURS(dist.all_reduce, FP16)(x)
    return reported, x.tolist()


def test_torch_still_does_not_support_sums(pool: Any) -> None:
    for reported, ours in pool.run(2, sums):
        assert "not supported" in reported and ours == [3.0] * 4
