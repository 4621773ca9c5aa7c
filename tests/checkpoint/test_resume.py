"""A run that is saved and restored goes on as one that was not, to the bit, in every golden row."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import optree
import pytest
import torch

import fjoin
from fjoin import transforms as tx
from fjoin.step import HookState
from fjoin.transforms.base import names_of
from tests.goldens.golden_paths import BUCKET_BYTES
from tests.goldens.golden_problem import buffers_of, gradients, loss_fn, start, weight
from tests.goldens.golden_rows import ROWS

NAMES = [
    name
    for name, row in ROWS.items()
    if {"gloo", "shared"} & set(row.paths) and not row.poisoned and not row.make().hook.pauses
]
BEFORE, AFTER = 4, 2  # calls


def trained(name: str, place: tuple[int, ...], folder: Path | None) -> Any:
    """Parameters and state after all steps; with a folder, a new step restores the state in the middle."""
    row = ROWS[name]
    accumulate = row.options.get("accumulate", 1)
    before = accumulate * -(-BEFORE // accumulate)  # after a window
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
    for at in range(before + AFTER):
        if folder is not None and at == before:
            if isinstance(state._body.hook, HookState):
                assert_split(state._body.hook)
            fjoin.Checkpoints(folder, step).save(state)
            step.close()
            step = make()
            state = fjoin.Checkpoints(folder, step).restore(start(row.dtype), buffers_of(row.loss))
            assert (state.step, state.batches) == (before // accumulate, before)
        batch = gradients(row, rank, at % 5), weight("odd", rank, at)
        state, _ = step(state, batch)
    last = state.clone()
    step.close()
    rest = tx.to_state_dict({"buffers": last.buffers or {}, "on_buffers": last.on_buffers})
    return dict(last.params), read_values(last.pipeline) | rest


def read_values(state: Any) -> dict[str, Any]:
    """Name -> value, without the bookkeeping that no later call reads, such as the total of the last message."""
    return {name: value for (name, read), value in zip(names_of(state), optree.tree_leaves(state), strict=True) if read}


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


@pytest.mark.sample(5)  # many rows are one transform with other options
@pytest.mark.parametrize("name", NAMES)
def test_a_restored_run_goes_on_to_the_bit(name: str, tmp_path: Path) -> None:
    axes = ROWS[name].axes
    ranks = list(itertools.product(*map(range, axes.values())))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        cut = tx.simulate(lambda place: trained(name, place, tmp_path), axes, ranks)
        whole = tx.simulate(lambda place: trained(name, place, None), axes, ranks)
    for (params, state), (other, expected) in zip(cut, whole, strict=True):
        assert_same(params, other)
        assert_same(state, expected)
