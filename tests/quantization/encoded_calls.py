"""One call of each of torch's collectives with encoded floats, and records of its messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms._quantization.quantization import DQuantType

import fjoin
from fjoin import transforms as tx

# Each codec, and its largest error relative to the largest value encoded with it.
CODECS: dict[str, tuple[Any, float]] = {
    "fp16": ("fp16", 2.0**-11), "torch's fp16": (DQuantType.FP16, 2.0**-11), "bfp16": ("BFP16", 2.0**-8),
    "torch's bfp16": (DQuantType.BFP16, 2.0**-8), "fp8": (tx.fp8(block=8), 1 / 15), "int8": (tx.int8(), 1 / 253),
    "int4": (tx.int4(block=4), 1 / 13), "float32": (tx.float32(), 1e-7),
}  # fmt: skip
SUM = dist.ReduceOp.SUM
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SHAPES: list[tuple[int, ...]] = [(), (7,), (3, 5), (2, 1, 4), (0, 3)]


def value(shape: tuple[int, ...], *seed: int) -> Tensor:
    """The values that a rank sends, which every rank can compute."""
    g = torch.Generator().manual_seed(sum((s + 1) * 10**i for i, s in enumerate(seed)))
    return torch.randn(shape, generator=g, dtype=torch.float64).clamp(-2, 2)


def place(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor to be filled, every second element of another one."""
    return torch.full((*shape, 2), 9.0, dtype=dtype)[..., 0]


def near(got: Tensor, want: Tensor, room: float) -> None:
    rounding = torch.finfo(got.dtype).eps + 1e-6
    assert got.shape == want.shape
    assert got.numel() == 0 or (got.double() - want).abs().max() <= 2 * room + want.abs().max() * rounding, (got, want)


def calls(codec: Any, n: int, me: int) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...], list[Tensor]]]:
    """One call of each collective: the function, its arguments, the tensors that it fills."""

    def quantized(name: str) -> Callable[..., Any]:
        return fjoin.auto_quantize(getattr(dist, name), codec)

    x, all_of, uneven = value((50,), me).float(), value((n * 50,), me).float(), [50 * me + r for r in range(n)]
    fresh = [[place((50,)) for _ in range(n)] for _ in range(2)]
    b, c, split = (place((size,)) for size in (50 * n, 50 * n, sum(50 * r + me for r in range(n))))
    c.copy_(all_of)
    return {
        "all_gather": (quantized("all_gather"), (fresh[0], x), fresh[0]),
        "all_to_all": (quantized("all_to_all"), (fresh[1], list(all_of.split(50))), fresh[1]),
        "all_to_all_single": (quantized("all_to_all_single"), (b, all_of), [b]),
        "all_reduce": (quantized("all_reduce"), (c,), [c]),
        "splits": (quantized("all_to_all_single"), (split, torch.ones(sum(uneven)), [50 * r + me for r in range(n)], uneven), [split]),
    }  # fmt: skip
