"""On a device autograd runs backward in a thread of its own: steps give the same numbers there."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import fjoin
from tests.devices.echo import EchoMesh
from tests.devices.test_streams import PIPELINES, loss_fn
from tests.devices.threaded_models import all_of, elsewhere
from tests.pool import JobFailed


def trained(name: str, threaded: bool) -> list[torch.Tensor]:
    make, options = PIPELINES[name]
    torch.manual_seed(0)
    params = {"a": torch.randn(3, 4), "b": torch.zeros(4), "c": torch.randn(4, 3), "d": torch.zeros(3)}
    with elsewhere() if threaded else contextlib.nullcontext():
        step = fjoin.train_step(loss_fn, make(), mesh=EchoMesh(), weight=len, bucket_bytes=40, **options)
        state = step.init(params)
        for i in range(4):
            state, _ = step(state, torch.randn(2 + i % 3, 3))
    return [p.detach().clone() for p in state.params.values()]


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_runs_in_another_thread(name: str) -> None:
    assert all(map(torch.equal, trained(name, True), trained(name, False)))


def test_what_is_computed_again_there_communicates(pool: Any) -> None:
    for found in pool.run(2, all_of):
        for name, values in found.items():
            want = found[f"{name.split(' plain')[0].split(' checkpoint')[0].split(' remat')[0]} plain False"]
            assert values == pytest.approx(want, rel=1e-6, abs=1e-7), name


def test_a_thread_without_bindings_is_found(pool: Any) -> None:
    with pytest.raises(JobFailed, match="UnboundAxis"):
        pool.run(2, all_of, True)
