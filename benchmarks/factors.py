"""What PowerSGD's thin factors cost on one core: how they lie in memory, and how they are made orthonormal.

OMP_NUM_THREADS=1 python benchmarks/factors.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _orthogonalize_gram_schmidt

ROWS, COLUMNS, RANK, MATRICES = 640, 160, 4, 4


def microseconds(run: Callable[[], Any]) -> float:
    """The median of several blocks."""
    blocks = []
    for _ in range(15):
        start = time.perf_counter()
        for _ in range(50):
            run()
        blocks.append((time.perf_counter() - start) / 50)
    return 1e6 * statistics.median(blocks)


def gram_schmidt(p: Tensor) -> Tensor:
    out = p.mT.contiguous().clone()
    _orthogonalize_gram_schmidt(out)
    return out.mT


def householder(p: Tensor) -> Tensor:
    return torch.linalg.qr(p.mT)[0].mT


def cholesky(p: Tensor) -> Tensor:
    wide = p.double()
    return torch.linalg.solve_triangular(torch.linalg.cholesky(wide @ wide.mT), wide, upper=False).to(p.dtype)


def off(u: Tensor) -> float:
    """How far rows are from orthonormal."""
    return (u.double() @ u.double().mT - torch.eye(RANK, dtype=torch.float64)).abs().max().item()


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    m, q = torch.randn(ROWS, COLUMNS), torch.randn(RANK, COLUMNS)
    tall = q.T.contiguous()
    print(f"{ROWS} x {COLUMNS} times a factor of rank {RANK}, in us: the rank first {microseconds(lambda: q @ m.T):.0f}, "
          f"last, as torch's hook has it, {microseconds(lambda: m @ tall):.0f}")  # fmt: skip
    p = torch.randn(MATRICES, RANK, ROWS)
    near = p[:, :1] + 1e-5 * torch.randn(MATRICES, RANK, ROWS)  # rows that are nearly dependent
    print("| orthonormal by | us | off by, where rows are nearly dependent |\n|---|---|---|")
    for name, make in (
        ("Householder's QR", householder),
        ("Gram-Schmidt, torch's", gram_schmidt),
        ("Cholesky in float64", cholesky),
    ):
        print(f"| {name} | {microseconds(lambda: make(p)):.0f} | {off(make(near)):.1e} |")  # noqa: B023


if __name__ == "__main__":
    main()
