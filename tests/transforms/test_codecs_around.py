"""Codecs around hooks: around feedback, not twice, and not of complex numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import max_diff, raises_text

import fjoin
from fjoin import transforms as tx

FED_BACK_INSIDE: dict[str, Callable[[], tx.Transform]] = {
    "later": lambda: tx.error_feedback(tx.power_sgd("data", start=2, min_compression_rate=1.0)),
    "by path": lambda: tx.error_feedback(
        tx.partition({"w": tx.power_sgd("data", min_compression_rate=1.0), "*": tx.mean("data")})
    ),
    "loco": lambda: tx.loco(tx.power_sgd("data", start=2, min_compression_rate=1.0)),
    "torch's": lambda: fjoin.ddp.powerSGD_hook(1, start_powerSGD_iter=2, min_compression_rate=1.0),
    "batched": lambda: fjoin.ddp.batched_powerSGD_hook(1, 2, min_compression_rate=1.0),
}  # fmt: skip


@pytest.mark.parametrize("codec", [tx.bfloat16, tx.int8], ids=["bfloat16", "int8"])
@pytest.mark.parametrize("hook", FED_BACK_INSIDE)
def test_a_codec_around_what_is_fed_back(hook: str, codec: Any) -> None:
    """What travels whole inside has no memory, and is encoded: near the mean, in every step."""
    inner = FED_BACK_INSIDE[hook]()
    coded, params = tx.compress(codec(), inner), {"w": torch.zeros(6, 5), "b": torch.zeros(5)}
    xs = [
        {k: torch.randn(p.shape, generator=torch.Generator().manual_seed(r)) for k, p in params.items()}
        for r in (0, 1, 2)
    ]

    def one_rank(grads: Any, made: tx.Transform) -> Any:
        state, outs = made.init(params), []
        for _ in range(5):
            out, state = made.update(grads, state, params)
            outs.append(out)
        return outs

    got, want = (tx.simulate(one_rank, {"data": 3}, xs, [made] * 3)[0] for made in (coded, inner))
    assert max_diff(got, want) < 0.15
    if hook != "batched":  # in which "b" is a part of the matrix
        assert max_diff([out["b"] for out in got], [sum(x["b"] for x in xs) / 3] * 5) < 0.05


def test_what_is_encoded_twice_is_refused() -> None:
    inner = tx.quantized_mean("data", tx.int8())
    for hook in (tx.compress(tx.int4(), inner), tx.error_feedback(tx.cast(torch.bfloat16, inner))):
        raises_text(TypeError, lambda h=hook: tx.simulate(_once(h), {"data": 2}), "by int8()", "leave one")
    nodes = tx.compress(tx.int4(), tx.hierarchical_mean("local", "node", tx.int8()))
    raises_text(TypeError, lambda: tx.simulate(_once(nodes), {"node": 2, "local": 2}), "int4()", "int8()", "leave one")


def _once(hook: tx.Transform) -> Callable[[], Any]:
    return lambda: hook.update(torch.ones(4), hook.init(torch.ones(4)))


@pytest.mark.parametrize(
    "hook",
    [
        lambda: tx.quantized_mean("data", tx.int8()), lambda: tx.cast(torch.bfloat16, tx.all_gather_mean("data")),
        lambda: tx.hierarchical_mean("data", "node"), lambda: tx.power_sgd("data"), lambda: tx.majority_vote("data"),
    ],
)  # fmt: skip
def test_complex_gradients_are_refused(hook: Any) -> None:
    made, g = hook(), {"w": torch.ones(3, dtype=torch.complex64)}
    raises_text(
        TypeError, lambda: tx.simulate(lambda: made.update(g, made.init({"w": torch.ones(3)})), {"data": 2, "node": 2}),
        "'w' is complex", "view_as_real",
    )  # fmt: skip
