"""EF21, deep gradient compression and 1-bit Adam, written out over the gradients of all ranks; plain torch.

Each takes `grads[step][rank]` and `weights[step][rank]`, and gives the result of each step. A code is a function of a message
to what the ranks decode.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Code = Callable[[Tensor], Tensor]
Steps = list[list[Tensor]]
Weights = list[list[float]]


def largest(k: float) -> Code:
    """The largest elements, `k` of all."""

    def code(x: Tensor) -> Tensor:
        at = x.abs().topk(math.ceil(k * x.numel())).indices
        return torch.zeros_like(x).scatter(0, at, x[at])

    return code


def signs(x: Tensor) -> Tensor:
    """The signs, times the mean absolute value."""
    return x.abs().mean() * (1.0 - 2.0 * (x < 0))


def part(grad: Tensor, weight: float, of: list[float]) -> Tensor:
    """The summand of one rank in the weighted mean."""
    return grad * (weight / sum(of)) if weight else torch.zeros_like(grad)


def differences(grads: Steps, weights: Weights, code: Code) -> list[Tensor]:
    """EF21."""
    believed, outs = [torch.zeros_like(g) for g in grads[0]], []
    for step, of in zip(grads, weights, strict=True):
        for r, w in enumerate(of):
            if any(of):
                believed[r] = believed[r] + code(part(step[r], w, of) - believed[r])
        outs.append(torch.stack(believed).sum(0) * any(of))
    return outs


def deep_compression(grads: Steps, weights: Weights, code: Code, momentum: float) -> list[Tensor]:
    """Deep gradient compression. The momentum of a rank is that of its summand in the mean."""
    u, v = ([torch.zeros_like(g) for g in grads[0]] for _ in range(2))
    outs = []
    for step, of in zip(grads, weights, strict=True):
        sent = [torch.zeros_like(g) for g in grads[0]]
        for r, w in enumerate(of):
            if any(of):
                u[r] = momentum * u[r] + part(step[r], w, of)
                sent[r] = code(v[r] + u[r])
                v[r] = v[r] + u[r] - sent[r]
                if len(of) > 1:  # one rank has no code
                    u[r] = u[r] * (sent[r] == 0)
        outs.append(torch.stack(sent).sum(0))
    return outs


def one_bit(
    grads: Steps, weights: Weights, code: Code, warmup: int, b1: float, b2: float, eps: float = 1e-8
) -> list[Tensor]:
    """1-bit Adam. A step without any input counts in the warm-up alone."""
    ranks = len(grads[0])
    m, v = (torch.zeros_like(grads[0][0]) for _ in range(2))
    errors, outs, in_m, in_v = [m] * ranks, [], 0, 0
    for number, (step, of) in enumerate(zip(grads, weights, strict=True)):
        if not any(of):
            outs.append(torch.zeros_like(m))
            continue
        if number < warmup:
            g = torch.stack([part(step[r], of[r], of) for r in range(ranks)]).sum(0)
            m, v, in_v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g, in_v + 1
        else:
            given = [part(b1 * m + (1 - b1) * step[r], of[r], of) + errors[r] for r in range(ranks)]
            sent = [code(x) for x in given]
            errors = [x - s for x, s in zip(given, sent, strict=True)]
            m = torch.stack(sent).sum(0)
        in_m += 1
        outs.append(m / (1 - b1**in_m) / ((v / (1 - b2**in_v)).sqrt() + eps) * (v > 0))
    return outs
