"""The axes take tensors of every layout and size, and sum them as gloo does in rank order, and as the simulator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from tests.helpers import raises_text
from tests.ranks import end_of


def values(shape: Any, dtype: torch.dtype, start: int) -> Tensor:
    n = torch.Size(shape).numel()
    x = torch.arange(n) % 13 * (start + 1) + start
    x = x / 7 if dtype.is_floating_point or dtype.is_complex else x
    return (x + 1j * (x + 1) if dtype.is_complex else x).to(dtype).reshape(shape)


def strided(x: Tensor) -> Tensor:
    return torch.stack([x, x], -1)[..., 0]


def conjugated(x: Tensor) -> Tensor:
    return x.conj().resolve_conj().conj() if x.is_complex() else x


def negated(x: Tensor) -> Tensor:
    return torch.complex(torch.zeros_like(x), -x).conj().imag if x.dtype in (torch.float32, torch.float64) else x


# A shape, and the function that gives values their layout.
LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "contiguous": ((6,), lambda x: x), "large": ((3, 30_000), lambda x: x), "strided": ((6,), strided),
    "strided, large": ((90_000,), strided), "reversed rows": ((4, 3), lambda x: strided(x.flip(0)).flip(0)),
    "one element with a stride": ((1,), lambda x: x.new_zeros(4, 3)[:1, 0].copy_(x)),
    "two dimensions of one element": ((1, 1), lambda x: x.new_zeros(4, 3, 5)[:1, 1, 2:3].copy_(x)),
    "transposed": ((5, 4), lambda x: x.t().contiguous().t()),
    "transposed, large": ((300, 200), lambda x: x.t().contiguous().t()),
    "channels last": ((2, 3, 4, 5), lambda x: x.contiguous(memory_format=torch.channels_last)),
    "with an offset": ((7,), lambda x: x.new_zeros(20)[5:12].copy_(x)), "empty": ((0,), lambda x: x),
    "empty with a stride": ((0,), lambda x: x.new_zeros(4, 3)[:0, 0]), "0-d": ((), lambda x: x),
    "0-d in a matrix": ((), lambda x: x.new_zeros(4, 3)[2, 1].copy_(x)), "conjugated": ((6,), conjugated),
    "conjugated, strided": ((6,), lambda x: strided(conjugated(x)).conj().resolve_conj().conj() if x.is_complex() else strided(x)),
    "conjugated, 0-d": ((), conjugated), "negated": ((6,), negated), "negated, large": ((90_000,), negated),
    "negated, 0-d": ((), negated), "negated, empty": ((0,), negated),
}  # fmt: skip
# Layouts that only an input can have.
INPUTS: Any = {"expanded": ((4, 3), lambda x: x[:1].expand(4, 3)), "expanded, 1-d": ((5,), lambda x: x[:1].expand(5))}
# Elements: one, fewer than ranks, those of a packet, one more, and several chunks.
SIZES: Any = {str(n): ((n,), lambda x: x) for n in (1, 3, 16384, 16385, 150_001)}
DTYPES = (torch.float32, torch.int64, torch.complex64)
MORE_DTYPES = (*DTYPES, torch.float64, torch.bfloat16, torch.float16, torch.uint8)


def on_axes(mesh: Any, bound: bool, layout: str, dtype: torch.dtype) -> dict[str, Any]:
    """Collectives over a mesh of a tensor of a layout."""
    shape, lay = (LAYOUTS | INPUTS | SIZES)[layout]
    x = lay(values(shape, dtype, mesh.rank))
    rows = torch.stack([x] * mesh.size) if x.dim() else x.expand(mesh.size)
    give = [(mesh.rank + i) % 3 for i in range(mesh.size)]  # to each rank as many rows as from it
    calls: dict[str, Callable[[], Any]] = {
        "psum": lambda: tx.psum(x, "data"), "tree": lambda: tx.psum({"a": x, "b": [x, rows]}, "data"),
        "pbroadcast": lambda: tx.pbroadcast(x, "data", mesh.size - 1), "all_gather": lambda: tx.all_gather(x, "data"),
        "psum_scatter": lambda: tx.psum_scatter(rows, "data"), "all_to_all": lambda: tx.all_to_all(rows, "data"),
        "all_to_all_single": lambda: tx.all_to_all_single(rows, "data"),
        "split": lambda: tx.all_to_all_single(torch.cat([rows] * 3)[: sum(give)], "data", input_split_sizes=give, output_split_sizes=give),
        "to some": lambda: tx.ppermute(x, "data", [(i, (i + 1) % mesh.size) for i in range(1, mesh.size)]),
        "ppermute": lambda: tx.ppermute(x, "data", [(i, (i + 1) % mesh.size) for i in range(mesh.size)]),
    }  # fmt: skip
    if not dtype.is_complex:
        calls |= {"pmax": lambda: tx.pmax(x, "data"), "pmin": lambda: tx.pmin(x, "data")}
    before = x.clone()
    with contextlib.nullcontext() if bound else fjoin.bind(mesh):
        out = {name: call() for name, call in calls.items()}
    assert torch.equal(x, before)
    return out


def every_layout(transport: str | None) -> dict[Any, Any]:
    """The same over all layouts; None for simulated ranks."""
    mesh = fjoin.mesh({"data": -1}, transport=transport or "auto", ordered=transport == "gloo")
    sizes = [3, 0, 5, 2][: mesh.size]
    flat = torch.cat([torch.full((n,), rank + 1.0) * (rank == mesh.rank) for rank, n in enumerate(sizes)])
    mesh.axes["data"].begin_gather(flat, sizes, mesh.rank).wait()
    assert flat.tolist() == [rank + 1.0 for rank, n in enumerate(sizes) for _ in range(n)]
    return {
        (layout, dtype): on_axes(mesh, transport is None, layout, dtype)
        for layout in LAYOUTS | INPUTS | SIZES
        for dtype in (MORE_DTYPES if layout in SIZES else DTYPES)
    }


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_collectives_over_axes_on_every_layout(pool: Any, n: int, transport: str) -> None:
    """Results are bitwise equal to the simulation."""
    want = tx.simulate(lambda: every_layout(None), {"data": n})
    for own, simulated in zip(pool.run(n, every_layout, transport), want, strict=True):
        for key in simulated:
            torch.testing.assert_close(own[key], simulated[key], rtol=0, atol=0, msg=lambda text: f"{key}: {text}")  # noqa: B023


# -- ranks that call a collective with other arguments raise, on all ranks; so does the simulator --


LARGE = 40_000
Call = Callable[[int, int], Any]


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


# What differs on rank 1 -> the call of rank r, in tensors of n elements.
CALLS: dict[str, Call] = {
    "the root": lambda r, n: tx.pbroadcast(ones(n), "data", int(r == 1)),
    "pairs": lambda r, n: tx.ppermute(ones(n), "data", [(0, 1)] if r != 1 else [(1, 0)]),
    "more pairs": lambda r, n: tx.ppermute(ones(n), "data", [(0, 1), (1, 0)][: 2 - (r == 1)]),
    "a size": lambda r, n: tx.psum(ones(n + (r == 1)), "data"),
    "the dtype": lambda r, n: tx.psum(ones(n, dtype=torch.int32 if r == 1 else torch.float32), "data"),
    "the shape of rows": lambda r, n: tx.all_to_all_single(ones(6, 2 + (r == 1), n), "data"),
    "the number of rows": lambda r, n: tx.all_to_all_single(ones(6 + 6 * (r == 1), n), "data"),
    "the reduction": lambda r, n: (tx.pmax if r == 1 else tx.pmin)(ones(n), "data"),
    "the collective": lambda r, n: tx.all_gather(ones(n), "data") if r == 1 else tx.pbroadcast(ones(n), "data", 0),
}  # fmt: skip


def called(what: str, n: int) -> str:
    with fjoin.bind(mesh := fjoin.mesh({"data": -1}, transport="shared")):
        # Where one rank alone has noticed, the others do in the second call.
        return end_of(lambda: (CALLS[what](mesh.rank, n), tx.psum(torch.ones(3), "data"))).kind


@pytest.mark.sample(5)
@pytest.mark.parametrize("n", [3, LARGE])
@pytest.mark.parametrize("what", CALLS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_arguments_that_differ(pool: Any, ranks: int, what: str, n: int) -> None:
    assert pool.run(ranks, called, what, n) == ["DesyncError"] * ranks


@pytest.mark.parametrize("what", CALLS)
def test_simulator_raises_on_mismatched_arguments(what: str) -> None:
    raises_text(tx.CollectiveMismatch, lambda: tx.simulate(lambda r: CALLS[what](r, 3), {"data": 2}, [0, 1]))
