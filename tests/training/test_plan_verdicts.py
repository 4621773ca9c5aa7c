"""Ranks that share gradients leave out a step together, and the others of their loop raise in the next."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from tests.helpers import judged, stepped
from tests.training.plan_problem import NAN, SGD, by_step, product, purely, start


@pytest.mark.parametrize("on_device", [False, True])
def test_rank_with_local_gradients_skips_only_its_own_steps(on_device: bool) -> None:
    """The others take them; the average that is due is taken without the work of that step."""
    pipeline = tx.skip_if_nonfinite(tx.fuse(tx.identity(), SGD, after=tx.mean("data")))
    batches = [[NAN], [1.0], [3.0]]
    want = tx.simulate(lambda own: purely(pipeline, own)[0][0]["w"][0].item(), {"data": 3}, batches)
    average = (1 * 0.5 + 3 * -0.5) / 4
    assert want == [average] * 3
    assert tx.simulate(
        lambda own: by_step(pipeline, {"data": 3}, own, on_device)[0][0]["w"][0].item(), {"data": 3}, batches
    ) == want  # fmt: skip
    skipped = tx.simulate(
        lambda own: by_step(pipeline, {"data": 3}, own, on_device)[1].skipped.item(), {"data": 3}, batches
    )
    assert skipped == [1, 0, 0]


def not_finite(hook: tx.Transform, on_device: bool, batches: list[float], as_loop: bool) -> Any:
    """The step of the NonFinite, its text, and the state after it."""
    pipeline = tx.fuse(hook, SGD, after=tx.every(4, tx.mean("data" if "node" not in repr(hook) else "node")))
    step = judged(fjoin.train_step(product, pipeline, mesh=fjoin.mesh({"data": -1})), on_device)
    state, calls = step.init(start()), 0
    try:
        for batch in step.join(batches) if as_loop else batches:
            calls += 1
            state, _ = step(state, batch)
    except fjoin.NonFinite as error:
        ended = state.step, state.params["w"][0].item()
        state, _ = step(state, 1.0)  # the step can be used again
        return calls, error.step, error.ranks, ended, state.params["w"][0].item(), str(error)
    return calls, None, (), (), 0.0, ""


def test_ranks_with_local_steps_raise_together() -> None:
    """They raise in the second call after a step that one rank skipped; the text says that the others took it."""
    out = tx.simulate(
        lambda b: not_finite(tx.identity(), False, b, True), {"data": 3}, [[1.0] * 4, [1.0, NAN, 1.0, 1.0], [1.0] * 4]
    )
    for rank, (calls, step, ranks, ended, _, text) in enumerate(out):
        assert (calls, step, ranks) == (4, 1, (1,)) and "Rank 1 left step 1 out, which the others took" in text
        assert ended == (3, 0.0 if rank == 1 else -0.5)


def test_loop_end_raises_if_some_ranks_skipped_the_last_step() -> None:
    for on_device in (False, True):
        out = tx.simulate(
            lambda b: not_finite(tx.identity(), on_device, b, True),  # noqa: B023
            {"data": 2},
            [[1.0, 1.0], [1.0, NAN]],
        )
        assert [(calls, step, ranks) for calls, step, ranks, *_ in out] == [(2, 1, (1,))] * 2


def test_error_names_all_ranks_that_skipped_a_step() -> None:
    for *_, ranks, _, _, text in tx.simulate(
        lambda b: not_finite(tx.identity(), False, b, True), {"data": 2}, [[1.0, NAN, 1.0, 1.0]] * 2
    ):
        assert ranks == (0, 1) and "Ranks 0, 1 left step 1 out; wrap" in text


WARMUPS = {
    "warm-up": tx.switch_after(9, tx.mean("data"), tx.identity()),
    "by hand": tx.stateless(lambda grad: tx.psum(grad, "data") / 3),
    "one leaf": tx.masked(tx.mean("data"), "w"),
}


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("name", WARMUPS)
def test_only_the_ranks_with_bad_gradients_are_named(name: str, on_device: bool) -> None:
    """Their values have reached all ranks; the gradients may differ between ranks."""

    def one_rank(batches: list[float]) -> Any:
        step = judged(fjoin.train_step(product, tx.fuse(WARMUPS[name], SGD), mesh=fjoin.mesh({"data": 3})), on_device)
        state = step.init(start())
        with pytest.raises(fjoin.NonFinite) as info:
            state = stepped(step, state, batches)
        return info.value.step, info.value.ranks

    batches = [[1.0] * 6, [1.0, NAN, 1.0, 1.0, 1.0, 1.0], [1.0] * 6]
    assert tx.simulate(one_rank, {"data": 3}, batches) == [(1, (1,))] * 3


def test_a_sum_that_overflows_names_no_rank() -> None:
    def one_rank() -> Any:
        step = fjoin.train_step(product, tx.fuse(WARMUPS["by hand"], SGD), mesh=fjoin.mesh({"data": 3}))
        state = step.init(start(torch.float32))
        with pytest.raises(fjoin.NonFinite, match="the summed gradient of 'v', 'w' is not finite") as info:
            step(state, 1.5e38)
        return info.value.ranks

    assert tx.simulate(one_rank, {"data": 3}) == [()] * 3


def test_ranks_with_local_steps_raise_together_on_a_device() -> None:
    out = tx.simulate(
        lambda b: not_finite(tx.identity(), True, b, False), {"data": 2}, [[1.0, NAN, 1.0, 1.0, 1.0, 1.0], [1.0] * 6]
    )
    assert [(calls, step, ranks) for calls, step, ranks, *_ in out] == [out[0][:3]] * 2 == [(6, 1, (0,))] * 2


def test_loss_scale_is_per_rank_without_a_reduction() -> None:
    pipeline = tx.dynamic_loss_scale(tx.fuse(tx.identity(), SGD), init_scale=4.0)
    for on_device in (False, True):
        out = tx.simulate(
            lambda own: float(by_step(pipeline, {"data": 2}, own, on_device, torch.float32)[1].scale),  # noqa: B023
            {"data": 2}, [[NAN], [1.0]],
        )  # fmt: skip
        assert out == [2.0, 4.0]
