"""States: donation, clones, memory, going back to an earlier one."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from tests.helpers import raises_text, same_bits, seen_by, stepped
from tests.training.small import MEAN_SGD, X, one, quadratic, start, step_of


def test_a_donated_state_cannot_be_used_again() -> None:
    step, first = one(tx.fuse(tx.mean("data"), tx.sgd(0.1)))
    kept = first.clone()
    second, _ = step(first, X)
    for use in (lambda: step(first, X), lambda: first.params, lambda: first.clone(), lambda: first.pipeline):
        raises_text(fjoin.DonatedState, use, "donated to step 0", "state, metrics = step(state, batch)", "donate=False")
    assert same_bits(kept.params, start())
    again, _ = step(kept, X)
    assert same_bits(again.params, second.params)


def test_a_state_is_copied_but_not_pickled() -> None:
    step, state = one(tx.fuse(tx.mean("data"), tx.sgd(0.1, momentum=0.9)))
    for _ in range(2):  # before and after a step
        for save in (lambda: torch.save(state, io.BytesIO()), lambda: pickle.dumps({"state": state})):  # noqa: B023
            raises_text(TypeError, save, "fjoin.save(folder, step, state)")
        raises_text(TypeError, lambda: tx.to_state_dict(state), "the state is a TrainState", "state.pipeline")  # noqa: B023
        raises_text(TypeError, lambda: tx.to_state_dict({"a": state}), "at 'a' a TrainState")  # noqa: B023
        raises_text(TypeError, lambda: tx.from_state_dict(state, {}), "the state is a TrainState")  # noqa: B023
        kept, also = copy.deepcopy(state), copy.copy(state)
        before = state.clone().params
        state, _ = step(state, X)
        assert same_bits(kept.params, before) and same_bits(also.params, before)
        again, _ = step(kept, X)
        assert same_bits(again.params, state.params)
    saved = io.BytesIO()
    torch.save(tx.to_state_dict(state.pipeline), saved)
    saved.seek(0)
    assert same_bits(torch.load(saved, weights_only=True), tx.to_state_dict(state.pipeline))


def test_a_state_belongs_to_its_step() -> None:
    step, state = one(tx.fuse(tx.mean("data"), tx.sgd(0.1)))
    other, _ = one(tx.fuse(tx.mean("data"), tx.sgd(10.0)))
    raises_text(ValueError, lambda: other(state, X), "another train_step's init", "step.init(state.params)")
    moved, _ = other(other.init(state.params), X)
    assert not same_bits(moved.params, start()) and same_bits(state.params, start())


def test_without_donation_what_was_given_stays() -> None:
    params = start()
    step, first = step_of(quadratic, tx.fuse(tx.mean("data"), tx.adamw(0.1)), params, donate=False)
    second, _ = step(first, X)
    assert same_bits(first.params, start()) and not same_bits(second.params, start())
    again, _ = step(first, X)
    assert same_bits(again.params, second.params) and same_bits(again.pipeline.optimizer, second.pipeline.optimizer)
    assert same_bits(params, start()) and all(p.grad is None for p in params.values())


def test_backward_raises_if_a_step_overwrote_its_parameters() -> None:
    """A graph that still needs the old values must detect the in-place step."""
    step, state = one(tx.fuse(tx.mean("data"), tx.sgd(0.1)))
    w = state.params["w"].requires_grad_()
    other = (w * w).sum()
    step(state, X)
    raises_text(RuntimeError, lambda: other.backward(), "modified by an inplace operation")


def test_torn_state_raises() -> None:
    def explode(p: Any, s: Any, params: Any = None, **extra: Any) -> Any:
        raise ValueError("boom")

    pipeline = tx.fuse(tx.mean("data"), tx.sgd(0.1), after=tx.Transform(lambda p: (), explode))
    for donate in (True, False):
        step, state = one(pipeline, donate=donate)
        raises_text(ValueError, lambda: step(state, X), "boom")  # noqa: B023
        if donate:
            raises_text(fjoin.TornState, lambda: state.params, "step 0", "donate=False")  # noqa: B023
        else:
            assert same_bits(state.params, start())
    after = tx.outer_step(
        tx.Transform(lambda p: (), explode, facts=tx.Facts(reduces=tx.mean("data").facts.reduces)), tx.sgd(1.0), 2
    )
    step, state = one(tx.fuse(tx.identity(), tx.sgd(0.1), after=after))
    state, _ = step(state, X)
    raises_text(ValueError, lambda: step.flush(state), "boom")
    raises_text(fjoin.TornState, lambda: state.params, "step 1")


def freed_without_looking_for_cycles() -> list[bool]:
    gc.collect()
    gc.disable()
    try:
        mesh = fjoin.mesh({"x": 2, "y": 1})
        step = fjoin.train_step(lambda p, b: (p["w"] * b).sum(), tx.fuse(tx.mean("x"), tx.sgd(1.0)), mesh=mesh)
        state = step.init({"w": torch.zeros(2)})
        for batch in step.join([torch.ones(2)] * 2):
            state, metrics = step(state, batch)
        refs = [weakref.ref(mesh), weakref.ref(step), weakref.ref(step.run)]
        del mesh, step, state, metrics, batch
        return [ref() is None for ref in refs]
    finally:
        gc.enable()


def test_process_groups_go_with_the_step(pool: Any) -> None:
    """If they lived until the interpreter ends, gloo's threads could abort the process."""
    assert pool.run(2, freed_without_looking_for_cycles) == [[True] * 3] * 2


# -- going back to an earlier state: the steps after it leave nothing behind ---------------------------

LOCAL = tx.local_sgd(tx.sgd(0.1), tx.mean("data"), 4)  # whose records are read one step late


def gone_back(pipeline: tx.Pipeline, donate: bool, steps: int) -> Any:
    """The state after 5 steps, where `steps` others were taken from the second state first."""
    step, state = one(pipeline, donate=donate)
    state, _ = step(state, X)
    kept = state.clone() if donate else state
    stepped(step, state, [X * 3] * steps)
    state = stepped(step, kept, [X] * 4)
    return state.params, state.step


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("pipeline", [LOCAL, tx.fuse(tx.mean("data"), tx.sgd(0.1))], ids=["local", "mean"])
def test_a_step_goes_on_from_an_earlier_state(pipeline: tx.Pipeline, donate: bool) -> None:
    def one_rank() -> Any:
        return [gone_back(pipeline, donate, steps) for steps in range(4)]

    for (want, number), *others in tx.simulate(one_rank, {"data": 2}):
        assert number == 5 and all(same_bits(params, want) and steps == 5 for params, steps in others)


# -- a loss may return parameters in its aux and buffers, which the step must not overwrite --

ONE, ZERO = torch.ones(1), torch.zeros(1)


def distance(params: Any, batch: Any) -> torch.Tensor:
    return ((params["w"] - batch) ** 2).sum()


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("donate", [True, False])
def test_buffers_are_copies_of_parameters_and_of_gradients(donate: bool, accumulate: int) -> None:
    """A copy of the parameters in every second step, kept in the others; and the gradients gathered so far in a window, to which
    the next call adds in place."""

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
        n = int(buffers["n"])
        target = params["w"].detach() if n // accumulate % 2 == 0 else buffers["target"]
        grad = params["w"].grad
        return distance(params, batch), None, {"target": target, "n": buffers["n"] + 1, "grad": ZERO if grad is None else grad}  # fmt: skip

    buffers = {"target": ZERO, "n": torch.tensor(0), "grad": ZERO}
    step, state = step_of(loss_fn, MEAN_SGD, {"w": ZERO}, buffers, donate=donate, accumulate=accumulate)
    look = lambda state, _: (state.buffers["target"].item(), state.buffers["grad"].item())  # noqa: E731
    seen = seen_by(look, step, state, [ONE] * 6 * accumulate)[accumulate - 1 :: accumulate]
    assert [target for target, _ in seen] == pytest.approx([0.0, 0.0, 0.36, 0.36, 0.5904, 0.5904])
    assert seen[-1][1] == pytest.approx(-2 * (1 - 0.67232) * (accumulate - 1))


@pytest.mark.parametrize("donate", [True, False])
def test_aux_views_of_parameters_are_copied(donate: bool) -> None:
    def loss_fn(params: Any, batch: Any) -> Any:
        w, other = params["w"], torch.ones(1)
        return distance(params, batch), {"own": other, "deep": [w, (w.detach().view(1, 1), {"plain": w[:1]})], "n": 3}

    step, state = step_of(loss_fn, params={"w": ZERO}, donate=donate)
    state, metrics = step(state, ONE)
    first, (second, third) = metrics.aux["deep"]
    assert [t.item() for t in (first, second, third["plain"])] == [0.0] * 3 and second.shape == (1, 1)
    assert state.params["w"].item() == pytest.approx(0.2)
    assert metrics.aux["n"] == 3 and not first.requires_grad


def test_aux_without_views_is_returned_unchanged() -> None:
    own = {"a": torch.ones(3), "b": [torch.zeros(1), "text"]}
    step, state = step_of(lambda p, b: (distance(p, b), own), params={"w": ZERO})
    _, metrics = step(state, ONE)
    assert metrics.aux is own
