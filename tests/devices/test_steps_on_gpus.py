"""Steps with tensors on GPUs, over NCCL, and on CPUs, over gloo: each rank has what a simulated rank on the CPU has.

All cases of a kind are one job, since a process group of GPUs takes seconds to make.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from fjoin import transforms as tx
from tests.devices.step_cases import cases, net_params, runs
from tests.pool import Pool

AXES = {"rows on nodes": {"node": 2, "local": 2}}


def compare(kind: str, name: str, got: dict[str, Any], want: dict[str, Any]) -> None:
    room, start = cases(kind)[name].room, net_params()
    way = max((want["params"][path] - p).norm().item() for path, p in start.items())
    for path, p in want["params"].items():
        assert (got["params"][path] - p).norm() <= room * way + 1e-9, (name, path)
    for part in ("buffers", "state"):
        assert {path: x.shape for path, x in got[part].items()} == {path: x.shape for path, x in want[part].items()}, (
            name
        )
    for buffer, x in want["buffers"].items():
        assert (got["buffers"][buffer] - x).abs().max() <= 1e-6, (name, buffer)
    assert len(got["seen"]) == len(want["seen"]), name
    for (loss, weight, sums), (expected, *others) in zip(got["seen"], want["seen"], strict=True):
        for number, wanted in ((weight, others[0]), (loss, expected)):  # NaN within a window
            assert math.isclose(number, wanted, rel_tol=max(room, 1e-6)) or math.isnan(number) and math.isnan(wanted), (
                name
            )
        assert sums == others[1], name


LONG = ["rows", "rows on nodes", "optimizers", "options"]


@pytest.mark.parametrize("kind", ["some options", *(pytest.param(kind, marks=pytest.mark.long) for kind in LONG)])
def test_each_rank_has_what_a_simulated_rank_has(ranks: tuple[str, Pool], kind: str) -> None:
    device, pool = ranks
    axes = AXES.get(kind, {"data": 2})
    simulated = tx.simulate(lambda: runs(kind, "cpu", axes), axes)
    for got, want in zip(pool.run(math.prod(axes.values()), runs, kind, device, axes), simulated, strict=True):
        assert got.keys() == want.keys()
        for name in want:
            compare(kind, name, got[name], want[name])
