"""One state in the forms that are compared, fjoin's checkpoints, torch.save and torch.distributed.checkpoint, and damage to them."""

from __future__ import annotations

import copy
import hashlib
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import fjoin
from fjoin import transforms as tx


def train_step_of(pipeline: Any, mesh: Any = None) -> Any:
    """A step whose loss needs only the parameters."""

    def loss_fn(params: dict[str, Tensor], batch: Any) -> Tensor:
        return torch.cat([p.flatten() for p in params.values()]).square().sum()

    return fjoin.train_step(loss_fn, pipeline, mesh=mesh)


def same(a: Any, b: Any) -> bool:
    """Whether two trees of tensors and numbers are equal, to the bit."""
    (ours, form), (theirs, other) = optree.tree_flatten(a), optree.tree_flatten(b)
    return form == other and all(
        type(x) is type(y) and (torch.equal(x, y) and x.dtype == y.dtype if isinstance(x, Tensor) else x == y)
        for x, y in zip(ours, theirs, strict=True)
    )


class Fjoin:
    """The state of a train_step with AdamW."""

    def __init__(self, model: nn.Module, pipeline: Any) -> None:
        _, self._params, _ = fjoin.functional(model)
        mesh = fjoin.mesh({"data": -1})
        self._step, self._other = train_step_of(pipeline, mesh), train_step_of(pipeline, mesh)
        self._state, _ = self._step(self._step.init(self._params), 0)
        self._loaded: Any = None

    def save(self, path: Path) -> None:
        fjoin.save(path, self._step, self._state)

    def load(self, path: Path) -> None:
        self._loaded = fjoin.load(path, self._other, self._params)

    def equal(self) -> bool:
        """Whether the values that were loaded are those that were saved."""
        return same(*([s.params, s.pipeline.optimizer, s.step, s.batches] for s in (self._state, self._loaded)))

    def forget(self) -> None:
        """Put what was loaded away."""
        self._loaded = None


class Module:
    """A module and its AdamW, equal on all ranks."""

    _trained: dict[nn.Module, Any] = {}  # the variants share one, for the sake of memory

    def __init__(self, model: nn.Module) -> None:
        self._saved = self._target = self._trained.setdefault(model, trained(model))

    def write(self, state: Any, path: Path) -> None:
        raise NotImplementedError

    def read(self, state: Any, path: Path) -> Any:
        raise NotImplementedError

    def save(self, path: Path) -> None:
        path.mkdir(exist_ok=True)
        self.write(_state_of(*self._saved), path)
        if not dist.get_rank():
            _sync(path)
            _sync(path.parent)

    def load(self, path: Path) -> None:
        state = self.read(_state_of(*self._target), path)
        for one, name in zip(self._target, ("model", "optimizer"), strict=True):
            one.load_state_dict(state[name])

    def equal(self) -> bool:
        return same(_state_of(*self._saved), _state_of(*self._target))

    def forget(self) -> None:
        """Load into a module of its own from now on, whose values are others at each load."""
        if self._target is self._saved:
            self._target = copy.deepcopy(self._saved)
        for value in optree.tree_leaves(_state_of(*self._target)):
            if isinstance(value, Tensor):
                value.zero_()
        self._target[1].param_groups[0]["lr"] = -1.0


class TorchSave(Module):
    """By rank 0, and read by all."""

    checksum = False

    def write(self, state: Any, path: Path) -> None:
        if dist.get_rank():
            return
        file = path / "state.pt"
        torch.save(state, file)
        _sync(file)
        if self.checksum:
            (path / "sha256").write_text(_sha256(file))
            _sync(path / "sha256")

    def read(self, state: Any, path: Path) -> Any:
        file = path / "state.pt"
        if self.checksum and (path / "sha256").read_text() != _sha256(file):
            raise ValueError("the file has another checksum")
        return torch.load(file, weights_only=True)


class TorchSaveSha256(TorchSave):
    """With a checksum of the file beside it, which each load compares."""

    checksum = True


class Distributed(Module):
    """torch.distributed.checkpoint: of values that ranks have in common each writes a part."""

    def write(self, state: Any, path: Path) -> None:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path, sync_files=True))

    def read(self, state: Any, path: Path) -> Any:
        dcp.load(state, storage_reader=dcp.FileSystemReader(path))
        return state


def trained(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sha256(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


MAKE: dict[str, Callable[[nn.Module], Any]] = {
    "fjoin": lambda model: Fjoin(model, tx.fuse(tx.mean("data"), tx.adamw(1e-3))),
    "fjoin, ZeRO": lambda model: Fjoin(model, tx.zero(tx.mean("data"), tx.adamw(1e-3), "data")),
    "torch.save": TorchSave,
    "torch.save, sha256": TorchSaveSha256,
    "torch.distributed.checkpoint": Distributed,
}


def damage(model: nn.Module, count: int, folder: Path, variant: str) -> dict[str, Any]:
    """How many loads refuse, take wrong values in silence, or take the right ones, by the kind of damage."""
    one, path, draw = MAKE[variant](model), folder / "saved", random.Random(0)
    folder.mkdir()
    one.save(path)
    one.forget()
    one.load(path)
    assert one.equal(), "the load of an undamaged file takes other values"
    files = sorted(file for file in path.rglob("*") if file.is_file())
    sizes = [file.stat().st_size for file in files]

    def flip(data: bytearray, at: int) -> None:
        data[at] ^= 1 << draw.randrange(8)

    def zero(data: bytearray, at: int) -> None:
        page = slice(at - at % 4096, at - at % 4096 + 4096)
        data[page] = bytes(len(data[page]))

    def cut(data: bytearray, at: int) -> None:
        del data[at:]

    found: dict[str, Any] = {"refused by": Counter()}
    for kind, change, times in (("bit", flip, count), ("page", zero, count // 4), ("cut", cut, count // 4)):
        outcomes = Counter({"refused": 0, "wrong": 0, "right": 0})
        for _ in range(times):
            file = draw.choices(files, sizes)[0]
            data = bytearray(before := file.read_bytes())
            while data == before:  # a page may be zero already
                change(data, draw.randrange(len(data)))
            file.write_bytes(data)
            one.forget()
            try:
                one.load(path)
                outcomes["right" if one.equal() else "wrong"] += 1
            except (Exception, dcp.CheckpointException) as error:  # the second is none of the first
                outcomes["refused"] += 1
                found["refused by"][type(error).__name__] += 1
            file.write_bytes(before)
        found[kind] = outcomes
    return found
