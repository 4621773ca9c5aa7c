"""Every collective with the meaning it must have, in plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fjoin import transforms as tx

SIZES = [1, 2, 3, 5]
DTYPES = [torch.float32, torch.float64, torch.int64, torch.int32, torch.bfloat16, torch.float16, torch.uint8]


def inputs(n: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 9, shape, generator=g).to(dtype) for _ in range(n)]


def ring(n: int) -> list[tuple[int, int]]:
    return [(r, (r + 1) % n) for r in range(n)]


def rows(r: int, s: int, n: int) -> int:
    """How many go from rank r to rank s: in all as many from each, but not as many there as back."""
    return (r - s) % n + 1


def ragged(x: Tensor, n: int) -> Tensor:
    me = int(tx.axis_index("data"))
    give, take = [rows(me, s, n) for s in range(n)], [rows(s, me, n) for s in range(n)]
    return tx.all_to_all_single(x, "data", input_split_sizes=give, output_split_sizes=take)


# For each collective: its call, the input's shape for n ranks, and rank r's result in plain torch.
OPS: dict[str, tuple[Any, Any, Any]] = {
    "psum": (lambda x, n: tx.psum(x, "data"), lambda n: (2, 3), lambda xs, r: sum(xs)),
    "pmax": (lambda x, n: tx.pmax(x, "data"), lambda n: (2, 3), lambda xs, r: torch.stack(xs).amax(0)),
    "pmin": (lambda x, n: tx.pmin(x, "data"), lambda n: (2, 3), lambda xs, r: torch.stack(xs).amin(0)),
    "pbroadcast": (lambda x, n: tx.pbroadcast(x, "data", n - 1), lambda n: (2, 3), lambda xs, r: xs[-1]),
    "all_gather": (lambda x, n: tx.all_gather(x, "data"), lambda n: (2, 3), lambda xs, r: torch.stack(xs)),
    "all_gather dim": (lambda x, n: tx.all_gather(x, "data", dim=1), lambda n: (2, 3), lambda xs, r: torch.stack(xs, 1)),
    "all_gather tiled": (lambda x, n: tx.all_gather(x, "data", dim=1, tiled=True), lambda n: (2, 3), lambda xs, r: torch.cat(xs, 1)),
    "psum_scatter": (lambda x, n: tx.psum_scatter(x, "data"), lambda n: (n, 3), lambda xs, r: sum(xs)[r]),
    "psum_scatter dim": (lambda x, n: tx.psum_scatter(x, "data", dim=1), lambda n: (3, n), lambda xs, r: sum(xs)[:, r]),
    "psum_scatter tiled": (
        lambda x, n: tx.psum_scatter(x, "data", dim=1, tiled=True), lambda n: (3, 2 * n),
        lambda xs, r: sum(xs)[:, 2 * r : 2 * r + 2],
    ),
    "all_to_all": (lambda x, n: tx.all_to_all(x, "data"), lambda n: (n, 3), lambda xs, r: torch.stack([x[r] for x in xs])),
    "all_to_all dims": (lambda x, n: tx.all_to_all(x, "data", 1, 0), lambda n: (3, n), lambda xs, r: torch.stack([x[:, r] for x in xs])),
    "all_to_all tiled": (
        lambda x, n: tx.all_to_all(x, "data", 1, 0, tiled=True), lambda n: (3, 2 * n),
        lambda xs, r: torch.cat([x[:, 2 * r : 2 * r + 2] for x in xs], 0),
    ),
    "all_to_all_single": (
        lambda x, n: tx.all_to_all_single(x, "data"), lambda n: (2 * n, 3),
        lambda xs, r: torch.cat([x[2 * r : 2 * r + 2] for x in xs]),
    ),
    "all_to_all_single split": (
        ragged, lambda n: (n * (n + 1) // 2, 3),
        lambda xs, r: torch.cat([x.split([rows(s, t, len(xs)) for t in range(len(xs))])[r] for s, x in enumerate(xs)]),
    ),
    "ppermute": (lambda x, n: tx.ppermute(x, "data", ring(n)), lambda n: (2, 3), lambda xs, r: xs[r - 1]),
    "ppermute partial": (lambda x, n: tx.ppermute(x, "data", ring(n)[:-1]), lambda n: (2, 3), lambda xs, r: xs[r - 1] if r else xs[0] * 0),
}  # fmt: skip
DIFFERENTIABLE = [op for op in OPS if not op.startswith(("pmax", "pmin"))]
