"""Helpers outside of steps make no message on the host, and wait for no device; collectives over NCCL.

tests/devices and tests/goldens/test_host_reads.py have steps.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fjoin
from fjoin import transforms as tx
from fjoin.testing._devices import NoWaiting
from fjoin.transforms.axes._simulate import SimulatedAxis
from fjoin.transforms.base import devices
from fjoin.transforms.base.trees import choose_state
from fjoin.transforms.sync import BatchNormState
from tests.pool import Pool
from tests.ranks import reports


def test_a_choice_of_states_waits_for_no_device() -> None:
    here, there = torch.zeros(()), torch.zeros((), device="meta")
    fine, rows = there > 0, torch.zeros(2)
    for new, old in ((here, here.clone()), (here, there), (there, here)):
        assert choose_state(fine, new, old).device.type == "meta"
    assert choose_state(fine, rows, rows.to("meta")).device.type == "meta"
    assert choose_state(here > 0, rows, rows).device.type == "cpu"
    kept = torch.zeros(2)
    assert choose_state(fine, kept, kept) is kept


@pytest.mark.parametrize("weight", [1.0, 0.0, torch.tensor(2.0)])
def test_helpers_outside_steps_do_not_wait_for_the_device(weight: Any, monkeypatch: Any) -> None:
    run, sent = SimulatedAxis.run, set[str]()

    def watched(axis: Any, op: str, x: torch.Tensor, arg: Any) -> torch.Tensor:
        sent.add(x.device.type)
        return run(axis, op, x, arg)

    def one_rank(last: bool) -> None:
        x, channels = torch.empty(4, 3, device="meta"), torch.empty(3, device="meta")
        with NoWaiting():
            y, state = tx.sync_batch_norm(x, BatchNormState(channels, channels), axis="data", weight=weight)
            of_last = tx.broadcast_from_last("data").post({"x": x}, last)["x"]
        assert {y.device.type, state.mean.device.type, of_last.device.type} == {"meta"}

    monkeypatch.setattr(SimulatedAxis, "run", watched)
    tx.simulate(one_rank, {"data": 3}, [False, True, True])
    assert sent == {"meta"}


def with_one_gpu(rank: int, report: Any) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    devices.kind, devices.count = lambda: "cuda", lambda: 1
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        mesh = fjoin.mesh({"data": -1}, timeout_s=60)
    report((dist.get_backend(mesh.group), [str(w.message) for w in said if "gloo" in str(w.message)]))


def test_every_rank_warns_if_there_are_too_few_gpus() -> None:
    for backend, (text,) in reports(2, with_one_gpu):
        assert backend == "gloo" and "2 ranks" in text and "fewer GPUs, 1" in text
        assert "init_process_group('nccl')" in text


def collectives(device: str) -> Any:
    warnings.simplefilter("default")
    n, rank, codec = dist.get_world_size(), dist.get_rank(), tx.int8(block=4)
    x = torch.arange(8.0 * n, device=device).view(n, 8) * (rank + 1)
    with fjoin.bind(fjoin.mesh({"data": -1})):
        out = [
            tx.quantized(tx.all_gather, codec)(x, "data"), tx.quantized(tx.all_to_all, codec)(x, "data"),
            tx.quantized(tx.psum, codec)(x, "data"), tx.ppermute(x, "data", [(r, (r + 1) % n) for r in range(n)]),
            tx.all_gather(x, "data"), tx.psum_scatter(x, "data"), tx.pmax(x, "data"), tx.pbroadcast(x, "data", 1),
        ]  # fmt: skip
    filled = [torch.empty_like(x) for _ in range(n)]
    fjoin.auto_quantize(dist.all_gather, codec)(filled, x)
    return [y.cpu() for y in [*out, torch.stack(filled)]]


@pytest.mark.parametrize("n", [2, 3])
def test_collectives(ranks: tuple[str, Pool], n: int) -> None:
    device, pool = ranks
    xs = [torch.arange(8.0 * n).view(n, 8) * (rank + 1) for rank in range(n)]
    for rank, got in enumerate(pool.run(n, collectives, device)):
        total, all_x = sum(xs), torch.stack(xs)
        plain = [all_x, total[rank], xs[-1], xs[1]]
        want = [all_x, torch.stack([x[rank] for x in xs]), total, xs[rank - 1], *plain, all_x]
        for y, exact in zip(got, want, strict=True):
            assert y.shape == exact.shape and (y - exact).abs().max() <= 0.02 * exact.abs().max()
