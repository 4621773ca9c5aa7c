"""Codecs around hooks: around feedback, not twice, and not of complex numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from tests.helpers import max_diff, raises_text, same_bits

FED_BACK_INSIDE: dict[str, Callable[[], tx.Transform]] = {
    "later": lambda: tx.error_feedback(tx.power_sgd("data", warmup_steps=2, min_compression_rate=1.0)),
    "by path": lambda: tx.error_feedback(tx.partition({"w": tx.power_sgd("data", min_compression_rate=1.0), "*": tx.mean("data")})),
    "torch's": lambda: fjoin.ddp.powerSGD_hook(1, start_powerSGD_iter=2, min_compression_rate=1.0),
    "batched": lambda: fjoin.ddp.batched_powerSGD_hook(1, 2, min_compression_rate=1.0),
}  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("codec", [tx.bfloat16, tx.int8], ids=["bfloat16", "int8"])
@pytest.mark.parametrize("hook", FED_BACK_INSIDE)
def test_compress_around_error_feedback(hook: str, codec: Any) -> None:
    """Leaves that an inner transform sends uncompressed have no residual, and are encoded: near the mean, in every step."""
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


DONATING: dict[str, tx.Transform] = {
    "cast": tx.compress(torch.bfloat16, tx.mean("data")),
    "cast to float32": tx.compress(torch.float32, tx.sum_over("data")),
    "int8": tx.compress(tx.int8(), tx.mean("data", over="world")),
    "by chance": tx.compress(tx.int4(stochastic=True), tx.mean("data")),
    "fed back": tx.error_feedback(tx.compress(tx.int8(), tx.mean("data"))),
    "first": tx.chain(tx.compress(torch.bfloat16, tx.mean("data")), tx.clip_by_value(0.5)),
    "two axes": tx.compress(torch.bfloat16, tx.mean(("node", "data"))),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("form", ["flat", "tree"])
@pytest.mark.parametrize("kind", DONATING)
def test_donated_gradients_make_no_difference(kind: str, form: str, dtype: torch.dtype) -> None:
    """But for where the mean lies: the same bits, after a gradient that is not finite and without input too."""

    def one_rank(donated: bool) -> Any:
        hook, outs, states, held = DONATING[kind], [], [], []
        rank = int(tx.axis_index(("node", "data")))
        state = hook.init(
            {"": torch.zeros(40, dtype=dtype)} if form == "flat" else {"a": torch.zeros(6, 6), "b": torch.zeros(4)}
        )
        for step in range(5):
            flat = torch.randn(40, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)
            if step == 2 and rank == 1:
                flat[3] = float("nan")
            grads = {"": flat} if form == "flat" else {"a": flat[:36].view(6, 6), "b": flat[36:].clone()}
            weight: Any = 0.0 if step == 3 and rank == 1 else 1.0 + rank
            weight = torch.tensor(weight) if step == 4 else weight
            out, state = hook.update(grads, state, weight=weight, donated=donated)
            held.append(all(out[path].data_ptr() == g.data_ptr() for path, g in grads.items()))
            outs.append({path: x.clone() for path, x in out.items()})
            states.append(state)
        return outs, states, held

    for ranks in (2, 3):
        axes = {"node": 2 if kind == "two axes" else 1, "data": ranks}
        count = axes["node"] * ranks
        want = tx.simulate(one_rank, axes, [False] * count)
        got = tx.simulate(one_rank, axes, [True] * count)
        for (outs, states, held), (others, other_states, other_held) in zip(got, want, strict=True):
            assert same_bits((outs, states), (others, other_states))
            written = form == "flat" and dtype is torch.float32 and kind not in ("first", "cast to float32", "int8")
            assert not any(other_held) and (not written or (ranks == 3 and kind != "gathered") or all(held))


def test_raises_if_gradients_are_encoded_twice() -> None:
    """When it is made: not in the step in which the inner one begins."""
    inner = tx.compress(tx.int8(), tx.mean("data"))
    for hook in (inner, tx.error_feedback(inner), tx.switch_after(5, tx.mean("data"), inner)):
        raises_text(TypeError, lambda h=hook: tx.compress(tx.int4(), h), "int4()", "int8()", "leave one")


@pytest.mark.parametrize(
    "hook",
    [
        lambda: tx.compress(tx.int8(), tx.mean("data")),
        lambda: tx.hierarchical_mean("data", "node"), lambda: tx.power_sgd("data"),
    ],
)  # fmt: skip
def test_complex_gradients_are_refused(hook: Any) -> None:
    made, g = hook(), {"w": torch.ones(3, dtype=torch.complex64)}
    raises_text(
        TypeError, lambda: tx.simulate(lambda: made.update(g, made.init({"w": torch.ones(3)})), {"data": 2, "node": 2}),
        "'w' is complex", "view_as_real",
    )  # fmt: skip
