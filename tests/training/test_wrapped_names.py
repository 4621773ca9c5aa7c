"""Modules inside wrappers of torch keep the names that they have without: in functional, load_into, saved objects and exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import fjoin
from fjoin import transforms as tx


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


WRAPPERS: dict[str, Any] = {
    "torch.compile": compiled, "DDP": nn.parallel.DistributedDataParallel, "DataParallel": nn.DataParallel,
    "both": lambda module: compiled(nn.parallel.DistributedDataParallel(module)),
}  # fmt: skip


def same(a: Any, b: Any) -> bool:
    return list(a) == list(b) and all(torch.equal(a[path], b[path]) for path in a)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", WRAPPERS)
def test_names_are_those_inside(tmp_path: Path, name: str, inside: bool) -> None:
    """Of the whole module, or of one part of it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        plain, module = net(), WRAPPERS[name](net())
        plain, module = (nn.Sequential(plain), nn.Sequential(module)) if inside else (plain, module)
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
        found = []
        for one in (plain, module):
            apply, params, buffers = fjoin.functional(one)
            out, after = apply.with_buffers(params, buffers, x)
            found.append((params, buffers, {"out": out}, after))
        assert all(same(a, b) for a, b in zip(*found, strict=True))

        def loss(params: Any, x: Any) -> Any:
            return apply.eval()(params, buffers, x).square().mean()

        step = fjoin.train_step(loss, tx.fuse(tx.mean("data"), tx.sgd(0.1)))
        state, _ = step(step.init(params), x)
        fjoin.save(tmp_path / "step", step, state)
        fjoin.checkpoint.export(tmp_path / "step", tmp_path / "model")
        assert load_file(tmp_path / "model").keys() == params.keys()
        for into in (module, plain):
            fjoin.load_into(into, state)
            assert same(dict(fjoin.functional(into)[1]), dict(state.params))
        if not inside:
            fjoin.save(tmp_path / "objects", {"model": module}, 1)
            other = net()
            assert fjoin.load(tmp_path / "objects", {"model": other}) == 1 and same(
                other.state_dict(), plain.state_dict()
            )
    finally:
        dist.destroy_process_group()


def test_objects_saved_by_their_outer_names_are_loaded(tmp_path: Path) -> None:
    class Outer:
        def __init__(self, model: nn.Module) -> None:
            self.model = model

        def state_dict(self) -> dict[str, Any]:
            return {f"module._orig_mod.{path}": value for path, value in self.model.state_dict().items()}

        def load_state_dict(self, state: Any) -> None:
            raise NotImplementedError

    first, other = net(), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    fjoin.save(tmp_path / "old", {"model": Outer(first)}, 1)
    fjoin.load(tmp_path / "old", {"model": other})
    assert same(first.state_dict(), other.state_dict())
