"""The messages of collectives with encoded floats."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fjoin import transforms as tx
from fjoin.transforms.axes._simulate import SimulatedAxis
from tests.quantized_calls import CALLS, CODECS, SERVED


def sent(monkeypatch: pytest.MonkeyPatch, axes: dict[str, int], function: Any, xs: list[Any]) -> list[Any]:
    """The values that rank 0 gives to the axis: (op, dtype, bytes)."""
    notes: list[Any] = []
    plain = SimulatedAxis.run

    def run(self: SimulatedAxis, op: str, x: Tensor, arg: Any) -> Tensor:
        if self.world_rank == 0:
            notes.append((op, x.dtype, x.numel() * x.element_size()))
        return plain(self, op, x, arg)

    monkeypatch.setattr(SimulatedAxis, "run", run)
    tx.simulate(function, axes, xs)
    monkeypatch.undo()
    return notes


@pytest.mark.parametrize("codec", CODECS)
def test_messages(monkeypatch: pytest.MonkeyPatch, codec: str) -> None:
    """One message of bytes for all floats of a call, and one for each other dtype; nothing else."""
    made, n = CODECS[codec][0], 3
    xs = [
        {"a": torch.ones(n, 40), "b": torch.ones(n, 7, dtype=torch.bfloat16), "c": torch.ones(n, 2).long()}
        for _ in range(n)
    ]
    whole, row, ints = made.width(47 * n), made.width(47), (torch.int64, 2 * n * 8)
    once = {
        "all_gather": [("all_gather", *ints), ("all_gather", torch.uint8, whole)],
        "all_to_all": [("all_to_all", *ints), ("all_to_all", torch.uint8, row * n)],
        "all_to_all_single": [("all_to_all", *ints), ("all_to_all", torch.uint8, row * n)],
    }
    for name, want in once.items():
        f = tx.quantized(getattr(tx, name), made)
        assert sent(monkeypatch, {"data": n}, lambda x: CALLS[name](f, x, n), xs) == want, name  # noqa: B023
    for name in ("psum", "pmean"):  # a part to each rank, and back; a word with each row
        f = tx.quantized(getattr(tx, name), made)
        (_, *other), to, back = sent(monkeypatch, {"data": n}, lambda x: CALLS[name](f, x, n), xs)  # noqa: B023
        assert (
            tuple(other) == ints and to[:2] == ("all_to_all", torch.uint8) and back[:2] == ("all_gather", torch.uint8)
        )
        assert row * n <= to[2] <= (row + 16) * n and row <= back[2] <= row + 8
    for name in SERVED:  # nothing is encoded for one rank
        f = tx.quantized(getattr(tx, name), made)
        x = {"a": torch.rand(1, 40), "b": torch.rand(1, 3, dtype=torch.float64)}
        notes = sent(monkeypatch, {"data": 1}, lambda x: CALLS[name](f, x, 1), [x])  # noqa: B023
        assert {dtype for _, dtype, _ in notes} == {torch.float32, torch.float64}


@pytest.mark.parametrize("codec", CODECS)
def test_rows_of_different_lengths(monkeypatch: pytest.MonkeyPatch, codec: str) -> None:
    """To each rank its own number of rows, none included: a row of bytes for each, all floats of a call in one message."""
    made, room = CODECS[codec]
    gives = [(0, 2, 3), (4, 1, 0), (2, 0, 0)]
    takes = [tuple(give[r] for give in gives) for r in range(3)]
    g = torch.Generator().manual_seed(0)
    trees = [
        {"a": torch.rand(sum(give), 5, generator=g), "b": torch.rand(sum(give), generator=g).to(torch.bfloat16),
         "n": torch.arange(sum(give)) + 10 * r}
        for r, give in enumerate(gives)
    ]  # fmt: skip

    def one_rank(tree: Any, give: Any, take: Any, coded: bool = True) -> Any:
        f = tx.quantized(tx.all_to_all_single, made) if coded else tx.all_to_all_single
        return f(tree, "data", input_split_sizes=give, output_split_sizes=take)

    got, want = (
        tx.simulate(lambda *given: one_rank(*given, coded), {"data": 3}, trees, gives, takes)  # noqa: B023
        for coded in (True, False)
    )
    for mine, other in zip(got, want, strict=True):
        assert torch.equal(mine["n"], other["n"])
        for path in ("a", "b"):
            a, b = mine[path], other[path]
            assert a.dtype is b.dtype and a.shape == b.shape
            assert ((a - b).abs() <= room + 2.0**-8 * (path == "b")).all()
    rows = list(zip(trees, gives, takes, strict=True))
    notes = sent(monkeypatch, {"data": 3}, lambda row: one_rank(*row), rows)
    assert notes == [
        ("all_to_all_single", torch.int64, 8 * sum(gives[0])),
        ("all_to_all_single", torch.uint8, sum(made.width(6 * n) for n in gives[0])),
    ]
    trees[1]["a"][0, 0] = math.nan  # which goes to rank 0
    hit = [not torch.isfinite(out["a"]).all() for out in tx.simulate(one_rank, {"data": 3}, trees, gives, takes)]
    assert hit == [True, False, False]


def test_bytes_of_a_sum_do_not_grow_with_the_ranks() -> None:
    f = tx.quantized(tx.psum, tx.int8())
    hook = tx.Transform(lambda params: (), lambda g, s, params=None, **extra: (f(g, "data"), s))
    params = {"w": torch.zeros(10**6, device="meta"), "v": torch.zeros(1000, dtype=torch.bfloat16)}
    for ranks in (2, 8, 64):
        what = tx.explain(hook, params, {"data": ranks})
        assert what.messages == (1 if ranks == 2 else 2) and what.sent_bytes < 2.1e6


def _sends(f: Any) -> Any:
    return lambda x, give, take: f(x, "data", input_split_sizes=give, output_split_sizes=take)


SPLITS = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])], [(1, 1), (1, 1)], [(1, 1), (2, 1)]


@pytest.mark.parametrize("codec", [tx.int4(), tx.sign(), tx.bfloat16()], ids=repr)
def test_ranks_that_disagree_on_rows_raise_at_equal_bytes(codec: tx.Codec) -> None:
    """In the simulator, as for the plain collective."""
    for f in (tx.all_to_all_single, tx.quantized(tx.all_to_all_single, codec)):
        with pytest.raises(tx.CollectiveMismatch, match="rank 0 sends 1 rows to rank 1, which takes 2"):
            tx.simulate(_sends(f), {"data": 2}, *SPLITS)
