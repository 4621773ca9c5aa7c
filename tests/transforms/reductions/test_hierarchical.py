"""The mean in two levels is the mean over both axes, and sends less across nodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fjoin import transforms as tx
from tests.helpers import max_diff, same_bits

SHAPES = [
    {"node": 2, "local": 2}, {"node": 2, "local": 3}, {"node": 3, "local": 2}, {"node": 1, "local": 3},
    {"node": 3, "local": 1},
]  # fmt: skip


def _grads(rank: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(rank)
    shapes: list[tuple[str, tuple[int, ...]]] = [("a", (5, 3)), ("b", ()), ("none", (0, 2))]
    return {name: torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for name, shape in shapes}


def _one_rank(hook: tx.Transform, as_tensor: bool) -> Any:
    rank = int(tx.axis_index(("node", "local")))
    weight: Any = float(rank % 4)  # some have none, a whole node maybe
    grads = {k: v * float("nan") for k, v in _grads(rank).items()} if weight == 0 else _grads(rank)
    weight = torch.tensor(weight, dtype=torch.float64) if as_tensor else weight
    return hook.update(grads, hook.init(grads), weight=weight)


@pytest.mark.sample(2)
@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("over", ["weight", "live", "world"])
@pytest.mark.parametrize("axes", SHAPES, ids=str)
def test_result_matches_the_mean_over_both_axes(axes: dict[str, int], over: Any, as_tensor: bool) -> None:
    two, one = tx.hierarchical_mean("local", "node", over=over), tx.mean(("node", "local"), over)
    got, want = (tx.simulate(lambda: _one_rank(hook, as_tensor), axes) for hook in (two, one))  # noqa: B023
    for (out, _), (expected, _) in zip(got, want, strict=True):
        assert max_diff(out, expected) < 1e-15
        assert same_bits(out, got[0][0])


@pytest.mark.parametrize("over", ["weight", "live", "world"])
@pytest.mark.parametrize("axes", SHAPES, ids=str)
def test_encoded_across_nodes(axes: dict[str, int], over: Any) -> None:
    """Near the mean, and the same on all ranks."""
    hook = tx.compress(tx.int8(), tx.hierarchical_mean("local", "node", over=over))
    got = tx.simulate(lambda: _one_rank(hook, False), axes)
    want = tx.simulate(lambda: _one_rank(tx.mean(("node", "local"), over), False), axes)
    for (out, _), (expected, _) in zip(got, want, strict=True):
        assert max_diff(out, expected) < (0.03 if axes["node"] > 1 else 1e-15)
        assert same_bits(out, got[0][0])


def test_bytes_between_nodes() -> None:
    params = {"w": torch.ones(1_000_000)}
    axes = {"node": 8, "local": 8}

    def sent(hook: tx.Transform, axis: str) -> int:
        return sum(m.sent_bytes for row in tx.explain(hook, params, axes).rows for m in row.messages if axis in m.axis)

    floats = sent(tx.mean("node"), "node")
    assert sent(tx.hierarchical_mean("local", "node"), "node") < 1.01 * floats / 8
    assert sent(tx.compress(tx.int8(), tx.hierarchical_mean("local", "node")), "node") < 0.26 * floats / 8
