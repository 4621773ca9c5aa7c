"""fjoin.join over several steps, which share one loader."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import fjoin
from fjoin import transforms as tx
from tests.helpers import max_diff, raises_text, same_bits, stepped
from tests.oracle.whole_batch import make_batches
from tests.uneven.loop_problem import SIZES, make_model, reference, samples


def two_steps(batches: list[Any], accumulate: int) -> Any:
    """A generator and a discriminator, so to speak."""
    model = make_model()
    apply, params, _ = fjoin.functional(model)

    def loss_fn(params: Any, batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(apply(params, {}, batch[0]), batch[1])

    mesh = fjoin.mesh({"data": -1}, ordered=True)
    a, b = (
        fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), opt), mesh=mesh, weight=samples, accumulate=accumulate)
        for opt in (tx.adamw(0.05), tx.sgd(0.1))
    )
    first, second = a.init(params), b.init(params)
    n = 0
    for batch in fjoin.join(batches, steps=[a, b]):
        first, _ = a(first, batch)
        second, _ = b(second, batch)
        n += 1
    out = [{p: v.clone() for p, v in state.params.items()} for state in (first, second)], first.batches, second.step, n
    a.close()
    b.close()
    return out


def alone(batches: list[Any], accumulate: int, which: int) -> Any:
    """One of the two by itself."""
    model = make_model()
    apply, params, _ = fjoin.functional(model)

    def loss_fn(params: Any, batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(apply(params, {}, batch[0]), batch[1])

    pipeline = tx.fuse(tx.mean("data"), [tx.adamw(0.05), tx.sgd(0.1)][which])
    step = fjoin.train_step(loss_fn, pipeline, weight=samples, accumulate=accumulate)
    state = stepped(step, step.init(params), step.join(batches))
    return {p: v.clone() for p, v in state.params.items()}


def two_steps_on_processes(sizes: list[list[int]], accumulate: int) -> Any:
    return two_steps(make_batches(1, sizes)[dist.get_rank()], accumulate)


@pytest.mark.parametrize("sizes", [SIZES, [[2], [3, 1, 4]]], ids=str)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_several_steps_over_one_loader(pool: Any, sizes: list[list[int]], accumulate: int) -> None:
    """Each step ends as it would alone, including an incomplete last window."""
    batches = make_batches(1, sizes)
    want = [tx.simulate(lambda b, i=i: alone(b, accumulate, i), {"data": 2}, batches)[0] for i in (0, 1)]
    real = pool.run(2, two_steps_on_processes, sizes, accumulate)
    simulated = tx.simulate(lambda b: two_steps(b, accumulate), {"data": 2}, batches)
    steps = -(-max(map(len, sizes)) // accumulate)
    for rank, (params, consumed, seconds, n) in enumerate(real):
        assert max_diff(params, want) < 1e-13
        assert (consumed, seconds, n) == (len(sizes[rank]), steps, steps * accumulate)
        assert same_bits((params, consumed), simulated[rank][:2])
    if accumulate == 1:
        assert max_diff(real[0][0][0], reference(sizes)) < 1e-12


def test_each_of_several_steps_must_be_called() -> None:
    def loss_fn(params: Any, batch: Any) -> Any:
        return (params["w"] * batch).sum()

    a, b = (fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.sgd(0.1))) for _ in range(2))
    slow = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.sgd(0.1)), accumulate=2)
    state = a.init({"w": torch.ones(2)})

    def loop() -> None:
        nonlocal state
        state = stepped(a, state, fjoin.join([torch.ones(2)], steps=[a, b]))

    raises_text(fjoin.JoinError, loop, "did not call step 1 of steps")
    raises_text(TypeError, lambda: fjoin.join([], steps=[]), "steps", "at least one")
    raises_text(TypeError, lambda: fjoin.join([], steps=[loss_fn]), "train_step")  # type: ignore[call-overload]
    raises_text(ValueError, lambda: fjoin.join([], steps=[a, a]), "different")
    raises_text(ValueError, lambda: fjoin.join([], steps=[a, slow]), "same mesh, axes and accumulate")
    raises_text(TypeError, lambda: fjoin.join([], steps=[a], weight=len), "no weight")  # type: ignore[call-overload]
    raises_text(TypeError, lambda: fjoin.join([], when_exhausted="replay"), "steps")  # type: ignore[call-overload]
