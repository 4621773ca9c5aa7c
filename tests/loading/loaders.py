"""Loaders, and a run whose order, augmentation and dropout depend on random numbers, which may be saved and restored anywhere."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy.random  # noqa: F401  a stream that is there from the start
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import fjoin
from fjoin import transforms as tx
from fjoin.transforms.axes import bound

PIPELINE = tx.fuse(tx.error_feedback(tx.compress(tx.int8(), tx.mean("data"))), tx.sgd(1e-5, momentum=0.9))


class Noisy(Dataset[Tensor]):
    """Samples with noise from torch's stream, and from the others of a process where it is one rank."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.alone = not any(axis.simulated for axis in bound().values())  # simulated ranks share the others

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Tensor:
        noise = torch.rand(()).item()
        if self.alone:
            noise += random.random()
        if self.alone and "numpy.random" in sys.modules:
            noise += sys.modules["numpy.random"].random()
        return torch.tensor([float(i), noise], dtype=torch.float64)


class Stateful:
    """A loader that saves its own position, as torchdata's StatefulDataLoader does: the order is its own, the state is alive."""

    def __init__(self, n: int, size: int) -> None:
        self.data, self.size = Noisy(n), size
        self.state: dict[str, Any] = {"epoch": 0, "at": 0, "asked": 0}

    def __iter__(self) -> Iterator[Tensor]:
        if self.state["at"] >= self.data.n:
            self.state.update(epoch=self.state["epoch"] + 1, at=0)
        gen = torch.Generator().manual_seed(self.state["epoch"])
        order = torch.randperm(self.data.n, generator=gen).tolist()
        while (at := self.state["at"]) < self.data.n:
            self.state["at"] = at + self.size
            yield torch.stack([self.data[i] for i in order[at : at + self.size]])

    def state_dict(self) -> dict[str, Any]:
        self.state["asked"] += 1
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def loader_of(kind: str, n: int) -> Any:
    if kind == "own state":
        return Stateful(n, 2)
    if kind == "list":
        return list(torch.arange(2.0 * n, dtype=torch.float64).reshape(-1, 2, 2)) if n else []
    if kind == "Shuffled":
        return DataLoader(Noisy(n), batch_sampler=fjoin.Shuffled(n, 6, seed=4))
    workers: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "forkserver"} if kind == "workers" else {}
    if kind == "generator":
        workers = {"generator": torch.Generator().manual_seed(7)}
    return DataLoader(Noisy(n), batch_size=2, shuffle=True, **workers)


def loss_fn(params: Any, batch: Tensor) -> Tensor:
    return (torch.nn.functional.dropout(batch * params["w"], 0.5) - 1).square().mean()


def run(
    kind: str, n: int, folder: Path | str, restores: bool = False, save_at: tuple[int, int] | None = None,
    own: bool = False, stop: bool = False, epochs: int = 3, background: bool = False,
) -> list[Any]:  # fmt: skip
    """One rank's epoch, iteration and batch of each iteration, with the parameters after it, from the start or the newest save.

    Args:
        n: The number of this rank's samples; with Shuffled that of all.
        save_at: The epoch and the iteration in which to save; iteration -1 is before the epoch.
        own: Whether to use the loop of fjoin.join.
        stop: Whether to end the run where it saves, by `stop`, after which it saves once more.
    """
    seed = 5 if restores else 100  # what a resumed process has drawn before does not matter
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(seed)
    mesh, empty = fjoin.mesh({"data": -1}), torch.zeros(0, 2, dtype=torch.float64)
    step = fjoin.train_step(loss_fn, PIPELINE, mesh=mesh, weight=len)
    loader = loader_of(kind, n)
    loop: Any = fjoin.join(loader, mesh=mesh, weight=len, empty=empty) if own else step.join(loader, empty=empty)
    options: dict[str, Any] = {"mesh": mesh} if own else {}
    runs, seen = fjoin.Checkpoints(folder, PIPELINE if own else step, background=background, **options), list[Any]()
    state = runs.restore({"w": torch.ones(2, dtype=torch.float64)}, data=loop if restores else None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "to resume, the loop loads", UserWarning)
        for epoch in range(loop.epoch, epochs):
            if save_at == (epoch, -1):
                runs.save(state, data=loop)
            for batch in loop:
                at = loop._position.steps - 1
                if own:
                    with fjoin.bind(mesh):
                        grads = (
                            torch.func.grad(loss_fn, 0)(state[0], batch)
                            if len(batch)
                            else {"w": torch.zeros(2).double()}
                        )
                        state = PIPELINE.step(state[0], grads, state[1], weight=loop.weight)
                else:
                    state, _ = step(state, batch)
                seen.append((epoch, at, batch.tolist(), (state[0] if own else state.params)["w"].tolist()))
                if save_at == (epoch, at):
                    runs.save(state, data=loop)
                    if stop:
                        loop.stop()
            if loop.stopped:
                runs.save(state, data=loop)
                break
    runs.wait()
    step.close()
    return seen
