"""Modules, optimizers and handles on real ranks go on as uncut, to the bit."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from fjoin.checkpoint._leaves import Leaves
from fjoin.checkpoint._manifest import read_step
from tests.helpers import raises_text

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
        hook = tx.error_feedback(tx.compress(tx.int8(), tx.mean("data")))
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
        return {"model": ddp, "handle": fjoin.ddp.register(ddp, tx.local_sgd(tx.adamw(0.1), tx.mean("data"), 2))}
    if kind == "torch":
        return {"model": ddp, "optimizer": torch.optim.AdamW(ddp.parameters(), 0.1)}
    if kind == "optimizer":
        return {"model": ddp, "optimizer": fjoin.Optimizer(named, tx.adamw(0.1))}
    if kind == "muon in torch":  # it needs whole parameters
        matrices = [p for p in ddp.parameters() if p.dim() == 2]
        return {"model": ddp, "optimizer": fjoin.ZeroRedundancyOptimizer(matrices, tx.muon, lr=0.1)}
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
    "kind",
    ["handle", "feedback", "local", "torch", "optimizer", "zero", "sharded", "muon", "muon in torch", "post local"],
)
def test_objects_go_on_to_the_bit(pool: Any, kind: str, tmp_path: Path) -> None:
    for equal in pool.run(2, run, kind, str(tmp_path)):
        assert all(equal), equal


def run_on_others(kind: str, folder: str, at: int) -> dict[str, Any]:
    """What a run has after a load on this number of ranks, or a save: parameters, residuals, and parameters after a step."""
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    of = made(kind)
    if at:
        assert fjoin.load(folder, of, fresh=("objects.model.module.1.running_*",)) == at
    else:
        steps(of, dist.get_rank(), 0, CUT)
        if kind == "local":
            of["handle"].flush()
        fjoin.save(folder, of, CUT)
    found: dict[str, Any] = {"params": [p.detach().flatten().tolist() for p in of["model"].parameters()]}
    if kind == "feedback":
        found["error"] = {path: own.tolist() for path, own in of["handle"].pipeline.hook.error.items()}
    of["model"].module[1].reset_running_stats()
    of["model"].eval()
    steps(of, 100, CUT, CUT + 1)  # the same batch on all ranks
    return found | {"next": [p.detach().flatten().tolist() for p in of["model"].parameters()]}


@pytest.mark.parametrize(
    "kind", ["handle", "feedback", "torch", "optimizer", "zero", "sharded", "muon", "muon in torch"]
)
def test_a_run_goes_on_on_other_ranks(pool: Any, kind: str, tmp_path: Path) -> None:
    before = pool.run(2, run_on_others, kind, str(tmp_path), 0)
    after = pool.run(3, run_on_others, kind, str(tmp_path), CUT)
    for of in (*before, *after):
        assert of["params"] == before[0]["params"]
    if kind == "feedback":  # what has not been sent yet is kept
        for path in before[0]["error"]:
            old, new = (sum(torch.tensor(of["error"][path]) for of in ranks) for ranks in (before, after))
            assert old.any()  # type: ignore[union-attr]
            torch.testing.assert_close(new, old)
        return
    for of in after:
        for one, other, start in zip(of["next"], before[0]["next"], before[0]["params"], strict=True):
            moved = torch.tensor(other) - torch.tensor(start)
            torch.testing.assert_close(torch.tensor(one) - torch.tensor(start), moved, rtol=1e-4, atol=1e-6)


def run_without_gathering(folder: str) -> None:
    """The whole state of a ZeroRedundancyOptimizer is never on one rank."""
    import torch.distributed as dist

    def refuse(self: Any, to: int = 0) -> None:
        raise AssertionError("it gathers")

    of, gathers = made("zero"), fjoin.ZeroRedundancyOptimizer.consolidate_state_dict
    steps(of, dist.get_rank(), 0, CUT)
    fjoin.ZeroRedundancyOptimizer.consolidate_state_dict = refuse  # type: ignore[method-assign]
    try:
        path = fjoin.save(folder, of, CUT)
        fjoin.load(folder, made("zero"))
    finally:
        fjoin.ZeroRedundancyOptimizer.consolidate_state_dict = gathers  # type: ignore[method-assign]
    (own,) = path.glob(f"rank-{dist.get_rank():05d}-*")
    whole = sum(2 * 4 * p.numel() for p in of["model"].parameters())
    with contextlib.closing(Leaves(path, read_step(path))) as leaves:
        file = leaves.file([entry.name for entry in read_step(path).files].index(own.name))
        held = sum(4 * file.read(name).numel() for name in file.names if ".state." in name and file.span(name).shape)
    assert 0 < held < 0.8 * whole


def test_a_zero_redundancy_optimizer_is_saved_by_slices(pool: Any, tmp_path: Path) -> None:
    pool.run(2, run_without_gathering, str(tmp_path))


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
