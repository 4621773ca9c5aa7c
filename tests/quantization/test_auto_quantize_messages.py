"""The messages of torch's collectives with encoded floats, and the handles of messages under way."""

from __future__ import annotations

import datetime
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from tests.helpers import raises_text, same_bits
from tests.quantization.encoded_calls import calls, until
from tests.traffic import watched


def payload(codec: str) -> Any:
    made, sent = {"fp16": tx.float16(), "int8": tx.int8()}[codec], {}
    for name, (function, args, _) in calls(
        codec if codec == "fp16" else made, dist.get_world_size(), dist.get_rank()
    ).items():
        with watched() as notes:
            assert function(*args) is None
        sent[name] = [(one.name, one.dtype, one.bytes) for one in notes]
    return sent


@pytest.mark.parametrize("codec", ["fp16", "int8"])
def test_bytes_travel(pool: Any, codec: str) -> None:
    """A message has one row for each receiver, of the codec's width, and nothing else."""
    width = {"fp16": tx.float16(), "int8": tx.int8()}[codec].width
    for n in (1, 2, 3):
        for me, sent in enumerate(pool.run(n, payload, codec)):
            gather, each = ("all_gather", "torch.uint8", width(50)), ("all_to_all_single", "torch.uint8", n * width(50))
            want = {
                "all_gather": [gather],
                "all_gather_into_tensor": [gather],
                "all_to_all": [each],
                "all_to_all_single": [each],
                "reduce_scatter_tensor": [each],
                "all_reduce": [("all_gather", "torch.uint8", width(100))] if n == 2 else [each, gather],
                "splits": [("all_to_all_single", "torch.uint8", sum(width(50 * me + r) for r in range(n)))],
            }
            assert sent == (want if n > 1 else dict.fromkeys(want, []))


# -- handles ---------------------------------------------------------------------------------------


def handles() -> Any:
    n, me = dist.get_world_size(), dist.get_rank()
    now = {name: (f(*args), [o.clone() for o in outs]) for name, (f, args, outs) in calls("bfp16", n, me).items()}
    for name, (f, args, outs) in calls("bfp16", n, me).items():
        before = [o.clone() for o in outs]
        work = f(*args, async_op=True)
        dist.barrier()
        assert isinstance(work, dist.Work) and all(same_bits(o, b) for o, b in zip(outs, before, strict=True)), name
        assert work.wait() is True and work.wait() is True and work.is_completed() and work.is_success()
        assert all(same_bits(o, w) for o, w in zip(outs, now[name][1], strict=True)), name
        assert all(a is b for a, b in zip(work.result(), outs, strict=True))
        work.synchronize()
    for how in ("poll", "future", "timeout", "success"):
        for name, (f, args, outs) in calls("bfp16", n, me).items():
            position = (*args, None, True) if name in ("all_gather", "all_to_all") else args
            work = f(*position) if position is not args else f(*args, async_op=True)
            if how == "poll":
                until(work.is_completed)
            elif how == "success":
                until(work.is_success)
            elif how == "future":
                future = work.get_future()
                assert future.done() and all(a is b for a, b in zip(future.value(), outs, strict=True))
                assert future.then(lambda fut: len(fut.value())).wait() == len(outs)
            else:
                assert work.wait(datetime.timedelta(seconds=20))
            assert all(same_bits(o, w) for o, w in zip(outs, now[name][1], strict=True)), (how, name)
    # Several at once, waited for in another order on each rank.
    many = [(calls("bfp16", n, me), name) for _ in range(2) for name in now]
    works = [(name, c[name][0](*c[name][1], async_op=True), c[name][2]) for c, name in many]
    for i in range(len(works)):
        name, work, outs = works[(i * (2 * me + 1)) % len(works)]
        work.wait()
        assert all(same_bits(o, w) for o, w in zip(outs, now[name][1], strict=True)), name


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_handles(pool: Any, ranks: int) -> None:
    pool.run(ranks, handles)


def lets_go() -> None:
    n, me = dist.get_world_size(), dist.get_rank()
    kept, seen = dist.all_to_all_single, []

    def watch(out: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        work = kept(out, x, *args, **kwargs)
        seen.extend([weakref.ref(out), weakref.ref(x)])
        return work

    f, args, _ = calls("fp16", n, me)["all_to_all_single"]
    dist.all_to_all_single = watch
    try:
        work = f(*args, async_op=True)
        assert seen[0]() is not None
        work.wait()
    finally:
        dist.all_to_all_single = kept

    def gone() -> bool:
        gc.collect()
        return all(ref() is None for ref in seen)

    until(gone)  # gloo's own thread lets go of them a little later


def test_wait_frees_the_tensors_of_a_handle(pool: Any) -> None:
    pool.run(2, lets_go)


def peer_that_does_not_come() -> Any:
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=0.5))
    if dist.get_rank() == 1:
        return
    out = [torch.full((2,), 9.0) for _ in range(2)]
    work = fjoin.auto_quantize(dist.all_gather, "fp16")(out, torch.ones(2), group, True)
    for _ in range(2):
        raises_text(RuntimeError, work.wait)
    assert work.is_completed() and not work.is_success() and all(o.eq(9.0).all() for o in out)


def test_a_failed_message_raises_in_every_wait(pool: Any) -> None:
    pool.run(2, peer_that_does_not_come)
