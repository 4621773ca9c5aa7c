"""The placements of states hold: a leaf is equal on the ranks along its axes, and slices make up the whole."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest
import torch

from fjoin import transforms as tx
from fjoin.transforms.axes import bound
from fjoin.transforms.base.placements import marks
from fjoin.transforms.pipelines import buffers_placement, params_placement, placed
from tests.goldens.golden_records import STEPS, places, steps
from tests.goldens.golden_rows import ROWS


@pytest.mark.sample(4)  # many rows are one transform with other options
@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if not row.poisoned])
def test_placements(name: str) -> None:
    row, ranks, pipeline = ROWS[name], places(ROWS[name]), ROWS[name].make()

    def run(rank: int) -> list[Any]:
        """The parameters and the state after each step, and the placements of the state."""
        return [
            (params, state, {leaf.path: leaf.placement for leaf in placed(pipeline, state, bound()) if leaf.placement})
            for params, state in steps(row, "odd", rank)
        ]

    found, of_params = tx.simulate(run, row.axes, list(range(len(ranks)))), params_placement(pipeline, row.axes)
    for step in range(STEPS):
        states = [tx.to_state_dict(one[step][1]) for one in found]
        kinds = found[0][step][2]
        assert kinds.keys() == states[0].keys()
        for path, kind in kinds.items():
            assert_equal_along(row.axes, ranks, [state[path] for state in states], kind.equal, path)
        for path in found[0][step][0]:
            assert_equal_along(row.axes, ranks, [one[step][0][path] for one in found], of_params.equal, path)


def test_a_wrong_placement_is_found() -> None:
    with pytest.raises(AssertionError, match="total differs over"):
        assert_equal_along({"data": 2}, [(0,), (1,)], [torch.zeros(1), torch.ones(1)], ("data",), "total")
    assert_equal_along({"data": 2}, [(0,), (1,)], [torch.zeros(1), torch.ones(1)], (), "total")


def test_every_field_of_a_rank_by_itself_has_a_merge() -> None:
    found = 0
    for module in pkgutil.walk_packages(tx.__path__, "fjoin.transforms."):
        for kind in vars(importlib.import_module(module.name)).values():
            if isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"):
                for name, (own, merge) in marks(kind).items():
                    assert not own or merge is not None, f"{kind.__name__}.{name}"
                    found += own
    assert found > 10


def assert_equal_along(axes: Any, ranks: Any, values: list[Any], equal: tuple[str, ...], path: str) -> None:
    first: dict[Any, Any] = {}
    for place, value in zip(ranks, values, strict=True):
        group = tuple(at for name, at in zip(axes, place, strict=True) if name not in equal)
        assert same(first.setdefault(group, value), value), f"{path} differs over {equal}"


def same(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor):
        return bool(a == b)
    return a.shape == b.shape and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


def test_buffers_are_equal_where_they_are_averaged() -> None:
    assert buffers_placement(None, {"data": 2}).equal == ()
    assert buffers_placement(tx.average_buffers("data"), {"data": 2}).equal == ("data",)
    assert buffers_placement(tx.every(2, tx.average_buffers("data")), {"data": 2}).equal == ()
    by_path = {"a": tx.average_buffers("data"), "*": tx.broadcast_buffers("data")}
    assert buffers_placement(tx.partition(by_path), {"data": 2}).equal == ("data",)
    both = {"a": tx.average_buffers("node"), "*": tx.average_buffers(("node", "local"))}
    assert buffers_placement(tx.partition(both), {"node": 2, "local": 2}).equal == ("node",)
