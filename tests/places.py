"""One runner for the places in which a pipeline trains `tests/problem.py`.

`run(name, place, sizes, pool)` trains a row of `tests/rows.py` and gives what each rank saw, in rank order.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from tests import problem
from tests.helpers import judged
from tests.rows import ROWS, Row
from tests.traffic import Sent, watched

# In "one process" a single rank has the batches of all; in "device" the device judges. The last four need sizes that end.
PLACES = ("one process", "pure", "simulated", "device", "real", "shared", "module", "join", "loop", "real loop", "Join")
ON_RANKS = ("real", "shared", "module", "real loop", "Join")


class Seen(NamedTuple):
    """What one rank saw.

    Attributes:
        params: Path -> parameter after each step.
        state: The pipeline's last state, by name.
        metrics: (loss, weight) of all ranks in each step, where the place has metrics.
        messages: The calls of torch.distributed in each step.
    """

    params: list[dict[str, Tensor]]
    state: dict[str, Any]
    metrics: list[tuple[float, float]]
    messages: list[list[Sent]]


def run(name: str, place: str, sizes: str, pool: Any = None, bucket_bytes: int | None = 64) -> list[Seen]:
    row = ROWS[name]
    ranks = math.prod(row.axes.values())
    if place == "one process":
        return tx.simulate(lambda: _pure(row, sizes, whole=ranks), dict.fromkeys(row.axes, 1))
    if place in ON_RANKS:
        return [Seen(*one) for one in pool.run(ranks, on_this_rank, name, place, sizes, bucket_bytes)]
    return [Seen(*one) for one in tx.simulate(lambda: on_this_rank(name, place, sizes, bucket_bytes), row.axes)]


def on_this_rank(name: str, place: str, sizes: str, bucket_bytes: int | None) -> tuple[Any, ...]:
    # Of plain classes: a worker of the pool loads this file under a name of its own.
    row = ROWS[name]
    if sizes == "poisoned" and row.make().skips is None:
        row = row._replace(make=lambda make=row.make: tx.skip_if_nonfinite(make()))  # type: ignore[misc]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of pipelines that do not reduce, which are rows too
        if place == "pure":
            return tuple(_pure(row, sizes))
        if place in ("loop", "real loop"):
            return tuple(_loop(row, sizes))
        if place in ("module", "Join"):
            return tuple(_module(row, sizes, joins=place == "Join"))
        return tuple(_step(row, place, sizes, bucket_bytes))


def _rank(row: Row) -> int:
    rank = 0
    for axis, size in row.axes.items():
        rank = rank * size + int(tx.axis_index(axis))
    return rank


def _input(row: Row, rank: int, sizes: str) -> list[tuple[Tensor, int]]:
    """A rank's batches up to the last that has samples."""
    found = [problem.batch(rank, step, problem.size(sizes, rank, step), row.dtype) for step in range(problem.STEPS)]
    while found and not found[-1][1]:
        found.pop()
    return found


def _grads(row: Row, params: Any, buffers: Any, batch: Any, state: Any) -> tuple[Any, Any]:
    """The gradients, times the loss scale of the state, and the buffers after the batch."""
    loss = problem.LOSSES[row.loss]
    if row.loss != "buffered":
        grads = torch.func.grad(loss)(params, batch)
        return {path: g * getattr(state, "scale", 1.0) for path, g in grads.items()}, buffers

    def with_buffers(params: Any) -> Any:
        value, _, new = loss(params, buffers, batch)
        return value, new

    return torch.func.grad(with_buffers, has_aux=True)(params)


def _pure(row: Row, sizes: str, whole: int = 0) -> Seen:
    pipeline, params, buffers = row.make(), problem.start(row.dtype), problem.buffers(row.dtype)
    state, seen = pipeline.init(params), Seen([], {}, [], [])
    for step in range(problem.STEPS):
        if whole:
            batch = problem.whole_batch(sizes, whole, step, row.dtype)
        else:
            rank = _rank(row)
            batch = problem.batch(rank, step, problem.size(sizes, rank, step), row.dtype)
        grads, new = _grads(row, params, buffers, batch, state)
        buffers = new if batch[1] else buffers  # a rank without input keeps its own
        params, state = pipeline.step(params, grads, state, weight=batch[1])
        seen.params.append(params)
    return seen._replace(state=tx.to_state_dict(state))


def _loop(row: Row, sizes: str) -> Seen:
    """A loop of one's own over this rank's batches."""
    mesh = fjoin.mesh(row.axes)
    pipeline, params, seen = row.make(), problem.start(row.dtype), Seen([], {}, [], [])
    with fjoin.bind(mesh):
        state = pipeline.init(params)
        empty = problem.batch(0, 0, 0, row.dtype)
        loop = fjoin.join(_input(row, mesh.rank, sizes), mesh=mesh, weight=lambda b: b[1], empty=empty)
        for batch in loop:
            grads, _ = _grads(row, params, None, batch, state)
            params, state = pipeline.step(params, grads, state, weight=loop.weight)
            seen.params.append(params)
            seen.metrics.append((math.nan, loop.total))
    mesh.close()
    return seen._replace(state=tx.to_state_dict(state))


def _step(row: Row, place: str, sizes: str, bucket_bytes: int | None) -> Seen:
    """A train_step, called for each batch, or joined over those that a rank has."""
    transport = {"real": "gloo", "shared": "shared"}.get(place, "auto")
    mesh = fjoin.mesh(row.axes, transport=transport)
    loss = problem.LOSSES[row.loss]
    step = fjoin.train_step(
        loss, row.make(), mesh=mesh, weight=lambda b: b[1], **{"bucket_bytes": bucket_bytes} | row.options
    )
    judged(step, place == "device")
    state = step.init(problem.start(row.dtype), problem.buffers(row.dtype) if row.loss == "buffered" else None)
    seen = Seen([], {}, [], [])
    if place == "join":
        batches: Any = step.join(_input(row, mesh.rank, sizes))
    else:
        batches = [
            problem.batch(mesh.rank, i, problem.size(sizes, mesh.rank, i), row.dtype) for i in range(problem.STEPS)
        ]
    for batch in batches:
        with watched() as messages:
            state, metrics = step(state, batch)
        seen.messages.append(messages)
        seen.metrics.append((float(metrics.loss), float(metrics.weight)))
        seen.params.append({path: p.detach().clone() for path, p in state.params.items()})
    seen = seen._replace(state=tx.to_state_dict(state.clone().pipeline))
    step.close()
    mesh.close()
    return seen


def _module(row: Row, sizes: str, joins: bool) -> Seen:
    """A pipeline registered with a DistributedDataParallel; in a Join each rank runs its own batches only."""
    rank, module = dist.get_rank(), problem.Module(row.loss, row.dtype)
    model = DistributedDataParallel(module, bucket_cap_mb=6e-5, find_unused_parameters=True)
    mesh = fjoin.mesh(row.axes) if len(row.axes) > 1 else None
    handle, seen = fjoin.ddp.register(model, row.make(), mesh), Seen([], {}, [], [])

    def train(batch: tuple[Tensor, int]) -> None:
        handle.weight(batch[1])
        model.zero_grad()
        with watched() as messages:
            loss = model(batch)
            (handle.scale(loss) if row.scaled else loss).backward()
        seen.messages.append(messages)
        seen.metrics.append((math.nan, float(handle.total)))
        seen.params.append({path: p.detach().clone() for path, p in module.named_parameters()})

    if joins:
        with fjoin.Join([model]):
            for batch in _input(row, rank, sizes):
                train(batch)
        seen.params.append({path: p.detach().clone() for path, p in module.named_parameters()})
    else:
        for step in range(problem.STEPS):
            train(problem.batch(rank, step, problem.size(sizes, rank, step), row.dtype))
    return seen._replace(state=tx.to_state_dict(handle.state_dict()))
