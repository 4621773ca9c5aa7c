"""The messages of torch's collectives with encoded floats."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fjoin
from fjoin import transforms as tx
from tests.helpers import raises_text
from tests.quantization.encoded_calls import calls
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
                "all_to_all": [each],
                "all_to_all_single": [each],
                "all_reduce": [("all_gather", "torch.uint8", width(100))] if n == 2 else [each, gather],
                "splits": [("all_to_all_single", "torch.uint8", sum(width(50 * me + r) for r in range(n)))],
            }
            assert sent == (want if n > 1 else dict.fromkeys(want, []))


def peer_that_does_not_come() -> Any:
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=0.5))
    if dist.get_rank() == 1:
        return
    out = [torch.full((2,), 9.0) for _ in range(2)]
    raises_text(RuntimeError, lambda: fjoin.auto_quantize(dist.all_gather, "fp16")(out, torch.ones(2), group))
    assert all(o.eq(9.0).all() for o in out)


def test_a_failed_message_raises_and_fills_nothing(pool: Any) -> None:
    pool.run(2, peer_that_does_not_come)
