"""The step's own promises, on simulated ranks: fused equals unfused, accumulation, donation, buffers, sums."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from helpers import max_diff, raises_text, same_bits
from one_rank import train_one_rank
from oracle.whole_batch import make_batches, make_model, parameters, train
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from fjoin.transforms._layout import make_layout

SIZES = [[3, 2, 4], [5], []]


def _quadratic(params: Any, batch: Tensor) -> Tensor:
    return ((params["w"] * batch).sum() - 1) ** 2 + params["b"].sum() ** 2


def _start() -> dict[str, Tensor]:
    return {"w": torch.tensor([0.5, -0.5], dtype=torch.float64), "b": torch.tensor(0.25, dtype=torch.float64)}


def _one(pipeline: tx.Pipeline, **settings: Any) -> tuple[fjoin.TrainStep, fjoin.TrainState]:
    step = fjoin.train_step(_quadratic, pipeline, **settings)
    return step, step.init(_start())


X = torch.tensor([1.0, 2.0], dtype=torch.float64)

HOOKS = {
    "mean": lambda: tx.mean("data"),
    "live": lambda: tx.mean("data", over="live"),
    "world": lambda: tx.mean("data", over="world"),
    "sum": lambda: tx.sum_over("data"),
    "mean, clip": lambda: tx.chain(tx.mean("data"), tx.clip_by_global_norm(0.1)),
    "mean, two stages": lambda: tx.chain(tx.mean("data"), tx.clip_by_value(0.05), tx.clip_by_global_norm(0.1)),
    "clip, mean": lambda: tx.chain(tx.clip_by_value(0.05), tx.mean("data")),
    "by path": lambda: tx.partition({"*.weight": tx.mean("data"), "*": tx.sum_over("data")}),
    "masked": lambda: tx.chain(tx.mean("data"), tx.masked(tx.clip_by_value(0.01), "*.bias")),
    "switched": lambda: tx.switch_after(2, tx.mean("data"), tx.mean("data", over="live")),
    "mean of mean": lambda: tx.chain(tx.skip_if_nonfinite(tx.mean("data")), tx.identity()),
}
OPTIMIZERS = {
    "adamw": lambda: tx.adamw(tx.warmup_cosine(0.05, 2, 10), weight_decay=0.1),
    "by path": lambda: tx.partition({"*.bias": tx.sgd(0.1, momentum=0.9), "0.*": tx.frozen(), "*": tx.adam(0.05)}),
}


def _unfused(batches: list[Any], pipeline: tx.Pipeline) -> Any:
    """The same training with torch.func.grad and pipeline.step, one call after the other."""
    apply, params, _ = fjoin.functional(make_model())

    def loss_fn(params: Any, batch: Any) -> Tensor:
        return torch.nn.functional.cross_entropy(apply(params, {}, batch[0]), batch[1])

    state = pipeline.init(params)
    steps = int(tx.pmax(torch.tensor(len(batches)), "data"))
    for i in range(steps):
        if i < len(batches):
            grads, weight = torch.func.grad(loss_fn)(params, batches[i]), float(len(batches[i][1]))
        else:
            grads, weight = {path: torch.zeros_like(p) for path, p in params.items()}, 0.0
        params, state = pipeline.step(params, grads, state, weight=weight)
    return params, state.optimizer


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("bucket_bytes", [1, 100, 10**6])
def test_fused_equals_unfused(hook: str, optimizer: str, bucket_bytes: int) -> None:
    pipeline = tx.fuse(HOOKS[hook](), OPTIMIZERS[optimizer]())
    batches = make_batches(1, SIZES)
    fused = tx.simulate(lambda b: train_one_rank(b, pipeline, bucket_bytes=bucket_bytes), {"data": 3}, batches)
    plain = tx.simulate(lambda b: _unfused(b, pipeline), {"data": 3}, batches)
    start = parameters(make_model())
    for a, (params, slots) in zip(fused, plain, strict=True):
        moved = {path: p - start[path] for path, p in a["params"].items()}
        assert max_diff(moved, {path: p - start[path] for path, p in params.items()}) < 1e-13
        assert max_diff(a["optimizer"], slots) < 1e-13


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("hook", ["mean", "live", "world", "sum", "mean, clip", "mean, two stages"])
@pytest.mark.parametrize("bucket_bytes", [1, 100, 10**6])
def test_stepping_early_changes_no_bit(hook: str, optimizer: str, bucket_bytes: int) -> None:
    pipeline = tx.fuse(HOOKS[hook](), OPTIMIZERS[optimizer]())
    batches = make_batches(1, SIZES)

    def run(early: bool) -> Any:
        return tx.simulate(
            lambda b: train_one_rank(b, pipeline, bucket_bytes=bucket_bytes, overlap_step=early), {"data": 3}, batches
        )

    assert same_bits(run(False), run(True))


def test_the_state_is_that_of_the_pure_pipeline() -> None:
    pipeline = tx.fuse(tx.chain(tx.mean("data"), tx.clip_by_global_norm(1.0)), tx.adamw(0.1))
    step, state = _one(pipeline)
    assert same_bits(state.pipeline, pipeline.init(_start()))
    params = {path: p.clone() for path, p in state.params.items()}
    old = pipeline.init(params)
    grads = torch.func.grad(_quadratic)(params, X)
    with fjoin.bind(fjoin.mesh({"data": -1})):
        params, new = pipeline.step(params, grads, old)
    state, _ = step(state, X)
    assert max_diff(state.params, params) < 1e-14
    assert max_diff(state.pipeline.optimizer, new.optimizer) < 1e-14
    assert state.pipeline.hook[0].total == new.hook[0].total == 1


@pytest.mark.parametrize("window", [1, 2, 3, 4])
def test_accumulation_is_one_step_on_the_window(window: int) -> None:
    """Ranks with 7, 4 and 0 micro-batches; the last windows are incomplete."""
    sizes = [[3, 2, 4, 1, 2, 5, 3], [5, 1, 2, 2], []]
    batches = make_batches(3, sizes)
    pipeline = tx.fuse(tx.mean("data"), tx.adamw(0.05))
    results = tx.simulate(lambda b: train_one_rank(b, pipeline, accumulate=window), {"data": 3}, batches)
    calls = -(-7 // window) * window
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    start = parameters(model)
    windows = [[_together([m for b in batches for m in b[i : i + window]])] for i in range(0, 7, window)]
    for one in windows:
        train(model, optimizer, [one])
    for r in results:
        assert r["calls"] == calls and len(r["losses"]) == len(windows)
        moved = {path: p - start[path] for path, p in r["params"].items()}
        assert max_diff(moved, {path: p - start[path] for path, p in parameters(model).items()}) < 1e-12
        assert same_bits(r["params"], results[0]["params"])


def _together(batches: list[Any]) -> Any:
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


def test_accumulation_under_a_hook_that_runs_as_it_stands() -> None:
    sizes = [[3, 2, 4], [5, 1]]
    batches = make_batches(3, sizes)
    a = tx.simulate(
        lambda b: train_one_rank(b, tx.fuse(tx.mean("data"), tx.sgd(0.1)), accumulate=2), {"data": 2}, batches
    )
    hook = tx.chain(tx.stateless(lambda g: g * 1.0), tx.mean("data"))
    b = tx.simulate(lambda b: train_one_rank(b, tx.fuse(hook, tx.sgd(0.1)), accumulate=2), {"data": 2}, batches)
    assert max_diff(a[0]["params"], b[0]["params"]) < 1e-14 and a[0]["calls"] == b[0]["calls"] == 4


def test_within_a_window_nothing_is_reported() -> None:
    step, state = _one(tx.fuse(tx.mean("data"), tx.sgd(0.1)), accumulate=2)
    state, metrics = step(state, X)
    assert not metrics.stepped and metrics.loss != metrics.loss and state.step == 0
    state, metrics = step(state, X)
    assert metrics.stepped and metrics.weight == 2 and state.step == 1


def test_the_users_sums_travel_with_the_gradients() -> None:
    def one_rank(batches: list[Any]) -> list[Any]:
        apply, params, _ = fjoin.functional(make_model())

        def loss_fn(params: Any, batch: Any) -> Any:
            out = apply(params, {}, batch[0])
            right = (out.argmax(1) == batch[1]).sum()
            return torch.nn.functional.cross_entropy(out, batch[1]), {
                "sum": {"right": right, "n": len(batch[1])},
                "own": 7,
            }

        step = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.sgd(0.1)))
        state, seen = step.init(params), []
        for batch in step.join(batches):
            state, metrics = step(state, batch)
            seen.append((metrics.sums["n"], metrics.sums["right"], metrics.aux and metrics.aux["own"]))
        return seen

    a, b, c = tx.simulate(one_rank, {"data": 3}, make_batches(1, SIZES))
    assert [n for n, _, _ in a] == [8, 2, 4] and [s[:2] for s in a] == [s[:2] for s in b] == [s[:2] for s in c]
    assert [own for _, _, own in b] == [7, None, None] and [own for _, _, own in c] == [None] * 3


def test_a_rank_without_any_batch_may_come_first_or_be_alone() -> None:
    pipeline = tx.fuse(tx.mean("data"), tx.adamw(0.1))
    for sizes in ([[], [], [2, 3]], [[], []], [[]]):
        results = tx.simulate(lambda b: train_one_rank(b, pipeline), {"data": len(sizes)}, make_batches(0, sizes))
        assert all(r["calls"] == max(len(s) for s in sizes) for r in results)
        assert all(same_bits(r["params"], results[0]["params"]) for r in results)


def test_weight_zero_of_a_live_batch_is_left_out() -> None:
    """A batch of padding alone: its loss is 0 / 0, and is not looked at."""

    def one_rank(batch: Tensor, weight: float) -> Any:
        step = fjoin.train_step(_quadratic, tx.fuse(tx.mean("data"), tx.sgd(0.1)), weight=lambda _: weight)
        state, metrics = step(step.init(_start()), batch)
        return state.params["w"].clone(), metrics.loss

    nan = torch.full((2,), float("nan"), dtype=torch.float64)
    (a, loss_a), (b, loss_b) = tx.simulate(one_rank, {"data": 2}, [X, nan], [2.0, 0.0])
    ((alone, loss),) = tx.simulate(one_rank, {"data": 1}, [X], [2.0])
    assert torch.equal(a, b) and torch.equal(a, alone) and loss_a == loss_b == loss


def test_all_weights_zero_changes_nothing() -> None:
    step, state = _one(tx.fuse(tx.mean("data"), tx.adamw(0.1)), weight=lambda _: 0)
    state, metrics = step(state, X)
    assert same_bits(state.params, _start()) and metrics.weight == 0 and metrics.loss != metrics.loss
    assert all(s.step == 0 for s in state.pipeline.optimizer.values())


def test_counts_are_exact_where_float32_is_not() -> None:
    """2^24 + 1 tokens on one rank and 1 on another: their sum is not a float32."""

    def one_rank(weight: float) -> float:
        def loss_fn(params: Any, batch: Any) -> Tensor:
            return (params["w"] * batch).sum()

        step = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.sgd(0.1)), weight=lambda _: weight)
        _, metrics = step(step.init({"w": torch.ones(1)}), torch.ones(1))
        return metrics.weight

    assert tx.simulate(one_rank, {"data": 3}, [2.0**24 + 1, 1.0, 2.0**40]) == [2.0**24 + 2 + 2.0**40] * 3


# -- donation, purity, memory ------------------------------------------------------------------------


def test_a_donated_state_cannot_be_used_again() -> None:
    step, first = _one(tx.fuse(tx.mean("data"), tx.sgd(0.1)))
    kept = first.clone()
    second, _ = step(first, X)
    for use in (lambda: step(first, X), lambda: first.params, lambda: first.clone(), lambda: first.pipeline):
        raises_text(fjoin.DonatedState, use, "donated to step 0", "state, metrics = step(state, batch)", "donate=False")
    assert same_bits(kept.params, _start())
    again, _ = step(kept, X)
    assert same_bits(again.params, second.params)


def test_a_state_belongs_to_its_step() -> None:
    step, state = _one(tx.fuse(tx.mean("data"), tx.sgd(0.1)))
    other, _ = _one(tx.fuse(tx.mean("data"), tx.sgd(10.0)))
    raises_text(ValueError, lambda: other(state, X), "another train_step's init", "step.init(state.params)")
    moved, _ = other(other.init(state.params), X)
    assert not same_bits(moved.params, _start()) and same_bits(state.params, _start())


def test_clones_and_second_states_overlap_too() -> None:
    """Every state's leaves tell when their gradients arrive, whichever was used before."""
    step, state = _one(tx.fuse(tx.mean("data"), tx.sgd(0.1)), bucket_bytes=1)
    state, _ = step(state, X)
    seen: list[int] = []
    assert step._run._queue is not None
    arrived = step._run._queue.arrived
    step._run._queue.arrived = lambda bucket, leaf: (seen.append(bucket), arrived(bucket, leaf))[1]  # type: ignore
    a, b = state.clone(), state.clone()
    for s in (a, b, state):
        step(s, X)
    assert seen == [0, 1] * 3 or sorted(seen) == [0, 0, 0, 1, 1, 1]


def test_without_donation_the_old_state_stays_whole() -> None:
    step, first = _one(tx.fuse(tx.mean("data"), tx.adamw(0.1)), donate=False)
    second, _ = step(first, X)
    assert same_bits(first.params, _start()) and not same_bits(second.params, _start())
    again, _ = step(first, X)
    assert same_bits(again.params, second.params) and same_bits(again.pipeline.optimizer, second.pipeline.optimizer)


def test_the_parameters_given_stay_as_they_were() -> None:
    params = _start()
    step = fjoin.train_step(_quadratic, tx.fuse(tx.mean("data"), tx.sgd(0.1)))
    step(step.init(params), X)
    assert same_bits(params, _start()) and all(p.grad is None for p in params.values())


def test_a_pending_use_of_a_parameter_is_noticed() -> None:
    """Stepping in place must not go unseen by a graph that still needs the old values."""
    step, state = _one(tx.fuse(tx.mean("data"), tx.sgd(0.1)))
    w = state.params["w"].requires_grad_()
    other = (w * w).sum()
    step(state, X)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


def test_a_closed_step_is_freed() -> None:
    step, state = _one(tx.fuse(tx.mean("data"), tx.sgd(0.1)))
    state, _ = step(state, X)
    gone = weakref.ref(step)
    run = weakref.ref(step._run)
    step.close()
    del step
    gc.collect()
    assert gone() is None and run() is None
    assert state.params["w"].shape == (2,)


def test_a_torn_state_says_so() -> None:
    def explode(p: Any, s: Any, params: Any = None, **extra: Any) -> Any:
        raise ValueError("boom")

    step, state = _one(tx.fuse(tx.mean("data"), tx.sgd(0.1), after=tx.Transform(lambda p: (), explode)))
    with pytest.raises(ValueError, match="boom"):
        step(state, X)
    raises_text(fjoin.TornState, lambda: state.params, "step 0", "donate=False")
    step, state = _one(tx.fuse(tx.mean("data"), tx.sgd(0.1), after=tx.Transform(lambda p: (), explode)), donate=False)
    with pytest.raises(ValueError, match="boom"):
        step(state, X)
    assert same_bits(state.params, _start())


def test_a_parameter_transform_runs_after_the_optimizer() -> None:
    """Local SGD: nobody sends gradients, parameters are averaged every other step."""

    def one_rank(scale: float) -> Any:
        def average(p: Any, s: Any, params: Any = None, **extra: Any) -> Any:
            return tx.pmean(p, "data"), s

        after = tx.every(2, tx.Transform(lambda p: (), average))
        step = fjoin.train_step(_quadratic, tx.fuse(tx.noop(), tx.sgd(0.01), after=after))
        state, seen = step.init(_start()), []
        for batch in step.join([X * scale] * 4):
            state, _ = step(state, batch)
            seen.append(state.params["w"].clone())
        return seen

    a, b = tx.simulate(one_rank, {"data": 2}, [1.0, 2.0])
    assert [torch.equal(x, y) for x, y in zip(a, b, strict=True)] == [False, True, False, True]


# -- trees, buffers, dtypes, layouts -----------------------------------------------------------------


def test_any_tree_of_parameters() -> None:
    tree = {"b": [torch.ones(2), (torch.ones(1), {"z": torch.tensor(1.0), "a": torch.ones(0, 3)})], "a": torch.ones(1)}

    def loss_fn(params: Any, batch: Any) -> Tensor:
        assert isinstance(params["b"][1], tuple)
        return (params["b"][0] * batch).sum() + params["b"][1][1]["z"] ** 2 + params["a"].sum()

    step = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.adamw(0.1)))
    state, _ = step(step.init(tree), torch.ones(2))
    assert state.params["b"][1][1]["a"].shape == (0, 3)
    assert torch.equal(state.params["b"][1][0], torch.ones(1) * (1 - 0.1 * 0.01)), "an unused parameter is decayed"
    assert state.pipeline.optimizer["a"].step == 1


def test_no_parameters_at_all() -> None:
    step = fjoin.train_step(lambda p, b: b.sum(), tx.fuse(tx.mean("data"), tx.sgd(0.1)))
    state = step.init({})
    raises_text(ValueError, lambda: step(state, torch.ones(1)), "does not depend on params")
    state, metrics = step(state, torch.ones(1, requires_grad=True))
    assert metrics.loss == 1 and state.params == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_exact_counts(dtype: torch.dtype) -> None:
    """Counts never ride in 16 bits: they are a message of their own, or in a float32 bucket."""

    def one_rank(n: float) -> Any:
        def loss_fn(params: Any, batch: Any) -> Tensor:
            return (params["h"] * batch).float().sum()

        step = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.sgd(0.5)), weight=lambda _: n)
        state, metrics = step(step.init({"h": torch.ones(4, dtype=dtype)}), torch.ones(4, dtype=dtype))
        return metrics.weight, state.params["h"].clone()

    (weight, h), (other, _) = tx.simulate(one_rank, {"data": 2}, [2049.0, 1.0])
    assert weight == other == 2050
    assert torch.allclose(h, torch.full((4,), 0.5, dtype=dtype), rtol=0, atol=2**-8)


def test_mixed_dtypes_in_one_model() -> None:
    def one_rank(x: float) -> Any:
        params = {"a": torch.ones(3), "b": torch.ones(3, dtype=torch.float64), "c": torch.ones(3, dtype=torch.bfloat16)}

        def loss_fn(params: Any, batch: Any) -> Tensor:
            return sum((p * batch).double().sum() for p in params.values())

        step = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.sgd(1.0)))
        state, _ = step(step.init(params), x)
        return {path: p.clone() for path, p in state.params.items()}

    (a, b) = tx.simulate(one_rank, {"data": 2}, [1.0, 2.0])
    assert same_bits(a, b)
    assert all(torch.allclose(p.double(), torch.full((3,), -0.5, dtype=torch.float64)) for p in a.values())


def test_large_tensors_are_sent_without_a_copy() -> None:
    params = {"big": torch.zeros(1100, 1000), "small": torch.zeros(10)}
    layout = make_layout(params, lambda path: 0)
    assert [b.direct for b in layout] == [False, True] or [b.direct for b in layout] == [True, False]

    def one_rank(x: float) -> Any:
        def loss_fn(params: Any, batch: Any) -> Tensor:
            return (params["big"] * batch).sum() / 1000 + params["small"].sum() * batch

        step = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.adamw(0.1)))
        state = step.init(params)
        for batch in step.join([x] * int(x)):
            state, _ = step(state, batch)
        return {path: p.clone() for path, p in state.params.items()}

    a, b = tx.simulate(one_rank, {"data": 2}, [1.0, 3.0])
    assert same_bits(a, b) and a["big"].abs().sum() > 0


def test_buffers_are_returned_and_kept() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
    apply, params, buffers = fjoin.functional(model)

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
        out, buffers = apply.with_buffers(params, buffers, batch[0])
        return torch.nn.functional.cross_entropy(out, batch[1]), None, buffers

    step = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.sgd(0.1)))
    state = step.init(params, buffers)
    reference = torch.optim.SGD(model.parameters(), 0.1)
    for batch in make_batches(0, [[4, 5]], torch.float32)[0]:
        state, _ = step(state, batch)
        reference.zero_grad()
        torch.nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        reference.step()
    assert state.buffers is not None and state.buffers["1.num_batches_tracked"] == 2
    assert max_diff(state.buffers, dict(model.named_buffers())) < 1e-7
    assert max_diff(state.params, parameters(model)) < 1e-6
    assert buffers["1.num_batches_tracked"] == 0


def test_initial_parameters_are_made_equal_or_checked() -> None:
    def one_rank(value: float, sync: Any) -> Any:
        step = fjoin.train_step(lambda p, b: p["w"].sum() * b, tx.fuse(tx.mean("data"), tx.sgd(0.1)))
        return step.init({"w": torch.full((3,), value)}, sync=sync).params["w"].clone()

    a, b = tx.simulate(one_rank, {"data": 2}, [1.0, 2.0], ["broadcast"] * 2)
    assert torch.equal(a, b) and a[0] == 1
    a, b = tx.simulate(one_rank, {"data": 2}, [1.0, 2.0], [None] * 2)
    assert a[0] == 1 and b[0] == 2
    tx.simulate(one_rank, {"data": 2}, [2.0, 2.0], ["check"] * 2)
    raises_text(
        fjoin.DesyncError, lambda: tx.simulate(one_rank, {"data": 2}, [1.0, 2.0], ["check"] * 2),
        "'w' has other values on rank 1 than on rank 0", "broadcast",
    )  # fmt: skip


def test_two_axes_at_once() -> None:
    """mean over both axes of a 2 x 2 mesh is the mean over four ranks; the hook may also go one by one."""
    batches = make_batches(5, [[3, 2], [1], [], [4, 4, 2]])

    def one_rank(mine: Any, hook: tx.Transform) -> Any:
        apply, params, _ = fjoin.functional(make_model())
        step = fjoin.train_step(
            lambda p, b: torch.nn.functional.cross_entropy(apply(p, {}, b[0]), b[1]),
            tx.fuse(hook, tx.adamw(0.01)), mesh=fjoin.mesh({"node": 2, "local": 2}), weight=lambda b: len(b[1]),
        )  # fmt: skip
        state = step.init(params)
        for batch in step.join(mine):
            state, _ = step(state, batch)
        return {path: p.clone() for path, p in state.params.items()}

    pipeline = tx.fuse(tx.mean("data"), tx.adamw(0.01))
    flat = tx.simulate(lambda b: train_one_rank(b, pipeline), {"data": 4}, batches)
    for hook in (tx.mean(("node", "local")), tx.chain(tx.mean("local"), tx.mean("node")), tx.mean(("local", "node"))):
        both = tx.simulate(lambda b: one_rank(b, hook), {"node": 2, "local": 2}, batches)  # noqa: B023
        assert all(max_diff(p, flat[0]["params"]) < 1e-13 for p in both)
