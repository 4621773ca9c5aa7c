"""A run goes on with another number of ranks: as one on the whole batch where all ranks step together, else by a rule of each value."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from tests.checkpoint.rows import FEEDBACK, RUNS, mean_and, on_this_rank, sharded
from tests.checkpoint.runs import Run, simulated, start
from tests.helpers import raises_text

ADAMW, SGD = tx.adamw(0.01), tx.sgd(0.1, momentum=0.9)


def _of(make: Any, **settings: Any) -> Run:
    return Run(make, dtype=torch.float64, cut=3, calls=6, **settings)


EXACT: dict[str, Run] = {
    "plain": _of(mean_and(ADAMW)),
    "zero, muon": _of(sharded(tx.muon(0.02), ADAMW)),
    "zero, masters": _of(lambda: tx.zero(tx.mean("data"), tx.mixed_precision(ADAMW), "data")),
    "momentum, clip, ema": _of(
        lambda: tx.fuse(tx.chain(tx.mean("data"), tx.clip_by_global_norm(1.0)), SGD, after=tx.ema(0.9))
    ),
    "skip": _of(lambda: tx.skip_if_nonfinite(mean_and(tx.adafactor(0.01))())),
}


def on(run: Run, ranks: int, folder: Path, calls: range, *args: Any) -> list[dict[str, Any]]:
    return simulated(run._replace(axes={"data": ranks}), folder, calls, *args)


@functools.cache
def whole(name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return on(EXACT[name], 1, Path(folder), range(6))[0]


@pytest.mark.sample(32)
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize(("before", "after"), [(before, after) for before in range(1, 9) for after in range(1, 9)])
def test_a_run_on_other_ranks_equals_one_on_the_whole_batch(name: str, before: int, after: int, tmp_path: Path) -> None:
    on(EXACT[name], before, tmp_path, range(3), True)
    for found in on(EXACT[name], after, tmp_path, range(3, 6)):
        for path, first in start().items():
            want = whole(name)[f"params.{path}"]
            moved = float((first - want).abs().sum())
            assert float((found[f"params.{path}"] - want).abs().sum()) < 1e-12 * moved + 1e-13


class OwnState(NamedTuple):
    moved: Annotated[tx.PerRank[dict[str, Tensor]], tx.Merge.MEAN]
    left: Annotated[tx.PerRank[dict[str, Tensor]], tx.Merge.SUM]
    own: Annotated[tx.PerRank[dict[str, Tensor]], tx.Merge.RESTART]


@tx.factory
def own_of_each_kind() -> tx.Transform:
    """A mean that keeps each rank's own gradients three times."""
    mean = tx.mean("data")

    def update(grads: Any, state: OwnState, params: Any = None, **extra: Any) -> Any:
        kept = [{path: old + grads[path] for path, old in each.items()} for each in state]
        return mean.update(grads, (), params, **extra)[0], OwnState(*kept)

    def init(params: Any) -> OwnState:
        return OwnState(*({path: torch.zeros_like(p) for path, p in params.items()} for _ in range(3)))

    return tx.Transform(init, update, needs=tx.Needs.PATHS, facts=tx.Facts(reduces=tx.Reduction("data", "weight")))


# Calls before the save, and what becomes of values of ranks: their mean, their sum, the value at the start, or that of all.
PARAMS = {"params.layer.weight": "equal", "params.scale": "equal"}
MERGES: dict[str, tuple[Run, int, dict[str, str]]] = {
    "own": (
        _of(lambda: tx.fuse(own_of_each_kind(), tx.sgd(0.1))), 3,
        {"pipeline.hook.moved.bias": "mean", "pipeline.hook.left.bias": "sum", "pipeline.hook.own.bias": "start"},
    ),
    "residuals": (
        _of(lambda: tx.fuse(FEEDBACK, tx.sgd(0.1))), 3,
        {"pipeline.hook.error.layer.weight": "sum", "pipeline.hook.error.bias": "sum"},
    ),
    "local SGD after an average": (
        _of(lambda: tx.local_sgd(ADAMW, tx.mean("data"), 3)), 3,
        {"pipeline.optimizer.bias.exp_avg": "mean", "pipeline.optimizer.bias.exp_avg_sq": "mean"} | PARAMS,
    ),
    "DiLoCo after an average": (_of(lambda: tx.diloco(ADAMW, tx.mean("data"), 3)), 3, PARAMS),
    "an open window of accumulate": (
        _of(lambda: tx.fuse(tx.accumulate(3, tx.mean("data")), tx.sgd(0.1)), how="alone"), 2,
        {f"pipeline.{name}": "sum" for name in ("window", "hook.weight", "hook.grads.layer.weight", "hook.grads.bias")},
    ),
}  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MERGES)
@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 5), (4, 1), (8, 3)])
def test_values_of_ranks_are_merged(name: str, before: int, after: int, tmp_path: Path) -> None:
    run, calls, expected = MERGES[name]
    begun = on(run, after, tmp_path / "none", range(0))
    saved = on(run, before, tmp_path, range(calls), True)
    found = on(run, after, tmp_path, range(0))
    for path, how in expected.items():
        old, new = (torch.stack([torch.as_tensor(one[path]) for one in ranks]) for ranks in (saved, found))
        assert bool(old[0].any()), "else all rules agree"
        if how == "sum":
            torch.testing.assert_close(new.sum(0), old.sum(0), rtol=0, atol=1e-12)
        else:
            want = {"start": torch.as_tensor(begun[0][path]), "mean": old.mean(0), "equal": old[0]}[how]
            torch.testing.assert_close(new, want.expand_as(new), rtol=0, atol=0 if how == "equal" else 1e-12)


@pytest.mark.parametrize(
    ("pipeline", "words"),
    [
        (tx.local_sgd(ADAMW, tx.mean("data"), 3), ("params.", "{'data': 3}", "flush")),  # within a window
        (tx.fuse(tx.identity(), tx.sgd(0.1)), ("params.", "values of their own", "flush")),  # never averaged
    ],
)
def test_parameters_that_differ_are_refused(pipeline: tx.Pipeline, words: tuple[str, ...], tmp_path: Path) -> None:
    on(_of(lambda: pipeline), 3, tmp_path, range(2), True)
    raises_text(fjoin.CheckpointError, lambda: on(_of(lambda: pipeline), 2, tmp_path, range(0)), *words)


FRESH = ("objects.model.seen*",)  # numbers of each rank
OBJECTS = [name for name, run in RUNS.items() if run.how in ("module", "optimizer") and run.dtype is torch.float64]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [name for name in OBJECTS if name != "PostLocalSGDOptimizer"])
def test_modules_and_optimizers_go_on_on_other_ranks(pool: Any, name: str, tmp_path: Path) -> None:
    def real(ranks: int, folder: Path, *args: Any) -> Any:
        return pool.run(ranks, on_this_rank, name, {"data": ranks}, "gloo", str(folder), *args)

    uncut = real(2, tmp_path / "whole", range(8))[0]
    real(2, tmp_path, range(4), True)
    for found in real(3, tmp_path, range(4, 8), False, FRESH):
        for path in (path for path in found if path.startswith("params.")):
            torch.testing.assert_close(found[path], uncut[path], rtol=1e-9, atol=1e-9)
