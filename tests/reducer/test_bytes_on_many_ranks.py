"""The bytes that `explain` announces for many ranks equal those given to torch.distributed, counted on torch's fake group."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg as fake_pg  # which registers the backend

import fjoin
from fjoin import transforms as tx
from fjoin.groups import mesh_over
from tests.traffic import watched

HOOKS: dict[str, Any] = {
    "bfloat16": lambda: tx.compress(torch.bfloat16, tx.mean("data")),
    "int8": lambda: tx.compress(tx.int8(), tx.mean("data")),
    "int4 fed back": lambda: tx.error_feedback(tx.compress(tx.int4(), tx.mean("data"))),
    "qsgd": lambda: tx.compress(tx.qsgd(1), tx.mean("data")),
    "top_k": lambda: tx.error_feedback(tx.compress(tx.top_k(0.01), tx.mean("data"))),
    "skipped": lambda: tx.skip_if_nonfinite(tx.partition({"b": tx.mean("data"), "*": tx.compress(tx.int8(), tx.mean("data"))})),
    "by path": lambda: tx.partition({"b": tx.mean("data"), "*": tx.compress(tx.int8(), tx.mean("data"))}),
}  # fmt: skip
# The bytes that one rank sends of a payload in a ring.
SENT = {
    "all_reduce": lambda n: 2 * (n - 1) / n, "all_gather": lambda n: n - 1, "all_to_all_single": lambda n: (n - 1) / n,
}  # fmt: skip


@pytest.fixture
def fake_group(request: pytest.FixtureRequest) -> Iterator[int]:
    dist.init_process_group(
        "fake", rank=0, world_size=request.param, store=dist.HashStore(), timeout=datetime.timedelta(seconds=20)
    )
    yield request.param
    dist.destroy_process_group()


@pytest.mark.sample(8)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("fake_group", [2, 8, 64, 512], indirect=True)
def test_counted_and_announced(fake_group: int, hook: str) -> None:
    # Sizes that fill cache lines: the step pads others.
    params, made = {"w": torch.ones(300, 100), "b": torch.ones(16)}, HOOKS[hook]()
    state = made.init(params)
    for step in range(3):
        with fjoin.bind(mesh_over(dist.group.WORLD)), watched() as sent:
            _, state = made.update(params, state, params)
        rows = tx.explain(made, params, {"data": fake_group}, bucket_bytes=10**9, at_step=step).rows
        # A step sends its record in the place of the weights.
        assert sent.pop(0).bytes == 16 and rows[-1].stage == "(the step's own counts)"
        messages = [message for row in rows[:-1] for message in row.messages]
        assert sorted(one.bytes for one in sent) == sorted(m.payload_bytes for m in messages)
        counted = sum(round(one.bytes * SENT[one.name](fake_group)) for one in sent)
        assert counted == sum(m.sent_bytes for m in messages)
        floats = hook in {"by path", "skipped"}
        assert floats or {one.dtype for one in sent} == {"torch.uint8"}, "a payload travels as floats"
