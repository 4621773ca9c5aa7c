"""A user's transform that changes the weight of the one inside, and the reductions to put it around."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fjoin import transforms as tx


class AroundState(NamedTuple):
    inner: Any


@tx.factory
def with_weights(change: Callable[[Any], Any], hook: tx.Transform) -> tx.Transform:
    """The hook, whose ranks count by `change(weight)`, written as docs/your-own-transform.md teaches."""

    def init(params: Any) -> AroundState:
        return AroundState(hook.init(params))

    def update(grads: Any, state: Any, params: Any = None, *, weight: Any = None, **extra: Any) -> Any:
        weight = change(1.0 if weight is None else weight)
        out, new = hook.update(grads, state.inner, params, weight=weight, **extra)
        return out, AroundState(new)

    return tx.Transform(
        init,
        update,
        hook.needs,
        facts=tx.Facts(compression=hook.facts.compression, pauses=hook.facts.pauses, wraps="whole"),
    )


# Weight -> the weight that the reduction inside gets. The last one leaves out the rank of weight 1.
CHANGES: dict[str, Callable[[Any], Any]] = {
    "root": lambda weight: weight**0.5, "equal": lambda weight: 1.0, "three times": lambda weight: weight * 3,
    "none of one": lambda weight: weight * (weight != 1),
}  # fmt: skip
MOST = [pytest.param(name, marks=[pytest.mark.long] * (name in ("equal", "three times"))) for name in CHANGES]
WEIGHTS = [1.0, 9.0, 4.0, 16.0]  # of four ranks, all above 0: a rank without input has no gradient of its own in a step


def values(rank: int, step: int = 0) -> Tensor:
    """The gradient of a rank, 8 numbers; the first are 0, 4, 8 and 12 on ranks 0 to 3."""
    return 4.0 * rank + torch.arange(8, dtype=torch.float64) * (step + 1 - rank)


# A rank's share is its weight ("weight"), 1 where it has some ("live", and "world" with all ranks as the divisor), or
# its weight in a sum that nothing divides (None). These reductions lose nothing, or so little that 1e-6 is enough.
MEANS: dict[str, tuple[Callable[[], tx.Transform], str | None]] = {
    "mean": (lambda: tx.mean("data"), "weight"), "mean of live ranks": (lambda: tx.mean("data", over="live"), "live"),
    "mean of all ranks": (lambda: tx.mean("data", over="world"), "world"), "sum": (lambda: tx.sum_over("data"), None),
    "mean of two axes": (lambda: tx.mean(("node", "local")), "weight"),
    "chain": (lambda: tx.chain(tx.mean("local"), tx.mean("node")), "weight"),
    "hierarchical": (lambda: tx.hierarchical_mean("local", "node"), "weight"),
    "hierarchical, live": (lambda: tx.hierarchical_mean("local", "node", over="live"), "live"),
    "hierarchical, world": (lambda: tx.hierarchical_mean("local", "node", over="world"), "world"),
    "hierarchical, encoded": (lambda: tx.compress(tx.float32(), tx.hierarchical_mean("local", "node")), "weight"),
    "encoded": (lambda: tx.compress(tx.float32(), tx.mean("data")), "weight"),
    "encoded, live": (lambda: tx.compress(tx.float32(), tx.mean("data", over="live")), "live"),
    "encoded, world": (lambda: tx.compress(tx.float32(), tx.mean("data", over="world")), "world"),
    "cast": (lambda: tx.compress(torch.float32, tx.mean("data")), "weight"),
    "compressed sum": (lambda: tx.compress(tx.float32(), tx.sum_over("data")), None),
    "power_sgd": (lambda: tx.power_sgd("data", 1, warmup_steps=99), "weight"),
    "accumulated": (lambda: tx.accumulate(1, tx.mean("data")), "weight"),
    "masked": (lambda: tx.masked(tx.mean("data"), "w"), "weight"),
    "fed back": (lambda: tx.error_feedback(tx.compress(tx.float32(), tx.mean("data"))), "weight"),
}  # fmt: skip
# Reductions with other results: the wrapper is compared with the reduction at the changed weights.
OTHERS: dict[str, Callable[[], tx.Transform]] = {
    "int8": lambda: tx.compress(tx.int8(block=4), tx.mean("data")),
    "top_k": lambda: tx.error_feedback(tx.compress(tx.top_k(0.5), tx.mean("data"))),
    "int4, fed back": lambda: tx.error_feedback(tx.compress(tx.int4(block=4), tx.mean("data"))),
    "bfloat16": lambda: tx.compress(torch.bfloat16, tx.mean("data")),
    "low rank": lambda: tx.power_sgd("data", 1, min_compression_rate=0.5),
    "low rank, fed back": lambda: tx.error_feedback(tx.power_sgd("data", 1, min_compression_rate=0.5)),
    "batched low rank": lambda: tx.batched_power_sgd("data", 1, min_compression_rate=0.5, over="live"),
    "two means": lambda: tx.switch_after(1, tx.mean("data"), tx.compress(tx.int8(block=4), tx.mean("data"))),
}  # fmt: skip
ALL = {**{name: make for name, (make, _) in MEANS.items()}, **OTHERS}


def axes_for(name: str, ranks: int = 4) -> dict[str, int]:
    return {"node": 2, "local": 2} if "'local'" in repr(ALL[name]()) else {"data": ranks}


def by_hand(shares: list[float], over: str | None, of: list[Tensor]) -> Tensor:
    """The mean or the sum of four gradients."""
    factors = shares if over in ("weight", None) else [float(w > 0) for w in shares]
    divisor = 1.0 if over is None else 4.0 if over == "world" else sum(factors)
    return torch.stack([f * g for f, g in zip(factors, of, strict=True)]).sum(0) / divisor
