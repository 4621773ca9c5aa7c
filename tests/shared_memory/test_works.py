"""Works and futures of the backend "fjoin", and the parts of torch that use them, beside gloo."""

from __future__ import annotations

import datetime
import gc
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")
Group = Any


def waits_in_a_callback(group: Group, rank: int, depth: int = 1) -> Any:
    """Callbacks inside each other, each of which waits for a collective."""
    xs = [torch.full((2,), 1.0 + rank) for _ in range(depth + 1)]

    def then(i: int) -> Callable[[Any], Any]:
        def run(done: Any) -> Any:
            future = dist.all_reduce(xs[i], group=group, async_op=True).get_future()  # type: ignore[union-attr]
            return (future.then(then(i + 1)) if i < depth else future).wait()

        return run

    dist.all_reduce(xs[0], group=group, async_op=True).get_future().then(then(1)).wait()  # type: ignore[union-attr]
    return xs


def many_callbacks(group: Group, rank: int) -> Any:
    """Callbacks of twenty works, each of which waits for a work of its own, in one order on all ranks."""
    xs = [torch.full((1000,), float(rank + i)) for i in range(20)]
    ys = [torch.full((1,), float(rank - i)) for i in range(20)]
    futures = [dist.all_reduce(x, group=group, async_op=True).get_future() for x in xs]  # type: ignore[union-attr]
    later = [dist.all_reduce(y, group=group, async_op=True) for y in ys]
    chained = [future.then(lambda _, work=work: work.wait()) for future, work in zip(futures, later, strict=True)]
    torch.futures.wait_all(chained)
    return xs, ys


def after_a_wait(group: Group, rank: int) -> Any:
    work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
    assert work is not None
    work.wait()
    return work.get_future().value()


def gathered_lists(group: Group, rank: int) -> Any:
    """The future of a gather has one flat list."""
    outs = [torch.zeros(2) for _ in range(2)]
    future = dist.all_gather(outs, torch.full((2,), 1.0 + rank), group=group, async_op=True).get_future()  # type: ignore[union-attr]
    return future.wait()


def power_sgd(group: Group, rank: int) -> Any:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(8, 8), process_group=group)
    state = powerSGD_hook.PowerSGDState(group, 1, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for i in range(4):
        ddp(torch.full((1, 8), rank + i + 1.0)).sum().backward()
    return [p.grad for p in ddp.parameters()]


def joined(group: Group, rank: int, divide: bool, unused: bool) -> Any:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    module.extra = nn.Linear(2, 2)
    if not unused:
        del module.extra
    ddp = DistributedDataParallel(module, process_group=group, find_unused_parameters=unused)
    ddp.module.forward = lambda x: module[1](module[0](x))  # type: ignore[method-assign]
    with ddp.join(divide_by_initial_world_size=divide):
        for i in range(2 + rank):
            ddp(torch.full((2, 3), 1.0 + i)).sum().backward()
    return [p.grad for p in module.parameters()]


def dropped_by_python(group: Group, rank: int) -> Any:
    """Torch's C++ waits for a work to which Python refers no longer."""
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False), process_group=group)
    with torch.no_grad():
        ddp.module.weight.fill_(1.0)
    work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    ddp.reducer._set_forward_pass_work_handle(work, False)
    del work
    gc.collect()
    ddp(torch.full((1, 1), 1.0 + rank)).sum().backward()
    return ddp.module.weight.grad


def versions(group: Group, rank: int) -> Any:
    """No collective counts as a change for autograd, so views of a parameter made before it can be used."""
    x, halves = torch.ones(3), torch.ones(4, requires_grad=True)
    first, _ = torch.chunk(halves, 2)
    outs = [torch.zeros(3), torch.zeros(3)]
    for call in (
        lambda: dist.all_reduce(x, group=group), lambda: dist.broadcast(x, group=group, group_src=0),
        lambda: dist.reduce(x, group=group, group_dst=0), lambda: dist.all_gather(outs, x, group=group),
        lambda: dist.broadcast(x[::2], group=group, group_src=0),
        lambda: dist.broadcast(halves.detach(), group=group, group_src=0),
    ):  # fmt: skip
        call()
    first.sum().backward()
    return x._version, halves.grad


def twice(group: Group, rank: int) -> Any:
    x = torch.tensor([rank + 1.0])
    group.allreduce_coalesced([x, x], dist.AllreduceCoalescedOptions()).wait()
    return x


def uneven_lists(group: Group, rank: int) -> Any:
    out = torch.zeros(1 + 40_000 * rank)
    dist.reduce_scatter(out, [torch.full((1 + 40_000 * i,), 1.0 + rank) for i in range(2)], group=group)
    return out


def convenience_forms(group: Group, rank: int) -> Any:
    """The forms of a group's methods that take one tensor."""
    x, y, z, w = (torch.arange(4.0) + rank for _ in range(4))
    outs, out, rows = [torch.zeros(4), torch.zeros(4)], torch.zeros(4), torch.zeros(8)
    calls: list[Callable[[], Any]] = [
        lambda: group.allreduce(x), lambda: group.allreduce([y], dist.ReduceOp.MAX),
        lambda: group.allreduce(z, op=dist.ReduceOp.MIN), lambda: group.broadcast(w, root=1), lambda: group.broadcast(w, 0),
        lambda: group.allgather(outs, y), lambda: group.reduce(y, 0), lambda: group.reduce(z, root=0, op=dist.ReduceOp.MAX),
        lambda: group.gather(outs if rank == 0 else [], x, 0), lambda: group.scatter(out, outs if rank == 0 else [], root=0),
        lambda: group.reduce_scatter(out, [x, w]), lambda: group.alltoall_base(rows, torch.arange(8.0) + rank, [], []),
        lambda: group.barrier(),
    ]  # fmt: skip
    for call in calls:
        call().wait()
    return [x, w, out, rows] + ([y, z, *outs] if rank == 0 else [])


def saved(group: Group, rank: int) -> Any:
    """Functions of torch that ask a group for its devices."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, group=group, group_src=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint.async_save({"w": torch.ones(3)}, checkpoint_id=folder[0], process_group=group).result()
        module = nn.Linear(2, 2)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        whole = {name: torch.full_like(x, 7.0) for name, x in module.state_dict().items()} if rank == 0 else {}
        default, dist.distributed_c10d.GroupMember.WORLD = dist.group.WORLD, group
        try:
            set_model_state_dict(module, whole, options=options)
        finally:
            dist.distributed_c10d.GroupMember.WORLD = default
    return torch.device("cpu") in group._device_types, module.weight.detach()


CALLS: dict[str, Callable[[Group, int], Any]] = {
    "waits in a callback": waits_in_a_callback,
    "after a wait": after_a_wait,
    "gathered lists": gathered_lists,
    "powerSGD": power_sgd,
    "join, divided by all": lambda group, rank: joined(group, rank, True, False),
    "join, divided by the active": lambda group, rank: joined(group, rank, False, False),
    "join, unused parameters": lambda group, rank: joined(group, rank, True, True),
    "join, unused parameters, active": lambda group, rank: joined(group, rank, False, True),
    "dropped by Python": dropped_by_python,
    "versions": versions,
    "twice": twice,
    "uneven lists": uneven_lists,
    "convenience forms": convenience_forms,
    "saved": saved,
}


def deep() -> Any:
    group = dist.new_group(backend="fjoin", timeout=datetime.timedelta(seconds=30))
    found = waits_in_a_callback(group, dist.get_rank(), 6), many_callbacks(group, dist.get_rank())
    dist.destroy_process_group(group)
    return found


def test_callbacks_may_wait_inside_each_other(pool: Any) -> None:
    """Gloo has two threads, and waits for ever in the third callback."""
    for inside, (xs, ys) in pool.run(2, deep):
        assert torch.stack(inside).eq(3.0).all()
        assert [x.unique().item() for x in xs] == [2 * i + 1 for i in range(20)]
        assert [y.item() for y in ys] == [1 - 2 * i for i in range(20)]


# A group of gloo whose last reference ends in one of its own callbacks would abort the process.
_GROUPS: list[Group] = []


def on(backend: str, name: str) -> Any:
    group = dist.new_group(backend=backend, timeout=datetime.timedelta(seconds=30))
    _GROUPS.append(group)
    return CALLS[name](group, dist.get_rank())


@pytest.mark.parametrize("name", CALLS)
def test_works_match_those_of_gloo(pool: Any, name: str) -> None:
    for ours, of_gloo in zip(pool.run(2, on, "fjoin", name), pool.run(2, on, "gloo", name), strict=True):
        torch.testing.assert_close(ours, of_gloo, rtol=0, atol=0)


def with_a_time_out(way: str) -> tuple[str, float]:
    group = dist.new_group(backend="fjoin", timeout=datetime.timedelta(seconds=60))
    dist.barrier(group=group)
    text, start, limit = "", time.monotonic(), datetime.timedelta(seconds=0.5)
    if dist.get_rank() == 0:
        of_torch = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout  # the first from 2.14 on
        of_torch(limit, group) if way == "torch" else group.set_timeout(limit)
        try:
            if way == "future":
                dist.all_reduce(torch.ones(1), group=group, async_op=True).get_future().wait()  # type: ignore[union-attr]
            else:
                dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError as error:
            text = str(error)
    seconds = time.monotonic() - start
    dist.barrier()
    dist.destroy_process_group(group)
    return text, seconds


@pytest.mark.parametrize("way", ["torch", "group", "future"])
def test_the_time_out_can_be_set(pool: Any, way: str) -> None:
    text, seconds = pool.run(2, with_a_time_out, way)[0]
    assert "timed out" in text and 0.4 < seconds < 10.0


def fp16_hook(backend: str) -> str:
    ddp = DistributedDataParallel(nn.Linear(4, 4), process_group=dist.new_group(backend=backend))
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    try:
        ddp(torch.ones(1, 4)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "fine"


def test_torchs_builtin_fp16_hook_takes_no_future_of_a_python_backend(pool: Any) -> None:
    """Its C++ asserts the type of the value. docs/from-torch.md names the hooks that can be used instead."""
    assert pool.run(2, fp16_hook, "gloo") == ["fine"] * 2
    assert all("isTensorList" in text for text in pool.run(2, fp16_hook, "fjoin"))
