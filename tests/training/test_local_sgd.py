"""Averages of parameters on real ranks: equal to the bit, in many buckets too; with a delay, and without waiting for counts."""

from __future__ import annotations

import datetime
import math
import warnings
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist

import fjoin
from fjoin import transforms as tx
from tests import problem
from tests.helpers import judged, raises_text, stepped
from tests.ranks import reports
from tests.scalars import PLACES, on_ranks, registered
from tests.training.small import product, step_of

ADAM, MEAN = tx.adam(1e-2), tx.mean("data")
# Pipeline, bytes of a bucket, dtype.
PIPELINES = {
    "DiLoCo": (tx.diloco(ADAM, MEAN, 3), 64, torch.float32), "average": (tx.local_sgd(ADAM, MEAN, 3), 10**6, torch.float32),
    "int8": (tx.local_sgd(ADAM, tx.error_feedback(tx.compress(tx.int8(), MEAN)), 3), 300, torch.float32),
    "masters": (tx.diloco(tx.mixed_precision(ADAM), MEAN, 3), 64, torch.bfloat16),
}  # fmt: skip


def averages(name: str, rounds: int) -> Any:
    """How often parameters and outer state differ between ranks within the first ten rounds, and after an average."""
    pipeline, bucket_bytes, dtype = PIPELINES[name]
    mesh = fjoin.mesh({"data": -1})
    step = fjoin.train_step(problem.net, pipeline, mesh=mesh, bucket_bytes=bucket_bytes)
    state, apart, unequal = step.init(problem.start(dtype)), 0, 0
    for i in range(3 * rounds):
        state, _ = step(state, problem.batch(step.rank, i, 4, dtype))
        after = state.pipeline.after
        shared: Any = (state.params, getattr(after, "anchor", ()), getattr(after, "optimizer", ()))
        flat = torch.cat([leaf.reshape(-1).double() for leaf in optree.tree_leaves(shared)])
        with fjoin.bind(mesh):
            differ = bool((tx.pmax(flat, "data") != tx.pmin(flat, "data")).any())
        apart, unequal = apart + (differ and i % 3 < 2 and i < 30), unequal + (differ and i % 3 == 2)
    return apart, unequal


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize(
    "ranks, rounds", [(2, 60), (3, 60), *(pytest.param(n, 500, marks=pytest.mark.long) for n in (2, 3, 4))]
)
def test_averages_are_equal_to_the_bit(pool: Any, ranks: int, rounds: int, name: str) -> None:
    """Between them the ranks differ, until a long run comes to rest."""
    assert all(unequal == 0 and apart >= 10 for apart, unequal in pool.run(ranks, averages, name, rounds))


# -- the end of a run: `flush` averages what has been trained since the last average --

SGD, AVERAGE = tx.sgd(1.0), tx.average_parameters("data")


W = {"w": torch.zeros(1)}


def then(after: tx.Transform) -> tx.Pipeline:
    return tx.fuse(tx.identity(), SGD, after=after)


def outer(steps: int, **more: Any) -> tx.Transform:
    return tx.outer_step(tx.mean("data"), SGD, steps, **more)


# A pipeline, and the displacement after steps, by their number, where it is not that of a mean.
FLUSHED: dict[str, tuple[tx.Pipeline, dict[int, float]]] = {
    "one window": (tx.local_sgd(SGD, tx.mean("data"), 2), {}), "all open": (tx.local_sgd(SGD, tx.mean("data"), 9), {}),
    "outer": (tx.diloco(SGD, tx.mean("data"), 2, tx.sgd(0.5)), {3: -3.75}),
    "later phase": (tx.post_local_sgd(SGD, tx.mean("data"), 3, 2), {}),
    "pending": (tx.diloco(SGD, tx.mean("data"), 2, tx.sgd(1.0), delay=1), {2: -5.0}),
    "pending, then open": (tx.diloco(SGD, tx.mean("data"), 3, tx.sgd(1.0), delay=2), {4: -7.5}),
    "not touched": (tx.fuse(tx.mean("data"), SGD, after=tx.stateless(lambda p: p + 1)), {2: -3.0}),
    **{f"nested: {name}": (then(after), {}) for name, after in {
        "every": tx.every(2, tx.every(2, AVERAGE)), "every, from a later call": tx.every(2, tx.every(2, AVERAGE, first=2), first=3),
        "outer": tx.every(2, outer(3)), "outer, later": tx.every(2, outer(3, delay=1)),
        "hierarchy": tx.every(2, tx.chain(tx.every(2, tx.average_parameters("data"), first=0))),
        "in parts": tx.partition({"*": tx.every(2, tx.chain(tx.masked(tx.every(3, AVERAGE), "*"), tx.ema(0.5)))}),
        "switch": tx.switch_after(3, tx.every(2, AVERAGE), tx.every(4, AVERAGE)),
        "switch in a period": tx.every(2, tx.switch_after(2, tx.every(3, AVERAGE), outer(2))),
        "switch from outer": tx.switch_after(3, outer(2, delay=1), tx.every(4, AVERAGE)),
    }.items()},
}  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", FLUSHED)
def test_a_flush_reaches_all_windows(name: str) -> None:
    """Two ranks move by 1 and by 3 in each step, with these weights: means move by 2.5. A second flush changes nothing.

    A message with a delay replaces what a rank has trained since.
    """
    pipeline, known = FLUSHED[name]
    for steps in known or range(9):
        for place in PLACES[:2]:
            for seen in on_ranks(pipeline, [[1.0] * steps, [3.0] * steps], place, flushes=2):
                if "delay" not in repr(pipeline) or known:
                    assert seen.w[-2] == pytest.approx(known.get(steps, -2.5 * steps)), (steps, place)
                assert seen.w[-1] == pytest.approx(seen.w[-2]) and seen.state.step == steps


@pytest.mark.parametrize("inner", [AVERAGE, tx.chain(AVERAGE, tx.ema(0.9))])
def test_flush_starts_a_new_window(inner: tx.Transform) -> None:
    def one_rank(batches: list[float]) -> float:
        step = fjoin.train_step(product, then(tx.every(3, inner)), weight=lambda b: float(b != 0))
        state = step.flush(stepped(step, step.init(W), batches[:2]))
        return stepped(step, state, batches[2:]).params["w"].item()

    assert tx.simulate(one_rank, {"data": 2}, [[6.0, 6.0, 0.0], [0.0, 0.0, 3.0]]) == [-15.0, -15.0]


LOCAL, BUFFERS = tx.local_sgd(SGD, tx.mean("data"), 2), tx.every(3, tx.average_buffers("data"))


def with_buffers(params: Any, buffers: Any, batch: float) -> Any:
    return (params["w"] * batch).sum(), None, {"mean": buffers["mean"] + batch}


# What is open when a step is closed: a step, its number of calls, and the warning.
OPEN: dict[str, tuple[Any, int, str]] = {
    "within a period": (lambda: fjoin.train_step(product, then(tx.every(2, tx.every(2, AVERAGE)))), 2,
                        r"after step 1 a window of every\(2, every\(2"),
    "steps": (lambda: fjoin.train_step(product, LOCAL), 3, r"after step 2 a window of every\(2.*step\.flush"),
    "a window": (lambda: fjoin.train_step(product, tx.fuse(tx.mean("data"), SGD), accumulate=2), 1, "unfinished accumulation window"),
    "buffers": (lambda: fjoin.train_step(with_buffers, tx.fuse(tx.mean("data"), SGD), on_buffers=BUFFERS), 1,
                r"after step 0 a window of every\(3, average_buffers.*step\.flush"),
}  # fmt: skip


@pytest.mark.parametrize("name", OPEN)
def test_close_warns_of_what_is_open(name: str) -> None:
    make, calls, text = OPEN[name]
    step = make()
    state = step.init(W, {"mean": torch.zeros(1)} if name == "buffers" else None)
    step.close()
    state = stepped(step, state, [1.0] * calls)
    with pytest.warns(UserWarning, match=text):
        step.close()
    if name == "a window":
        raises_text(ValueError, lambda: step.flush(state), "accumulation window")
        raises_text(TypeError, lambda: step.flush(None), "TrainState", "NoneType")
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = step.flush(state)
        step.close()
        if name == "steps":
            step(state, 1.0)
            step.close()


def left_out(bad: int, on_device: bool) -> Any:
    """The NonFinite of a flush after four steps, and the parameters after a second flush; rank 1 has a bad batch."""
    step = judged(fjoin.train_step(product, tx.local_sgd(SGD, tx.mean("data"), 3)), on_device)
    state = stepped(step, step.init(W), (math.nan if step.rank == 1 and i == bad else 1.0 for i in range(4)))
    with pytest.raises(fjoin.NonFinite) as info:
        step.flush(state)
    assert state.step == 4
    return info.value.step, info.value.ranks, str(info.value), step.flush(state).params["w"].item()


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("bad", [2, 3])
def test_flush_raises_for_nonfinite_last_steps(bad: int, on_device: bool) -> None:
    """The given state stays usable, and the second flush averages it."""
    for step, ranks, text, param in tx.simulate(lambda: left_out(bad, on_device), {"data": 2}):
        assert (step, ranks) == (bad, (1,)) and "which the others took" in text
        assert param == pytest.approx(-4.0 if bad == 3 else -(3 * 3 + 2 * 2) / 5 - 1)


@pytest.mark.parametrize("steps", [3, 4])
def test_flush_averages_buffers(steps: int) -> None:
    def one_rank() -> Any:
        step = fjoin.train_step(with_buffers, tx.local_sgd(SGD, tx.mean("data"), 3), weight=abs, on_buffers=BUFFERS)
        state = stepped(step, step.init(W, {"mean": torch.zeros(1)}), [1.0 + 2 * step.rank] * steps)
        state = step.flush(state)
        step.close()
        return state.buffers["mean"].item(), step.flush(state).buffers["mean"].item()  # type: ignore[index]

    assert tx.simulate(one_rank, {"data": 2}) == [(2.5 * steps,) * 2] * 2


def apart(rank: int, report: Any, kind: str, steps: list[int], flushes: list[bool]) -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
    try:
        if kind == "step":
            step, state = step_of(product, OUTER, W)
            take, flush = (lambda state: step(state, 1.0)[0]), step.flush
        else:
            _, handle, train = registered(OUTER)
            state, take, flush = None, lambda state: train(1.0), lambda state: handle.flush()
        for _ in range(steps[rank]):
            state = take(state)
        if flushes[rank]:
            flush(state)
        for _ in range(0 if flushes[rank] else 4):
            state = take(state)
        report("no error")
    except Exception as error:
        report(f"{type(error).__name__}: {error}")


OUTER = tx.diloco(SGD, tx.mean("data"), 3)
APART = {
    "a step later": ([7, 6], [True, True]), "in a step that averages": ([7, 5], [True, True]),
    "not on all": ([7, 7, 7], [True, False, False]), "before any step": ([5, 0], [True, True]),
}  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind, name", [("step", name) for name in APART] + [("module", name) for name in list(APART)[:3]])  # fmt: skip
def test_ranks_that_do_not_flush_together_raise(kind: str, name: str) -> None:
    steps, flushes = APART[name]
    for text in reports(len(steps), apart, kind, steps, flushes):
        assert text.startswith("DesyncError") and "flush" in text, text
