"""On a device autograd runs backward in a thread of its own: steps give the same numbers there."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from fjoin.transforms.axes import _environment as _axis_env
from fjoin.transforms.base import devices
from tests.devices.echo import EchoMesh
from tests.devices.test_streams import PIPELINES, loss_fn
from tests.devices.threaded_models import all_of, elsewhere
from tests.helpers import raises_text, stepped
from tests.pool import JobFailed


def trained(name: str, threaded: bool) -> list[torch.Tensor]:
    make, options = PIPELINES[name]
    torch.manual_seed(0)
    params = {"a": torch.randn(3, 4), "b": torch.zeros(4), "c": torch.randn(4, 3), "d": torch.zeros(3)}
    with elsewhere() if threaded else contextlib.nullcontext():
        step = fjoin.train_step(loss_fn, make(), mesh=EchoMesh(), weight=len, bucket_bytes=40, **options)
        state = stepped(step, step.init(params), (torch.randn(2 + i % 3, 3) for i in range(4)))
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
    raises_text(JobFailed, lambda: pool.run(2, all_of, True), "UnboundAxis")


def test_torch_keeps_nothing_in_threads_that_end_on_the_host() -> None:
    """It would be freed behind the thread's end in Python, and abort the process where that ends at the same time."""

    def stashed() -> bool:
        step = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.sgd(0.1)))
        state = step.init({"a": torch.ones(3, 4), "b": torch.zeros(4), "c": torch.ones(4, 3), "d": torch.zeros(3)})
        step(state, torch.ones(2, 3))
        return torch._C._is_key_in_tls(_axis_env._KEY)

    assert tx.simulate(stashed, {"data": 2}) == [False, False]
    with mock.patch.object(devices, "in_use", lambda: True):
        assert tx.simulate(stashed, {"data": 2}) == [True, True]
