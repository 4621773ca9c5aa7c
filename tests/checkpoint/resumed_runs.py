"""Runs of many kinds on real ranks: whole, up to a save, or from it on."""

from __future__ import annotations

import multiprocessing
import os
import random
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import optree
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import fjoin
from fjoin import transforms as tx
from fjoin.loading._position import Streams
from fjoin.transforms.base import names_of
from tests.checkpoint.resumed_kinds import KINDS, Kind

CUT, EPOCHS = 4, 2  # steps before the save; epochs of a loop that is joined


class Noisy(Dataset[Tensor]):
    """Samples of a rank with noise from all three streams."""

    def __init__(self, rank: int, n: int) -> None:
        self.x = torch.randn(n, 4, generator=torch.Generator().manual_seed(rank))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Tensor:
        return self.x[i] + 0.1 * torch.rand(4) + 0.1 * random.random() + 0.1 * np.random.random()


class Model(nn.Sequential):
    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        extra = {"norm": nn.BatchNorm1d(3), "dropout": nn.Dropout(0.3)}.get(kind, nn.Tanh())
        super().__init__(nn.Linear(4, 3), extra, nn.Linear(3, 2))
        if kind == "unused":
            self.spare = nn.Parameter(torch.ones(3))
        self.to(dtype)


def batch_of(kind: Kind, rank: int, call: int) -> Tensor:
    x = torch.randn(3 + rank, 4, generator=torch.Generator().manual_seed(100 * call + rank))
    return (x * float("inf") if rank == 1 and call in kind.poisoned else x).to(kind.dtype)


class Seen(NamedTuple):
    """What one rank has at the end, as bytes by name, and the batches that it has used."""

    values: dict[str, bytes]
    counts: tuple[int, ...]
    batches: list[bytes]
    moved: bool  # whether a parameter has changed since this run began, or was restored


def as_bytes(value: Any) -> bytes:
    if not isinstance(value, Tensor):
        return repr(value).encode()
    data: Any = value.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
    return f"{value.dtype} {list(value.shape)}".encode() + bytes(data.tolist())


def seen_of(values: dict[str, Any], counts: tuple[int, ...], batches: list[bytes], first: Any, last: Any) -> Seen:
    moved = any(not torch.equal(first[path], last[path].detach()) for path in first)
    return Seen({name: as_bytes(value) for name, value in values.items()}, counts, batches, moved)


def train(name: str, transport: str, folder: str, part: str, lost: tuple[str, ...] = ()) -> tuple[Any, ...]:
    """One rank of a run.

    Args:
        part: "whole"; "before", up to a save after step 4; or "after", from that on.
        lost: What the restored run does not get.
    """
    kind, rank = KINDS[name], dist.get_rank()
    seed = 10 * rank + (part == "after")  # what a resumed process has drawn before does not matter
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    # Processes of the pool are daemons, which may not have the workers of a DataLoader.
    daemon: Any = multiprocessing.current_process()
    with (
        mock.patch.dict(os.environ, {"FJOIN_TRANSPORT": transport}),
        mock.patch.dict(daemon._config, {"daemon": False}),
        mock.patch.object(Streams, "restore", (lambda self: None) if lost == ("streams",) else Streams.restore),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        run = {"calls": calls, "loop": loop, "module": module}[kind.how]
        found = run(kind, rank, folder, part, tuple(one for one in lost if one != "streams"))
        return tuple(found)


def begun(kind: Kind, mesh: Any) -> tuple[Any, Any, Any]:
    """A step, and what it begins with."""
    apply, params, buffers = fjoin.functional(Model(kind.model, kind.dtype))

    def loss_fn(params: Any, *rest: Any) -> Any:
        if len(rest) == 2:
            out, new = apply.with_buffers(params, *rest)
            return out.float().square().mean(), None, new
        return apply(params, {}, rest[0]).float().square().mean()

    step = fjoin.train_step(loss_fn, kind.pipeline(), mesh=mesh, weight=len, **{"bucket_bytes": 64} | kind.options)
    return step, params, buffers or None


def end(step: Any, state: Any, batches: list[bytes], first: Any) -> Seen:
    last = state.clone()
    values = {f"params.{path}": p for path, p in last.params.items()}
    leaves = zip(names_of(last.pipeline), optree.tree_leaves(last.pipeline), strict=True)
    values |= {name: value for (name, read), value in leaves if read}  # those that a later call reads
    values |= tx.to_state_dict({"buffers": last.buffers or {}, "on_buffers": last.on_buffers})
    if batches:
        streams: Any = np.random.get_state()
        values |= {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": streams[1].tolist()}
    step.close()
    return seen_of(values, (last.step, last.batches), batches, first, last.params)


def calls(kind: Kind, rank: int, folder: str, part: str, lost: tuple[str, ...]) -> Seen:
    """As many steps behind the save as before it; a window of accumulated calls is one step."""
    cut = CUT * kind.options.get("accumulate", 1)
    with fjoin.mesh(kind.axes) as mesh:
        step, params, buffers = begun(kind, mesh)
        runs = fjoin.Checkpoints(folder, step)
        state = runs.restore(params, buffers, fresh=lost) if part == "after" else step.init(params, buffers)
        assert state.batches == (cut if part == "after" else 0)
        first = dict(state.clone().params)
        for call in range(state.batches, cut if part == "before" else 2 * cut):
            state, _ = step(state, batch_of(kind, rank, call))
        if part == "before":
            runs.save(state)
        found = end(step, state, [], first)
    return found


def loop(kind: Kind, rank: int, folder: str, part: str, lost: tuple[str, ...]) -> Seen:
    """Epochs of a loop whose position is saved."""
    seen: list[bytes] = []
    with fjoin.mesh(kind.axes) as mesh:
        step, params, buffers = begun(kind, mesh)
        n = (2 + 3 * rank if kind.uneven else 6) * 2
        fork: dict[str, Any] = {"num_workers": kind.workers, "multiprocessing_context": "fork"} if kind.workers else {}
        data = DataLoader(Noisy(rank, n), 2, shuffle=True, **fork)
        joined = step.join(data)
        with fjoin.Checkpoints(folder, step) as runs:
            state = runs.restore(params, buffers, data=joined, fresh=lost)
            first = dict(state.clone().params)
            while joined.epoch < EPOCHS and not joined.stopped:
                for batch in joined:
                    seen.append(as_bytes(batch))
                    state, _ = step(state, batch)
                    if part == "before" and state.step == CUT:
                        runs.save(state, data=joined)
                        joined.stop()
        return end(step, state, seen, first)


def module(kind: Kind, rank: int, folder: str, part: str, lost: tuple[str, ...]) -> Seen:
    """A module in one bucket, registered with the pipeline."""
    ddp = DistributedDataParallel(Model(kind.model, kind.dtype))
    objects: dict[str, Any] = {"model": ddp, "handle": fjoin.ddp.register(ddp, kind.pipeline())}
    done = fjoin.load(folder, objects, fresh=lost) if part == "after" else 0
    first = {path: p.detach().clone() for path, p in ddp.module.named_parameters()}
    for call in range(done, CUT if part == "before" else 2 * CUT):
        ddp.zero_grad()
        objects["handle"].weight(3 + rank)
        ddp(batch_of(kind, rank, call)).square().mean().backward()
    if part == "before":
        fjoin.save(folder, objects, CUT)
    values = dict(flat("", {name: one.state_dict() for name, one in objects.items()}))
    return seen_of(values, (objects["handle"].step,), [], first, dict(ddp.module.named_parameters()))


def flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, one in value.items():
            yield from flat(f"{name}.{key}", one)
    else:
        yield name, value
