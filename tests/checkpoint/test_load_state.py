"""A state that is loaded goes on as the one that was saved, to the bit, in every golden row."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from fjoin.reducer._hook_state import HookState
from fjoin.training.state._load import load_state
from tests.goldens.golden_paths import BUCKET_BYTES
from tests.goldens.golden_problem import buffers_of, gradients, loss_fn, start, weight
from tests.goldens.golden_rows import ROWS

NAMES = [
    name
    for name, row in ROWS.items()
    if {"gloo", "shared"} & set(row.paths) and not row.poisoned and row.loss == "plain" and not row.make().hook.pauses
]
BEFORE, AFTER = 4, 3


def trained(name: str, place: tuple[int, ...], stops: bool) -> Any:
    """Parameters and state after all steps; where it `stops`, a new step takes over the state in the middle."""
    row = ROWS[name]
    rank = list(itertools.product(*map(range, row.axes.values()))).index(place)

    def make() -> Any:
        return fjoin.train_step(
            loss_fn(row.loss),
            row.make(),
            mesh=fjoin.mesh(row.axes),
            weight=lambda b: b[1],
            **{"bucket_bytes": BUCKET_BYTES} | row.options,
        )

    step = make()
    state = step.init(start(row.dtype), buffers_of(row.loss))
    for at in range(BEFORE + AFTER):
        if stops and at == BEFORE:
            saved = tx.to_state_dict(state.pipeline), {path: p.clone() for path, p in state.params.items()}
            if isinstance(state._body.hook, HookState):
                assert_split(state._body.hook)
            step.close()
            step = make()
            state = step.init(start(row.dtype))
            like = state.pipeline
            load_state(state._body, saved[1], tx.from_state_dict(like, saved[0]))
        batch = gradients(row, rank, at % 5), weight("odd", rank, at)
        state, _ = step(state, batch)
    last = state.clone()
    step.close()
    return {path: p for path, p in last.params.items()}, tx.to_state_dict(last.pipeline)


def assert_split(hook: HookState) -> None:
    """`split` is the inverse of `whole`."""
    whole = hook.whole()
    again = hook.split(whole)
    assert_same(tx.to_state_dict(again.whole()), tx.to_state_dict(whole))
    assert_same(tx.to_state_dict((again.buckets, again.rest)), tx.to_state_dict((hook.buckets, hook.rest)))


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        if isinstance(value, torch.Tensor):
            assert value.shape == b[name].shape and torch.equal(torch.nan_to_num(value), torch.nan_to_num(b[name])), (
                name
            )
        else:
            assert value == b[name], name


@pytest.mark.parametrize("name", NAMES)
def test_a_loaded_state_goes_on_to_the_bit(name: str) -> None:
    axes = ROWS[name].axes
    ranks = list(itertools.product(*map(range, axes.values())))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        cut = tx.simulate(lambda place: trained(name, place, True), axes, ranks)
        whole = tx.simulate(lambda place: trained(name, place, False), axes, ranks)
    for (params, state), (other, expected) in zip(cut, whole, strict=True):
        assert_same(params, other)
        assert_same(state, expected)
