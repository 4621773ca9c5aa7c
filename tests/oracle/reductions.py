"""Reductions that are no sum, written out over the gradients of all ranks; plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def adaptive_sum(leaves: list[Tensor]) -> Tensor:
    """Of one leaf on all ranks: pairwise, after those above the last power of two have been added to the first ones."""

    def both(a: Tensor, b: Tensor) -> Tensor:
        dot, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
        return (1 - dot / (2 * aa) if aa else 1.0) * a + (1 - dot / (2 * bb) if bb else 1.0) * b

    power = 1
    while power * 2 <= len(leaves):
        power *= 2
    row = [both(leaves[r], leaves[power + r]) if power + r < len(leaves) else leaves[r] for r in range(power)]
    while len(row) > 1:
        row = [both(row[i], row[i + 1]) for i in range(0, len(row), 2)]
    return row[0]


def vote(leaves: list[Tensor], weights: list[float]) -> Tensor:
    return sum((w * leaf.sign() for w, leaf in zip(weights, leaves, strict=True)), torch.zeros_like(leaves[0])).sign()


def differences(grads: list[list[Tensor]], k: int) -> list[Tensor]:
    """EF21 with the k largest, of grads[step][rank] with equal weights: the result of each step.

    Every rank's own k, and no second choice of their sum.
    """
    ranks = len(grads[0])
    believed, outs = [torch.zeros_like(g) for g in grads[0]], []
    for step in grads:
        for r in range(ranks):
            gap = step[r] - believed[r]
            at = gap.abs().topk(k).indices
            believed[r] = believed[r] + torch.zeros_like(gap).scatter(0, at, gap[at])
        outs.append(torch.stack(believed).mean(0))
    return outs
