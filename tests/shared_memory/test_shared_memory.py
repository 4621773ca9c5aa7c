"""Ranks of one host that exchange tensors through shared memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from fjoin.shared_memory import _rendezvous as _hosts
from tests.helpers import raises_text
from tests.ranks import end_of
from tests.traffic import watched


@contextlib.contextmanager
def hosts_of(ranks: int) -> Iterator[None]:
    """A context in which hosts have so many ranks."""
    own, transport = _hosts.host_name, os.environ.pop("FJOIN_TRANSPORT", "auto")
    _hosts.host_name = lambda *_: f"host {dist.get_rank() // ranks}"  # type: ignore[assignment]
    try:
        yield
    finally:
        _hosts.host_name = own
        os.environ["FJOIN_TRANSPORT"] = transport


def grids(ranks: int) -> Any:
    with hosts_of(ranks), fjoin.mesh({"node": 2, "local": -1}) as mesh:
        kinds = {name: type(axis).__name__ for name, axis in mesh.axes.items()}
        own, large = float(mesh.rank), torch.full((20_000,), float(mesh.rank))
        sums = [axis.run("psum", large, None)[0].item() for axis in mesh.axes.values()]
        return kinds, sums, float(mesh.over(("node", "local"))[0].run("psum", torch.tensor(own), None))


@pytest.mark.parametrize("ranks", [4, 2])
def test_a_grid(pool: Any, ranks: int) -> None:
    """An axis inside a host shares memory, also beside one across hosts."""
    for rank, (kinds, sums, total) in enumerate(pool.run(4, grids, ranks)):
        assert kinds == {"node": "HostAxis" if ranks == 4 else "GroupAxis", "local": "HostAxis"}
        node, local = divmod(rank, 2)
        assert sums == [2 * local + 2, 4 * node + 1] and total == 6


def several_hosts(ranks: int) -> Any:
    with hosts_of(ranks):
        mesh = fjoin.mesh({"data": -1})
        axis = mesh.axes["data"]
        kind, sums = type(axis).__name__, []
        with watched() as sent:
            for n in (5, 100_003):
                x = torch.arange(float(n)) + mesh.rank
                sums.append((axis.run("psum", x, None) - mesh.size * torch.arange(float(n))).unique().tolist())
            works = [axis.begin_reduce(torch.full((50_000,), float(i))) for i in range(3)]
            for work in reversed(works):
                work.wait()
        raises_text(ValueError, lambda: fjoin.mesh({"data": -1}, transport="shared"), "all ranks on one Linux host")
    return kind, sums, [(one.name, one.elements) for one in sent]


@pytest.mark.parametrize("n", [3, 4])
def test_an_axis_over_several_hosts_uses_gloo(pool: Any, n: int) -> None:
    for kind, sums, sent in pool.run(n, several_hosts, 2):
        assert (
            kind == "GroupAxis"
            and sums == [[sum(range(n))]] * 2
            and sent[:2] == [("all_reduce", 5), ("all_reduce", 100_003)]
        )


def settings() -> Any:
    with pytest.raises(fjoin.DesyncError, match="transport='gloo'"):
        fjoin.mesh({"data": -1}, transport="gloo" if dist.get_rank() else "shared")
    with pytest.raises(ValueError, match="transport must be one of 'auto', 'gloo', 'shared', got 'tcp'"):
        fjoin.mesh({"data": -1}, transport="tcp")


def test_settings(pool: Any) -> None:
    pool.run(2, settings)


def busy() -> Any:
    """The order of waits differs between ranks: no rank may need another one's attention for a message it has sent.

    There are more messages than a socket takes at once.
    """
    mesh = fjoin.mesh({"data": -1}, transport="shared", timeout_s=20.0)
    axis: Any = mesh.axes["data"]
    tensors = [torch.full((50_000 if i < 2 else 2_000,), float(i)) for i in range(300)]
    works = [axis.begin_reduce(x) for x in tensors]
    for work in works if mesh.rank else [works[1], works[0], *works[2:]]:
        work.wait()
    dist.barrier()  # a rank that drops its mesh disturbs one that still reads
    return [x[-1].item() for x in tensors]


def test_waits_in_any_order(pool: Any) -> None:
    assert pool.run(3, busy) == [[3.0 * i for i in range(300)]] * 3


# -- the sums of messages in shared memory tell whether gradients are finite --


HOOKS = {
    "mean": lambda: tx.mean("data"), "zero": lambda: tx.scatter_mean("data"),
    "zero, clip": lambda: tx.chain(tx.scatter_mean("data"), tx.clip_by_global_norm(1e30)),
    "int8": lambda: tx.compress(tx.int8(), tx.mean("data")),
}  # fmt: skip
# Elements of the first parameter: all pieces larger than what may travel in a packet, some of them, and none.
ELEMENTS = (40_000, 33_000, 100)


def judged_steps(transport: str, hook: str, bad: str, n: int) -> Any:
    """The parameters after three judged_steps, the second of which is bad on rank 1; the error; the messages of each step."""
    mesh = fjoin.mesh({"data": -1}, transport=transport, ordered=True)

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        return (params["a"] * x).sum() + params["b"].sum()

    step = fjoin.train_step(loss_fn, tx.fuse(HOOKS[hook](), tx.sgd(1e-30)), mesh=mesh)
    state = step.init({"a": torch.zeros(n), "b": torch.ones(n // 2)})
    error, sent = "", []
    for i in range(3):
        x = torch.linspace(0, 1, n) * (mesh.rank + 1)
        if i == 1 and mesh.rank == 1:
            if bad == "nan":
                x[n // 2] = torch.nan
            elif bad == "opposite":
                x[5], x[-5] = torch.inf, -torch.inf
        if i == 1 and bad == "overflow":  # of the sum of the elements, which are finite, as is the loss
            x[: n // 2] = 1e38
        before = mesh.traffic.messages
        try:
            state, metrics = step(state, x)
            assert bool(torch.isfinite(torch.as_tensor(metrics.weight)))
        except fjoin.NonFinite as raised:
            error = f"{sorted(raised.ranks)} {raised.paths}"
        sent.append(mesh.traffic.messages - before)
    return {path: p.clone() for path, p in state.params.items()}, error, sent


@pytest.mark.sample(12)
@pytest.mark.parametrize("bad", ["", "nan", "opposite", "overflow"])
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("n", ELEMENTS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_they_are_those_over_gloo(pool: Any, ranks: int, n: int, hook: str, bad: str) -> None:
    want, got = (pool.run(ranks, judged_steps, transport, hook, bad, n) for transport in ("gloo", "shared"))
    for (params, error, sent), (others, other, _) in zip(got, want, strict=True):
        torch.testing.assert_close(params, others, rtol=0, atol=0)
        assert error == other and (error != "") == (bad in ("nan", "opposite"))
        if hook == "zero":  # the message of the verdict, only where the sums do not tell
            assert sent[1] - sent[2] == (bad != "")


# -- a registered pipeline: its messages are in shared memory, though the module's group is gloo's --

PIPELINES = {
    "adamw": lambda: tx.fuse(tx.mean("data"), tx.adamw(0.01)),
    "clip": lambda: tx.fuse(tx.chain(tx.mean("data"), tx.clip_by_global_norm(0.5)), tx.adamw(0.01)),
    "int8": lambda: tx.fuse(tx.error_feedback(tx.compress(tx.int8(), tx.mean("data"))), tx.sgd(0.01)),
    "zero": lambda: tx.zero(tx.mean("data"), tx.adamw(0.01), "data"),
}


def trained(transport: str, name: str) -> Any:
    """The parameters after five passes, and the names and sizes of torch's messages in the last three."""
    before, os.environ["FJOIN_TRANSPORT"] = os.environ["FJOIN_TRANSPORT"], transport
    try:
        torch.manual_seed(0)
        ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 8)), bucket_cap_mb=1)
        fjoin.ddp.register(ddp, PIPELINES[name]())
    finally:
        os.environ["FJOIN_TRANSPORT"] = before
    torch.manual_seed(1 + dist.get_rank())
    for i in range(5):
        with watched() as sent:
            ddp(torch.randn(16, 64)).square().mean().backward()
        large = [one for one in sent if one.bytes > 10_000] if i > 1 else []
    return [p.detach().clone() for p in ddp.parameters()], large


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("n", [2, 3])
def test_training_matches_gloo(pool: Any, n: int, name: str) -> None:
    want, got = pool.run(n, trained, "gloo", name), pool.run(n, trained, "auto", name)
    # Three ranks of gloo do not add in the order of ranks; the codec rounds what differs to other codes.
    tolerance = {"rtol": 0, "atol": 0} if n == 2 or name == "zero" else {"rtol": 1e-5, "atol": 1e-4}
    for (params, sent), (other, also) in zip(got, want, strict=True):
        torch.testing.assert_close(params, other, **tolerance)
        torch.testing.assert_close(params, got[0][0], rtol=0, atol=0)
        assert also and not sent


# -- tensors of every layout and size: sums as those of gloo in rank order, and of the simulator --


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
