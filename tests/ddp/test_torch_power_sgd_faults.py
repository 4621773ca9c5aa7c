"""Faults of torch's PowerSGD hooks that ours do not have. Where one of these fails, torch has fixed it."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

from fjoin import transforms as tx
from tests.traffic import watched


class Bucket:
    """The part of a bucket that torch's hooks use."""

    def __init__(self, *grads: Tensor) -> None:
        self._flat = torch.cat([g.reshape(-1) for g in grads])
        self._shapes = [g.shape for g in grads]

    def buffer(self) -> Tensor:
        return self._flat

    def gradients(self) -> list[Tensor]:
        parts = self._flat.split([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    place, last = 0, True

    def index(self) -> int:
        return self.place

    def is_last(self) -> bool:
        return self.last


def state_of(**settings: Any) -> power.PowerSGDState:
    return power.PowerSGDState(None, **{"start_powerSGD_iter": 2, "min_compression_rate": 1, **settings})


def run(state: power.PowerSGDState, *grads: Tensor, hook: Any = power.powerSGD_hook) -> Tensor:
    """The hook's result in the third call, the first compressed one, from the state of the first two calls."""
    while state.iter < 2:
        power.powerSGD_hook(state, Bucket(*grads)).wait()  # type: ignore[arg-type]
    out: Tensor = hook(state, Bucket(*grads)).wait()
    return out


def zeros_then_ones(feedback: bool) -> Any:
    state = state_of(use_error_feedback=feedback)
    first = run(state, torch.zeros(6, 6))
    return first, [run(state, torch.ones(6, 6)) for _ in range(3)]


def test_torch_returns_nan_from_a_zero_gradient_on(pool: Any) -> None:
    for feedback in (False, True):
        ((first, later),) = pool.run(1, zeros_then_ones, feedback)
        assert first.isnan().all() and all(out.isnan().all() for out in later)

    def ours(feedback: bool) -> Any:
        hook = tx.power_sgd("data", min_compression_rate=1.0)
        hook = tx.error_feedback(hook) if feedback else hook
        state = hook.init(torch.zeros(6, 6))
        zeros, state = hook.update(torch.zeros(6, 6), state)
        return zeros, hook.update(torch.ones(6, 6), state)[0]

    for zeros, ones in tx.simulate(ours, {"data": 2}, [True, True]) + tx.simulate(ours, {"data": 2}, [False, False]):
        assert (zeros == 0).all() and (ones - 1).abs().max() < 1e-5


def biases(steps: int) -> float:
    state, off = state_of(), 2.0 * dist.get_rank() - 1  # each rank's gradient is 1 off the mean, which is 0
    for _ in range(steps + 2):
        run(state, torch.ones(6, 6), torch.full((3,), off))
    return float(state.error_dict[0][36:].abs().max())


def test_torch_error_of_uncompressed_gradients_grows(pool: Any) -> None:
    ten, twenty = (pool.run(2, biases, steps)[0] for steps in (10, 20))
    assert twenty - ten == 10.0
    params = {"w": torch.zeros(6, 6), "b": torch.zeros(3)}
    assert tx.error_feedback(tx.power_sgd("data", min_compression_rate=1.0)).init(params).error.keys() == {"w"}


def messages(kind: str) -> list[int]:
    state = state_of()
    grads = {"both": (torch.ones(6, 6), torch.ones(3)), "matrix": (torch.ones(6, 6),), "vector": (torch.ones(3),)}[kind]
    run(state, *grads)
    with watched() as sent:
        run(state, *grads)
    return [one.elements for one in sent]


def test_torch_sends_three_messages_even_if_empty(pool: Any) -> None:
    """Ours: one or two; see test_power_sgd.py."""
    assert pool.run(1, messages, "both") == [[3, 6, 6]]
    assert pool.run(1, messages, "matrix") == [[0, 6, 6]]
    assert pool.run(1, messages, "vector") == [[3, 0, 0]]


def batched() -> str:
    try:
        run(state_of(), torch.ones(6, 6), hook=power.batched_powerSGD_hook)
    except AssertionError as error:
        return repr(error)
    return "fine"


def scalar() -> str:
    try:
        run(state_of(), torch.ones(()))
    except IndexError as error:
        return str(error)
    return "fine"


def test_its_batched_hook_never_runs_and_scalars_fail(pool: Any) -> None:
    assert pool.run(1, batched) == ["AssertionError()"]
    assert pool.run(1, scalar) == ["tuple index out of range"]


def resumed() -> str:
    """Two buckets in a run; after it, as in every new module's first pass, both in one."""
    state, buckets = state_of(), [Bucket(torch.ones(6, 6)), Bucket(torch.ones(4, 4))]
    for _ in range(4):
        for index, bucket in enumerate(buckets):
            bucket.place, bucket.last = index, index == 1
            power.powerSGD_hook(state, bucket).wait()  # type: ignore[arg-type]
    loaded = pickle.loads(pickle.dumps(state))
    try:
        power.powerSGD_hook(loaded, Bucket(torch.ones(4, 4), torch.ones(6, 6))).wait()  # type: ignore[arg-type]
    except RuntimeError as error:
        return str(error)
    return "fine"


def test_it_cannot_be_resumed_with_several_buckets(pool: Any) -> None:
    """Its errors are kept by bucket, and a new module's first pass has one bucket."""
    (text,) = pool.run(1, resumed)
    assert "must match" in text


HANGS = """
import datetime, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
store = "file://" + sys.argv[2]
soon = datetime.timedelta(seconds=3)
dist.init_process_group("gloo", init_method=store, rank=int(sys.argv[1]), world_size=2, timeout=soon)
torch.manual_seed(0)
net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
ddp = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.01)
ddp.register_comm_hook(power.PowerSGDState(None, 1, 2, min_compression_rate=1), power.powerSGD_hook)
for i in range(6):
    if i == 2:
        print("compressing", flush=True)
    ddp(torch.ones(2, 64)).sum().backward()
print("fine")
"""


@pytest.mark.long
def test_torch_hangs_or_aborts_with_several_buckets_on_gloo(tmp_path: Path) -> None:
    """The order of its later messages differs between ranks; ours runs in several buckets in test_power_sgd.py."""
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", HANGS]
    ranks = [
        subprocess.Popen([*command, str(r), str(tmp_path / "store")], env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        for r in range(2)
    ]  # fmt: skip
    begun = [rank.stdout.readline() for rank in ranks if rank.stdout]
    ended = []
    for rank in ranks:
        try:
            out, _ = rank.communicate(timeout=3)  # four passes take milliseconds
        except subprocess.TimeoutExpired:
            rank.kill()
            out, _ = rank.communicate()
        ended.append((rank.returncode, out))
    assert begun == [b"compressing\n"] * 2
    assert all(code != 0 and b"fine" not in out for code, out in ended), ended
