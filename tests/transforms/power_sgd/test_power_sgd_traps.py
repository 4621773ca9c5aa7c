"""PowerSGD on zeros, NaN, ranks of weight 0."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fjoin import transforms as tx
from tests.helpers import max_diff, same_bits
from tests.power_problem import SHAPES, draws, exact32, made


def test_zero_gradient_gives_zeros_and_does_not_affect_the_next_one() -> None:
    zeros = {path: torch.zeros(shape) for path, shape in SHAPES.items()}

    def one_rank(warm: bool) -> Any:
        hook = made(2, warm_start=warm)
        state = hook.init(zeros)
        first, state = hook.update(zeros, state)
        second, state = hook.update(exact32(), state)
        return first, second, state

    for warm in (True, False):
        for first, second, state in tx.simulate(one_rank, {"data": 2}, [warm, warm]):
            assert all((v == 0).all() for v in first.values())
            assert max_diff(second, exact32()) < 1e-4  # as far as a random Q of full rank is well conditioned
            assert all(torch.isfinite(q).all() for q in state.q.values())


def test_columns_that_have_become_zero_are_drawn_afresh() -> None:
    """A gradient that only the first input feeds leaves a Q that sees nothing of one that only the second feeds."""
    first, second = torch.zeros(20, 30), torch.zeros(20, 30)
    first[:, :15] = torch.outer(torch.arange(20.0), torch.arange(15.0) + 1)
    second[:, 15:] = torch.outer(torch.arange(20.0) - 3, torch.arange(15.0) + 2)

    def one_rank() -> Any:
        hook = tx.power_sgd("data", 1)
        _, state = hook.update(first, hook.init(first))
        blind, state = hook.update(second, state)
        seen, _ = hook.update(second, state)
        return blind, seen

    blind, seen = tx.simulate(one_rank, {"data": 2})[0]
    assert (seen - second).norm() < 1e-5 * second.norm()
    assert (blind - second).norm() <= second.norm() * (1 + 1e-6)


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nonfinite_gradients_do_not_affect_the_next_step(bad: float, coded: bool) -> None:
    """Every rank gets nonfinite values in that matrix only; later results and residuals are finite."""

    def one_rank(poison: bool) -> Any:
        rank, outs = int(tx.axis_index("data")), []
        inner = tx.compress(torch.bfloat16, made(2)) if coded else made(2)
        hook = tx.error_feedback(inner)
        state = hook.init(draws(0))
        for step in range(3):
            grads = draws(10 * step + rank)
            if poison and step == 1 and rank == 1:
                grads["a"][3, 4] = bad
            out, state = hook.update(grads, state)
            outs.append(out)
        return outs, state

    for ranks in (2, 3):
        runs = tx.simulate(one_rank, {"data": ranks}, [True] * ranks)
        for outs, state in runs:
            assert not outs[1]["a"].isfinite().any()
            assert coded or outs[1]["b"].isfinite().all()
            assert same_bits(outs[2], runs[0][0][2]) and all(v.isfinite().all() for v in outs[2].values())
            assert all(e.isfinite().all() for e in state.error.values())


def test_call_without_weight_changes_nothing() -> None:
    def one_rank(over: Any) -> Any:
        hook = tx.error_feedback(made(2, over=over))
        _, state = hook.update(draws(int(tx.axis_index("data"))), hook.init(draws(0)))
        poisoned = {path: g * float("nan") for path, g in draws(1).items()}
        out, after = hook.update(poisoned, state, weight=0.0)
        tensor, same = hook.update(poisoned, state, weight=torch.zeros(()))
        assert same_bits((out, after), (tensor, same))
        assert same_bits(after.error, state.error) and same_bits(after.inner.q, state.inner.q)
        return out

    for over in ("weight", "live", "world"):
        for out in tx.simulate(one_rank, {"data": 3}, [over] * 3):
            assert all((v == 0).all() for v in out.values())


def test_a_weight_in_a_tensor_is_a_weight() -> None:
    def one_rank(wrap: Any) -> Any:
        hook, rank = tx.error_feedback(made(2)), int(tx.axis_index("data"))
        state = hook.init(draws(0, torch.float64))
        for step in range(4):
            weight = float((rank + step) % 3)
            out, state = hook.update(draws(rank + 10 * step, torch.float64), state, weight=wrap(weight))
        return out, state.error, state.inner.q

    host, device = (tx.simulate(one_rank, {"data": 3}, [wrap] * 3) for wrap in (float, torch.tensor))
    for a, b in zip(host, device, strict=True):
        assert max_diff(a, b) < 1e-6  # a weight in a tensor is float32 here


DONATING: dict[str, tx.Transform] = {
    "alone": made(2),
    "fed back": tx.error_feedback(made(2)),
    "cold": tx.error_feedback(made(2, warm_start=False)),
    "late": tx.error_feedback(made(2, warmup_steps=2)),
    "batched": tx.error_feedback(tx.batched_power_sgd("data", 2, min_compression_rate=1.0)),
    "by path": tx.partition({("a", "conv"): tx.error_feedback(made(2)), "*": made(2)}),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", DONATING)
def test_donated_gradients_take_the_means(kind: str, dtype: torch.dtype) -> None:
    """The same bits with and without, after a gradient that is not finite and on a rank without input too."""

    def one_rank(donated: bool) -> Any:
        hook, rank, outs = DONATING[kind], int(tx.axis_index("data")), []
        state, taken = hook.init(draws(0, dtype)), True
        for step in range(5):
            grads = draws(10 * step + rank, dtype)
            grads["b"] = grads["b"].T.contiguous().T  # which no view makes a matrix of rows
            if step == 3 and rank == 1:
                grads["conv"][0, 0, 0, 0] = float("nan")
            held = dict(grads)
            weight = 0.0 if step == 4 and rank == 1 else 1.0
            out, state = hook.update(grads, state, weight=weight, donated=donated)
            if kind != "late" or step > 1:  # before, these are plain means
                taken &= all(out[path].data_ptr() == held[path].data_ptr() for path in ("a", "conv"))
            outs.append({path: v.clone() for path, v in out.items()})
        return outs, state, taken

    for ranks in (2, 3):
        want = tx.simulate(one_rank, {"data": ranks}, [False] * ranks)
        got = tx.simulate(one_rank, {"data": ranks}, [True] * ranks)
        for (outs, state, taken), (others, other_state, other_taken) in zip(got, want, strict=True):
            assert same_bits((outs, state), (others, other_state))
            assert taken == (kind != "batched" and dtype is not torch.bfloat16) and not other_taken


AROUND: dict[str, tuple[Callable[[tx.Transform], tx.Transform], bool]] = {
    "fed back": (tx.error_feedback, True), "late": (lambda hook: tx.switch_after(1, tx.mean("data"), hook), True),
    "by path": (lambda hook: tx.partition({"*": hook}), True),
    "first": (lambda hook: tx.chain(hook, tx.clip_by_value(1.0)), True),
    "second": (lambda hook: tx.chain(tx.clip_by_value(1.0), hook), False),
    "accumulated": (lambda hook: tx.accumulate(1, hook), False), "masked": (lambda hook: tx.masked(hook, "*"), False),
    "cast": (lambda hook: tx.compress(torch.bfloat16, hook), True),
    "by chance": (lambda hook: tx.compress(tx.bfloat16(stochastic=True), hook), True),
    "by one's own": (lambda hook: dataclasses.replace(hook, update=lambda *a, **k: hook.update(*a, **k)), False),
}  # fmt: skip


@pytest.mark.parametrize("around", AROUND)
def test_wrappers_pass_on_donation_if_they_do_not_reuse_gradients(around: str) -> None:
    make, expected = AROUND[around]
    inner, reported = made(2), []

    def update(*args: Any, donated: bool = False, wire: Any = None, **extra: Any) -> Any:
        reported.append(donated)
        return inner.update(*args, wire=wire, **extra)

    hook = make(dataclasses.replace(inner, update=update))

    def one_rank() -> None:
        state = hook.init(draws(0))
        for _ in range(2):
            _, state = hook.update(draws(0), state, donated=True)

    tx.simulate(one_rank, {"data": 2})
    assert set(reported) == {expected}
