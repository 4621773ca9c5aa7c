"""Ranks that save or restore differently: all of them get a typed error in time, and no checkpoint is lost."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from fjoin.checkpoint import verify

TIMEOUT_S, ODD = 2.0, 1  # of the mesh; the rank that differs
START = {"w": torch.linspace(-1, 1, 6)}
SGD = tx.sgd(0.1, momentum=0.9)
MEAN, LOCAL = tx.fuse(tx.mean("data"), SGD), tx.local_sgd(SGD, tx.mean("data"), 50)  # steps of the second need not meet


def loss_fn(params: Any, x: Tensor) -> Tensor:
    return ((params["w"] * x).sum() - 1) ** 2


def batch_of(rank: int) -> Tensor:
    return torch.full((6,), 1.0 + rank)


def train(
    mesh: Any,
    folder: Path,
    saves: Callable[[int, bool], bool],
    pipeline: tx.Pipeline = MEAN,
    until: int = 6,
    **given: Any,
) -> None:
    """Save after the steps that `saves` chooses on this rank, which is the odd one or not."""
    step = fjoin.train_step(loss_fn, pipeline, mesh=mesh)
    runs = fjoin.Checkpoints(folder, step)
    state = runs.restore(START)
    while state.step < until:
        state, _ = step(state, batch_of(mesh.rank))
        if saves(state.step, mesh.rank == ODD):
            runs.save(state, **given)


def one_behind(mesh: Any, folder: Path) -> None:
    train(mesh, folder, lambda step, odd: step == 4 - odd)


def one_behind_alone(mesh: Any, folder: Path) -> None:
    train(mesh, folder, lambda step, odd: step == 4 - odd, LOCAL)


def only_one(mesh: Any, folder: Path) -> None:
    train(mesh, folder, lambda step, odd: odd and step == 3)


def only_the_others(mesh: Any, folder: Path) -> None:
    train(mesh, folder, lambda step, odd: not odd and step == 3)


def only_one_at_the_end(mesh: Any, folder: Path) -> None:
    train(mesh, folder, lambda step, odd: odd and step == 6)


def every(mesh: Any, folder: Path) -> None:
    step = fjoin.train_step(loss_fn, MEAN, mesh=mesh)
    runs = fjoin.Checkpoints(folder, step, every=2 + (mesh.rank == ODD))
    state = runs.restore(START)
    while state.step < 6:
        state, metrics = step(state, batch_of(mesh.rank))
        runs.save(state, metrics)


def background(mesh: Any, folder: Path) -> None:
    step = fjoin.train_step(loss_fn, MEAN, mesh=mesh)
    runs = fjoin.Checkpoints(folder, step, background=mesh.rank == ODD)
    state = runs.restore(START)
    while state.step < 6:
        state, _ = step(state, batch_of(mesh.rank))
        runs.save(state)


def folders(mesh: Any, folder: Path) -> None:
    train(mesh, folder / ("odd" if mesh.rank == ODD else "new"), lambda step, odd: step == 4)


def extra(mesh: Any, folder: Path, ours: Any, theirs: Any) -> None:
    train(mesh, folder, lambda step, odd: step == 4, extra=ours if mesh.rank == ODD else theirs)


def number_of_a_pipeline(mesh: Any, folder: Path) -> None:
    params, state = fjoin.load(folder, MEAN, START, mesh=mesh)
    with fjoin.bind(mesh):
        for _ in range(2):
            params, state = MEAN.step(params, {"w": torch.ones(6)}, state)
    if mesh.rank == ODD:
        state = state._replace(step=state.step - 1)
    fjoin.save(folder, MEAN, (params, state), mesh=mesh)


def form_of_a_pipeline(mesh: Any, folder: Path, pipelines: tuple[tx.Pipeline, tx.Pipeline], params: Any) -> None:
    pipeline = pipelines[mesh.rank == ODD]
    with fjoin.bind(mesh):
        params, state = pipeline.step(params, params, pipeline.init(params))
    fjoin.save(folder / "new", pipeline, (params, state), mesh=mesh)


def number_of_objects(mesh: Any, folder: Path) -> None:
    fjoin.save(folder / "new", {"model": torch.nn.Linear(1, 1)}, 5 + (mesh.rank == ODD), mesh=mesh)


def restore(mesh: Any, folder: Path, params: Any = None, **given: Any) -> None:
    step = fjoin.train_step(loss_fn, MEAN, mesh=mesh)
    fjoin.Checkpoints(folder, step).restore(START if params is None else params, **given)


def restore_or_init(mesh: Any, folder: Path) -> None:
    step = fjoin.train_step(loss_fn, MEAN, mesh=mesh)
    step.init(START) if mesh.rank == ODD else fjoin.Checkpoints(folder, step).restore(START)


def data(mesh: Any, folder: Path, saves: bool) -> None:
    """Only the odd rank passes the position to a save, or to a restore."""
    step = fjoin.train_step(loss_fn, MEAN, mesh=mesh)
    runs, loop, odd = fjoin.Checkpoints(folder, step), step.join([batch_of(mesh.rank)] * 4), mesh.rank == ODD
    state = runs.restore(START)
    for batch in loop:
        state, _ = step(state, batch)
        if state.step == 4:
            runs.save(state, data=loop if odd or not saves else None)
    if not saves:
        fjoin.load(folder, step, START, data=loop if odd else None)


class Case(NamedTuple):
    """Something that the ranks do differently.

    Attributes:
        ends: Whether the other ranks end without an error, since they have ended before.
    """

    run: Callable[..., None]
    ends: bool = False


CASES: dict[str, Case] = {
    "one is a step behind": Case(one_behind),
    "one is a step behind, alone": Case(one_behind_alone),
    "only one saves": Case(only_one),
    "only one does not save": Case(only_the_others),
    "only one saves, at the end": Case(only_one_at_the_end, ends=True),
    "every": Case(every),
    "background": Case(background),
    "folders": Case(folders),
    "folders of a restore": Case(lambda mesh, folder: restore(mesh, folder / "odd" if mesh.rank == ODD else folder)),
    "extra of no kind": Case(lambda mesh, folder: extra(mesh, folder, object(), None)),
    "extra": Case(lambda mesh, folder: extra(mesh, folder, {"epoch": 1}, {"epoch": 2})),
    "extra tensors": Case(lambda mesh, folder: extra(mesh, folder, {"t": torch.ones(2)}, {"t": torch.zeros(2)})),
    "extra names": Case(lambda mesh, folder: extra(mesh, folder, {"a": torch.ones(2)}, {"b": torch.ones(2)})),
    "number of a pipeline": Case(number_of_a_pipeline),
    "number of objects": Case(number_of_objects),
    "shapes of a pipeline": Case(
        lambda mesh, folder: form_of_a_pipeline(mesh, folder, (LOCAL, LOCAL), {"w": torch.ones(5 + (mesh.rank == ODD))})
    ),
    "names of a pipeline": Case(
        lambda mesh, folder: form_of_a_pipeline(mesh, folder, (LOCAL, LOCAL), {f"w{mesh.rank == ODD}": torch.ones(5)})
    ),
    "pipelines": Case(
        lambda mesh, folder: form_of_a_pipeline(mesh, folder, (MEAN, tx.fuse(tx.mean("data"), tx.adamw(0.1))), START)
    ),
    "step of a restore": Case(lambda mesh, folder: restore(mesh, folder, step=1 + (mesh.rank == ODD))),
    "newest or a step": Case(lambda mesh, folder: restore(mesh, folder, step=1 if mesh.rank == ODD else None)),
    "shapes of a restore": Case(lambda mesh, folder: restore(mesh, folder, {"w": torch.ones(6 + (mesh.rank == ODD))})),
    "fresh": Case(lambda mesh, folder: restore(mesh, folder, fresh=("pipeline.optimizer",) * (mesh.rank == ODD))),
    "restore or init": Case(restore_or_init),
    "data of a save": Case(lambda mesh, folder: data(mesh, folder, True)),
    "data of a restore": Case(lambda mesh, folder: data(mesh, folder, False)),
}


def run(name: str, transport: str, folder: str) -> tuple[str, bool, float]:
    """The error of this rank, whether it is typed, and the seconds until it was raised."""
    with fjoin.mesh({"data": -1}, transport=transport) as mesh:
        train(mesh, Path(folder), lambda step, odd: True, until=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mesh = fjoin.mesh({"data": -1}, transport=transport, timeout_s=TIMEOUT_S)
        began = time.monotonic()
        try:
            CASES[name].run(mesh, Path(folder))
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


@pytest.mark.sample(9)
@pytest.mark.parametrize("transport", ["gloo", "shared"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_it_is_an_error_on_all_ranks(pool: Any, name: str, ranks: int, transport: str, tmp_path: Path) -> None:
    found = pool.run(ranks, run, name, transport, str(tmp_path))
    assert found[ODD][1], found
    assert all(typed or (CASES[name].ends and not text) for text, typed, _ in found), found
    assert max(took_s for *_, took_s in found) < 3 * TIMEOUT_S + 1
    held = sorted(os.listdir(tmp_path))
    assert {"step-00000001", "step-00000002"} <= set(held) and not [one for one in held if one.startswith(".tmp")]
    assert not [line for one in held if one.startswith("step") for line in verify(tmp_path / one)]
    first, *others = pool.run(ranks, resumed, str(tmp_path))
    assert first[0] >= 2 and all(one == first for one in others)
