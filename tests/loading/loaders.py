"""Loaders of any number of samples, with random order and noise."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy.random  # noqa: F401  a stream that is there from the start
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import fjoin
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
    workers: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "forkserver"} if kind == "workers" else {}
    if kind == "generator":
        workers = {"generator": torch.Generator().manual_seed(7)}
    return DataLoader(Noisy(n), batch_size=2, shuffle=True, **workers)
