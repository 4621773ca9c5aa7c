"""PowerSGD: the compressed leaves, their accuracy, and the residuals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fjoin import transforms as tx
from fjoin.transforms.axes import Axis, bind_axes
from fjoin.transforms.base import Call, restrict
from tests.helpers import max_diff, raises_text, same_bits
from tests.power_problem import COMPRESSED, SHAPES, draws, exact, made

STEPS = 8


def test_leaves_are_compressed_by_shape_and_rate() -> None:
    params = {
        "just not": torch.zeros(8, 8),  # (8 + 8) * 2 * 2 = 8 * 8
        "just": torch.zeros(8, 9),
        "conv": torch.zeros(9, 2, 2, 2),
        "vector": torch.zeros(1000),
        "column": torch.zeros(1000, 1),
        "scalar": torch.zeros(()),
        "none": torch.zeros(0, 50),
    }
    hook = tx.power_sgd("data", 2)
    want = {"just": (2, 9), "conv": (2, 8)}
    assert {path: tuple(q.shape) for path, q in hook.init(params).q.items()} == want
    assert tx.power_sgd("data", 2, min_compression_rate=2.2).init(params).q == {}
    hook = tx.power_sgd("data", 2, min_compression_rate=1.05)
    assert {path: tuple(q.shape) for path, q in hook.init(params).q.items()} == want | {"just not": (2, 8)}
    assert tx.error_feedback(hook).init(params).error.keys() == want.keys() | {"just not"}
    full = tx.power_sgd("data", 50, min_compression_rate=0.1)  # below 1 a rank above the matrix's own is cut
    assert full.init(params).q["just"].shape == (8, 9) and "vector" not in full.init(params).q
    assert tx.power_sgd("data", 50).init(params).q == {}
    assert tx.power_sgd("data", warm_start=False, min_compression_rate=1.05).init(params).q == {}


@pytest.mark.parametrize("rank", [1, 2, 3, 5])
def test_a_low_rank_is_reproduced(rank: int) -> None:
    for ranks in (2, 3):

        def one_rank() -> Any:
            hook = made(rank)
            grads = exact(int(tx.axis_index("data")), rank)
            state = hook.init(grads)
            return hook.update(grads, state)[0]

        grads = [exact(r, rank) for r in range(ranks)]
        want = {path: sum(g[path] for g in grads) / ranks for path in SHAPES}
        for out in tx.simulate(one_rank, {"data": ranks}):
            assert max_diff(out, want) < 1e-12


def telescoped(hook: tx.Transform, idle: bool, dtype: torch.dtype = torch.float64) -> Any:
    """The sum of the results, the residual at the end, and the sum of the inputs divided as each sum."""
    rank, ranks = int(tx.axis_index("data")), tx.axis_size("data")
    wrapped = hook.spec.name == "error_feedback"
    state = hook.init(draws(rank, dtype))
    out = {path: torch.zeros(shape, dtype=torch.float64) for path, shape in SHAPES.items()}
    given = {path: v.clone() for path, v in out.items()}
    over, last = "live" if "live" in repr(hook) else "world" if "world" in repr(hook) else "weight", 1.0
    for step in range(STEPS):
        weights = [0.0 if idle and (r + step) % 3 != 0 else 0.5 + r for r in range(ranks)]
        weights = [0.0] * ranks if idle and step == 4 else weights
        weight, grads = weights[rank], draws(100 * rank + step, dtype)
        shown = grads if weight else {path: g * float("nan") for path, g in grads.items()}
        new, state = hook.update(shown, state, weight=weight)
        total = sum(weights) if over == "weight" else ranks if over == "world" else sum(w > 0 for w in weights)
        factor = weight if over == "weight" else float(weight > 0)
        last = total if total else last
        out = {path: v + new[path].double() for path, v in out.items()}
        given = {path: v + factor * grads[path].double() / last for path, v in given.items()}
    return out, state.error if wrapped else {}, given


@pytest.mark.sample(12)
@pytest.mark.parametrize("idle", [False, True], ids=["all live", "some idle"])
@pytest.mark.parametrize("over", ["weight", "live", "world"])
@pytest.mark.parametrize("kind", ["each", "batched", "cold", "late", "bfloat16", "int8"])
def test_sent_and_residual_add_up_to_the_input(kind: str, over: Any, idle: bool) -> None:
    room = 1e-9
    if kind == "batched":
        hook: tx.Transform = tx.batched_power_sgd("data", 2, min_compression_rate=1.0, over=over)
    else:
        hook = made(2, over=over, warm_start=kind != "cold", warmup_steps=3 * (kind == "late"))
    if kind in ("bfloat16", "int8"):
        hook, room = tx.compress(tx.bfloat16() if kind == "bfloat16" else tx.int8(block=16), hook), 1e-3
    hook = tx.error_feedback(hook)
    for ranks in (2, 3, 5) if over == "weight" else (3,):
        results = tx.simulate(lambda: telescoped(hook, idle), {"data": ranks})
        lossy = results[0][1].keys()
        assert lossy == (SHAPES.keys() if kind in ("batched", "bfloat16", "int8") else COMPRESSED)
        for path in SHAPES:
            residual = sum(error[path] for _, error, _ in results) if path in lossy else 0.0
            given = sum(all_[path] for _, _, all_ in results)
            diff = results[0][0][path] + residual - given
            assert not diff.numel() or diff.abs().max() < room, (ranks, path, diff)
            assert all(same_bits(out, results[0][0]) for out, _, _ in results)
        assert max(e.abs().max() for _, error, _ in results for p, e in error.items() if p in COMPRESSED) > 0.1


def test_residuals_stay_bounded() -> None:
    """The same gradients 200 times, different on each rank. The sum of the residuals stays, and where the mean spans all rows
    so does each residual; torch's `local - mean` grows by as much in every step."""

    def one_rank() -> Any:
        hook = tx.error_feedback(made(2))
        grads = draws(int(tx.axis_index("data")), torch.float64)
        state, own, sums = hook.init(grads), [], []
        for _ in range(200):
            _, state = hook.update(grads, state)
            own.append(max(float(state.error[path].norm() / grads[path].norm()) for path in ("b", "conv")))
            sums.append(max(float(e.norm()) for e in tx.psum(state.error, "data").values()))
        return own, sums

    for seen in tx.simulate(one_rank, {"data": 3}):
        for values in seen:
            assert max(values[100:]) < 1.2 * max(values[:100])


ODD = {"a": (37, 53), "b": (53, 37), "c": (37, 53), "d": (5, 3, 7), "e": (64, 33), "f": (11,), "g": (3,), "h": (37, 53)}


@pytest.mark.parametrize("rank", [1, 2, 4, 8])
def test_results_do_not_depend_on_the_buckets(rank: int) -> None:
    """Results are bitwise equal in any buckets, for shapes that do not fill cache lines."""

    def one_rank() -> None:
        hook = tx.error_feedback(made(rank, over="world"))
        g = torch.Generator().manual_seed(int(tx.axis_index("data")))
        params = {path: torch.zeros(shape) for path, shape in ODD.items()}
        whole = hook.init(params)
        buckets = (["h", "f"], ["b"], ["a", "c", "d", "e", "g"])
        states = [restrict(whole, params, paths) for paths in buckets]
        for step in range(3):
            grads = {path: torch.randn(shape, generator=g) for path, shape in ODD.items()}
            weight = float(step != 1)
            out, whole = hook.update(grads, whole, weight=weight)
            call = Call(weight)
            for i, paths in enumerate(buckets):
                some = {path: grads[path] for path in paths}
                one, states[i] = hook.run(some, states[i], None, call)
                assert same_bits(one, {path: out[path] for path in paths})
                assert same_bits(states[i], restrict(whole, params, paths))

    tx.simulate(one_rank, {"data": 3})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    """Results have the gradients' dtype; sums, Q and errors have at least float32."""

    def one_rank() -> Any:
        hook = tx.error_feedback(made(2))
        grads = {path: g.to(dtype) for path, g in exact(int(tx.axis_index("data")), 2).items()}
        return hook.update(grads, hook.init(grads))

    want = {path: (exact(0, 2)[path] + exact(1, 2)[path]) / 2 for path in SHAPES}
    wide = torch.promote_types(dtype, torch.float32)
    for out, state in tx.simulate(one_rank, {"data": 2}):
        assert {v.dtype for v in out.values()} == {dtype}
        assert {v.dtype for v in (*state.error.values(), *state.inner.q.values())} == {wide}
        room = 40 * torch.finfo(dtype).eps
        assert max_diff({path: v.double() for path, v in out.items()}, want) < room * 4


def test_mixed_dtypes_travel_in_one_message() -> None:
    params = {
        "a": torch.zeros(30, 30),
        "b": torch.zeros(30, 30, dtype=torch.float64),
        "c": torch.zeros(3, dtype=torch.float16),
    }
    assert messages(params) == [(2, torch.float64), (30 + 30 + 3, torch.float64), (60, torch.float64)]


def messages(params: Any) -> list[tuple[int, torch.dtype]]:
    sent: list[tuple[int, torch.dtype]] = []

    class Counting(Axis):
        size = 2

        def index(self) -> Tensor:
            return torch.tensor(0)

        def run(self, op: str, x: Tensor, arg: Any) -> Tensor:
            sent.append((x.numel(), x.dtype))
            return 2 * x

    hook = tx.power_sgd("data")
    with bind_axes({"data": Counting()}):
        hook.update(params, hook.init(params))
    return sent


def test_no_message_without_something_in_it() -> None:
    def sizes(params: Any) -> list[int]:
        return [size for size, _ in messages(params)]

    matrix, vector, empty = torch.ones(30, 20), torch.ones(7), torch.ones(0, 4)
    assert sizes({"m": matrix, "v": vector, "e": empty}) == [2, 30 + 7, 20]  # first the weights
    assert sizes({"m": matrix}) == [2, 30, 20]
    assert sizes({"v": vector}) == [2, 7]
    assert sizes({}) == [2] == sizes({"e": empty})


def test_single_rank_does_not_compress() -> None:
    hook = tx.error_feedback(made(1))
    grads = draws(3)
    (out, state), *_ = tx.simulate(lambda: hook.update(grads, hook.init(grads), weight=4.0), {"data": 1})
    assert max_diff(out, grads) < 1e-6 and all((e == 0).all() for e in state.error.values())


def test_an_empty_tree() -> None:
    for hook in (tx.power_sgd("data"), tx.batched_power_sgd("data"), tx.error_feedback(tx.power_sgd("data"))):
        for out, _ in tx.simulate(lambda: hook.update({}, hook.init({}), weight=2.0), {"data": 2}):  # noqa: B023
            assert out == {}


def test_without_warm_start_every_step_draws() -> None:
    def one_rank(warm: bool) -> Any:
        hook = made(1, warm_start=warm)
        grads, outs = draws(int(tx.axis_index("data"))), []
        state = hook.init(grads)
        for _ in range(30):
            out, state = hook.update(grads, state)
            outs.append(out["a"])
        return outs

    mean = (draws(0)["a"] + draws(1)["a"]) / 2
    best = torch.linalg.svdvals(mean)[1:].norm()
    warm, cold = (tx.simulate(one_rank, {"data": 2}, [w, w])[0] for w in (True, False))
    assert (warm[-1] - mean).norm() < 1.001 * best  # power iterations have found the largest singular vector
    assert len({round(float(out.norm()), 5) for out in cold}) == 30
    assert max((out - mean).norm() for out in cold) > 1.1 * best


def test_random_numbers_depend_on_seed_and_path_alone() -> None:
    a = tx.power_sgd("data", seed=1).init({"x": torch.zeros(50, 40), "y": torch.zeros(50, 40)}).q
    b = tx.power_sgd("data", seed=1).init({"y": torch.zeros(50, 40)}).q
    c = tx.power_sgd("data", seed=2).init({"y": torch.zeros(50, 40)}).q
    assert same_bits(a["y"], b["y"]) and max_diff(a["x"], a["y"]) > 0.1 and max_diff(b["y"], c["y"]) > 0.1
    many = tx.power_sgd("data", 8).init({"x": torch.zeros(4000, 5000)}).q["x"]
    assert abs(many.mean()) < 0.02 and abs(many.std() - 3**-0.5) < 0.01 and many.abs().max() < 1
    assert (torch.corrcoef(many) - torch.eye(8)).abs().max() < 0.06


def test_start_is_switch_after() -> None:
    assert made(2, warmup_steps=3) == tx.switch_after(3, tx.mean("data"), made(2))
    assert tx.power_sgd("data", warmup_steps=2, over="live").spec["before"] == tx.mean("data", over="live")


def test_large_epsilon_shrinks_the_result() -> None:
    def one_rank(epsilon: float) -> Any:
        hook = tx.power_sgd("data", epsilon=epsilon)
        g = torch.outer(torch.arange(20.0), torch.arange(10.0))
        return hook.update(g, hook.init(g))[0] / g.clamp(min=1)

    small, none = (tx.simulate(one_rank, {"data": 2}, [e, e])[0].max() for e in (1e-8, 0.0))
    half = tx.simulate(one_rank, {"data": 2}, [1e9, 1e9])[0].max()
    assert abs(small - none) < 1e-6 and 0 < half < 0.01


def test_raises_on_bad_input() -> None:
    for rank in (0, -1, 1.5, True, "2"):
        raises_text(ValueError, lambda: tx.power_sgd("data", rank), "rank", "at least 1", repr(rank))  # noqa: B023
    for rate in (0.0, -1.0, float("nan"), float("inf"), True, "2"):
        given: Any = {"min_compression_rate": rate}
        raises_text(ValueError, lambda: tx.power_sgd("data", **given), "min_compression_rate", repr(rate))  # noqa: B023
    raises_text(ValueError, lambda: tx.power_sgd("data", epsilon=-1e-8), "epsilon", "-1e-08")
    raises_text(ValueError, lambda: tx.power_sgd("data", warmup_steps=-1), "warmup_steps", "-1")
    raises_text(ValueError, lambda: tx.power_sgd("data", seed=0.5), "seed", "0.5")
    raises_text(TypeError, lambda: tx.power_sgd("data", warm_start=1), "warm_start", "1")
    raises_text(ValueError, lambda: tx.batched_power_sgd("data", over="all"), "over", "'all'")
    hook, params = made(2), draws(0)
    for state in (made(1).init(params), hook.init({"b": params["b"]})):
        text = raises_text(
            ValueError, lambda: tx.simulate(lambda: hook.update(params, state), {"data": 2}), "'a'", "(2, 9)"  # noqa: B023
        )  # fmt: skip
        assert "another rank" in text
