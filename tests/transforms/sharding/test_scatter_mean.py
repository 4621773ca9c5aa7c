"""Pieces of a sharded mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fjoin import transforms as tx


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_values_that_persist_stay_where_no_rank_has_weight(ranks: int) -> None:
    """Each rank gets its shard, as of a mean."""

    def one_rank(weight: float) -> Any:
        hook, given = tx.scatter_mean("data"), {"w": torch.arange(40.0), "b": torch.tensor(7.0)}
        return hook.update(given, hook.init(given), given, weight=weight, persistent=True)[0]

    kept, meant = (tx.simulate(one_rank, {"data": ranks}, [weight] * ranks) for weight in (0.0, 2.0))
    for one, other in zip(kept, meant, strict=True):
        assert all(torch.equal(one[path], other[path]) for path in ("w", "b"))
    assert torch.cat([one["w"] for one in kept]).tolist() == list(range(40))
