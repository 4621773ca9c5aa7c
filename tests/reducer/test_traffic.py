"""The bytes that really cross the network: counted by torch's profiler, compared with the announcement of `explain`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import fjoin
from fjoin import transforms as tx
from tests.helpers import stepped
from tests.traffic import watched

MODELS = {
    "small": lambda: {"a": torch.ones(10), "b": torch.ones(3, 4)},
    "with a large one": lambda: {"a": torch.ones(10), "big": torch.ones(1_000_001), "c": torch.ones(7)},
    "only large ones": lambda: {"big": torch.ones(1_000_001), "big2": torch.ones(1_100_000)},
    "several buckets": lambda: {f"p{i}": torch.ones(1000 + 70 * i) for i in range(12)},
    "bfloat16": lambda: {"a": torch.ones(10, dtype=torch.bfloat16), "b": torch.ones(5, dtype=torch.bfloat16)},
    "mixed": lambda: {"a": torch.ones(10, dtype=torch.bfloat16), "b": torch.ones(5), "c": torch.ones(4, dtype=torch.float64)},
    "float64": lambda: {"a": torch.ones(10, dtype=torch.float64)},
    "a large bucket": lambda: {f"p{i}": torch.ones(100_000 + i) for i in range(7)},
    "with an empty leaf": lambda: {"a": torch.ones(10), "none": torch.ones(0, 3)},
}  # fmt: skip
HOOKS: dict[str, Any] = {
    "mean": lambda: tx.mean("data"), "mean, clip": lambda: tx.chain(tx.mean("data"), tx.clip_by_global_norm(1.0)),
    "live": lambda: tx.mean("data", over="live"), "sum": lambda: tx.sum_over("data"),
    "leaf, mean": lambda: tx.chain(tx.stateless(torch.neg), tx.mean("data")),
    "clip, mean": lambda: tx.chain(tx.clip_by_value(1.0), tx.mean("data")), "noop": lambda: tx.identity(),
    "by path": lambda: tx.partition({"a": tx.mean("data"), "*": tx.sum_over("data")}),
}  # fmt: skip
BUCKET_BYTES = dict.fromkeys(MODELS, 20_000) | {"a large bucket": 1_200_000}


def _pipeline(hook: str) -> tx.Pipeline:
    return tx.fuse(HOOKS[hook](), tx.adamw(0.1))


def counted(model: str, hook: str, batches_of_rank: list[int]) -> tuple[list[tuple[str, int, str]], int]:
    """(collective, payload bytes, dtype) of all that a loop over `join` sends, and the profiler's own count."""

    def loss_fn(params: Any, batch: Any) -> Any:
        return sum((p * batch).double().sum() for p in params.values())

    step = fjoin.train_step(loss_fn, _pipeline(hook), mesh=fjoin.mesh({"data": -1}), bucket_bytes=BUCKET_BYTES[model])
    state = step.init(MODELS[model]())
    with (
        watched() as seen,
        torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            acc_events=True,  # else some versions of torch warn
            experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True),
        ) as profile,
    ):
        state = stepped(step, state, step.join([1.0] * batches_of_rank[dist.get_rank()]))
    step.close()
    sent = [(one.name, one.bytes, one.dtype) for one in seen]
    return sent, sum(event.name.startswith("c10d::") for event in profile.events())


CASES = [
    (model, hook)
    for model, params in MODELS.items()
    for hook in HOOKS
    if hook not in ("by path", "mean, some again")
    or {"a"} < params().keys()  # there must be an "a", and another parameter
    if hook != "mean, some again" or "big" not in params()  # large tensors leave in pieces; see test_wire.py
]


@pytest.mark.gloo
@pytest.mark.sample(12)
@pytest.mark.parametrize(("model", "hook"), CASES)
def test_explain_announces_what_is_sent(pool: Any, model: str, hook: str) -> None:
    """Each of 3 steps sends the announced messages, the loop two numbers before them, and a rank without input the same."""
    results = pool.run(2, counted, model, hook, [3, 1])
    what = tx.explain(_pipeline(hook), MODELS[model](), {"data": 2}, bucket_bytes=BUCKET_BYTES[model])
    announced = sorted((m.payload_bytes, str(m.dtype)) for row in what.rows for m in row.messages)
    assert announced, "something is always sent: at least the step's own counts"
    for sent, seen_by_profiler in results:
        at_end = hook == "noop"  # a rank may have left the last step out that the other took
        assert seen_by_profiler == len(sent) == 1 + 3 * what.messages + at_end
        assert {name for name, _, _ in sent} <= {"all_reduce", "all_to_all_single"}
        assert sent[0][1:] == (8, "torch.float32")
        for i in range(3):
            of_step = sent[1 + i * what.messages : 1 + (i + 1) * what.messages]
            assert sorted((size, dtype) for _, size, dtype in of_step) == announced
    assert results[0][0] == results[1][0], "both ranks send the same in the same order"
