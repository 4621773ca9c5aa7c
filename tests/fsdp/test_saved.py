"""A sharded run is saved, and goes on to the bit: on other numbers of ranks, without shards, as ZeRO, and back."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from tests.fsdp.gpt import (
    Case,
    frozen_model,
    full,
    loss_of,
    make_batches,
    make_model,
    mesh_of,
    shard,
    tokens,
    train,
)
from tests.helpers import max_diff, same_bits

ADAM = tx.adamw(0.01)
MATRICES = tx.partition({"blocks.*.up.weight": tx.muon(0.02), "*": ADAM})
CASES = {
    "clip, average": Case(lambda: tx.fuse(tx.chain(tx.mean("data"), tx.clip_by_global_norm(0.5)), ADAM, after=tx.ema(0.9))),
    "owners": Case(lambda: tx.fuse(tx.mean("data"), MATRICES, after=tx.ema(0.9))),
    "skip, frozen": Case(lambda: tx.skip_if_nonfinite(tx.fuse(tx.mean("data"), ADAM, after=tx.ema(0.9))), frozen_model),
}  # fmt: skip


def wholes(handle: Any) -> dict[str, Any]:
    """The whole parameters, averages and first moments."""
    state = getattr(handle.pipeline, "inner", handle.pipeline)
    moments = {path: getattr(one, "exp_avg", getattr(one, "momentum", None)) for path, one in state.optimizer.items()}
    averages = handle.whole(tx.ema_params(handle.params(), handle.pipeline))
    return {
        "params": handle.whole(handle.params()),
        "averages": averages,
        "moments": handle.whole(moments),
        "step": state.step,
    }


def register(name: str, seed: int = 0) -> tuple[Any, Any]:
    case = CASES[name]
    model = case.make()
    if seed:
        other = make_model(seed)
        with torch.no_grad():
            for p, q in zip(model.parameters(), other.parameters(), strict=True):
                p.copy_(q)
    model = shard(model, mesh_of(case, dist.get_world_size())[0])
    return model, fjoin.fsdp.register(model, case.pipeline())


def saved(name: str, folder: str) -> Any:
    model, handle = register(name)
    own = make_batches(dist.get_rank(), False)[:2]
    loop = fjoin.join(own, weight=tokens)
    for batch in loop:
        handle.backward(loss_of(model, batch), loop.weight)
        handle.step()
    with torch.no_grad():
        model.seen += 3.0
        loss_of(model, own[0])  # leaves the root whole
    fjoin.save(folder, {"model": handle}, handle.steps)
    return wholes(handle), full(model)


def resumed(name: str, folder: str) -> Any:
    """What has been loaded; and the parameters after one more step."""
    model, handle = register(name, seed=1)
    with torch.no_grad():
        loss_of(model, make_batches(0)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the checkpoint may be of another kind of run
        assert fjoin.load(folder, {"model": handle}) == 2
    found, params, seen = wholes(handle), full(model), model.seen.clone()
    handle.backward(loss_of(model, batch := make_batches(dist.get_rank(), False)[2]), tokens(batch))
    handle.step()
    return found, params, seen, full(model)


def one_more(name: str, folder: Path, ranks: int) -> dict[str, Tensor]:
    """The parameters after one more step in one process, of the pipeline without shards."""
    model, pipeline = make_model(1), CASES[name].pipeline()
    start = {path: p.detach() for path, p in model.named_parameters()}

    def alone() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the checkpoint is of another kind of run
            params, state = fjoin.load(folder, {"model": pipeline}, {"model": start})["model"]
        with torch.no_grad():
            for path, p in model.named_parameters():
                p.copy_(params[path])
        for rank in range(ranks):
            (loss_of(model, make_batches(rank, False)[2]) / ranks).backward()
        return pipeline.step(params, {path: p.grad for path, p in model.named_parameters()}, state, weight=1.0)[0]

    return tx.simulate(alone, {"data": 1})[0]  # type: ignore[no-any-return]


SHORT = {("clip, average", 3), ("owners", 3), ("skip, frozen", 1)}
ROWS = [
    pytest.param(name, ranks, marks=() if (name, ranks) in SHORT else pytest.mark.long)
    for name in CASES
    for ranks in (1, 3, 4)
]


@pytest.mark.parametrize(("name", "ranks"), ROWS, ids=str)
def test_a_run_goes_on_on_other_ranks(pool: Any, name: str, ranks: int, tmp_path: Path) -> None:
    (before, whole), *_ = pool.run(2, saved, name, str(tmp_path))
    for found, params, seen, new in pool.run(ranks, resumed, name, str(tmp_path)):
        assert same_bits(found, before) and same_bits(params, whole) and seen == 3
        if name != "skip, frozen":
            assert max_diff(new, one_more(name, tmp_path, ranks)) < 1e-10  # Adam enlarges rounding


def as_zero(folder: str, again: str) -> Any:
    """Loaded into a train_step that shards, and saved by it."""
    apply, params, buffers = fjoin.functional(make_model(1))
    pipeline = CASES["clip, average"].pipeline()
    zero = tx.zero(pipeline.hook, pipeline.optimizer, "data", after=pipeline.after)
    step = fjoin.train_step(lambda p, b, batch: (loss_of(lambda x: apply(p, b, x), batch), {}, b), zero)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the checkpoint is of another kind of run
        state = fjoin.load(folder, {"model": step}, {"model": params}, {"model": buffers})["model"]
    fjoin.save(again, {"model": step}, {"model": state})
    return dict(state.params)


def test_a_run_goes_on_as_zero_and_back_and_in_a_plain_module(pool: Any, tmp_path: Path) -> None:
    (before, whole), *_ = pool.run(2, saved, "clip, average", str(tmp_path / "a"))
    for params in pool.run(3, as_zero, str(tmp_path / "a"), str(tmp_path / "b")):
        assert same_bits(params, whole)
    for found, params, *_ in pool.run(2, resumed, "clip, average", str(tmp_path / "b")):
        assert same_bits(found, before) and same_bits(params, whole)
    model = make_model(1)
    fjoin.load(tmp_path / "a", {"model": model})
    assert same_bits(dict(model.named_parameters()), whole) and model.seen == 3


def of_replicas(folder: str, begins: bool, name: str) -> Any:
    from tests.fsdp.test_steps import CASES as STEPS

    case = STEPS[name]
    over, _, mesh = mesh_of(case, 4)
    model = shard(make_model(0 if begins else 1), over)
    handle = fjoin.fsdp.register(model, case.pipeline(), mesh=mesh)
    if begins:
        train(model, handle, case, dist.get_rank(), mesh)
        fjoin.save(folder, {"model": handle}, handle.steps)
    else:
        fjoin.load(folder, {"model": handle})
    return full(model), tx.to_state_dict(handle.pipeline)


@pytest.mark.parametrize(
    "name", [pytest.param("replicas, average", marks=pytest.mark.long), "local SGD", "int8 between replicas"]
)
def test_a_run_of_replicas_goes_on(pool: Any, name: str, tmp_path: Path) -> None:
    before = pool.run(4, of_replicas, str(tmp_path), True, name)
    assert same_bits(before, pool.run(4, of_replicas, str(tmp_path), False, name))
