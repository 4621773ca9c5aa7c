"""Saves and loads that are refused: what is called, the error, and words of it. No file is written or changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fjoin
from fjoin import transforms as tx
from tests.checkpoint.test_values import Dict
from tests.helpers import raises_text

START, BUFFERS, X = {"w": torch.ones(6), "b": torch.zeros(())}, {"n": torch.zeros(())}, torch.ones(6)
V, T, E = ValueError, TypeError, fjoin.CheckpointError
PIPELINE, MODEL = tx.fuse(tx.mean("data"), tx.adam(0.1)), {"model": nn.Linear(1, 1)}


def loss_fn(params: Any, *rest: Any) -> Any:
    loss = (params["w"] * rest[-1]).sum() + params["b"]
    return (loss, None, {"n": rest[0]["n"] + 1}) if len(rest) == 2 else loss


def step(pipeline: tx.Pipeline = PIPELINE, **options: Any) -> fjoin.TrainStep:
    return fjoin.train_step(loss_fn, pipeline, **options)


def update(grads: Any, state: Any, params: Any = None) -> Any:
    return grads, {"first": state["first"] or {"b": grads["b"].clone()}}


GROWS = tx.fuse(
    tx.chain(tx.mean("data"), tx.Transform(lambda params: {"first": {}}, update, tx.Needs.LEAVES)), tx.sgd(0.1)
)


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders: of a step with buffers, a step without, one whose state grows, objects, and none."""
    folder = tmp_path_factory.mktemp("runs")
    for name, buffers, pipeline in (("buffers", BUFFERS, PIPELINE), ("step", None, PIPELINE), ("grows", None, GROWS)):
        made = step(pipeline)
        fjoin.save(folder / name, made, made(made.init(START, buffers), X)[0])
    fjoin.save(folder / "objects", MODEL, 1)
    return folder


def load(name: str, *given: Any, **more: Any) -> Callable[[Path], Any]:
    return lambda at: fjoin.load(at / name, step(), *given, **more)


def save(*given: Any, **more: Any) -> Callable[[Path], Any]:
    return lambda at: fjoin.save(at / "new", *given, **more)


def within(at: Path, **more: Any) -> None:
    """In the middle of a window."""
    one = step(accumulate=2)
    runs = fjoin.Checkpoints(at / "new", one, every=1)
    state, metrics = one(one.init(START), X)
    assert runs.save(state, metrics) is None
    runs.save(state)


def never_due(at: Path, **options: Any) -> None:
    """In the first step."""
    one = step()
    fjoin.Checkpoints(at / "new", one, **options).save(*one(one.init(START), X))


def extra(value: Any) -> tuple[Any, ...]:
    return save(MODEL, 1, extra=value), T, "extra must be JSON"


ROWS: list[tuple[Any, ...]] = [
    # -- arguments
    (lambda at: fjoin.Checkpoints(at, step(), every=0), V, "every", "0"),
    (lambda at: fjoin.Checkpoints(at, PIPELINE, every_s=1.0), V, "every_s", "train_step"),
    (save(object(), 1), T, "object", "state_dict"),
    (save({"model": 3}, 1), T, "'model'", "load_state_dict"),
    (save(MODEL, None), T, "number of steps"),
    (save({"a": nn.ModuleDict({"b": MODEL["model"]}), "a.b": MODEL["model"]}, 1), V, "'a.b'", "other names"),
    (save({"a": step(), "b": PIPELINE}, 1), T, "the state", "['a', 'b']", "got int"),
    (save({"a": step(), "b": PIPELINE}, {"a": 0}), T, "the state", "['a', 'b']", "got ['a']"),
    (lambda at: fjoin.Checkpoints(at / "new", {"a": step()}).restore(START), T, "params", "['a']", "got ['b', 'w']"),
    (lambda at: fjoin.Checkpoints(at / "new", {"a": step()}).restore({"a": START}, {"b": {}}), T, "buffers", "['a']", "'b'"),
    *((save({name: step()}, 1), T, "must be text") for name in ("", 0)),
    (lambda at: fjoin.Checkpoints(at, {"a": step()}, mesh=fjoin.mesh({"data": 1})), T, "leave mesh= out"),
    (save(one := step(), one.init(START), data=[1]), T, "batches = step.join(loader)"),
    *((partial(never_due, **options), V, "every=1000", "every_s=600", "save(state) ", 'every_s=float("inf")')
      for options in ({}, {"keep_every": 2}, {"background": True})),
    (within, V, "accumulation window", "metrics.stepped"),
    *map(extra, ({1: 2}, {"a": {3}}, {"$tensor": 1}, {"$float": "inf"}, object(),
                 {"a": {"b": X}, "a.b": X})),
    *((save({"it": Dict(x=one)}, 1), T, "dense tensor", ".x'") for one in (X.to_sparse(), X.to("meta"))),
    *((save(MODEL, 1, extra={"x": one}), T, "dense tensor", ".x'") for one in (X.to_sparse(), X.to("meta"))),
    # -- folders
    (lambda at: fjoin.save(at / "objects", MODEL, 1), E, "step-00000001 exists"),
    (lambda at: fjoin.load(at / "new", MODEL), E, "holds no checkpoint"),
    (load("step", START, step="1"), V, "step must be a whole number", "'1'"),
    (load("step", START, step=7), E, "step-00000007 does not exist", "holds the steps [1]"),
    (lambda at: fjoin.Checkpoints(at / "new", step()).restore(), E, "holds no checkpoint", "parameters at the start"),
    # -- another model, pipeline or data than was saved
    (lambda at: fjoin.load(at / "step", MODEL), E, "['model']"),
    (lambda at: fjoin.load(at / "objects", {"other": MODEL["model"]}), E, "['model']", "['other']"),
    (load("step", START | {"w": torch.ones(7)}), E, "'w'", "(6,)", "(7,)"),
    (load("step", {path: p.double() for path, p in START.items()}), E, "float32", "float64"),
    (load("buffers", START), E, "['n']", "restore(params, buffers)"),
    (lambda at: fjoin.load(at / "grows", step(GROWS), START), E, "first.b"),
    (lambda at: fjoin.load(at / "step", {"a": step()}, {"a": START}), E, "params.a", "'b'"),
    (lambda at: fjoin.load(at / "step", one := step(), START, data=one.join([X])), E, "no position", "data="),
    # -- values that start anew
    (load("step", START, fresh=("pipelin.",)), E, "'pipelin.'", "no name"),
    (load("step", START, fresh=("*.exp",)), E, "no name"),  # a pattern fits whole names
    (load("step", fresh=("params.b",)), E, "'params.b'", "pass restore"),
    (load("step", {"w": START["w"]}, {"b": START["b"]}), E, "optimizer.b.exp_avg", "frozen now", "fresh=('pipeline.optimizer."),
    (load("step", START | {"w": torch.ones(7)}, fresh=("pipeline",)), E, "params.w", "(6,)", "(7,)"),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=[f"{i} {row[2]}" for i, row in enumerate(ROWS)])
def test_it_is_refused(row: tuple[Any, ...], at: Path) -> None:
    call, kind, *words = row
    before = sorted((path, os.stat(path).st_mtime_ns) for path in at.rglob("*"))
    raises_text(kind, lambda: call(at), *words)
    assert sorted((path, os.stat(path).st_mtime_ns) for path in at.rglob("*")) == before
