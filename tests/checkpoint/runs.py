"""Runs that a save cuts, and one runner of them: a train_step, a pipeline, a module or an optimizer; on simulated ranks or real ones."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from fjoin.transforms.base.state_dicts import names_of
from tests import problem

SAMPLES = 24


class Run(NamedTuple):
    """A run.

    Attributes:
        make: Its pipeline; of an "optimizer" the one of a module.
        how: "step"; "alone", the pipeline in a loop of one's own; "module", registered with one; or "optimizer".
        sizes: In each call the samples of the ranks, -1 for one that is not finite; None: each call has 24, which the ranks share out.
        cut: The calls before the save.
        lost: A part of the checkpoint that the run would miss.
    """

    make: Callable[..., Any]
    axes: dict[str, int] = {"data": 2}
    how: str = "step"
    loss: str = "net"
    dtype: torch.dtype = torch.float32
    sizes: Sequence[Sequence[float]] | None = None
    cut: int = 4
    calls: int = 8
    options: dict[str, Any] = {}  # of train_step
    background: bool = False
    lost: str = ""

    @property
    def ranks(self) -> int:
        return math.prod(self.axes.values())

    def batch(self, rank: int, call: int) -> tuple[Tensor, float]:
        if self.sizes is None:
            x = problem.numbers(500 + call, (SAMPLES, 4), self.dtype)[rank :: self.ranks]
            return x, len(x)
        size = self.sizes[call][rank]
        return problem.batch(rank, call, min(math.ceil(size), 4), self.dtype)[0], abs(size)


def start(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return problem.start(dtype) | {"none": torch.zeros(0, 2, dtype=dtype)}


class Step:
    def __init__(self, run: Run, folder: str, mesh: fjoin.Mesh) -> None:
        self.run, self.start = run, start(run.dtype)
        options = {"bucket_bytes": 64, "weight": lambda batch: batch[1]} | run.options
        self.step = fjoin.train_step(problem.LOSSES[run.loss], run.make(), mesh=mesh, **options)
        self.runs = fjoin.Checkpoints(folder, self.step, background=run.background)
        self.buffers = problem.buffers(run.dtype) if run.loss == "buffered" else None

    def begin(self, fresh: tuple[str, ...]) -> None:
        self.state = self.runs.restore(self.start, self.buffers, fresh=fresh)

    def call(self, batch: Any) -> None:
        self.state, _ = self.step(self.state, batch)

    def save(self, batch: Any) -> None:
        self.last = self.state.clone()
        self.runs.save(self.state)
        if self.run.background:
            self.step(self.state, batch)  # takes the memory of the state, and is lost
        self.runs.wait()
        self.state = self.last

    def values(self) -> Any:
        last = self.state.clone()
        self.step.close()
        counts = {"step": last.step, "batches": last.batches}
        return counts | read(
            {"params": last.params, "pipeline": last.pipeline, "buffers": last.buffers or {}, "on": last.on_buffers}
        )


class Alone:
    def __init__(self, run: Run, folder: str, mesh: fjoin.Mesh) -> None:
        self.pipeline, self.start, self.mesh = run.make(), start(run.dtype), mesh
        self.runs, self.loss = fjoin.Checkpoints(folder, self.pipeline, mesh=mesh), problem.LOSSES[run.loss]

    def begin(self, fresh: tuple[str, ...]) -> None:
        self.params, self.state = self.runs.restore(self.start, fresh=fresh)

    def call(self, batch: Any) -> None:
        grads = torch.func.grad(self.loss)(self.params, batch)
        with fjoin.bind(self.mesh):
            self.params, self.state = self.pipeline.step(self.params, grads, self.state, weight=batch[1])

    def save(self, batch: Any) -> None:
        self.runs.save((self.params, self.state))

    def values(self) -> Any:
        return read({"params": self.params, "pipeline": self.state})


class Module(problem.Module):
    """It has also numbers of each rank."""

    def __init__(self, loss: str, dtype: torch.dtype) -> None:
        super().__init__(loss, dtype)
        self.register_buffer("seen", torch.zeros(4, dtype=dtype))

    def forward(self, batch: Any) -> Tensor:
        self.get_buffer("seen").mul_(0.5).add_(batch[0].mean(0))
        return super().forward(batch)


class Objects:
    def __init__(self, run: Run, folder: str, mesh: fjoin.Mesh) -> None:
        self.folder, self.run, self.done = folder, run, 0
        model = DistributedDataParallel(Module(run.loss, run.dtype), find_unused_parameters=True)
        if run.how == "module":
            self.objects: dict[str, Any] = {"model": model, "handle": fjoin.ddp.register(model, run.make())}
        else:
            self.objects = {"model": model, "optimizer": run.make(model.module)}

    def begin(self, fresh: tuple[str, ...]) -> None:
        if any(Path(self.folder).glob("step-*")):
            self.done = fjoin.load(self.folder, self.objects, fresh=fresh)

    def call(self, batch: Any) -> None:
        self.objects["model"].zero_grad()
        if "handle" in self.objects:
            self.objects["handle"].weight(batch[1])
        self.objects["model"](batch).backward()
        if "optimizer" in self.objects:
            self.objects["optimizer"].step()
        self.done += 1

    def save(self, batch: Any) -> None:
        fjoin.save(self.folder, self.objects, self.done)

    def values(self) -> Any:
        held = {name: one.state_dict() for name, one in self.objects.items() if name != "optimizer"}
        params = {f"params.{path}": p.detach().clone() for path, p in self.objects["model"].module.named_parameters()}
        return {
            name: value.clone() if isinstance(value, Tensor) else repr(value) for name, value in flat("", held)
        } | params


def flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, one in value.items():
            yield from flat(f"{name}.{key}", one)
    else:
        yield name, value


def read(tree: Any) -> dict[str, Any]:
    """Name -> value, without the bookkeeping that no later call reads, such as the total of the last message."""
    return {name: value for (name, read), value in zip(names_of(tree), optree.tree_leaves(tree), strict=True) if read}


def part(
    run: Run, rank: int, folder: str, calls: Sequence[int], saves: bool = False, fresh: tuple[str, ...] = ()
) -> Any:
    """On one rank: the calls from the checkpoint in a folder, or from the start, with a save at the end. Returns name -> value."""
    with fjoin.mesh(run.axes) as mesh:
        program = {"step": Step, "alone": Alone}.get(run.how, Objects)(run, folder, mesh)
        program.begin(fresh)
        for call in calls:
            program.call(run.batch(rank, call))
        if saves:
            program.save(run.batch(rank, len(calls)))
        return program.values()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without warnings of pipelines that do not reduce, and of unfinished windows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


@quiet()
def simulated(run: Run, folder: Path, *args: Any) -> list[dict[str, Any]]:
    return tx.simulate(lambda rank: part(run, rank, str(folder), *args), run.axes, list(range(run.ranks)))
