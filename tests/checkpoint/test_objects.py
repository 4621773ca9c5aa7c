"""Modules, optimizers and other objects with a state dict: what is written of them, and read back."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fjoin
from fjoin import transforms as tx
from fjoin.checkpoint._leaves import SavedLeaves
from fjoin.checkpoint._manifest import read_step
from tests.helpers import raises_text


def without_gathering(folder: str) -> None:
    """The whole state of a ZeroRedundancyOptimizer is never on one rank."""

    def made() -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        return {
            "model": model,
            "optimizer": fjoin.ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1),
        }

    of = made()
    of["model"](torch.ones(3)).sum().backward()
    of["optimizer"].step()
    with mock.patch.object(
        fjoin.ZeroRedundancyOptimizer, "consolidate_state_dict", side_effect=AssertionError("it gathers")
    ):
        path = fjoin.save(folder, {"optimizer": of["optimizer"]}, 1)
        fjoin.load(folder, {"optimizer": made()["optimizer"]})
    (own,) = path.glob(f"rank-{dist.get_rank():05d}-*")
    whole = sum(2 * 4 * p.numel() for p in of["model"].parameters())
    with contextlib.closing(SavedLeaves(path, read_step(path))) as leaves:
        file = leaves.file([entry.name for entry in read_step(path).files].index(own.name))
        held = sum(4 * file.read(name).numel() for name in file.names if ".state." in name and file.span(name).shape)
    assert 0 < held < 0.8 * whole


def test_a_zero_redundancy_optimizer_is_saved_by_slices(pool: Any, tmp_path: Path) -> None:
    pool.run(2, without_gathering, str(tmp_path))


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


def save_and_load(folder: Path, rank: int) -> None:
    state = of_rank(rank)
    for step, mine in enumerate((state, state if rank else {}), 1):  # at last one rank has nothing
        fjoin.save(folder, {"it": Dict(mine)}, step)
        assert fjoin.load(folder, again := {"it": Dict()}) == step
        assert again["it"].keys() == mine.keys() and all(torch.equal(again["it"][name], mine[name]) for name in mine)


def test_ranks_may_have_values_of_other_forms(tmp_path: Path) -> None:
    tx.simulate(lambda rank: save_and_load(tmp_path, rank), {"data": 2}, [0, 1])
    assert fjoin.checkpoint.verify(tmp_path) == fjoin.checkpoint.verify(tmp_path / "step-00000001") == []
    one = {"it": Dict()}
    raises_text(
        fjoin.CheckpointError, lambda: fjoin.load(tmp_path, one), "objects.it.", "values of their own", "fresh="
    )


def test_a_module_keeps_its_version(tmp_path: Path) -> None:
    seen: list[Any] = []
    module = nn.BatchNorm1d(2)
    module.register_load_state_dict_pre_hook(
        lambda module, state, prefix, local, *rest: seen.append(local.get("version"))
    )
    fjoin.save(tmp_path, {"model": nn.BatchNorm1d(2)}, 1)
    fjoin.load(tmp_path, {"model": module})
    assert seen == [nn.BatchNorm1d._version]


def test_names_that_would_be_one_in_the_file_are_refused(tmp_path: Path) -> None:
    def one_rank(rank: int) -> None:
        fjoin.save(tmp_path, {"m": Dict({"w": torch.full((2,), float(rank)), "w@rank-0": torch.zeros(2)})}, 1)

    with pytest.raises((ValueError, fjoin.CheckpointError), match="both called 'objects.m.w@rank-0'"):
        tx.simulate(one_rank, {"data": 2}, [0, 1])
    assert not list(tmp_path.glob("step*"))
