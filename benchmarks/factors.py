"""The cost of PowerSGD's thin factors on one core: memory layout, orthonormalization, and a whole step.

OMP_NUM_THREADS=1 python benchmarks/factors.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import torch
from timing import seconds
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _orthogonalize_gram_schmidt

from fjoin import transforms as tx
from fjoin.transforms.axes import bind_axes

ROWS, COLUMNS, RANK, MATRICES = 640, 160, 4, 4


def microseconds(run: Callable[[], Any]) -> float:
    return 1e6 * seconds(run, 15, 50)


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
    """The largest deviation of rows from orthonormality."""
    return (u.double() @ u.double().mT - torch.eye(RANK, dtype=torch.float64)).abs().max().item()


def all_matrices() -> None:
    """Time PowerSGD's matrix products with error feedback in a step of the 10M transformer, all in place."""
    grads = [torch.randn(p.shape) for p in models.model("10m").parameters() if p.dim() == 2 and p.numel() > 10_000]
    errors, means = [torch.randn_like(g) for g in grads], [torch.empty_like(g) for g in grads]
    left, right = [torch.randn(RANK, g.shape[0]) for g in grads], [torch.randn(RANK, g.shape[1]) for g in grads]
    other = torch.randn(2 * 10**7)  # stands for the other data that a step moves through the caches

    def to_p() -> None:
        for e, g, q in zip(errors, grads, right, strict=True):
            torch.mm(q, e.add_(g).T)

    def to_q() -> None:
        for e, p in zip(errors, left, strict=True):
            e.addmm_(p.T, torch.mm(p, e), alpha=-1.0)

    def to_means() -> None:
        for out, p, q in zip(means, left, right, strict=True):
            torch.mm(p.T, q, out=out)

    figures = [
        f"{run.__name__} {1e3 * seconds(run, 15, between=lambda: other.add_(1.0)):.1f}"
        for run in (to_p, to_q, to_means)
    ]
    print(f"all {len(grads)} matrices of the 10M transformer, in ms: {', '.join(figures)}")


class Echo:
    """An axis of two ranks whose messages take no time."""

    size, token = 2, None

    def run(self, op: str, x: Tensor, arg: Any) -> Tensor:
        return x.clone()


def whole_hook() -> None:
    """Time a whole update of our hook in one bucket."""
    hook = tx.error_feedback(tx.power_sgd("data", RANK))
    params = {path: p.detach() for path, p in models.model("10m").named_parameters()}
    source, grads = ({path: torch.randn_like(p) for path, p in params.items()} for _ in range(2))
    state = hook.init(params)

    def refill() -> None:
        torch._foreach_copy_(list(grads.values()), list(source.values()))

    def run() -> None:
        nonlocal state
        with torch.no_grad(), bind_axes({"data": Echo()}):
            _, state = hook.update(grads, state, params, weight=1.0, donated=True)

    print(f"error_feedback(power_sgd), in ms: {1e3 * seconds(run, 15, between=refill):.1f}")


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
    all_matrices()
    whole_hook()


if __name__ == "__main__":
    main()
