"""The backend "fjoin" of torch.distributed does what gloo does."""

from __future__ import annotations

import copy
import datetime
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from tests.ranks import Ranks

Report = Callable[[Any], None]
OPS = {name: getattr(dist.ReduceOp, name) for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")}
BITS = ("BAND", "BOR", "BXOR")
# By their names from torch 2.13 on, or by the earlier ones.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.uint8, torch.complex64)
SIZES = (0, 1, 6, 16_386, 150_000)


def values(rank: int, shape: Any, dtype: torch.dtype) -> Tensor:
    """Small whole numbers, whose sums and products are exact in every dtype."""
    x = torch.arange(torch.empty(shape).numel()).reshape(shape) * (rank + 1) % 3 + rank % 2
    return x.to(dtype)


def reductions(group: Any, rank: int, w: int) -> Iterator[tuple[Any, Any]]:
    for dtype in DTYPES:
        for name, op in OPS.items():
            whole = not (dtype.is_floating_point or dtype.is_complex)
            if name == "AVG" or (dtype.is_complex and name != "SUM") or (name in BITS and not whole):
                continue  # gloo has no averages
            for n in SIZES if dtype is torch.float32 else (6, 16_386):
                x = values(rank, n, dtype)
                dist.all_reduce(x, op, group=group)
                yield (name, dtype, n, "all_reduce"), x
                x = values(rank, n, dtype)
                dist.reduce(x, group=group, op=op, group_dst=w - 1)
                yield (name, dtype, n, "reduce"), x if rank == w - 1 else None
    x = values(rank, (40, 50), torch.float32).t()
    dist.all_reduce(x, group=group)
    yield "not contiguous", x
    work = dist.all_reduce(y := values(rank, 20_000, torch.float32), group=group, async_op=True)
    first = work.get_future().then(lambda done: [t + 1 for t in done.value()])
    yield "then", (first.wait(), y)


def copies(group: Any, rank: int, w: int) -> Iterator[tuple[Any, Any]]:
    for n in SIZES:
        for dtype in (torch.float32, torch.complex64, torch.bool):
            x = values(rank, n, dtype)
            dist.broadcast(x, group=group, group_src=w - 1)
            yield ("broadcast", n, dtype), x
            outs = [torch.empty(n, dtype=dtype) for _ in range(w)]
            dist.all_gather(outs, values(rank, n, dtype), group=group)
            yield ("all_gather", n, dtype), outs
    for n in (0, 1, 9_000):
        x, out = values(rank, (n, 2), torch.float32), torch.empty(w * n, 2)
        ALL_GATHER(out, x, group=group)
        yield ("all_gather_into_tensor", n), out
        x, out = values(rank, (w * n, 2), torch.float32), torch.empty(n, 2)
        REDUCE_SCATTER(out, x, group=group)
        yield ("reduce_scatter_tensor", n), out
        out = torch.empty(n, 2)
        dist.reduce_scatter(out, [values(rank + i, (n, 2), torch.float32) for i in range(w)], group=group)
        yield ("reduce_scatter", n), out
        got = [torch.empty(n) for _ in range(w)] if rank == 0 else None
        dist.gather(values(rank, n, torch.float32), got, group=group, group_dst=0)
        yield ("gather", n), got
        out = torch.empty(n)
        parts = [values(i, n, torch.float32) for i in range(w)] if rank == w - 1 else None
        dist.scatter(out, parts, group=group, group_src=w - 1)
        yield ("scatter", n), out
        out = torch.empty(w * n, 3)
        dist.all_to_all_single(out, values(rank, (w * n, 3), torch.float32), group=group)
        yield ("all_to_all_single", n), out
        give, take = [(rank + i) % 3 for i in range(w)], [(i + rank) % 3 for i in range(w)]
        out = torch.empty(sum(take), 2)
        dist.all_to_all_single(out, values(rank, (sum(give), 2), torch.float32), take, give, group=group)
        yield ("all_to_all_single, uneven", n), out
    objects: list[Any] = [None] * w
    dist.all_gather_object(objects, {"rank": rank, "x": torch.ones(rank)}, group=group)
    yield "objects", [(one["rank"], one["x"]) for one in objects]
    dist.barrier(group=group)


def from_rank_to_rank(group: Any, rank: int, w: int) -> Iterator[tuple[Any, Any]]:
    """A ring, both ways at once, with tags out of order and with messages from anyone."""
    right, left = (rank + 1) % w, (rank - 1) % w
    for n in (0, 5, 100_000):
        got = [torch.empty(n) for _ in range(4)]
        works = [
            dist.isend(values(rank, n, torch.float32), group=group, group_dst=right, tag=1),
            dist.isend(values(rank + 1, n, torch.float32), group=group, group_dst=right, tag=2),
            dist.isend(values(rank + 2, n, torch.float32), group=group, group_dst=left, tag=1),
            dist.isend(values(rank + 3, n, torch.float32), group=group, group_dst=right, tag=2),
            dist.irecv(got[1], group=group, group_src=left, tag=2),
            dist.irecv(got[0], group=group, group_src=left, tag=1),
            dist.irecv(got[2], group=group, group_src=right, tag=1),
            dist.irecv(got[3], group=group, group_src=left, tag=2),
        ]
        for work in works:
            assert work is not None
            work.wait()
        yield ("ring", n), got
    out = torch.empty(3)
    if rank == 0:
        seen = []
        for _ in range(w - 1):
            source = dist.recv(out, group=group, tag=7)
            seen.append((source, out.clone()))
        yield "anyone", sorted((source, x.tolist()) for source, x in seen)
    else:
        dist.send(torch.full((3,), float(rank)), group=group, group_dst=0, tag=7)


TABLES = {"reductions": reductions, "copies": copies, "rank to rank": from_rank_to_rank}


def both(table: str) -> list[list[tuple[Any, Any]]]:
    rank, w = dist.get_rank(), dist.get_world_size()
    found = []
    for backend in ("fjoin", "gloo"):
        group = dist.new_group(backend=backend)
        found.append(list(TABLES[table](group, rank, w)))
        dist.destroy_process_group(group)
    return found


@pytest.mark.sample(3)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("table", TABLES)
def test_collectives_match_gloo(pool: Any, table: str, n: int) -> None:
    if n == 1 and table == "rank to rank":
        pytest.skip("one rank has no peer")
    for ours, of_gloo in pool.run(n, both, table):
        assert [name for name, _ in ours] == [name for name, _ in of_gloo]
        assert len(ours) > 2
        for (name, own), (_, want) in zip(ours, of_gloo, strict=True):
            torch.testing.assert_close(own, want, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")  # type: ignore[misc]


def averages() -> Any:
    group = dist.new_group(backend="fjoin")
    x, y = torch.full((3,), float(dist.get_rank())), torch.full((40_000,), float(dist.get_rank()))
    dist.all_reduce(x, dist.ReduceOp.AVG, group=group)
    out = torch.empty(20_000)
    REDUCE_SCATTER(out, y, dist.ReduceOp.AVG, group=group)
    dist.destroy_process_group(group)
    return x, out


def test_averages(pool: Any) -> None:
    """gloo has none."""
    for x, out in pool.run(2, averages):
        assert (x == 0.5).all() and (out == 0.5).all()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 500), nn.BatchNorm1d(500), nn.Linear(500, 500)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu())


def trained(backend: str, way: str) -> Any:
    """The displacements of a few steps of DistributedDataParallel."""
    torch.manual_seed(0)
    group = dist.new_group(backend=backend)
    module = Net()
    before = copy.deepcopy(module.state_dict())
    ddp = DistributedDataParallel(
        module, process_group=group, find_unused_parameters=True, gradient_as_bucket_view=True, bucket_cap_mb=1
    )
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    if way == "register":
        fjoin.ddp.register(ddp, tx.fuse(tx.mean("data"), tx.sgd(0.1, momentum=0.9)))
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        ddp(torch.randn(16, 8)).square().mean().backward()
        if way != "register":
            optimizer.step()
            optimizer.zero_grad()
    after = {name: value - before[name] for name, value in module.state_dict().items()}
    del ddp
    dist.destroy_process_group(group)
    return after


@pytest.mark.parametrize("way", ["plain", "register"])
def test_ddp(pool: Any, way: str) -> None:
    """Two ranks' sums have the same bits in any order."""
    for ours, of_gloo in zip(pool.run(2, trained, "fjoin", way), pool.run(2, trained, "gloo", way), strict=True):
        torch.testing.assert_close(ours, of_gloo, rtol=0, atol=0)
        assert ours["last.weight"].abs().max() > 1e-4


def refused() -> list[str]:
    group, texts = dist.new_group(backend="fjoin"), []
    rank = dist.get_rank()

    def says(call: Callable[[], Any]) -> None:
        with pytest.raises((RuntimeError, ValueError, TypeError)) as error:
            call()
        texts.append(str(error.value))

    says(lambda: dist.all_reduce(torch.ones(3, device="meta"), group=group))
    says(lambda: dist.all_reduce(torch.ones(3).to_sparse(), group=group))
    says(lambda: dist.all_gather([torch.ones(2), torch.ones(3)], torch.ones(2), group=group))
    says(lambda: REDUCE_SCATTER(torch.ones(2), torch.ones(5), group=group))
    says(lambda: dist.all_reduce(torch.ones(3 + rank), group=group))
    dist.destroy_process_group(group)
    return texts


def test_bad_input(pool: Any) -> None:
    for texts in pool.run(2, refused):
        assert "meta" in texts[0] and "gloo" in texts[0]
        assert "sparse" in texts[1]
        assert "elements" in texts[2] and "elements" in texts[3]
        assert "another size" in texts[4]


def waits(rank: int, report: Report, way: str) -> None:
    dist.init_process_group("fjoin", timeout=datetime.timedelta(seconds=3 if way == "stopped" else 60))
    x = torch.ones(100_000)
    dist.all_reduce(x)
    report("ready")
    if rank == 1:
        signal.pause()
    try:
        if way == "future":
            dist.all_reduce(x, async_op=True).get_future().wait()  # type: ignore[union-attr]
        else:
            dist.all_reduce(x)
    except RuntimeError as error:
        report(str(error))


@pytest.mark.parametrize("way", ["killed", "future", "stopped"])
def test_a_rank_that_ends_or_stops(way: str) -> None:
    with Ranks(2, waits, way) as ranks:
        for _ in range(2):
            assert ranks.next()[2] == "ready"
        os.kill(ranks.processes[1].pid, signal.SIGSTOP if way == "stopped" else signal.SIGKILL)  # type: ignore[arg-type]
        text = ranks.next(20)[2]
        os.kill(ranks.processes[1].pid, signal.SIGCONT) if way == "stopped" else None  # type: ignore[arg-type]
    assert ("timed out" if way == "stopped" else "closed its connection") in text


def whole_program(rank: int, report: Report) -> None:
    dist.init_process_group("fjoin")
    ddp = DistributedDataParallel(nn.Linear(300, 300))
    fjoin.ddp.register(ddp, tx.fuse(tx.mean("data"), tx.sgd(0.1)))
    ddp(torch.full((2, 300), 1.0 + rank)).sum().backward()
    with fjoin.mesh({"data": -1}) as mesh, fjoin.bind(mesh):
        total = tx.psum(torch.ones(()), "data").item()
    report((dist.get_backend(), total, ddp.module.weight.sum().item()))
    dist.destroy_process_group()


def test_it_can_be_the_backend_of_a_program() -> None:
    with Ranks(2, whole_program) as run:
        (_, _, first), (_, _, second) = run.next(30), run.next(30)
    assert first == second and first[:2] == ("fjoin", 2.0)


def polled() -> Any:
    """The results of works that are complete, without a wait."""
    group, rank = dist.new_group(backend="fjoin"), dist.get_rank()
    x, total, halves = torch.ones(4, 6).t(), torch.full((3,), 1.0 + rank), torch.zeros(2)
    own, mean = torch.arange(4.0) + 10 * rank, torch.full((70_000,), 1.0 + rank)
    works = [
        dist.all_reduce(x, group=group, async_op=True),
        dist.reduce(total, 0, group=group, async_op=True),
        REDUCE_SCATTER(halves, own, group=group, async_op=True),
        dist.all_reduce(mean, dist.ReduceOp.AVG, group=group, async_op=True),
    ]
    while not all(work.is_completed() for work in works):
        pass
    assert all(work.is_success() for work in works)
    return x.unique().tolist(), total.tolist()[:1] if rank == 0 else [], halves.tolist(), mean.unique().tolist()


def test_a_complete_work_has_its_results(pool: Any) -> None:
    assert pool.run(2, polled) == [([2.0], [3.0], [10.0, 12.0], [1.5]), ([2.0], [], [14.0, 16.0], [1.5])]


def waits_for_others(rank: int, report: Report) -> None:
    """Rank 1 has ended. Rank 0 has sent to it, polls a message of it, and waits for rank 2, which is stopped."""
    dist.init_process_group("fjoin", timeout=datetime.timedelta(seconds=2))
    dist.barrier()
    if rank:
        report("now")
        os.kill(os.getpid(), signal.SIGKILL if rank == 1 else signal.SIGSTOP)
    texts = []
    lost = dist.irecv(torch.zeros(4), 1)
    while not lost.is_completed():
        pass
    for _ in range(2):
        dist.isend(torch.ones(4), 1)
    busy = time.process_time()
    for work in (lost, dist.irecv(torch.zeros(4), 2)):
        try:
            work.wait()
        except RuntimeError as error:
            texts.append(str(error))
    report((texts, time.process_time() - busy))


def test_lost_rank_raises_in_polls_and_waits_without_busy_waiting() -> None:
    with Ranks(3, waits_for_others) as run:
        found = [run.next(30) for _ in range(3)]
    ((lost, late), busy) = next(what for who, _, what in found if who == 0)
    assert "rank 1" in lost and "timed out" in late and busy < 1.0


def lazily_negated() -> list[tuple[float, float, float]]:
    """Sums of tensors whose memory does not hold their values, in place, by the backend and by a mesh."""
    group, mesh, found = dist.new_group(backend="fjoin"), fjoin.mesh({"data": -1}, transport="shared"), []
    for n in (10, 60_000):
        z, minus = ((torch.full((n,), 1 + 2j) * (1 + dist.get_rank())).conj() for _ in range(2))
        minus = minus.imag
        assert minus.is_neg() and z.is_conj()
        with fjoin.bind(mesh):
            by_mesh = tx.psum(z, "data")
            params, pipeline = {"w": torch.zeros(n)}, tx.fuse(tx.sum_over("data"), tx.sgd(1.0))
            stepped, _ = pipeline.step(params, {"w": z.imag}, pipeline.init(params), donate=True)
        dist.all_reduce(minus, group=group)
        found.append((minus[-1].item(), by_mesh[-1].imag.item(), -stepped["w"][-1].item()))
    return found


def test_lazily_negated_and_conjugated_values(pool: Any) -> None:
    assert pool.run(2, lazily_negated) == [[(-6.0, -6.0, -6.0)] * 2] * 2
