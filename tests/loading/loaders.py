"""Loaders, and a run whose order, augmentation and dropout depend on random numbers."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import fjoin
from fjoin import transforms as tx
from fjoin.transforms.axes import bound


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
    return DataLoader(
        Noisy(n),
        batch_size=2,
        shuffle=True,
        num_workers=2 if kind == "workers" else 0,
        multiprocessing_context="forkserver" if kind == "workers" else None,
    )


def loss_fn(params: Any, batch: Tensor) -> Tensor:
    return (torch.nn.functional.dropout(batch * params["w"], 0.5) - 1).square().mean()


def run(
    kind: str,
    n: int,
    saved: tuple[Any, Any] | None = None,
    save_at: tuple[int, int] | None = None,
    epochs: int = 3,
    own: bool = False,
    stop: bool = False,
) -> tuple[list[Any], Any]:
    """A run from the start or from what was saved.

    Args:
        n: The number of this rank's samples; with Shuffled that of all.
        saved: The position and the parameters.
        save_at: The epoch and the iteration in which to save; iteration -1 is before the epoch.
        own: Whether to use the loop of fjoin.join.
        stop: Whether to end the run where it saves, by `stop`, after which it saves once more.

    Returns:
        Epoch, iteration and batch of each iteration with the parameters after it; and what was saved.
    """
    torch.manual_seed(100 if saved is None else 5)  # what a resumed process has drawn before does not matter
    random.seed(100 if saved is None else 5)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(100 if saved is None else 5)
    mesh = fjoin.mesh({"data": -1})
    step = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.sgd(0.1)), mesh=mesh, weight=len)
    state = step.init({"w": torch.ones(2, dtype=torch.float64)} if saved is None else saved[1])
    loader, empty = loader_of(kind, n), torch.zeros(0, 2, dtype=torch.float64)
    loop: Any = fjoin.join(loader, mesh=mesh, weight=len, empty=empty) if own else step.join(loader, empty=empty)
    if saved is not None:
        loop.load_state_dict(saved[0])
        assert loop.epoch == saved[0]["epoch"]
    seen, kept = [], None

    def keep() -> Any:
        return loop.state_dict(), {path: p.clone() for path, p in state.params.items()}

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "to resume, the loop loads", UserWarning)
        for epoch in range(loop.epoch, epochs):
            if save_at == (epoch, -1):
                kept = keep()
            for batch in loop:
                at = loop._position.steps - 1
                if own:
                    with fjoin.bind(mesh):
                        loss = loss_fn(state.params, batch)  # draws also where this rank is out of input
                        del loss
                state, _ = _stepped(step, state, batch, own)
                seen.append((epoch, at, batch.tolist(), state.params["w"].tolist()))
                if save_at == (epoch, at):
                    kept = keep()
                    if stop:
                        loop.stop()
            if loop.stopped:
                seen.append("stopped")
                return seen, keep()
    step.close()
    return seen, kept


def _stepped(step: Any, state: Any, batch: Any, own: bool) -> Any:
    return (state, None) if own else step(state, batch)
