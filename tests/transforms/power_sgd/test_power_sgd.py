"""PowerSGD: the compressed leaves, their accuracy, and the residuals; on zeros, NaN and ranks of weight 0."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fjoin import transforms as tx
from fjoin.transforms.base.trees import restrict
from tests.helpers import max_diff, same_bits
from tests.power_problem import COMPRESSED, SHAPES, draws, exact, exact32, made


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


def test_residuals_stay_bounded() -> None:
    """The same gradients 200 times, different on each rank. The sum of the residuals stays, and where the mean spans all rows
    so does each residual; torch's `local - mean` grows by as much in every step."""

    def one_rank() -> Any:
        hook = tx.error_feedback(made(2))
        grads = draws(int(tx.axis_index("data")), torch.float64)
        state, own, sums = hook.init(grads), [], []
        for _ in range(60):
            _, state = hook.update(grads, state)
            own.append(max(float(state.error[path].norm() / grads[path].norm()) for path in ("b", "conv")))
            sums.append(max(float(e.norm()) for e in tx.psum(state.error, "data").values()))
        return own, sums

    for seen in tx.simulate(one_rank, {"data": 3}):
        for values in seen:
            assert max(values[30:]) < 1.2 * max(values[:30])


WIDE = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    ("rank", "dtype"), [*((rank, torch.float64) for rank in (1, 3, 5)), *((2, dtype) for dtype in WIDE)]
)
def test_a_low_rank_is_reproduced(rank: int, dtype: torch.dtype) -> None:
    """Results have the gradients' dtype; sums, Q and errors have at least float32."""

    def one_rank() -> Any:
        hook = tx.error_feedback(made(rank))
        grads = {path: g.to(dtype) for path, g in exact(int(tx.axis_index("data")), rank).items()}
        return hook.update(grads, hook.init(grads))

    wide, room = torch.promote_types(dtype, torch.float32), 160 * torch.finfo(dtype).eps
    for ranks in (2, 3):
        want = {path: sum(exact(r, rank)[path] for r in range(ranks)) / ranks for path in SHAPES}
        for out, state in tx.simulate(one_rank, {"data": ranks}):
            assert {v.dtype for v in out.values()} == {dtype}
            assert {v.dtype for v in (*state.error.values(), *state.inner.q.values())} == {wide}
            assert max_diff({path: v.double() for path, v in out.items()}, want) < room


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


# -- zeros, values that are not finite, ranks of weight 0 ---------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 1])
def test_gradients_of_a_lower_rank_do_not_affect_the_next_ones(rows: int) -> None:
    """Factors that vanish are drawn anew; a gradient of zeros gives zeros."""
    low = {path: torch.zeros(shape) for path, shape in SHAPES.items()}
    for value in (low[path] for path in COMPRESSED):
        value[:rows] = 2.0

    def one_rank(warm: bool) -> Any:
        hook = made(2, warm_start=warm)
        state = hook.init(low)
        first, state = hook.update(low, state)
        second, state = hook.update(exact32(), state)
        return first, second, state

    for warm in (True, False):
        for first, second, state in tx.simulate(one_rank, {"data": 2}, [warm, warm]):
            assert max_diff(first, low) < 1e-6 * rows + 1e-12
            assert max_diff(second, exact32()) < 1e-4  # as far as a random Q of full rank is well conditioned
            assert all(torch.isfinite(q).all() for q in state.q.values())


def test_a_bucket_keeps_its_corner_of_a_batched_q() -> None:
    def one_rank(rank: int) -> Any:
        hook, grads = tx.batched_power_sgd("data", 2, min_compression_rate=1.0), draws(rank)
        before = restrict(hook.init(grads), grads, ["a", "b"])
        _, after = hook.update({path: grads[path] for path in ("a", "b")}, before)
        return before.q["a"], after.q["a"]

    for old, new in tx.simulate(one_rank, {"data": 2}, [0, 1]):
        side = 15  # of a square for 216 elements
        assert (
            new.shape == old.shape
            and same_bits(new[:, side:], old[:, side:])
            and not same_bits(new[:, :side], old[:, :side])
        )
