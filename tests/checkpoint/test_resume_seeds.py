"""Random runs of every public transform and optimizer go on after a restore as uncut ones, to the bit."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from tests.checkpoint.test_resume import assert_same, read_values
from tests.goldens.golden_problem import SHAPES, loss_of
from tests.goldens.golden_rows import AFTER, OF_BUFFERS
from tests.optimizer_table import OPTIMIZERS
from tests.transform_table import TRANSFORMS

INT8 = tx.int8(block=4)
HOOKS: list[Callable[[], tx.Transform]] = [
    lambda: tx.mean("data"),
    lambda: tx.error_feedback(tx.compress(INT8, tx.mean("data"))),
    lambda: tx.chain(tx.mean("data"), tx.clip_by_global_norm(0.5)),
    tx.identity,
]
INNER: list[Callable[[], tx.Optimizer]] = [
    lambda: tx.sgd(0.1, momentum=0.9),
    lambda: tx.adamw(0.05),
    lambda: tx.mixed_precision(tx.adam(0.05)),
]


class Run(NamedTuple):
    """A random run.

    Attributes:
        cut: The call before which it is saved and restored.
        own_loop: Whether the pipeline is called in a loop of one's own, and not by a train_step.
        background: Whether it is saved while training goes on.
        weights: Of each call, those of the ranks.
    """

    pipeline: tx.Pipeline
    axes: dict[str, int]
    dtype: torch.dtype
    cut: int
    own_loop: bool
    background: bool
    options: dict[str, Any]  # of train_step
    weights: list[list[float]]
    seed: int


def random_run(name: str, seed: int) -> Run:
    draw, (kind, factory) = random.Random(f"{name} {seed}"), name.split()
    pipeline, on_buffers = random_pipeline(draw, kind, factory, seed)
    if "'local'" in repr((pipeline, on_buffers)):
        axes = {"node": draw.randint(1, 3), "local": draw.randint(1, 2)}
    else:
        axes = {"data": draw.randint(1, 5)}
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
    dtype = draw.choice(dtypes[: 2 if factory == "from_optax" else 4])  # the epsilon of optax's Adam is 0 in float16
    accumulate = draw.choice([1, 1, 2])
    calls, cut = accumulate * draw.randint(3, 7), accumulate * draw.randint(0, 2)
    weights = [[draw.choice([0.0, 1.0, 2.5, 64.0]) for _ in range(math.prod(axes.values()))] for _ in range(calls)]
    own_loop = pipeline.hook.pauses or (on_buffers is None and draw.random() < 0.3)
    options = {"bucket_bytes": draw.choice([8, 24, 1 << 20]), "accumulate": accumulate, "on_buffers": on_buffers}
    return Run(pipeline, axes, dtype, cut, own_loop, draw.random() < 0.5, options, weights, seed)


def random_pipeline(draw: random.Random, kind: str, factory: str, seed: int) -> tuple[tx.Pipeline, tx.Transform | None]:
    if kind == "optimizer":
        optimizer = OPTIMIZERS[factory][seed % len(OPTIMIZERS[factory])]()
        sharded = draw.random() < 0.3
        return tx.zero(tx.mean("data"), optimizer, "data") if sharded else tx.fuse(
            draw.choice(HOOKS)(), optimizer
        ), None
    made, optimizer = TRANSFORMS[factory][seed % len(TRANSFORMS[factory])](), draw.choice(INNER)()
    if factory in OF_BUFFERS:
        return tx.fuse(tx.mean("data"), optimizer), made
    return tx.fuse(tx.identity(), optimizer, after=made) if factory in AFTER else tx.fuse(made, optimizer), None


def tree(run: Run, *seeds: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(hash((run.seed, *seeds)) % 2**31)
    return {path: torch.randn(shape, generator=g).to(run.dtype) for path, shape in SHAPES.items()}


def in_own_loop(run: Run, rank: int, folder: Path | None) -> tuple[Any, dict[str, Any]]:
    params = tree(run, 0)
    state = run.pipeline.init(params)
    for call, weights in enumerate(run.weights):
        if folder is not None and call == run.cut:
            mesh = fjoin.mesh(run.axes)
            fjoin.save(folder, run.pipeline, (params, state), mesh=mesh)
            params, state = fjoin.load(folder, run.pipeline, params, mesh=mesh)
        params, state = run.pipeline.step(params, tree(run, 1, rank, call), state, weight=weights[rank])
    return params, read_values(state)


def with_buffers(params: Any, buffers: Any, batch: Any) -> Any:
    return loss_of(params, batch[0]), None, {name: b * 0.5 + batch[0]["w"] for name, b in buffers.items()}


def in_steps(run: Run, rank: int, folder: Path | None, fresh: tuple[str, ...] = ()) -> tuple[Any, dict[str, Any]]:
    def begun() -> Any:
        loss = (lambda params, batch: loss_of(params, batch[0])) if buffers is None else with_buffers
        mesh = fjoin.mesh(run.axes)
        return fjoin.train_step(loss, run.pipeline, weight=lambda batch: batch[1], mesh=mesh, **run.options)

    def batch(call: int) -> Any:
        return tree(run, 1, rank, call), run.weights[call][rank]

    buffers = None if run.options["on_buffers"] is None else {"b": torch.zeros(2, dtype=run.dtype)}
    step = begun()
    state = step.init(tree(run, 0), buffers)
    for call in range(len(run.weights)):
        if folder is not None and call == run.cut:
            with fjoin.Checkpoints(folder, step, background=run.background) as runs:
                runs.save(state)
                step(state, batch(call))  # takes the memory of the state, and is lost
            step.close()
            step = begun()
            state = fjoin.Checkpoints(folder, step).restore(tree(run, 0), buffers, fresh=fresh)
        state, _ = step(state, batch(call))
    last = state.clone()
    step.close()
    values = read_values(last.pipeline) | {"step": last.step, "batches": last.batches}
    return dict(last.params), values | tx.to_state_dict({"buffers": last.buffers or {}, "on_buffers": last.on_buffers})


def cases() -> Iterator[Any]:
    for name in [*(f"transform {name}" for name in TRANSFORMS), *(f"optimizer {name}" for name in OPTIMIZERS)]:
        for seed in range(21):
            # Importing optax takes seconds.
            yield pytest.param(name, seed, marks=pytest.mark.long if seed or "optax" in name else ())


def on_ranks(run: Run, function: Any, *args: Any) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        ranks = list(range(math.prod(run.axes.values())))
        return tx.simulate(lambda rank: function(run, rank, *args), run.axes, ranks)


def check(run: Run, folder: Path) -> None:
    train = in_own_loop if run.own_loop else in_steps
    cut, whole = on_ranks(run, train, folder), on_ranks(run, train, None)
    for (params, state), (want, expected) in zip(cut, whole, strict=True):
        assert_same(params, want)
        assert_same(state, expected)


@pytest.mark.sample(4)
@pytest.mark.parametrize(("name", "seed"), list(cases()))
def test_a_random_run_goes_on_to_the_bit(name: str, seed: int, tmp_path: Path) -> None:
    check(random_run(name, seed), tmp_path)


STEPS = Run(
    tx.fuse(tx.identity(), tx.sgd(0.1)), {"data": 3}, torch.float32, 1, False, False, {"on_buffers": None}, [], 0
)


def test_a_rank_that_has_had_no_weight(tmp_path: Path) -> None:
    check(STEPS._replace(weights=[[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]), tmp_path)


def test_a_number_that_is_sharded_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = tx.zero(tx.mean("data"), tx.lamb(0.1), "data")
    monkeypatch.setitem(
        globals(), "tree", lambda run, *seeds: {path: torch.ones(shape) for path, shape in SHAPES.items()}
    )
    check(STEPS._replace(pipeline=pipeline, weights=[[1.0, 1.0, 1.0]] * 2), tmp_path)


def test_the_law_fails_where_a_state_is_lost(tmp_path: Path) -> None:
    run = STEPS._replace(pipeline=tx.fuse(tx.mean("data"), tx.adamw(0.1)), weights=[[1.0, 1.0, 1.0]] * 2)
    (lacking, _), *_ = on_ranks(run, in_steps, tmp_path, ("pipeline.optimizer",))
    (whole, _), *_ = on_ranks(run, in_steps, None)
    assert not torch.equal(lacking["w"], whole["w"])
