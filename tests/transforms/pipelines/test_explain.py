"""The messages of a pipeline before it runs, and their buckets."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from fjoin import transforms as tx
from fjoin.transforms.layout._buckets import make_layout
from tests.helpers import raises_text


def test_explain_covers_periodic_stages() -> None:
    params = {"w": torch.zeros(1000), "b": torch.zeros(10)}
    pipeline = tx.fuse(
        tx.chain(tx.switch_after(5, tx.mean("data"), tx.every(3, tx.sum_over("data"))), tx.clip_by_global_norm(1.0)),
        tx.partition({"b": tx.sgd(0.1), "*": tx.adam(0.1)}),
    )
    what = tx.explain(pipeline, params, {"data": 4})
    *others, last, lastly = [(r.stage, r.when, len(r.messages)) for r in what.rows]
    assert [*others, *sorted([last, lastly])] == [
        ("mean('data')", "before step 5", 1),
        ("sum_over('data')", "from step 5, every 3 calls", 1),
        ("clip_by_global_norm(1.0)", "each step", 0),
        ("(the step's own counts)", "each step", 1),
        ("adam(lr=0.1)", "each step, 1 of 2 leaves", 0),
        ("sgd(lr=0.1)", "each step, 1 of 2 leaves", 0),
    ]
    text = str(what)
    assert "psum(data)" in text and "total per rank and step" in text and "before step 5" in text
    assert what.settled == what.rows[1:] and what.messages == 2 and "settled" in text.splitlines()[-1]
    assert what.sent_bytes == sum(m.sent_bytes for row in what.rows[1:] for m in row.messages)
    inside = tx.explain(tx.switch_after(5, tx.every(3, tx.mean("data")), tx.sum_over("data")), params, {"data": 4})
    assert [row.ends for row in inside.rows if row.messages] == [True, False] and inside.messages == 1
    assert what.rows[0].messages[0].sent_bytes == round(what.rows[0].messages[0].payload_bytes * 2 * 3 / 4)


def test_explain_takes_no_memory_for_huge_models() -> None:
    params = {f"p{i}": torch.empty(10**9, device="meta") for i in range(70)}
    what = tx.explain(tx.fuse(tx.mean("data"), tx.adamw(0.1)), params, {"data": 512})
    assert what.state_bytes == 70 * 8 * 10**9 + 4 + 8 and what.messages == 71


def test_explain_raises_on_stages_that_read_values() -> None:
    def peek(g: Any, s: Any, params: Any = None, **extra: Any) -> Any:
        return (g, s) if g["w"].sum().item() > 0 else (tx.psum(g, "data"), s)

    part = tx.chain(tx.mean("data"), tx.Transform(lambda p: (), peek))
    raises_text(
        TypeError, lambda: tx.explain(part, {"w": torch.zeros(3)}, {"data": 2}), "peek", "reads a tensor's value"
    )


def test_explain_of_nested_axes() -> None:
    what = tx.explain(tx.mean(("node", "local")), {"w": torch.zeros(10)}, {"node": 2, "local": 4})
    assert [(m.axis, m.collective) for m in what.rows[0].messages] == [("node x local", "psum")]
    what = tx.explain(tx.mean("local"), {"w": torch.zeros(10)}, {"node": 2, "local": 4})
    assert [m.axis for m in what.rows[0].messages] == ["local"]


def test_explain_finds_periodic_stages_inside_others() -> None:
    """Messages and steps do not depend on the order of two wrappers."""
    params, mean = {"w": torch.zeros(1000), "v": torch.zeros(10)}, tx.mean("data")

    def rows(hook: tx.Transform) -> list[Any]:
        return [(row.when, row.messages) for row in tx.explain(hook, params, {"data": 4}).rows if row.messages]

    cast = lambda hook: tx.cast(torch.bfloat16, hook)  # noqa: E731
    (now_and_then,) = rows(tx.every(2, cast(mean)))
    assert now_and_then[0] == "every 2 steps" and len(now_and_then[1]) == 2
    for hook in (
        cast(tx.every(2, mean)),
        tx.error_feedback(cast(tx.every(2, mean))),
        tx.masked(tx.every(2, cast(mean)), "*"),
    ):
        ((when, messages),) = rows(hook)
        assert when == "every 2 steps" and [m.collective for m in messages] == [m.collective for m in now_and_then[1]]
    assert rows(cast(tx.chain(tx.clip_by_value(1.0), tx.every(2, mean)))) == [now_and_then]
    assert [when for when, _ in rows(cast(tx.switch_after(1, tx.noop(), mean)))] == ["from step 1"]
    by_path = rows(tx.partition({"w": tx.every(2, mean), "*": mean}))
    assert [(when, [m.payload_bytes for m in messages]) for when, messages in by_path] == [
        ("every 2 steps", [4008]), ("each step", [48])
    ]  # fmt: skip
    average = tx.every(2, tx.average_parameters("data"))
    after = [when for when, _ in rows(tx.fuse(tx.noop(), tx.sgd(0.1), tx.switch_after(3, average, average)))]
    assert after == ["each step", "before step 3, every 2 calls", "step 2", "from step 3, every 2 calls"]
    ((when, messages),) = rows(tx.skip_if_nonfinite(tx.every(2, mean)))
    assert when == "every 2 steps" and len(messages) == 1


@pytest.mark.long
def test_explain_of_stages_that_change_with_the_step() -> None:
    """Each phase has a row, also inside wrappers; the first row has the whole state."""
    params = {"w": torch.zeros(1000, 4), "v": torch.zeros(16, dtype=torch.bfloat16)}
    grads = 4016 * 4  # in float32, momenta's dtype

    def rows(hook: tx.Transform) -> list[Any]:
        return list(tx.explain(hook, params, {"data": 4}).rows)

    dgc = tx.dgc("data", 0.01, warmup=7)
    for hook in (dgc, tx.masked(dgc, "*"), tx.skip_if_nonfinite(dgc)):
        phases = rows(hook)
        starts = ["2", "3", "5", "6", "7"]
        assert [row.when for row in phases] == [
            "before step 2", *(f"from step {a}, before step {b}" for a, b in itertools.pairwise(starts)), "from step 7"
        ]  # fmt: skip
        sent = [sum(m.payload_bytes for m in row.messages) for row in phases]
        assert all(a > 1.3 * b for a, b in itertools.pairwise(sent)), sent
        assert not any(row.state_bytes for row in phases[1:]) and 2 * grads <= phases[0].state_bytes < 2 * grads + 80
        for step, phase in zip((0, 2, 3, 5, 6, 7, 100) if hook is dgc else (), [*phases, phases[-1]]):  # noqa: B905
            (row,) = tx.explain(hook, params, {"data": 4}, at_step=step).rows
            assert row.when == f"step {step}" and row.messages == phase.messages
    for hook, slots in (tx.one_bit_adam("data", 3), 3):
        first, then = rows(hook)
        assert (first.when, then.when) == ("before step 3", "from step 3") and first.stage == then.stage == repr(hook)
        sent, coded = (sum(m.payload_bytes for m in row.messages) for row in (first, then))
        assert sent >= grads > 8 * coded
        assert slots * grads <= first.state_bytes < slots * grads + 120 and not then.state_bytes
    (row,) = rows(tx.accumulate(2, tx.mean("data")))
    assert (row.stage, row.when) == ("mean('data')", "once in 2 calls")
    assert grads + 8 <= row.state_bytes < grads + 30
    assert sum(m.payload_bytes for m in row.messages) > 4000 * 4 + 16 * 2, "in the last call of a window"
    assert [row.stage for row in rows(tx.switch_after(0, tx.noop(), tx.mean("data")))] == ["mean('data')"]


def test_layout() -> None:
    params = {f"p{i}": torch.zeros(10) for i in range(5)} | {
        "big": torch.zeros(1_000_000),
        "half": torch.zeros(3, dtype=torch.float16),
    }
    layout = make_layout(params, lambda path: path in ("p1", "p3"), bucket_bytes=120)
    assert sorted(p for b in layout for p in b.paths) == sorted(params)
    assert [b.direct for b in layout if "big" in b.paths] == [True]
    first = next(b for b in layout if "p4" in b.paths)
    assert first.paths == ("p4", "p2", "p3"), "reverse order, equal labels together"
    assert [(s.start, s.stop, s.paths) for s in first.spans] == [(0, 32, ("p4", "p2")), (32, 48, ("p3",))]
    assert first.offsets == (0, 16, 32), "each leaf begins on a cache line"
    assert all(b.dtype == params[p].dtype for b in layout for p in b.paths)
    assert make_layout({}, lambda path: 0) == ()
    mebibyte = {f"p{i}": torch.zeros(2**18) for i in range(8)}
    assert [len(b.paths) for b in make_layout(mebibyte, lambda path: 0)] == [1, 5, 2], "the first of several is small"
    assert [len(b.paths) for b in make_layout(dict(list(mebibyte.items())[:5]), lambda path: 0)] == [5]
