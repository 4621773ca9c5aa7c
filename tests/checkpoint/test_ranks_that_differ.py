"""Ranks that save or restore differently: all of them get a typed error in time, and no checkpoint is lost."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fjoin
from fjoin import transforms as tx
from fjoin.checkpoint import verify
from fjoin.records._compare import on_devices

TIMEOUT_S, ODD = 2.0, 1  # of the mesh; the rank that differs
START = {"w": torch.linspace(-1, 1, 6)}
SGD = tx.sgd(0.1, momentum=0.9)
MEAN, LOCAL = tx.fuse(tx.mean("data"), SGD), tx.local_sgd(SGD, tx.mean("data"), 50)  # steps of the second need not meet
ADAMW = tx.fuse(tx.mean("data"), tx.adamw(0.1))


def loss_fn(params: Any, x: Tensor) -> Tensor:
    return ((params["w"] * x).sum() - 1) ** 2


def train(
    mesh: Any, folder: Path, saves: Callable[[int], bool], until: int = 6, pipeline: tx.Pipeline = MEAN,
    extra: Any = None, **options: Any,
) -> None:  # fmt: skip
    """Save after the steps that `saves` chooses on this rank."""
    step = fjoin.train_step(loss_fn, pipeline, mesh=mesh)
    runs = fjoin.Checkpoints(folder, step, **options)
    state = runs.restore(START)
    while state.step < until:
        state, metrics = step(state, torch.full((6,), 1.0 + mesh.rank))
        if saves(state.step):
            runs.save(state, metrics if "every" in options else None, extra=extra)


def data(mesh: Any, folder: Path, saves: bool, loads: bool) -> None:
    """Whether a save has the position of the loop, and a load takes it."""
    step = fjoin.train_step(loss_fn, MEAN, mesh=mesh)
    runs, loop = fjoin.Checkpoints(folder, step), step.join([torch.full((6,), 1.0 + mesh.rank)] * 4)
    state = runs.restore(START)
    for batch in loop:
        state, _ = step(state, batch)
        if state.step == 4:
            runs.save(state, data=loop if saves else None)
    fjoin.load(folder, step, START, data=loop if loads else None)


def at(*steps: int) -> Callable[[int], bool]:
    return lambda step: step in steps


def always(step: int) -> bool:
    return True


def extra(ours: Any, theirs: Any) -> Callable[[Any, Path, bool], None]:
    return lambda mesh, folder, odd: train(mesh, folder, at(4), extra=ours if odd else theirs)


def stepped(mesh: Any, folder: Path, pipeline: tx.Pipeline, params: Any, back: int = 0) -> None:
    """Save what a pipeline has after three steps."""
    with fjoin.bind(mesh):
        state = pipeline.init(params)
        for _ in range(3):
            params, state = pipeline.step(params, params, state)
    fjoin.save(folder / "new", pipeline, (params, state._replace(step=state.step - back)), mesh=mesh)


def restore(mesh: Any, folder: Path, params: Any = START, **given: Any) -> None:
    fjoin.Checkpoints(folder, fjoin.train_step(loss_fn, MEAN, mesh=mesh)).restore(params, **given)


def restore_or_init(mesh: Any, folder: Path, odd: bool) -> None:
    step = fjoin.train_step(loss_fn, MEAN, mesh=mesh)
    step.init(START) if odd else fjoin.Checkpoints(folder, step).restore(START)


ENDS = "only one saves, at the end"  # there the other ranks have ended before, without an error
CASES: dict[str, Callable[[Any, Path, bool], None]] = {
    "one is a step behind": lambda mesh, folder, odd: train(mesh, folder, at(4 - odd)),
    "one is a step behind, alone": lambda mesh, folder, odd: train(mesh, folder, at(4 - odd), pipeline=LOCAL),
    "only one saves": lambda mesh, folder, odd: train(mesh, folder, at(3) if odd else at()),
    "only one does not save": lambda mesh, folder, odd: train(mesh, folder, at() if odd else at(3)),
    ENDS: lambda mesh, folder, odd: train(mesh, folder, at(6) if odd else at()),
    "every": lambda mesh, folder, odd: train(mesh, folder, always, every=2 + odd),
    "background": lambda mesh, folder, odd: train(mesh, folder, always, background=odd),
    "folders": lambda mesh, folder, odd: train(mesh, folder / ("odd" if odd else "new"), at(4)),
    "folders of a restore": lambda mesh, folder, odd: restore(mesh, folder / "odd" if odd else folder),
    "extra of no kind": extra(object(), None),
    "extra": extra({"epoch": 1}, {"epoch": 2}),
    "extra tensors": extra({"t": torch.ones(2)}, {"t": torch.zeros(2)}),
    "extra names": extra({"a": torch.ones(2)}, {"b": torch.ones(2)}),
    "number of a pipeline": lambda mesh, folder, odd: stepped(mesh, folder, MEAN, START, back=odd),
    "number of objects": lambda mesh, folder, odd: [
        fjoin.save(folder / "new", {"m": nn.Linear(1, 1)}, 5 + odd, mesh=mesh)
    ],
    "shapes of a pipeline": lambda mesh, folder, odd: stepped(mesh, folder, LOCAL, {"w": torch.ones(5 + odd)}),
    "names of a pipeline": lambda mesh, folder, odd: stepped(mesh, folder, LOCAL, {f"w{odd}": torch.ones(5)}),
    "pipelines": lambda mesh, folder, odd: stepped(mesh, folder, ADAMW if odd else MEAN, START),
    "step of a restore": lambda mesh, folder, odd: restore(mesh, folder, step=1 + odd),
    "newest or a step": lambda mesh, folder, odd: restore(mesh, folder, step=1 if odd else None),
    "shapes of a restore": lambda mesh, folder, odd: restore(mesh, folder, {"w": torch.ones(6 + odd)}),
    "fresh": lambda mesh, folder, odd: restore(mesh, folder, fresh=("pipeline.optimizer",) * odd),
    "restore or init": restore_or_init,
    "data of a save": lambda mesh, folder, odd: data(mesh, folder, odd, odd),
    "data of a restore": lambda mesh, folder, odd: data(mesh, folder, True, odd),
}


def run(name: str, transport: str, folder: str) -> tuple[str, bool, float]:
    """The error of this rank, whether it is typed, and the seconds until it was raised."""
    with fjoin.mesh({"data": -1}, transport=transport) as mesh:
        train(mesh, Path(folder), always, until=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mesh = fjoin.mesh({"data": -1}, transport=transport, timeout_s=TIMEOUT_S)
        began = time.monotonic()
        try:
            CASES[name](mesh, Path(folder), mesh.rank == ODD)
        except Exception as error:
            typed = isinstance(error, fjoin.FjoinError) or (isinstance(error, TypeError) and "extra" in str(error))
            return f"{type(error).__name__}: {error}", typed, time.monotonic() - began
        finally:
            mesh.close()
    return "", False, time.monotonic() - began


def resumed(folder: str) -> list[Any]:
    with fjoin.mesh({"data": -1}) as mesh:
        state = fjoin.load(folder, fjoin.train_step(loss_fn, MEAN, mesh=mesh), START)
        return [state.step, *state.params["w"].tolist()]


@pytest.mark.sample(16)
@pytest.mark.parametrize("transport", ["gloo", "shared"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_it_is_an_error_on_all_ranks(pool: Any, name: str, ranks: int, transport: str, tmp_path: Path) -> None:
    found = pool.run(ranks, run, name, transport, str(tmp_path))
    assert found[ODD][1], found
    assert all(typed or (name == ENDS and not text) for text, typed, _ in found), found
    assert max(took_s for *_, took_s in found) < 3 * TIMEOUT_S + 1
    held = sorted(os.listdir(tmp_path))
    assert {"step-00000001", "step-00000002"} <= set(held) and not [one for one in held if one.startswith(".tmp")]
    assert not [line for one in held if one.startswith("step") for line in verify(tmp_path / one)]
    first, *others = pool.run(ranks, resumed, str(tmp_path))
    assert first[0] >= 2 and all(one == first for one in others)


# -- the numbers by which ranks compare tensors on devices ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("numel", [0, 1, 3, 64, 1001])
def test_numbers_of_tensors_on_devices(dtype: torch.dtype, numel: int) -> None:
    x = torch.arange(numel).fmod(2).bool() if dtype is torch.bool else torch.randn(numel).to(dtype)
    ((own,), (again,)) = on_devices([x]), on_devices([x.clone()])
    assert own == again
    for i in range(0, numel, 97):  # any change of one element
        other = x.clone()
        other[i] = ~other[i] if dtype is torch.bool else other[i] + 1
        assert on_devices([x, other])[0] == own and on_devices([other]) != [own]
    assert numel < 2 or on_devices([x.flip(0)]) != [own] or torch.equal(x.flip(0), x)  # and any change of places


def test_numbers_of_tensors_on_devices_do_not_depend_on_where_memory_begins() -> None:
    data = torch.randint(0, 255, (4099,), dtype=torch.uint8)
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), data])[1:]
    assert shifted.data_ptr() % 4 and on_devices([data]) == on_devices([shifted])


def test_two_equal_changes_do_not_cancel_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fjoin.records._compare._CHUNK", 16)  # also in different chunks
    x = torch.randn(50)
    numbers = set[int]()
    for i in range(50):
        for j in range(i + 1, 50):
            y = x.clone()
            y[i], y[j] = -y[i], -y[j]
            numbers.add(on_devices([y])[0])
    assert len(numbers) == 50 * 49 // 2 and on_devices([x])[0] not in numbers
