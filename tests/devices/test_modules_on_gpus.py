"""Modules, torch's interfaces, loops and checkpoints with tensors on GPUs, over NCCL: as with tensors on CPUs, over gloo.

On a machine without a GPU the cases run on CPUs; some are compared with one process.

All cases of a kind are one job, since a process group of GPUs takes seconds to make.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.devices.module_cases import F64, batches, loss, model, runs
from tests.oracle import uneven_ddp
from tests.pool import Pool


def close(name: str, got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got.keys() == want.keys(), name
    for path, x in want.items():
        torch.testing.assert_close(got[path], x, rtol=1e-4, atol=1e-6, msg=lambda text: f"{name}: {path}: {text}")  # noqa: B023


def known() -> dict[str, dict[str, Any]]:
    """What some cases must give, from one process with torch alone."""
    both = [batches("cpu", n, rank) for rank, n in enumerate((3, 2))]
    x, first = torch.cat([*both[0], *both[1]]), torch.cat([own[0] for own in both])
    one, data = model(), [batches("cpu", n, rank) for rank, n in enumerate((4, 2))]
    uneven_ddp.train(one, lambda params: torch.optim.SGD(params, 0.1), data, loss, by_world=False)
    trained = {path: p.detach() for path, p in one.state_dict().items()}
    var, mean = torch.var_mean(first, 0)
    return {
        "evaluate": {"mean": x.mean(), "columns": x.mean(0), "positive": (x > 0).sum(), "weight": torch.tensor(float(len(x)))},
        "generic Join": {"count": torch.tensor([4.0])},
        "sync_batch_norm": {"mean": 0.1 * mean, "var": 0.9 + 0.1 * var},
        "Join": trained,
        "Join, sharded": trained,
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["interfaces", "checkpoints", pytest.param("hooks", marks=pytest.mark.long)])
def test_they_have_the_results_of_the_cpu(ranks: tuple[str, Pool], pool: Pool, kind: str, tmp_path: Path) -> None:
    device, workers = ranks
    got = workers.run(2, runs, kind, device, str(tmp_path / device))
    want = got if device == "cpu" else pool.run(2, runs, kind, "cpu", str(tmp_path / "cpu"))
    for own, expected in zip(got, want, strict=True):
        assert own.keys() == expected.keys()
        for name in expected:
            close(name, own[name], expected[name])
        for name, values in known().items() if kind == "interfaces" else ():
            for path, x in values.items():
                torch.testing.assert_close(
                    own[name][path].to(F64), torch.as_tensor(x).to(F64), rtol=1e-6, atol=1e-9, msg=name
                )
