"""Every optimizer in a training step: on flat buffers, fused into the hook, with uneven inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from tests.helpers import judged, max_diff
from tests.optimizer_table import OPTIMIZERS
from tests.oracle.whole_batch import make_batches, make_model, parameters
from tests.reducer.one_rank import train_one_rank, unfused_one_rank
from tests.training.small import net_batch, net_loss, net_params

SIZES = [[3, 2, 4], [5], []]
ROWS = [
    pytest.param(make, id=f"{name}{i}")
    for name, rows in OPTIMIZERS.items() if name != "partition" for i, make in enumerate(rows)
]  # fmt: skip


@pytest.mark.sample(8)
@pytest.mark.parametrize("make", ROWS)
@pytest.mark.parametrize("bucket_bytes", [1, 10**6])
def test_a_step_is_the_pure_pipelines(make: Any, bucket_bytes: int) -> None:
    pipeline, batches, start = tx.fuse(tx.mean("data"), make()), make_batches(1, SIZES), parameters(make_model())
    fused = tx.simulate(lambda b: train_one_rank(b, pipeline, bucket_bytes=bucket_bytes), {"data": 3}, batches)
    plain = tx.simulate(lambda b: unfused_one_rank(b, pipeline), {"data": 3}, batches)
    for a, (params, slots) in zip(fused, plain, strict=True):
        moved = {path: p - start[path] for path, p in a["params"].items()}
        assert max_diff(moved, {path: p - start[path] for path, p in params.items()}) < 1e-12
        assert max_diff(a["optimizer"], slots) < 1e-12


@pytest.mark.sample(2)
@pytest.mark.parametrize("make", ROWS)
@pytest.mark.parametrize("on_device", [False, True])
def test_skipped_step_changes_nothing(make: Any, on_device: bool) -> None:
    """The decision is the host's, or a tensor that the host does not read."""
    step = judged(fjoin.train_step(net_loss, tx.skip_if_nonfinite(tx.fuse(tx.mean("data"), make()))), on_device)
    state = step.init(net_params())
    state, _ = step(state, net_batch(0, 0))
    kept = state.clone()
    state, _ = step(state, net_batch(0, 1) * float("nan"))
    assert max_diff(state.params, kept.params) == 0
    assert max_diff(state.pipeline.inner.optimizer, kept.pipeline.inner.optimizer) == 0
    assert state.pipeline.skipped == 1 and torch.isfinite(state.params["a.weight"]).all()
