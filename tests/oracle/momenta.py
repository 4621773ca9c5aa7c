"""Methods that send momenta, written out over the gradients of two ranks with equal weights; plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def deep_compression(
    grads: list[list[Tensor]], shares: list[float], momentum: float, nesterov: bool, clip: float | None
) -> list[Tensor]:
    """The result of each step for grads[step][rank]; shares[step] of the elements are sent."""
    ranks = len(grads[0])
    u, v = ([torch.zeros_like(g) for g in grads[0]] for _ in range(2))
    outs = []
    for step, share in zip(grads, shares, strict=True):
        sent = []
        for r in range(ranks):
            g = step[r] if clip is None else step[r] * min(1.0, clip / step[r].norm().item())
            u[r] = momentum * u[r] + g
            v[r] = v[r] + (g + momentum * u[r] if nesterov else u[r])
            at = v[r].abs().topk(-int(-share * v[r].numel() // 1)).indices
            sent.append(torch.zeros_like(v[r]).scatter(0, at, v[r][at]))
            u[r], v[r] = u[r].index_fill(0, at, 0.0), v[r].index_fill(0, at, 0.0)
        outs.append(torch.stack(sent).mean(0))
    return outs


def one_bit(
    grads: list[list[Tensor]], warmup: int, b1: float, b2: float, eps: float, code: Callable[[Tensor], Tensor]
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(direction, momentum, frozen variance) of each step; `code` is a momentum after encoding and decoding."""
    ranks = len(grads[0])
    m, v, error = (torch.zeros_like(grads[0][0]) for _ in range(3))
    errors, outs = [error] * ranks, []
    for t, step in enumerate(grads, start=1):
        if t <= warmup:
            g = torch.stack(step).mean(0)
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        else:
            residual = [b1 * m + (1 - b1) * step[r] + errors[r] for r in range(ranks)]
            sent = [code(x) for x in residual]
            errors = [x - s for x, s in zip(residual, sent, strict=True)]
            m = torch.stack(sent).mean(0)
        u = m / (1 - b1**t) / ((v / (1 - b2 ** min(t, warmup))).sqrt() + eps)
        outs.append((u, m, v))
    return outs
