"""Reductions that are no plain sum, differences and moving errors, and inspecting values that pass."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from tests.helpers import max_diff, raises_text, same_bits
from tests.oracle.reductions import adaptive_sum, differences, vote


def grads_of(rank: int, step: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1000 * step + rank)
    shapes: dict[str, tuple[int, ...]] = {"a": (5, 3), "b": (), "none": (0, 2)}
    return {path: torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for path, shape in shapes.items()}


def on_ranks(hook: tx.Transform, n: int, weights: Any = None, dtype: torch.dtype = torch.float64) -> list[Any]:
    def one_rank(rank: int) -> Any:
        grads = grads_of(rank, dtype=dtype)
        weight = 1.0 if weights is None else weights[rank]
        given = grads if weight else {path: g * float("nan") for path, g in grads.items()}
        return hook.update(given, hook.init(grads), weight=weight, lane={"x": 1.0 + rank})

    return tx.simulate(one_rank, {"data": n}, list(range(n)))


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("over", ["weight", "live", "world"])
def test_all_gather_mean_matches_mean(over: Any, n: int) -> None:
    weights = [0.0 if r == 1 else 1.0 + r for r in range(n)]
    got, want = (on_ranks(hook, n, weights) for hook in (tx.all_gather_mean("data", over), tx.mean("data", over)))
    for (out, state), (mean, reported) in zip(got, want, strict=True):
        assert max_diff(out, mean) < 1e-14 and max_diff(state, reported) < 1e-12
        assert same_bits(out, got[0][0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_all_gather_mean_sums_in_float32(dtype: torch.dtype) -> None:
    """Rounded once, at the end: seven ranks that hold the same have it as their mean."""
    outs = on_ranks(tx.all_gather_mean("data"), 7, dtype=dtype)
    exact = sum(grads_of(rank, dtype=dtype)["a"].double() for rank in range(7)) / 7
    assert torch.equal(outs[0][0]["a"], exact.float().to(dtype))
    hook, three = tx.all_gather_mean("data"), torch.full((4,), 3.0, dtype=dtype)
    assert all((out == 3).all() for out in tx.simulate(lambda: hook.update(three, hook.init(three))[0], {"data": 7}))


@pytest.mark.parametrize("n", [2, 3, 5])
def test_gathered_codes_are_encoded_once(n: int) -> None:
    """The mean of the decoded codes of all ranks, where a mean that is sent back is encoded again."""
    codec = tx.int4(block=4)
    got = on_ranks(tx.compress(codec, tx.all_gather_mean("data")), n, dtype=torch.float32)
    flats = [torch.cat([g.flatten() for g in grads_of(r, dtype=torch.float32).values()]) for r in range(n)]
    want = torch.stack([codec.decode(codec.encode(x.view(1, -1)), 16)[0] for x in flats]).mean(0)
    for out, _ in got:
        assert (torch.cat([g.flatten() for g in out.values()]) - want).abs().max() < 1e-6


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_a_vote_is_the_sign_of_the_sum_of_signs(n: int) -> None:
    weights = [0.0 if r == 3 else float(1 + r % 3) for r in range(n)]
    leaf = {
        r: torch.randint(-1, 2, (4, 50), generator=torch.Generator().manual_seed(r)).double() * 1e-30 for r in range(n)
    }
    hook, plain = tx.majority_vote("data"), tx.majority_vote("data", over="live")
    for chosen, counts in ((hook, weights), (plain, [float(w > 0) for w in weights])):
        out = tx.simulate(
            lambda r: chosen.update(leaf[r], chosen.init(leaf[r]), weight=weights[r])[0],  # noqa: B023
            {"data": n},
            list(range(n)),
        )
        want = vote([leaf[r] for r in range(n)], counts)
        assert all(torch.equal(o, want) for o in out) and 0 < (want == 0).float().mean() < 1


def test_vote_of_nonfinite_values_is_not_finite() -> None:
    hook = tx.majority_vote("data")
    for n in (1, 2, 3):
        for bad in (math.nan, math.inf):
            out = tx.simulate(
                lambda r: hook.update(torch.tensor([1.0, bad if r == 0 else 1.0]), hook.init(torch.zeros(2)))[0],  # noqa: B023
                {"data": n},
                list(range(n)),
            )
            assert not any(torch.isfinite(o).all() for o in out)


def test_a_vote_takes_a_fifth_of_a_byte() -> None:
    what = tx.explain(tx.majority_vote("data"), {"w": torch.zeros(1_000_000)}, {"data": 64})
    assert what.sent_bytes < 2 * 0.2002 * 1_000_000 and {m.dtype for m in what.rows[0].messages} == {torch.uint8}


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 8])
def test_adasum_is_pairwise(n: int) -> None:
    weights = [0.0 if r == 1 else 2.0 for r in range(n)]
    for given in (None, weights):
        got = on_ranks(tx.adasum("data"), n, given)
        for path in ("a", "b"):
            alive = [grads_of(r)[path] * (1.0 if given is None else float(weights[r] > 0)) for r in range(n)]
            assert max_diff(got[0][0][path], adaptive_sum(alive)) < 1e-13
        assert all(same_bits(out, got[0][0]) for out, _ in got)
        assert got[0][1].total == (n if given is None else sum(w > 0 for w in weights))
        assert got[0][1].lane["x"] == sum(range(1, n + 1))
    halves = on_ranks(tx.adasum("data"), n, dtype=torch.bfloat16)
    assert halves[0][0]["a"].dtype is torch.bfloat16
    assert max_diff(halves[0][0]["a"].double(), on_ranks(tx.adasum("data"), n)[0][0]["a"]) < 0.1


def test_ef21_matches_the_reference() -> None:
    """Two ranks encode once, so the mean is that of the encoded values."""
    grads = [[grads_of(r, step)["a"].flatten() for r in range(2)] for step in range(6)]
    hook = tx.ef21(tx.quantized_mean("data", tx.top_k(3)))

    def one_rank(rank: int) -> Any:
        state, outs = hook.init(grads[0][0]), []
        for step in grads:
            out, state = hook.update(step[rank], state)
            outs.append(out)
        return outs

    for outs in tx.simulate(one_rank, {"data": 2}, [0, 1]):
        assert max_diff(outs, differences(grads, 3)) < 1e-5


@pytest.mark.sample(6)
@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("over", ["weight", "live", "world"])
def test_constant_gradients_arrive_exactly_in_the_end(over: Any, n: int) -> None:
    """Also where ranks have different weights and some have none: their last gradient counts on, or is taken back."""
    hook = {how: tx.ef21(tx.quantized_mean("data", tx.top_k(0.3), over), how) for how in ("freeze", "flush")}
    weights = [1.0 + r for r in range(n)]

    def one_rank(rank: int, how: str) -> Any:
        grads, state = grads_of(rank), hook[how].init(grads_of(rank))
        for _ in range(40):
            out, state = hook[how].update(grads, state, weight=weights[rank])
        gone = 0.0 if rank == 0 else weights[rank]
        for _ in range(40):
            late, state = hook[how].update(grads, state, weight=gone, lane={"x": 1.0})
        assert list(hook[how].sums(state).lane) == ["x"]
        return out, late, state

    def mean(ranks: range, of: int) -> dict[str, Tensor]:
        w = [weights[r] if over == "weight" else 1.0 for r in range(n)]
        total = of if over == "world" else sum(w[r] for r in ranks)
        return {path: sum(w[r] * grads_of(r)[path] for r in ranks) / total for path in grads_of(0)}

    for how in ("freeze", "flush"):
        results = tx.simulate(lambda r: one_rank(r, how), {"data": n}, list(range(n)))  # noqa: B023
        for out, late, state in results:
            assert max_diff(out, mean(range(n), n)) < 1e-5
            assert max_diff(late, mean(range(n) if how == "freeze" else range(1, n), n)) < 1e-5, how
            sums = {path: sum(r[2].own[path] for r in results) for path in state.own}
            assert max_diff(sums, state.whole) < 1e-4, "the sum of what is believed of each"


def test_a_moving_average_of_errors() -> None:
    """Two ranks, against the formula with the codec's own error; begins anew in every third call."""
    codec, kept, beta = tx.int4(block=8), tx.int8(block=4), 0.75
    hook = tx.loco(tx.quantized_mean("data", codec), beta=beta, reset=3, memory=kept)
    grads = [[grads_of(r, step, torch.float32)["a"].flatten() for r in range(2)] for step in range(7)]

    def one_rank(rank: int) -> Any:
        state, outs = hook.init(grads[0][0]), []
        for step in grads:
            out, state = hook.update(step[rank], state)
            outs.append(out)
        return outs, state

    error, want = [torch.zeros(15), torch.zeros(15)], []
    for i, step in enumerate(grads):
        sent = [codec.decode(codec.encode((step[r] + error[r]).view(1, -1)), 15)[0] for r in range(2)]
        want.append((sent[0] + sent[1]) / 2)
        for r in range(2):
            new = (1 - beta) * error[r] + beta * (step[r] + error[r] - sent[r])
            error[r] = torch.zeros(15) if (i + 1) % 3 == 0 else kept.decode(kept.encode(new.view(1, -1)), 15)[0]
    for outs, state in tx.simulate(one_rank, {"data": 2}, [0, 1]):
        assert max_diff(outs, want) < 1e-6
        assert state.error[""].dtype is torch.uint8 and state.error[""].numel() == kept.width(15)


def test_tap_receives_the_gradients() -> None:
    seen: list[Any] = []
    hook = tx.chain(tx.mean("data"), tx.tap(lambda g: seen.append({path: v.clone() for path, v in g.items()})))
    out = on_ranks(hook, 2)[0][0]
    assert same_bits(seen[0], out) and same_bits(seen[1], out)
    del seen[:]
    tx.explain(hook, grads_of(0), {"data": 2})
    assert not seen, "explain called it"
    raises_text(TypeError, lambda: tx.tap(3), "3")  # type: ignore[arg-type]
    raises_text(
        tx.NotVmappable, lambda: tx.simulate(lambda g: hook.update(g, hook.init(g)), {"data": 1}, [1.0], engine="vmap")
    )
    step = fjoin.train_step(lambda p, b: (p["w"] * b).sum(), tx.fuse(hook, tx.sgd(0.1)))
    step(step.init({"w": torch.ones(2)}), torch.tensor([3.0, 4.0]))
    assert [g["w"].tolist() for g in seen] == [[3.0, 4.0]]
    step.close()


def test_raises_on_bad_input() -> None:
    coded = tx.quantized_mean("data", tx.int8())
    for make in (tx.ef21, tx.loco, tx.error_feedback):
        raises_text(TypeError, lambda: make(tx.mean("data")), "mean('data')", "quantized_mean(axis, codec)")  # noqa: B023
        raises_text(ValueError, lambda: make(coded, without_input="keep"), "'freeze' or 'flush'", "'keep'")  # noqa: B023
    for make in (tx.loco, tx.error_feedback):
        fed = tx.chain(tx.error_feedback(coded), tx.clip_by_value(1.0))
        raises_text(TypeError, lambda: make(fed), "nothing in chain(error_feedback", "is lost")  # noqa: B023
        by_path = tx.partition({"a": tx.mean("data"), "*": tx.error_feedback(coded)})
        raises_text(TypeError, lambda: make(by_path), "nothing in partition(", "is lost")  # noqa: B023
    raises_text(TypeError, lambda: tx.ef21(tx.chain(coded, tx.clip_by_value(1.0))), "one mean", "chain(")
    raises_text(TypeError, lambda: tx.ef21(tx.partition({"*": coded})), "one mean", "partition(")
    for beta in (0.0, 1.5, "1"):
        raises_text(ValueError, lambda: tx.loco(coded, beta=beta), "beta", repr(beta))  # type: ignore[arg-type]  # noqa: B023
    raises_text(ValueError, lambda: tx.loco(coded, reset=0), "reset", "0")
    raises_text(TypeError, lambda: tx.loco(coded, memory=tx.int8), "Codec")  # type: ignore[arg-type]
    raises_text(ValueError, lambda: tx.loco(coded, memory=tx.qsgd()), "stochastic", "qsgd()")
    raises_text(
        ValueError,
        lambda: tx.hierarchical_mean("a", "b", tx.qsgd()),
        "stochastic",
        "compress(qsgd(), hierarchical_mean",
    )
    raises_text(ValueError, lambda: tx.majority_vote("data", over="all"), "'all'")  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1e-30, 1e-24, 1.0, 3e20, 1e37])
def test_adasum_of_very_small_and_very_large_gradients(size: float) -> None:
    """Their squares neither overflow nor vanish: equal ones are averaged, orthogonal ones summed."""
    hook, a, b = tx.adasum("data"), torch.tensor([3.0, 4.0]) * size, torch.tensor([-4.0, 3.0]) * size

    def one_rank(g: Tensor) -> Tensor:
        return hook.update(g, hook.init(g))[0]

    assert max_diff(tx.simulate(one_rank, {"data": 2}, [a, a])[0] / size, torch.tensor([3.0, 4.0])) < 1e-6
    assert max_diff(tx.simulate(one_rank, {"data": 2}, [a, b])[0] / size, torch.tensor([-1.0, 7.0])) < 1e-6


@pytest.mark.parametrize("ranks", [2, 3, 7, 100])
def test_votes_that_cancel_are_a_tie_despite_rounding(ranks: int) -> None:
    hook, weights = tx.majority_vote("data"), [0.1 + 0.37 * r for r in range(ranks)]
    weights.append(sum(weights))  # against all others

    def one_rank(vote: Tensor, weight: float) -> Tensor:
        return hook.update(vote, hook.init(vote), weight=weight)[0]

    votes = [torch.tensor([1.0, 1.0])] * ranks
    tie = tx.simulate(one_rank, {"data": ranks + 1}, [*votes, torch.tensor([-1.0, 1.0])], weights)
    assert all(out.tolist() == [0.0, 1.0] for out in tie)
    won = tx.simulate(
        one_rank, {"data": ranks + 1}, [*votes, torch.tensor([-1.0, 1.0])], [*weights[:-1], weights[-1] * 1.01]
    )
    assert all(out.tolist() == [-1.0, 1.0] for out in won)
