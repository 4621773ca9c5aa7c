"""Steps that are not finite: who leaves them out, who raises, and what runs in them all the same."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import fjoin
from fjoin import transforms as tx
from tests.helpers import judged, max_diff, raises_text, same_bits, seen_by
from tests.reducer.test_wire import CODECS
from tests.scalars import NAN, PLACES, Batch, as_batch, check, loss, on_ranks, own, registered, run, start
from tests.traffic import watched
from tests.training.small import product, step_of

SGD, NOT = tx.sgd(0.5), tx.identity()
ON_DEVICE = pytest.mark.parametrize("on_device", [False, True])


def plus_one(p: torch.Tensor) -> torch.Tensor:
    return p + 1


def counted(steps: int) -> tx.Pipeline:
    """Adds 1 to the parameters in every so many steps."""
    return tx.skip_if_nonfinite(tx.fuse(tx.mean("data"), SGD, after=tx.every(steps, tx.stateless(plus_one))))


# -- left out ----------------------------------------------------------------------------------------


EVERY = tx.skip_if_nonfinite(tx.fuse(NOT, SGD, after=tx.mean("data")))
SECOND = tx.skip_if_nonfinite(tx.fuse(NOT, SGD, after=tx.every(2, tx.mean("data"))))
MEAN = (1 * -0.5 + 2 * -2.5 + 2 * -2.5) / 5
PAIRS = [[Batch(1.0, 1.0), Batch(NAN, 1.0)], [Batch(2.0, 1.0), Batch(3.0, 1.0)], [Batch(3.0, 1.0), Batch(2.0, 1.0)]]
# A pipeline, the batches of each rank, w after each step or at the end, and the steps that each rank leaves out.
LEFT: dict[str, tuple[tx.Pipeline, list[Any], list[Any], list[int]]] = {
    # Periods advance in steps that are left out.
    "in the second": (counted(2), [[1.0, NAN, 1.0, 1.0]], [[-0.5, 0.5, 0.0, 0.5]], [1]),
    "in the first and the last": (counted(2), [[NAN, 1.0, 1.0, NAN]], [[0.0, 0.5, 0.0, 1.0]], [2]),
    "at the end": (counted(2), [[1.0, 1.0, NAN, NAN]], [[-0.5, 0.0, 0.0, 1.0]], [2]),
    # They advance without input too. An average that is due leaves the parameters as they are, other transforms run as in any step.
    "without input": (counted(3), [[1.0, None, 1.0, None, None, 1.0]], [[-0.5, -0.5, 0.0, 0.0, 0.0, 0.5]], [0]),
    "an average without input": (tx.skip_if_nonfinite(tx.fuse(tx.mean("data"), SGD, after=tx.every(2, tx.mean("data")))),
                                 [[1.0, None, 1.0, None, None, 1.0]], [[-0.5, -0.5, -1.0, -1.0, -1.0, -1.5]], [0]),
    # A rank with gradients of its own leaves out its own steps; the others take them. An average that is due is taken, without the
    # work of that step.
    "of one rank": (EVERY, [[NAN], [1.0], [3.0]], [(1 * -0.5 + 3 * -1.5) / 4] * 3, [1, 0, 0]),
    "of one rank, in a window": (SECOND, PAIRS, [[-0.5, MEAN], [-1.0, MEAN], [-1.5, MEAN]], [1, 0, 0]),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_a_step_is_left_out(name: str) -> None:
    pipeline, ranks, want, skipped = LEFT[name]
    check(pipeline, ranks, want)
    pure, *others = (on_ranks(pipeline, ranks, place) for place in PLACES)
    for place in (pure, *others):
        assert [int(seen.state.skipped) for seen in place] == skipped
        assert all(
            same_bits(seen.state.inner.after, first.state.inner.after) for seen, first in zip(place, pure, strict=True)
        )


def test_the_loss_scale_is_of_each_rank_without_a_reduction() -> None:
    pipeline = tx.dynamic_loss_scale(tx.fuse(NOT, SGD), init_scale=4.0)
    for place in PLACES[1:]:
        found = on_ranks(pipeline, [[NAN], [1.0]], place, dtype=torch.float32)
        assert [float(seen.state.scale) for seen in found] == [2.0, 4.0]


@ON_DEVICE
def test_buffers_are_transformed_in_every_step(on_device: bool) -> None:
    """A step that is left out transforms the buffers of the step before it."""

    def counts(params: Any, buffers: Any, batch: Batch) -> Any:
        return loss(params, batch), None, {"n": buffers["n"] + 10}

    pipeline, over = tx.skip_if_nonfinite(tx.fuse(tx.mean("data"), SGD)), tx.every(2, tx.stateless(plus_one))
    step, state = step_of(counts, pipeline, start(), {"n": torch.tensor(0.0)}, on_buffers=over)
    batches = map(as_batch, (1.0, NAN, 1.0, 1.0))
    seen = seen_by(lambda state, _: state.buffers["n"].item(), judged(step, on_device), state, batches)
    assert seen == [10.0, 11.0, 21.0, 32.0]


# -- raised ------------------------------------------------------------------------------------------


def not_finite(on_device: bool, batches: list[float], as_loop: bool) -> Any:
    """The number of calls until the NonFinite, its step, its ranks, the state after it, and its text."""
    pipeline = tx.fuse(NOT, SGD, after=tx.every(4, tx.mean("data")))
    step = judged(fjoin.train_step(loss, pipeline), on_device)
    state, calls, given = step.init(start()), 0, [as_batch(batch) for batch in batches]
    try:
        for batch in step.join(given) if as_loop else given:
            calls += 1
            state, _ = step(state, batch)
    except fjoin.NonFinite as error:
        ended = state.step, state.params["w"][0].item()
        step(state, as_batch(1.0))  # the step can be used again
        return calls, error.step, error.ranks, ended, str(error)
    return calls, None, (), (), ""


def test_ranks_with_local_steps_raise_together() -> None:
    """In the second call after a step that one rank left out; the text says that the others took it."""
    ranks = [[1.0] * 4, [1.0, NAN, 1.0, 1.0], [1.0] * 4]
    for rank, seen in enumerate(tx.simulate(lambda own: not_finite(False, own, True), {"data": 3}, ranks)):
        assert seen[:4] == (4, 1, (1,), (3, -1.0 if rank == 1 else -1.5)), rank
        assert "Rank 1 left step 1 out, which the others took" in seen[4]
    for *_, found, _, text in tx.simulate(lambda own: not_finite(False, own, True), {"data": 2}, [ranks[1]] * 2):
        assert found == (0, 1) and "Ranks 0, 1 left step 1 out; wrap" in text
    late = [[1.0, NAN, 1.0, 1.0, 1.0, 1.0], [1.0] * 6]  # a device is read later
    seen = [one[:3] for one in tx.simulate(lambda own: not_finite(True, own, False), {"data": 2}, late)]
    assert seen == [(6, 1, (0,))] * 2


HOOKS = {
    "warm-up": tx.switch_after(9, tx.mean("data"), NOT),
    "by hand": tx.stateless(lambda grad: tx.psum(grad, "data") / 3),
    "one leaf": tx.masked(tx.mean("data"), "w"),
}


@ON_DEVICE
@pytest.mark.parametrize("name", HOOKS)
def test_only_the_ranks_with_bad_gradients_are_named(name: str, on_device: bool) -> None:
    """Their values have reached all ranks; the gradients may differ between ranks."""

    def one_rank(batches: list[float]) -> Any:
        with pytest.raises(fjoin.NonFinite) as info:
            run(tx.fuse(HOOKS[name], SGD), batches, "device" if on_device else "step")
        return info.value.step, info.value.ranks

    ranks = [[1.0] * 6, [1.0, NAN, 1.0, 1.0, 1.0, 1.0], [1.0] * 6]
    assert tx.simulate(one_rank, {"data": 3}, ranks) == [(1, (1,))] * 3


def test_a_rank_that_counts_its_flops_decides_in_the_same_step() -> None:
    """What watches torch's operations does not make the host wait for another step."""
    step, state = step_of()
    with FlopCounterMode(display=False), pytest.raises(fjoin.NonFinite):
        step(state, torch.tensor(NAN))


# -- in a registered module --------------------------------------------------------------------------


def in_module(name: str, ranks: list[list[Any]]) -> Any:
    """`w` after each pass; of an error its step and ranks."""
    pipeline = {"counted": counted(2), "local": tx.fuse(NOT, SGD, after=tx.every(2, tx.mean("data")))}.get(name)
    module, handle, train = registered(pipeline or tx.fuse(HOOKS[name], SGD))
    seen = []
    for batch in own(ranks):
        try:
            train(batch)
        except fjoin.NonFinite as error:
            return seen, (error.step, error.ranks)
        seen.append(module.w[0].item())
    return seen, (handle.state_dict()["after"]["step"], handle.skipped)


def test_in_a_registered_module(pool: Any) -> None:
    """Periods advance in passes that are left out; ranks with local steps raise together; the rank with bad gradients is named."""
    assert pool.run(2, in_module, "counted", [[1.0, NAN, 1.0, 1.0]] * 2) == [([-0.5, 0.5, 0.0, 0.5], (4, 1))] * 2
    bad = [[1.0] * 4, [1.0, NAN, 1.0, 1.0]]
    assert [(len(seen), error) for seen, error in pool.run(2, in_module, "local", bad)] == [(3, (1, (1,)))] * 2
    assert [(len(seen), error) for seen, error in pool.run(2, in_module, "one leaf", bad)] == [(1, (1, (1,)))] * 2


def flushed_after_a_bad_pass() -> Any:
    module, handle, train = registered(tx.local_sgd(tx.sgd(1.0), tx.mean("data"), 9))
    for batch in own([[1.0, 1.0, 1.0], [1.0, 1.0, NAN]]):
        train(batch)
    raises_text(fjoin.NonFinite, handle.flush, "Rank 1 left step 2 out, which the others took")
    handle.flush()
    return module.w[0].item()


def test_a_flush_raises_if_one_rank_left_out_the_last_pass(pool: Any) -> None:
    assert pool.run(2, flushed_after_a_bad_pass) == [-(3 * 3 + 2 * 2) / 5] * 2


# -- averages at the end of steps weigh by what has been trained since the last: by windows, and not by steps left out --


RATE, NODES = 0.5, {"node": 2, "local": 2}


# Rank 0 has a NaN in the second step, rank 1 in the third, rank 2 in the first two, which is all of its window.
LEFT_OUT = [
    [Batch(1.0, 2.0), Batch(NAN, 7.0), Batch(3.0, 1.0), Batch(1.0, 1.0)],
    [Batch(2.0, 3.0), Batch(4.0, 1.0), Batch(NAN, 9.0), Batch(2.0, 5.0)],
    [Batch(NAN, 8.0), Batch(NAN, 9.0), Batch(5.0, 2.0), Batch(1.0, 4.0)],
]


def averaged(over: str) -> list[list[float]]:
    """`w` of each rank after each step, averaged after the second and the fourth."""
    params, windows, seen = [0.0] * 3, [0.0] * 3, [[], [], []]  # type: ignore[var-annotated]
    for i in range(4):
        for r, batches in enumerate(LEFT_OUT):
            if not math.isnan(batches[i].grad):
                params[r] -= RATE * batches[i].grad
                windows[r] += batches[i].weight
        if i % 2:
            shares = {"weight": windows, "live": [float(w > 0) for w in windows], "world": [1.0] * 3}[over]
            params = [sum(s * p for s, p in zip(shares, params, strict=True)) / sum(shares)] * 3
            windows = [0.0] * 3
        for mine, value in zip(seen, params, strict=True):
            mine.append(value)
    return seen


KINDS: dict[str, Any] = {
    "average": lambda over: tx.fuse(NOT, SGD, after=tx.every(2, tx.average_parameters("data", over=over))),
    "outer": lambda over: tx.fuse(NOT, SGD, after=tx.outer_step(tx.mean("data", over), tx.sgd(1.0), 2)),
    "local SGD": lambda over: tx.local_sgd(SGD, tx.mean("data", over), 2),
    "mean": lambda over: tx.fuse(NOT, SGD, after=tx.every(2, tx.mean("data", over))),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("over", ["weight", "live", "world"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_is_left_out_counts_nothing(kind: str, over: Any) -> None:
    if kind == "mean" and over == "world":  # which divides by all ranks whatever takes part: not an average
        return
    check(tx.skip_if_nonfinite(KINDS[kind](over)), LEFT_OUT, averaged(over))


def test_the_optimizers_state_is_averaged_by_the_same_weights() -> None:
    """Momenta of ranks that have left out a step, after the second step; the momentum is that of torch's SGD."""
    pipeline = tx.skip_if_nonfinite(
        tx.fuse(NOT, tx.sgd(RATE, momentum=0.5), on_state=tx.every(2, tx.average_state("data")))
    )
    own, windows = [1.0, 2.0 * 0.5 + 4.0, 0.0], [2.0, 4.0, 0.0]
    want = sum(w * m for w, m in zip(windows, own, strict=True)) / 6.0
    for place in PLACES:
        for seen in on_ranks(pipeline, [batches[:2] for batches in LEFT_OUT], place):
            momentum = seen.state.inner.optimizer["w"].momentum
            assert max_diff(momentum, torch.full((2,), want, dtype=torch.float64)) < 1e-12


# -- one counter decides on all periods, and ranks loop together over all axes ---------------------------


def test_one_counter_decides_on_all_periods() -> None:
    """Those in a state that has lost its place, such as a hook's that was started anew, follow the pipeline's."""
    pipeline = tx.fuse(tx.switch_after(3, tx.mean("data"), NOT), SGD, after=tx.every(2, tx.stateless(plus_one)))
    params = start()
    with fjoin.bind(fjoin.mesh({"data": -1})):
        state = pipeline.init(params)
        for _ in range(3):
            params, state = pipeline.step(params, params, state)
        fresh = pipeline.init(params)
        moved, after = pipeline.step(
            params, {path: 0 * p for path, p in params.items()}, state._replace(hook=fresh.hook, after=fresh.after)
        )
    assert state.step == 3 and after.hook.step == after.after.step == after.step == 4
    assert max_diff(moved["v"], params["v"] + 1) == 0


def with_count(**settings: Any) -> Any:
    """A step whose buffers are averaged over all axes, the parameters' gradients over one; and the state."""
    return step_of(
        lambda p, buffers, b: (p["w"] * b, None, {**buffers, "v": buffers["v"] + b}), params={"w": torch.tensor(0.0)},
        buffers=BUFFERS, mesh=fjoin.mesh(NODES), on_buffers=OVER, **settings,
    )  # fmt: skip


OVER = tx.average_buffers(("node", "local"))
BUFFERS = {"v": torch.zeros(()), "count": torch.tensor(1)}


def test_loops_end_over_the_axes_of_the_buffers_too() -> None:
    def one(batches: list[float]) -> Any:
        step, state = with_count(pipeline=tx.fuse(tx.mean("local"), tx.sgd(1.0)))
        values = lambda state, _: (float(state.params["w"]), float(state.buffers["v"]))  # noqa: E731
        seen = seen_by(values, step, state, step.join(batches))
        return len(seen), *seen[-1]

    out = tx.simulate(one, NODES, [[1.0], [3.0], [2.0, 4.0], [2.0]])
    # The buffers: the mean of 1, 3, 2, 2, then of the one rank that has input. The first node takes one step only.
    assert out == [(2, -2.0, 6.0)] * 2 + [(2, -6.0, 6.0)] * 2


AFTER = tx.fuse(tx.mean("local"), SGD, after=tx.mean("node"))


@pytest.mark.gloo
def test_explain_includes_buffers_and_the_message_of_the_loop(pool: Any) -> None:
    """Messages go over the union of the axes and are counted at torch.distributed."""
    params = {"w": torch.tensor(0.0)}
    what = tx.explain(AFTER, params, NODES, buffers=BUFFERS, on_buffers=OVER)
    assert [row.stage for row in what.rows if row.messages] == [
        "mean('local')", "(the step's own counts)", "mean('node')", "average_buffers(('node', 'local'))"
    ]  # fmt: skip
    announced = sorted(m.payload_bytes for row in what.rows for m in row.messages)
    assert pool.run(4, sent_with_buffers) == [announced] * 4
    raises_text(ValueError, lambda: tx.explain(AFTER, params, NODES, on_buffers=OVER), "without buffers")


def sent_with_buffers() -> list[int]:
    """The bytes of the messages of a step."""
    step, state = with_count(pipeline=AFTER)
    state, _ = step(state, 1.0)
    with watched() as sent:
        step(state, 2.0)
    return sorted(one.bytes for one in sent)


# -- on all ranks alike, nothing changed, the state still good --

X = torch.ones(2)


def sqrt_loss(params: Any, batch: Tensor) -> Tensor:
    return (params["w"] * batch).sum() + torch.sqrt(params["v"] - batch).sum()  # d/dv is infinite at v = batch


OVER_DATA = tx.mean("data")
NORM = tx.chain(OVER_DATA, tx.clip_by_global_norm(1.0))
# Hook, loss, the batches of three ranks, and words of the error.
POISONED: list[tuple[Any, ...]] = [
    *((hook, product, [X, X, torch.tensor([1.0, bad])], ["step 0", "loss of rank 2 is not finite", "'w'"])
      for hook in (OVER_DATA, NORM, *(tx.compress(make(), OVER_DATA) for make in CODECS.values())) for bad in (float("nan"), float("inf"))),
    (OVER_DATA, sqrt_loss, [X * 0, X, X * 0], ["the summed gradient of 'v' is not finite"]),
]  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("row", range(len(POISONED)))
def test_a_loss_or_a_gradient_that_is_not_finite(row: int) -> None:
    hook, loss, batches, words = POISONED[row]

    def one_rank(batch: Tensor) -> Any:
        step, state = step_of(loss, tx.fuse(hook, tx.adamw(0.1)))
        before = state.clone()
        text = raises_text(fjoin.NonFinite, lambda: step(state, batch), *words)
        assert same_bits(state.params, before.params) and same_bits(state.pipeline, before.pipeline)
        state, metrics = step(state, X * 0.5)  # the same state, and the other ranks, continue
        return text, metrics.loss

    for text, metric in tx.simulate(one_rank, {"data": 3}, batches):
        assert ("rank" in text.split(";")[0]) == (loss is product) and metric == float(loss({"w": X, "v": X}, X * 0.5))


def test_ranks_are_named_within_the_axes_that_are_reduced() -> None:
    def one_rank(batch: Tensor) -> Any:
        step = fjoin.train_step(
            product, tx.fuse(tx.mean("local"), tx.sgd(0.1)), mesh=fjoin.mesh({"node": 13, "local": 2})
        )
        state = step.init({"w": torch.ones(2), "v": torch.ones(2)}, sync=None)
        try:
            step(state, batch)
        except fjoin.NonFinite as error:
            return error.ranks
        return None

    out = tx.simulate(one_rank, {"node": 13, "local": 2}, [X] * 25 + [X * float("nan")])
    assert out == [None] * 24 + [(1,)] * 2


@pytest.mark.parametrize("on_device", [False, True])
def test_finite_values_with_an_overflowing_sum_or_norm_are_accepted(on_device: bool) -> None:
    for hook, value, rate, want in ((OVER_DATA, 3e38, 1e-38, -3.0), (NORM, 1e30, 0.5, -0.25)):
        step = judged(fjoin.train_step(lambda p, b: (p["w"] * b).sum(), tx.fuse(hook, tx.sgd(rate))), on_device)
        state, metrics = step(step.init({"w": torch.zeros(4)}), torch.full((4,), value))
        step.close()
        assert state.params["w"].tolist() == pytest.approx([want] * 4)
        assert hook is OVER_DATA or metrics.as_dict()["grad_norm"] == pytest.approx(2e30)


def test_nonfinite_step_on_a_device_changes_nothing_and_raises_later() -> None:
    """CPU tensors take the path of accelerators, on which the host does not wait."""
    for hook in (OVER_DATA, NORM, tx.chain(OVER_DATA, tx.clip_by_value(9.0))):
        step, state = step_of(pipeline=tx.fuse(hook, tx.adamw(0.1)))
        judged(step, True)
        reference, other = step_of(pipeline=tx.fuse(hook, tx.adamw(0.1)))
        state, metrics = step(state, X)
        other, expected = reference(other, X)
        # A device computes the norm of a clip in float64 at once.
        assert max_diff(state.params, other.params) < 1e-7 and metrics.loss == expected.loss
        before = state.clone()
        state, metrics = step(state, torch.tensor([1.0, float("nan")]))
        assert same_bits(state.params, before.params)
        assert same_bits(state.pipeline.optimizer, before.pipeline.optimizer)
        assert metrics.loss != metrics.loss  # one rank may read it, and must not raise before the others
        state, _ = step(state, X)  # verdicts are read when they are one step old, on all ranks alike
        raises_text(fjoin.NonFinite, lambda: step(state, X), "step 1", "loss of rank 0")  # noqa: B023
        state, metrics = step(state, X)
        assert metrics.loss == metrics.loss and not same_bits(state.params, before.params)
