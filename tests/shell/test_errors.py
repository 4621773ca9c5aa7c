"""Bad input: a clear error on every rank, parameters unchanged, nothing hung."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import raises_text, same_bits
from torch import Tensor

import fjoin
from fjoin import transforms as tx

MEAN_SGD = tx.fuse(tx.mean("data"), tx.sgd(0.1))


def _loss(params: Any, batch: Tensor) -> Tensor:
    return (params["w"] * batch).sum()


def _step(loss: Callable[..., Any] = _loss, pipeline: tx.Pipeline = MEAN_SGD, **settings: Any) -> Any:
    step = fjoin.train_step(loss, pipeline, **settings)
    return step, step.init({"w": torch.ones(2), "v": torch.ones(2)})


X = torch.ones(2)


@pytest.mark.parametrize(
    ("make", "kind", "texts"),
    [
        (lambda: fjoin.train_step(None, MEAN_SGD), TypeError, ["loss_fn must be a function", "None"]),
        (lambda: fjoin.train_step(_loss, tx.mean("data")), TypeError, ["pipeline must be a Pipeline", "fuse(hook, optimizer)"]),
        (lambda: fjoin.train_step(_loss, tx.sgd(0.1)), TypeError, ["pipeline must be a Pipeline"]),
        (lambda: fjoin.train_step(_loss, MEAN_SGD, accumulate=0), ValueError, ["accumulate", "at least 1", "0"]),
        (lambda: fjoin.train_step(_loss, MEAN_SGD, bucket_bytes=0), ValueError, ["bucket_bytes", "at least 1"]),
        (
            lambda: fjoin.train_step(_loss, tx.fuse(tx.accumulate(2, tx.mean("data")), tx.sgd(0.1))),
            ValueError, ["accumulate=k"],
        ),
        (
            lambda: fjoin.train_step(_loss, tx.fuse(tx.mean("rows"), tx.sgd(0.1))),
            NameError, ["'rows'", "['data']"],
        ),
        (lambda: fjoin.mesh({}), ValueError, ["at least one axis"]),
        (lambda: fjoin.mesh({"data": 2}), ValueError, ["does not fit 1 ranks"]),
        (lambda: fjoin.mesh({"a": -1, "b": -1}), ValueError, ["one of them may be -1"]),
        (lambda: fjoin.mesh({"a": 0}), ValueError, ["does not fit"]),
        (lambda: fjoin.functional(torch.ones(1)), TypeError, ["nn.Module"]),
        (lambda: tx.chain(tx.sgd(0.1), tx.mean("data")), TypeError, ["argument 0", "an optimizer comes last"]),
        (lambda: tx.chain(tx.mean), TypeError, ["forget to call the factory"]),
        (lambda: tx.chain(MEAN_SGD), TypeError, ["pipeline is complete already"]),
        (lambda: tx.fuse(tx.mean("data"), tx.mean("data")), TypeError, ["optimizer must be an Optimizer", "fuse(hook, optimizer)"]),
        (lambda: tx.fuse(tx.sgd(0.1), tx.mean("data")), TypeError, ["an optimizer comes last"]),
        (lambda: tx.fuse(tx.mean("data"), tx.sgd(0.1), after=3), TypeError, ["fuse: after", "3"]),
        (lambda: tx.partition({}), ValueError, ["at least one pattern"]),
        (lambda: tx.partition({"*": 3}), TypeError, ["'*'", "3"]),
        (lambda: tx.partition({"a": tx.sgd(0.1), "*": tx.mean("data")}), TypeError, ["must be a Transform"]),
        (lambda: tx.mean("data", over="ranks"), ValueError, ["'weight', 'live' or 'world'", "'ranks'"]),
        (lambda: tx.switch_after(-1, tx.noop(), tx.noop()), ValueError, ["step", "-1"]),
        (lambda: tx.every(0, tx.noop()), ValueError, ["steps", "0"]),
        (lambda: tx.accumulate(1.5, tx.noop()), ValueError, ["steps", "1.5"]),
        (lambda: tx.skip_if_nonfinite(tx.sgd(0.1)), TypeError, ["fuse(hook, optimizer)"]),
        (lambda: tx.clip_by_global_norm(0), ValueError, ["max_norm", "0"]),
        (lambda: tx.clip_by_value(-1.0), ValueError, ["max_value", "-1.0"]),
        (lambda: tx.stateless(torch.sign, scope="tree"), ValueError, ["'leaf' or 'element'"]),
        (lambda: tx.sgd(-0.1), ValueError, ["lr", "-0.1"]),
        (lambda: tx.sgd(0.1, nesterov=True), ValueError, ["nesterov needs momentum"]),
        (lambda: tx.adamw(0.1, betas=(0.9, 1.0)), ValueError, ["betas", "1.0"]),
        (lambda: tx.adam(0.1, eps=-1e-8), ValueError, ["eps"]),
        (lambda: tx.warmup_cosine(0.1, 10, 10), ValueError, ["total_steps", "11"]),
        (lambda: tx.explain(3, {}, {"data": 2}), TypeError, ["takes a pipeline or a transform"]),
        (lambda: tx.simulate(lambda: None, {}), ValueError, ["axes is empty"]),
        (lambda: tx.simulate(lambda: None, {"data": 0}), ValueError, ["'data'", "at least 1"]),
        (lambda: tx.simulate(lambda x: x, {"data": 2}, [1]), ValueError, ["1 values for 2 ranks"]),
        (lambda: tx.simulate(lambda: None, {"data": 2}, engine="fast"), ValueError, ["'lockstep' or 'vmap'"]),
        (lambda: tx.psum(torch.ones(1), "rows"), tx.UnboundAxis, ["'rows'", "Bound here: []", "fjoin.bind", "simulate"]),
        (lambda: tx.from_json('{"name": "nothing", "args": {}}'), ValueError, ["'nothing'", "known"]),
        (lambda: tx.to_json(3), TypeError, ["3"]),
    ],
)  # fmt: skip
def test_what_cannot_be_made(make: Any, kind: Any, texts: list[str]) -> None:
    raises_text(kind, make, *texts)


@pytest.mark.parametrize(
    ("params", "kind", "texts"),
    [
        ({"w": torch.ones(2, dtype=torch.int64)}, TypeError, ["params['w']", "int64"]),
        ({"w": torch.ones(2, dtype=torch.complex64)}, TypeError, ["params['w']", "complex64", "view_as_real"]),
        ({"w": torch.ones(2).to_sparse()}, TypeError, ["params['w']", "sparse"]),
        ({"w": 3.0}, TypeError, ["params['w']", "float"]),
        ({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, ValueError, ["'a.b'", "rename"]),
    ],
)
def test_parameters_that_cannot_be_trained(params: Any, kind: Any, texts: list[str]) -> None:
    step = fjoin.train_step(_loss, MEAN_SGD)
    raises_text(kind, lambda: step.init(params), *texts)


@pytest.mark.parametrize(
    ("loss", "kind", "texts"),
    [
        (lambda p, b: p["w"] * b, ValueError, ["0-d floating-point loss", "(2,)"]),
        (lambda p, b: 3.0, ValueError, ["0-d floating-point loss", "3.0"]),
        (lambda p, b: b.sum(), ValueError, ["does not depend on params"]),
        (lambda p, b: ((p["w"] * b).sum(), 1, 2), TypeError, ["loss or (loss, aux)", "3 values"]),
        (lambda p, b: ((p["w"] * b).sum(), {"sum": {"n": "x"}}), TypeError, ["aux['sum']['n']", "'x'"]),
        (lambda p, b: ((p["w"] * b).sum(), {"sum": {"n": torch.ones(2)}}), ValueError, ["aux['sum']['n']", "(2,)"]),
    ],
)
def test_losses_that_cannot_be_used(loss: Any, kind: Any, texts: list[str]) -> None:
    step, state = _step(loss)
    raises_text(kind, lambda: step(state, X), *texts)
    assert torch.equal(state.params["w"], torch.ones(2))


@pytest.mark.parametrize("rows", [2, 2_000_000])
def test_sparse_gradients_are_refused(rows: int) -> None:
    """In a bucket of many, and as a message of its own."""

    def loss(params: Any, batch: Any) -> Tensor:
        return torch.nn.functional.embedding(torch.tensor([0]), params["table"], sparse=True).sum()

    step = fjoin.train_step(loss, MEAN_SGD)
    state = step.init({"table": torch.ones(rows, 1)})
    raises_text(TypeError, lambda: step(state, None), "'table'", "sparse", "to_dense")
    assert torch.equal(state.params["table"], torch.ones(rows, 1))


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_weights_that_cannot_be_used(weight: float) -> None:
    step, state = _step(weight=lambda _: weight)
    raises_text(ValueError, lambda: step(state, X), "weight(batch) must be a finite number", repr(weight))
    hook = tx.mean("data")
    run = lambda g: hook.update(g, hook.init(g), weight=weight)  # noqa: E731
    raises_text(ValueError, lambda: tx.simulate(run, {"data": 1}, [X]), "weight must be a finite number", repr(weight))


def test_a_state_of_something_else() -> None:
    step, state = _step()
    raises_text(TypeError, lambda: step({"w": X}, X), "what step.init", "dict")
    pipeline, params = MEAN_SGD, {"w": X}
    with fjoin.bind(fjoin.mesh({"data": -1})):
        raises_text(ValueError, lambda: pipeline.step(params, {"w": X}, ()), "PipelineState")
        raises_text(
            ValueError, lambda: pipeline.step(params, {"v": X}, pipeline.init(params)), "lacks ['w']", "['v'] besides"
        )
        raises_text(
            ValueError,
            lambda: pipeline.step(params, {"w": torch.ones(3)}, pipeline.init(params)),
            "grads['w']",
            "(3,)",
            "(2,)",
        )
        raises_text(
            TypeError, lambda: pipeline.step(params, {"w": X.double()}, pipeline.init(params)), "float64", "float32"
        )
        other = pipeline.init({"w": X, "v": X})
        raises_text(ValueError, lambda: pipeline.step(params, {"w": X}, other), "another tree or another pipeline")
        chain = tx.chain(tx.mean("data"), tx.clip_by_value(1.0))
        raises_text(ValueError, lambda: chain.update({"w": X}, ((),), None), "2 stages, but the state has 1")


def test_patterns_that_match_nothing() -> None:
    params = {"a.weight": X, "a.bias": X}
    raises_text(ValueError, lambda: tx.partition({"*.weight": tx.sgd(0.1)}).init(params), "'a.bias'", "add '*'")
    raises_text(
        ValueError, lambda: tx.partition({"b.*": tx.sgd(0.1), "*": tx.sgd(0.1)}).init(params), "['b.*']", "'a.bias'"
    )
    raises_text(ValueError, lambda: tx.masked(tx.noop(), "b.*").init(params), "'b.*' matches no path")
    step = fjoin.train_step(_loss, tx.fuse(tx.mean("data"), tx.partition({"nope": tx.sgd(0.1), "*": tx.sgd(0.2)})))
    raises_text(ValueError, lambda: step.init({"w": X}), "['nope']")


# -- non-finite: on all ranks alike, nothing changed, the state still good ---------------------------


def _poisoned(batch: Tensor, pipeline: tx.Pipeline, loss: Callable[..., Any]) -> Any:
    step = fjoin.train_step(loss, pipeline)
    state = step.init({"w": torch.ones(2), "v": torch.ones(2)})
    before = state.clone()
    text = raises_text(fjoin.NonFinite, lambda: step(state, batch))
    assert same_bits(state.params, before.params) and same_bits(state.pipeline, before.pipeline)
    state, metrics = step(state, X)  # the same state, and the other ranks, go on
    return text, metrics.loss


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "hook", [tx.mean("data"), tx.chain(tx.mean("data"), tx.clip_by_global_norm(1.0))], ids=["mean", "clip"]
)
def test_a_loss_that_is_not_finite(hook: tx.Transform, bad: float) -> None:
    pipeline = tx.fuse(hook, tx.adamw(0.1))
    batches = [X, X, torch.tensor([1.0, bad])]
    for text, loss in tx.simulate(lambda b: _poisoned(b, pipeline, _loss), {"data": 3}, batches):
        assert "step 0" in text and "loss of rank 2 is not finite" in text and "'w'" in text and loss == 2.0


def test_a_gradient_that_is_not_finite_though_the_loss_is() -> None:
    def loss(params: Any, batch: Tensor) -> Tensor:
        return (params["w"] * batch).sum() + torch.sqrt(params["v"] - batch).sum()

    ok = torch.zeros(2)
    for text, _ in tx.simulate(lambda b: _poisoned_sqrt(b, loss), {"data": 2}, [ok, X]):
        assert "the summed gradient of 'v' is not finite" in text and "rank" not in text.split(";")[0]


def _poisoned_sqrt(batch: Tensor, loss: Any) -> Any:
    step = fjoin.train_step(loss, MEAN_SGD)
    state = step.init({"w": torch.ones(2), "v": torch.ones(2)})
    text = raises_text(fjoin.NonFinite, lambda: step(state, batch))
    assert torch.equal(state.params["w"], torch.ones(2))
    return text, None


def test_stepping_early_a_loss_that_is_not_finite_changes_nothing_a_gradient_tears() -> None:
    def loss(params: Any, batch: Tensor) -> Tensor:
        return (params["w"] * batch).sum() + torch.sqrt(params["v"] - batch).sum()

    def one_rank(batch: Tensor) -> str:
        step = fjoin.train_step(loss, MEAN_SGD, overlap_step=True, bucket_bytes=1)
        state = step.init({"v": torch.ones(2), "w": torch.ones(2)})
        raises_text(fjoin.NonFinite, lambda: step(state, X * float("nan")), "loss of rank")
        assert torch.equal(state.params["w"], torch.ones(2))
        raises_text(fjoin.NonFinite, lambda: step(state, batch), "'v'")  # 'w' is stepped before 'v' arrives
        return raises_text(fjoin.TornState, lambda: state.params, "neither old nor new")

    tx.simulate(one_rank, {"data": 2}, [torch.zeros(2), X])
    step = fjoin.train_step(loss, MEAN_SGD, overlap_step=True)  # one bucket: nothing before it was stepped
    state = step.init({"v": torch.ones(2), "w": torch.ones(2)})
    raises_text(fjoin.NonFinite, lambda: step(state, X))
    assert torch.equal(state.params["w"], torch.ones(2))


def test_a_window_that_is_not_finite_is_lost_whole() -> None:
    step, state = _step(accumulate=3)
    for batch in (X, X):
        state, _ = step(state, batch)
    raises_text(fjoin.NonFinite, lambda: step(state, X * float("nan")))
    weights = []
    for _ in range(6):
        state, metrics = step(state, X)
        weights.append(metrics.weight if metrics.stepped else None)
    assert weights == [None, None, 3.0] * 2


def test_ranks_are_named_within_the_axes_that_are_reduced() -> None:
    def one_rank(batch: Tensor) -> Any:
        step = fjoin.train_step(
            _loss, tx.fuse(tx.mean("local"), tx.sgd(0.1)), mesh=fjoin.mesh({"node": 13, "local": 2})
        )
        state = step.init({"w": torch.ones(2), "v": torch.ones(2)}, sync=None)
        try:
            step(state, batch)
        except fjoin.NonFinite as error:
            return error.ranks
        return None

    out = tx.simulate(one_rank, {"node": 13, "local": 2}, [X] * 25 + [X * float("nan")])
    assert out == [None] * 24 + [(1,)] * 2


def test_a_failure_within_a_window_is_told() -> None:
    def loss(params: Any, batch: Tensor) -> Tensor:
        if batch.sum() > 5:
            raise ValueError("bad batch")
        return _loss(params, batch)

    step, state = _step(loss, accumulate=2)
    state, _ = step(state, X)
    raises_text(ValueError, lambda: step(state, X * 9), "bad batch")
    raises_text(fjoin.TornState, lambda: step(state, X), "accumulation window")


def test_values_whose_sum_overflows_are_still_finite() -> None:
    step = fjoin.train_step(lambda p, b: (p["w"] * b).sum() * 1e-30, tx.fuse(tx.mean("data"), tx.sgd(1e-38)))
    state = step.init({"w": torch.ones(4)})
    step = fjoin.train_step(lambda p, b: (p["w"] * b).sum(), tx.fuse(tx.mean("data"), tx.sgd(1e-38)))
    state = step.init({"w": torch.zeros(4)})
    state, _ = step(state, torch.full((4,), 3e38))
    assert torch.isfinite(state.params["w"]).all() and state.params["w"][0] < 0


def test_skip_if_nonfinite_leaves_the_step_out() -> None:
    pipeline = tx.skip_if_nonfinite(tx.fuse(tx.mean("data"), tx.adamw(0.1)))
    step, state = _step(pipeline=pipeline)
    state, metrics = step(state, torch.tensor([1.0, float("nan")]))
    assert torch.equal(state.params["w"], torch.ones(2)) and state.pipeline.inner.optimizer["w"].step == 0
    assert state.pipeline.skipped == 1
    with fjoin.bind(fjoin.mesh({"data": -1})):
        pipeline.step(state.params, {k: torch.ones(2) for k in ("w", "v")}, state.pipeline)
    state, metrics = step(state, X)
    assert not torch.equal(state.params["w"], torch.ones(2)) and metrics.loss == 2.0


def test_a_verdict_on_the_device_changes_nothing_and_is_told_later() -> None:
    """The way of accelerators, where the host does not wait, on tensors of the CPU."""
    for hook in (
        tx.mean("data"),
        tx.chain(tx.mean("data"), tx.clip_by_global_norm(1.0)),
        tx.chain(tx.mean("data"), tx.clip_by_value(9.0)),
    ):
        step, state = _step(pipeline=tx.fuse(hook, tx.adamw(0.1)))
        step._run.guard.on_device = True
        reference, other = _step(pipeline=tx.fuse(hook, tx.adamw(0.1)))
        state, metrics = step(state, X)
        other, expected = reference(other, X)
        assert same_bits(state.params, other.params) and metrics.loss == expected.loss
        before = state.clone()
        state, metrics = step(state, torch.tensor([1.0, float("nan")]))
        assert same_bits(state.params, before.params)
        assert same_bits(state.pipeline.optimizer, before.pipeline.optimizer)
        raises_text(fjoin.NonFinite, lambda: metrics.loss, "step 1", "loss of rank 0")  # noqa: B023
        state, _ = step(state, X)  # verdicts are read when they are one step old, on all ranks alike
        raises_text(fjoin.NonFinite, lambda: step(state, X), "step 1")  # noqa: B023
        state, metrics = step(state, X)
        assert metrics.loss == metrics.loss and not same_bits(state.params, before.params)


# -- the loop of join --------------------------------------------------------------------------------


def test_the_body_must_call_the_step_once() -> None:
    step, state = _step()

    def never() -> None:
        for _ in step.join([X, X]):
            pass

    raises_text(fjoin.JoinError, never, "did not call the step in iteration 0", "weight 0")
    step, state = _step()

    def twice() -> None:
        nonlocal state
        for batch in step.join([X, X]):
            state, _ = step(state, batch)
            state, _ = step(state, batch)

    raises_text(fjoin.JoinError, twice, "twice in iteration 0", "accumulate=k")


def test_one_loop_at_a_time() -> None:
    step, state = _step()
    loop = iter(step.join([X, X]))
    next(loop)
    raises_text(fjoin.JoinError, lambda: next(iter(step.join([X]))), "still running")
    loop.close()  # type: ignore[attr-defined]
    for batch in step.join([X]):
        state, _ = step(state, batch)


def test_a_rank_that_leaves_the_loop_is_noticed_in_the_simulator() -> None:
    def one_rank(leave: bool) -> None:
        step, state = _step()
        for batch in step.join([X] * 3):
            state, _ = step(state, batch)
            if leave:
                break

    raises_text(
        tx.CollectiveMismatch, lambda: tx.simulate(one_rank, {"data": 2}, [False, True]),
        "rank 0 waits in psum", "rank 1 has returned",
    )  # fmt: skip


def test_no_batch_says_what_to_do() -> None:
    for use in (
        lambda b: b.shape,
        lambda b: b[0],
        lambda b: len(b),
        lambda b: list(b),
        lambda b: b + 1,
        lambda b: bool(b),
    ):
        raises_text(fjoin.NoBatch, lambda: use(fjoin.NO_BATCH), "empty=")  # noqa: B023
    assert repr(fjoin.NO_BATCH) == "fjoin.NO_BATCH"

    def one_rank(batches: list[Tensor], empty: Any) -> list[float]:
        step, state = _step()
        seen = []
        for batch in step.join(batches, empty=empty):
            seen.append(float(batch.sum()))
            state, _ = step(state, batch)
        return seen

    assert tx.simulate(one_rank, {"data": 2}, [[X, X], []], [X * 0] * 2) == [[2.0, 2.0], [0.0, 0.0]]
    raises_text(fjoin.NoBatch, lambda: tx.simulate(one_rank, {"data": 2}, [[X, X], []], [fjoin.NO_BATCH] * 2), "empty=")


def test_an_exhausted_rank_sees_its_last_batch_again() -> None:
    def one_rank(batches: list[Tensor]) -> list[float]:
        step, state = _step()
        seen = []
        for batch in step.join(batches):
            seen.append(float(batch.sum()))
            state, _ = step(state, batch)
        return seen

    assert tx.simulate(one_rank, {"data": 2}, [[X, X, X], [X * 2]]) == [[2.0] * 3, [4.0] * 3]


def test_throwing_early_on_all_ranks_in_the_same_step() -> None:
    def one_rank(batches: list[Tensor]) -> Any:
        step, state = _step()
        calls = 0
        try:
            for batch in step.join(batches, throw_on_early_termination=True):
                state, _ = step(state, batch)
                calls += 1
        except fjoin.EarlyTermination as error:
            for batch in step.join([X]):  # the step can be used on
                state, _ = step(state, batch)
            return calls, str(error)
        return calls, ""

    for calls, text in tx.simulate(one_rank, {"data": 3}, [[X] * 4, [X] * 2, [X] * 3]):
        assert calls == 2 and "1 of 3 ranks are out of input after step 1" in text
    assert tx.simulate(one_rank, {"data": 2}, [[X] * 2, [X] * 2]) == [(2, "")] * 2
    for calls, text in tx.simulate(one_rank, {"data": 2}, [[X], []]):
        assert calls == 0 and "1 of 2 ranks" in text


def test_a_loader_that_raises() -> None:
    def broken() -> Any:
        yield X
        raise OSError("disk gone")

    step, state = _step()
    with pytest.raises(OSError, match="disk gone"):
        for batch in step.join(broken()):
            state, _ = step(state, batch)


# -- the ranks run different programs ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        ({"pipeline": tx.fuse(tx.mean("data"), tx.sgd(0.2))}, ["pipeline", "sgd(lr=0.2)", "sgd(lr=0.1)"]),
        ({"pipeline": tx.fuse(tx.mean("data", over="live"), tx.sgd(0.1))}, ["pipeline", "over='live'"]),
        ({"params": {"w": torch.ones(3)}}, ["parameters", "w: float32[3]", "w: float32[2]"]),
        ({"params": {"w": torch.ones(2, dtype=torch.float64)}}, ["parameters", "float64"]),
        ({"params": {"w": torch.ones(2), "v": torch.ones(1)}}, ["parameters", "2 of them", "1"]),
        ({"settings": {"bucket_bytes": 7}}, ["bucket_bytes", "7"]),
        ({"settings": {"accumulate": 2}}, ["accumulate", "2"]),
        ({"buffers": {"n": torch.ones(1)}}, ["buffers"]),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else None,
)
def test_another_program_on_one_rank(change: dict[str, Any], texts: list[str]) -> None:
    def one_rank(odd: bool) -> str:
        mine = change if odd else {}
        step = fjoin.train_step(_loss, mine.get("pipeline", MEAN_SGD), **mine.get("settings", {}))
        return raises_text(
            fjoin.DesyncError,
            lambda: step.init(mine.get("params", {"w": torch.ones(2)}), mine.get("buffers")), "Nothing has been sent", *texts,
        )  # fmt: skip

    for text in tx.simulate(one_rank, {"data": 3}, [False, True, False]):
        assert text.startswith("rank 1 differs from rank 0 in its")


def test_other_names_of_sums_on_one_rank() -> None:
    def one_rank(name: str) -> str:
        step, state = _step(lambda p, b: (_loss(p, b), {"sum": {name: 1}}))
        return raises_text(fjoin.DesyncError, lambda: step(state, X), "['a']", "['b']", "on rank 1")

    tx.simulate(one_rank, {"data": 2}, ["a", "b"])
    step, state = _step(lambda p, b: (_loss(p, b), {"sum": {f"n{len(seen)}": seen.append(1) or 1}}))
    seen: list[int] = []
    state, _ = step(state, X)
    raises_text(ValueError, lambda: step(state, X), "['n1']", "['n0']", "must stay the same")
