"""A run that is saved, and restored with every object made anew, goes on as the uncut run, to the bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from tests import rows
from tests.checkpoint.rows import ADAMW, FEEDBACK, RUNS, SGD, on_this_rank
from tests.checkpoint.runs import Run, simulated
from tests.helpers import same_bits
from tests.optimizer_table import OPTIMIZERS
from tests.transform_table import TRANSFORMS


def on_ranks(pool: Any, name: str, transport: str, folder: Path, calls: range, *args: Any) -> list[Any]:
    run = RUNS[name]
    found: list[Any] = pool.run(run.ranks, on_this_rank, name, run.axes, transport, str(folder), calls, *args)
    return found


# Each run with one transport; with the other one in the long run.
CASES = [
    pytest.param(name, transport, marks=[pytest.mark.long] * ((i + j) % 2))
    for i, name in enumerate(RUNS)
    for j, transport in enumerate(("gloo", "shared"))
]


@pytest.mark.sample(5)
@pytest.mark.parametrize(("name", "transport"), CASES)
def test_on_real_ranks(pool: Any, name: str, transport: str, tmp_path: Path) -> None:
    """Without the part of the checkpoint that its row names it would not."""
    first, then = range(RUNS[name].cut), range(RUNS[name].cut, RUNS[name].calls)
    whole = on_ranks(pool, name, transport, tmp_path / "whole", range(RUNS[name].calls))
    before = on_ranks(pool, name, transport, tmp_path, first, True)
    assert same_bits(on_ranks(pool, name, transport, tmp_path, then), whole)
    for one, other in zip(before, whole, strict=True):
        assert any(not torch.equal(one[path], other[path]) for path in one if path.startswith("params"))
    assert not same_bits(on_ranks(pool, name, transport, tmp_path, then, False, (RUNS[name].lost,)), whole)


def check(run: Run, folder: Path) -> None:
    whole = simulated(run, folder / "whole", range(run.calls))
    simulated(run, folder, range(run.cut), True)
    assert same_bits(simulated(run, folder, range(run.cut, run.calls)), whole)


HOOKS = [tx.mean("data"), FEEDBACK, tx.chain(tx.mean("data"), tx.clip_by_global_norm(0.5)), tx.identity()]
AFTER, OF_BUFFERS = ("average_parameters", "ema", "outer_step"), ("average_buffers", "broadcast_buffers")


def random_run(name: str, seed: int) -> Run:
    """A run of a public transform, an optimizer, or a pipeline of tests/rows.py, and all else at random."""
    draw, (kind, factory) = random.Random(f"{name} {seed}"), name.split(" ", 1)
    loss, dtypes, on_buffers = "net", [torch.float32, torch.float64, torch.bfloat16, torch.float16], None
    if kind == "row":
        row = rows.ROWS[factory]
        pipeline, loss, dtypes = row.make(), row.loss, [row.dtype]
    elif kind == "optimizer":
        optimizer = OPTIMIZERS[factory][seed % len(OPTIMIZERS[factory])]()
        optimizer = tx.partition({"conv.weight": ADAMW, "*": optimizer}) if factory == "muon" else optimizer
        shards = draw.random() < 0.3
        pipeline = tx.zero(tx.mean("data"), optimizer, "data") if shards else tx.fuse(draw.choice(HOOKS), optimizer)
    else:
        made = TRANSFORMS[factory][seed % len(TRANSFORMS[factory])]()
        optimizer = draw.choice([SGD, ADAMW, tx.mixed_precision(tx.adam(0.05))])
        if factory in OF_BUFFERS:
            pipeline, on_buffers, loss = tx.fuse(tx.mean("data"), optimizer), made, "buffered"
        elif factory in AFTER:
            pipeline = tx.fuse(tx.identity(), optimizer, after=made)
        else:
            pipeline = tx.fuse(made, optimizer)
    if "'local'" in repr((pipeline, on_buffers)):
        axes = {"node": draw.randint(1, 3), "local": draw.randint(1, 2)}
    else:
        axes = {"data": draw.randint(1, 5)}
    dtype = draw.choice(dtypes[: 2 if factory == "from_optax" else 4])  # the epsilon of optax's Adam is 0 in float16
    accumulate = draw.choice([1, 1, 2])
    calls, cut = accumulate * draw.randint(3, 7), accumulate * draw.randint(0, 2)
    run = Run(lambda: pipeline, axes, loss=loss, dtype=dtype, cut=cut, calls=calls, background=draw.random() < 0.5)
    alone = pipeline.hook.facts.pauses or (loss != "buffered" and draw.random() < 0.3)
    options = {"bucket_bytes": draw.choice([8, 24, 1 << 20]), "accumulate": accumulate, "on_buffers": on_buffers}
    sizes = [[draw.choice([0, 1, 2.5, 64]) for _ in range(run.ranks)] for _ in range(calls)]
    return run._replace(how="alone" if alone else "step", options=options, sizes=sizes)


def cases() -> Iterator[Any]:
    kinds = {"row": rows.ROWS, "transform": TRANSFORMS, "optimizer": OPTIMIZERS}
    for name in (f"{kind} {factory}" for kind, table in kinds.items() for factory in table):
        for seed in range(3 if name.startswith("row") else 21):
            # Importing optax takes seconds.
            yield pytest.param(name, seed, marks=pytest.mark.long if seed or "optax" in name else ())


@pytest.mark.sample(8)
@pytest.mark.parametrize(("name", "seed"), list(cases()))
def test_on_simulated_ranks(name: str, seed: int, tmp_path: Path) -> None:
    check(random_run(name, seed), tmp_path)


def test_a_rank_that_has_had_no_weight(tmp_path: Path) -> None:
    pipeline = tx.fuse(tx.identity(), tx.sgd(0.1))
    check(Run(lambda: pipeline, {"data": 3}, sizes=[[1, 1, 0], [1, 1, 1]], cut=1, calls=2), tmp_path)


def test_names_of_parameters_may_read_like_those_of_parts_of_a_state(tmp_path: Path) -> None:
    """A slice belongs to the parameter at its place; a number may be sharded as a whole, and lamb's parameter may be all ones."""
    names = "weight average.weight master.weight w w.exp_avg optimizer inner hook momentum 0"
    params = {name: torch.ones(3 + 2 * i) for i, name in enumerate(names.split())}
    pipeline = tx.zero(tx.mean("data"), tx.lamb(0.1), "data", after=tx.ema(0.5), gather_codec=tx.int8())

    def train(rank: int, folder: Path, calls: int) -> Any:
        step = fjoin.train_step(lambda p, x: sum(v.square().sum() * x for v in p.values()), pipeline, bucket_bytes=64)
        runs = fjoin.Checkpoints(folder, step, every=1)
        state = runs.restore(params)
        for call in range(state.step, calls):
            state, metrics = step(state, torch.tensor(0.01 * (call + rank + 1)))
            runs.save(state, metrics)
        return tx.to_state_dict(state.clone().pipeline), state.clone().params

    def on(*args: Any) -> Any:
        return tx.simulate(lambda rank: train(rank, *args), {"data": 3}, [0, 1, 2])

    on(tmp_path / "cut", 2)
    assert same_bits(on(tmp_path / "cut", 4), on(tmp_path / "whole", 4))
