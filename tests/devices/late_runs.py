"""Training beside a late device, with failures, and what each rank's states hold afterwards."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import fjoin
from fjoin import transforms as tx
from fjoin.groups._message import Unfinished
from fjoin.step import StepCheck, StepRecords
from tests.devices.late_device import Device

STEPS = 5
MEAN, SCATTER = tx.mean("data"), tx.scatter_mean("data")
PIPELINES: dict[str, tuple[Any, dict[str, Any]]] = {
    "mean": (lambda: tx.fuse(MEAN, tx.sgd(0.1, momentum=0.5)), {}),
    "clipped": (lambda: tx.fuse(tx.chain(MEAN, tx.clip_by_global_norm(0.5)), tx.sgd(0.1)), {}),
    "fed back": (lambda: tx.fuse(tx.error_feedback(tx.compress(tx.int8(block=4), tx.mean("data"))), tx.sgd(0.1)), {}),
    "zero": (lambda: tx.fuse(SCATTER, tx.sgd(0.1, momentum=0.5)), {}),
    "local": (lambda: tx.local_sgd(tx.sgd(0.1), tx.mean("data"), 2), {}),
}


def params() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(6.0).reshape(2, 3) / 8, "b": torch.arange(4.0) / 4, "c": torch.ones(3)}


def batch_of(rank: int, step: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(10 * step + rank)
    return {path: torch.randn(p.shape, generator=g) for path, p in params().items()}


def loss_fn(p: Any, batch: Any) -> torch.Tensor:
    if batch is None:
        raise ValueError("bad batch")
    total: Any = sum((p[path] * p[path] * batch[path]).sum() for path in p)
    return total


def values(state: Any) -> list[float]:
    out: list[float] = torch.cat([p.detach().view(-1) for p in state.params.values()]).tolist()
    return out


def reference(name: str) -> list[list[list[float]]]:
    """By rank and step, of a run in one process without failures."""

    def one_rank(rank: int) -> list[list[float]]:
        make, options = PIPELINES[name]
        step = fjoin.train_step(loss_fn, make(), mesh=fjoin.mesh({"data": 2}), bucket_bytes=24, **options)
        state = step.init(params())
        seen = [values(state)]
        for i in range(STEPS):
            state, _ = step(state, batch_of(rank, i))
            seen.append(values(state))
        step.close()
        return seen

    with _quiet():
        out: list[list[list[float]]] = tx.simulate(one_rank, {"data": 2}, [0, 1])
    return out


@contextlib.contextmanager
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of local steps that are not averaged at the end
        yield


def _out(fault: str | None) -> Any:
    """Take a part of fjoin out."""
    parts: dict[str, Any] = {
        "settle": lambda: mock.patch.object(Unfinished, "settle", lambda *args: None),
        "drain": lambda: mock.patch.object(StepCheck, "drain", lambda *args: None),
        "forget": lambda: mock.patch.object(StepRecords, "forget", lambda *args: None),
        "age": lambda: mock.patch.object(StepCheck, "raise_pending", lambda *args, **options: None),
    }
    return contextlib.nullcontext() if fault is None else parts[fault]()


def failing(folder: str, cases: list[tuple[str, str, int, bool]], fault: str | None = None) -> list[Any]:
    """Rank 1 fails in a step. Of each case: the error of this rank, and of each of its states the values or why none."""
    rank, out = dist.get_rank(), []
    for number, (name, how, at, donate) in enumerate(cases):
        flag = os.path.join(folder, str(number))
        device = Device(lambda flag=flag: os.path.exists(flag))  # type: ignore[misc]
        dist.barrier()
        with _quiet(), device.used(), _out(fault):
            mesh = fjoin.mesh({"data": 2}, transport="gloo", timeout_s=1.0 if how == "sleeps" else 60.0)
            make, options = PIPELINES[name]
            step = fjoin.train_step(loss_fn, make(), mesh=mesh, bucket_bytes=24, donate=donate, **options)
            states, error = [step.init(params())], "none"
            try:
                for i in range(STEPS + 3):
                    batch: Any = batch_of(rank, i)
                    if rank == 1 and i == at:
                        open(flag, "w").close()
                        if how == "sleeps":
                            time.sleep(2.5)
                        else:
                            batch = None
                    states.append(step(states[-1], batch)[0])
            except Exception as found:
                error = type(found).__name__
                del found
            seen = []
            for state in states:
                try:
                    seen.append(values(state))
                except (fjoin.TornState, fjoin.DonatedState) as reason:
                    seen.append(type(reason).__name__)
            out.append((error, seen))
            mesh.close()
            dist.barrier()
    return out


def nonfinite(cases: list[tuple[str, int, int, str]], fault: str | None = None) -> list[Any]:
    """A gradient of one rank is NaN in a step of a loop: (the step of the error, calls until then, steps of a second run).

    In each case: the pipeline, the rank, the step, and who reads the metrics, or how a plain loop ends.
    """
    rank, out = dist.get_rank(), []
    for name, bad_rank, at, reads in cases:
        dist.barrier()
        with _quiet(), Device(lambda: False).used(), _out(fault):
            mesh = fjoin.mesh({"data": 2}, transport="gloo", timeout_s=20.0)
            make, options = PIPELINES[name]
            step = fjoin.train_step(loss_fn, make(), mesh=mesh, bucket_bytes=24, **options)
            batches = [batch_of(rank, i) for i in range(STEPS)]
            if rank == bad_rank:
                batches[at]["a"] = torch.full((2, 3), float("nan"))
            state, calls, error = step.init(params()), 0, None
            plain = reads in ("close", "leave")
            try:
                for batch in batches if plain else step.join(batches):
                    calls += 1
                    state, metrics = step(state, batch)
                    if reads == "all" or reads == "first" and rank == 0:
                        _ = metrics.loss
                if reads == "close":
                    step.close()
            except Exception as found:
                error = type(found).__name__, getattr(found, "step", None)
                del found
            state, again = step.init(params()), 0  # what is pending of the run before is none of this one's
            try:
                for i in range(3):
                    state, _ = step(state, batch_of(rank, i))
                    again += 1
            except Exception as found:
                error = *(error or ()), type(found).__name__
                del found
            out.append((error, calls, again))
            mesh.close()
    return out
