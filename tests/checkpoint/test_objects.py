"""Modules, optimizers and handles on real ranks go on as uncut, to the bit."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from tests.helpers import raises_text
from tests.pool import JobFailed

STEPS, CUT = 6, 3


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def made(kind: str) -> dict[str, Any]:
    """A module in DistributedDataParallel, and how it is stepped."""
    ddp = DistributedDataParallel(model())
    named = list(ddp.module.named_parameters())
    if kind == "handle":
        return {"model": ddp, "handle": fjoin.ddp.register(ddp, tx.fuse(tx.mean("data"), tx.adamw(0.1)))}
    if kind == "feedback":
        hook = tx.error_feedback(tx.quantized_mean("data", tx.int8()))
        return {"model": ddp, "handle": fjoin.ddp.register(ddp, tx.fuse(hook, tx.adamw(0.1)))}
    if kind == "sharded":  # slices of other sizes on the ranks
        return {"model": ddp, "handle": fjoin.ddp.register(ddp, tx.zero(tx.mean("data"), tx.adamw(0.1), "data"))}
    if kind == "muon":
        muon = tx.partition({("0.weight", "2.weight"): tx.muon(0.1), "*": tx.adamw(0.1)})
        return {"model": ddp, "handle": fjoin.ddp.register(ddp, tx.zero(tx.mean("data"), muon, "data"))}
    if kind == "post local":
        local = torch.optim.AdamW(ddp.parameters(), 0.1)
        averager = fjoin.PeriodicModelAverager(period=2, warmup_steps=1)
        return {"model": ddp, "optimizer": fjoin.PostLocalSGDOptimizer(local, averager)}
    if kind == "local":
        return {"model": ddp, "handle": fjoin.ddp.register(ddp, tx.local_sgd(tx.adamw(0.1), "data", 2))}
    if kind == "torch":
        return {"model": ddp, "optimizer": torch.optim.AdamW(ddp.parameters(), 0.1)}
    if kind == "optimizer":
        return {"model": ddp, "optimizer": fjoin.Optimizer(named, tx.adamw(0.1))}
    return {"model": ddp, "optimizer": fjoin.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.1)}


def steps(of: dict[str, Any], rank: int, start: int, stop: int) -> None:
    for i in range(start, stop):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * i + rank))
        of["model"].zero_grad()
        of["model"](x).square().sum().backward()
        if "optimizer" in of:
            of["optimizer"].step()


def run(kind: str, folder: str) -> list[bool]:
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    rank, whole = dist.get_rank(), made(kind)
    steps(whole, rank, 0, CUT)
    fjoin.save(folder, whole, CUT, extra={"kind": kind})
    steps(whole, rank, CUT, STEPS)
    again = made(kind)
    at = fjoin.load(folder, again)
    steps(again, rank, at, STEPS)
    first, second = whole["model"].state_dict(), again["model"].state_dict()
    return [at == CUT, *(torch.equal(first[name], second[name]) for name in first)]


@pytest.mark.parametrize(
    "kind", ["handle", "feedback", "local", "torch", "optimizer", "zero", "sharded", "muon", "post local"]
)
def test_objects_go_on_to_the_bit(pool: Any, kind: str, tmp_path: Path) -> None:
    for equal in pool.run(2, run, kind, str(tmp_path)):
        assert all(equal), equal


def run_on_others(kind: str, folder: str, at: int, fresh: tuple[str, ...] = ()) -> list[list[float]]:
    """The parameters when loaded on this number of ranks, and after a step more."""
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    of = made(kind)
    if at:
        assert fjoin.load(folder, of, fresh=fresh) == at
    else:
        steps(of, dist.get_rank(), 0, CUT)
        if kind == "local":
            of["handle"].flush()
        fjoin.save(folder, of, CUT)
    found = [p.detach().flatten().tolist() for p in of["model"].parameters()]
    steps(of, dist.get_rank(), CUT, CUT + 1)
    return found


# The module has buffers that differ, so they start anew.
@pytest.mark.parametrize("kind", ["handle", "feedback", "torch", "optimizer", "zero"])
def test_equal_values_are_loaded_on_other_ranks(pool: Any, kind: str, tmp_path: Path) -> None:
    before = pool.run(2, run_on_others, kind, str(tmp_path), 0)
    fresh = (
        "objects.model.module.1.running_*",
        *(f"objects.handle.hook.0.{name}" for name in ("error", "last") if kind == "feedback"),
    )
    after = pool.run(3, run_on_others, kind, str(tmp_path), CUT, fresh)
    if kind == "feedback":
        raises_text(
            JobFailed,
            lambda: pool.run(3, run_on_others, kind, str(tmp_path), CUT),
            "hook.0.error.",
            "values of their own",
        )
        wide = (*fresh, "objects.handle.hook")
        raises_text(JobFailed, lambda: pool.run(3, run_on_others, kind, str(tmp_path), CUT, wide), "name less of it")
    assert before[0] == before[1] == after[0] == after[1] == after[2]


class Dict(dict[str, Any]):
    """An object whose state is itself."""

    def state_dict(self) -> dict[str, Any]:
        return dict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.clear()
        self.update(state)


def of_rank(rank: int) -> dict[str, Any]:
    """Values of other forms, of one rank, in another order, and of all."""
    own = {"b": torch.ones(2 + rank), "d": torch.zeros(2, 3).reshape(2 + rank, 3 - rank), f"only {rank}": torch.ones(1)}
    return dict(sorted((own | {"a": torch.ones(5), "c": torch.ones(7)}).items(), reverse=bool(rank)))


def run_of_other_forms(folder: str) -> None:
    import torch.distributed as dist

    state = of_rank(dist.get_rank())
    for step, mine in enumerate((state, state if dist.get_rank() else {}), 1):  # at last one rank has nothing
        fjoin.save(folder, {"it": Dict(mine)}, step)
        assert fjoin.load(folder, again := {"it": Dict()}) == step
        assert again["it"].keys() == mine.keys() and all(torch.equal(again["it"][name], mine[name]) for name in mine)


def test_ranks_may_have_values_of_other_forms(pool: Any, tmp_path: Path) -> None:
    pool.run(2, run_of_other_forms, str(tmp_path))
    assert fjoin.checkpoint.verify(tmp_path) == fjoin.checkpoint.verify(tmp_path / "step-00000001") == []
    one = {"it": Dict()}
    raises_text(
        fjoin.CheckpointError, lambda: fjoin.load(tmp_path, one), "objects.it.", "values of their own", "fresh="
    )


def test_bad_input(tmp_path: Path) -> None:
    raises_text(TypeError, lambda: fjoin.save(tmp_path, object(), 1), "object", "state_dict")
    raises_text(TypeError, lambda: fjoin.save(tmp_path, {"model": 3}, 1), "'model'", "load_state_dict")
    raises_text(TypeError, lambda: fjoin.save(tmp_path, {"model": model()}, None), "number of steps")
    raises_text(TypeError, lambda: fjoin.save(tmp_path, {"model": model()}, 1, extra=object()), "extra", "JSON")
    raises_text(fjoin.CheckpointError, lambda: fjoin.load(tmp_path, {"model": model()}), "holds no checkpoint")
    fjoin.save(tmp_path, {"model": model()}, 1)
    raises_text(fjoin.CheckpointError, lambda: fjoin.save(tmp_path, {"model": model()}, 1), "step-00000001 exists")
    raises_text(fjoin.CheckpointError, lambda: fjoin.load(tmp_path, {"other": model()}), "['model']", "['other']")
