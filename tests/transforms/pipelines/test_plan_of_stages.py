"""The needs of chains and wrappers, what ranks sum beside their gradients, and the messages, before they run."""

from __future__ import annotations

import itertools
from typing import Any

import optree
import pytest
import torch

from fjoin import transforms as tx
from fjoin.transforms.layout import make_layout
from fjoin.transforms.pipelines import Parts, SentRecords, make_plan, records_of, takes_flat
from tests.helpers import raises_text

Needs = tx.Needs


def test_wrappers_combine_the_needs_of_their_parts() -> None:
    each = {needs: tx.Transform(lambda params: (), lambda g, s: (g, s), needs) for needs in (Needs.NOTHING, *Needs)}
    for first, second in itertools.product(each, repeat=2):
        chain = tx.chain(each[first], each[second])
        assert chain.needs == first | second
        assert takes_flat(chain) == (not chain.needs & (Needs.LEAVES | Needs.PATHS | Needs.TREE))
    coded = tx.compress(tx.int8(), tx.mean("data"))
    leaf = tx.stateless(torch.sign)
    assert tx.every(2, tx.chain(leaf, coded)).needs == Needs.LEAVES | Needs.LAYOUT
    assert tx.partition({"w": coded, "*": leaf}).needs == Needs.LEAVES | Needs.PATHS | Needs.LAYOUT
    assert tx.skip_if_nonfinite(coded).needs == Needs.TREE | Needs.LAYOUT
    assert tx.error_feedback(tx.compress(torch.bfloat16, tx.mean("data"))).needs == Needs.LAYOUT
    assert tx.identity().needs == tx.chain().needs == tx.mean("data").needs == Needs.NOTHING


def test_two_fields_are_enough() -> None:
    """A handwritten transform gets the whole tree, and may communicate over all axes, since nothing is known of it."""

    def update(grads: Any, state: int, params: Any = None, **extra: Any) -> Any:
        return optree.tree_map(lambda g: g * state, grads), state + 1

    mine = tx.Transform(lambda params: 1, update)
    assert mine.needs == Needs.TREE and mine.facts.reduces is mine.facts.compression is None and not mine.facts.pauses
    assert make_plan(mine, {"node": 2, "local": 2}).reduced(0)[:3] == (("node", "local"), False, ())
    raises_text(TypeError, lambda: tx.Transform(lambda params: 1, update, "leaf"), "Needs.LEAVES", "'leaf'")


# -- records ------------------------------------------------------------------------------------------------------------


DATA, NODES = {"data": 4}, {"node": 2, "local": 2}
MEAN, NODE, LOCAL = tx.mean("data"), tx.mean("node"), tx.mean("local")
SCATTER, VOTE = tx.scatter_mean("local"), tx.masked(MEAN, "*.weight")
AVERAGE, STATE = tx.every(2, tx.average_parameters("data")), tx.every(4, tx.average_state("data"))
CODED, SWITCH = tx.compress(tx.int8(), MEAN), tx.switch_after(3, MEAN, tx.identity())
RIDES, FIRST = SentRecords(), SentRecords((("data",),))
ALONE = SentRecords(apart=True, verdict=True)  # each rank decides for itself, and hears of the others a step later

# hook, the parts of the pipeline, axes, step, where it runs, and the records.
RECORDS: dict[str, Any] = {
    "a mean": (MEAN, Parts(), DATA, 0, "buckets", RIDES),
    "a mean of a module": (MEAN, Parts(), DATA, 0, "module", FIRST),
    "a mean, then an average": (MEAN, Parts(AVERAGE), DATA, 0, "buckets", RIDES),
    "an optimizer's state": (MEAN, Parts(None, STATE), DATA, 0, "buckets", RIDES),
    "a mean over one rank": (MEAN, Parts(), {"data": 1, "model": 4}, 0, "buckets", SentRecords(((),), apart=True, verdict=True)),
    "encoded": (CODED, Parts(), DATA, 0, "buckets", FIRST),
    "one leaf": (VOTE, Parts(), DATA, 0, "buckets", SentRecords((("data",),), verdict=True)),
    "one leaf, without an optimizer": (VOTE, Parts(steps=False), DATA, 0, "module", FIRST),
    "nothing, then an average": (tx.identity(), Parts(AVERAGE), DATA, 0, "buckets", ALONE),
    "a switch before": (SWITCH, Parts(AVERAGE), DATA, 2, "buckets", FIRST),
    "a switch after": (SWITCH, Parts(AVERAGE), DATA, 3, "buckets", ALONE),
    "local steps of nodes": (LOCAL, Parts(tx.every(2, tx.average_parameters("node"))), NODES, 0, "buckets", SentRecords(apart=True)),
    "a module of nodes that skips": (
        LOCAL, Parts(tx.every(2, tx.average_parameters("node")), None, True), NODES, 0, "module", SentRecords((("local",),)),
    ),
    "pieces": (
        tx.chain(SCATTER, NODE), Parts(), NODES, 0, "buckets", SentRecords((("node", "local"), ("local",)), pieces="local"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDS)
def test_records_match_the_table(name: str) -> None:
    hook, parts, axes, step, place, expected = RECORDS[name]
    assert records_of(make_plan(hook, axes, *parts.ends), parts, step, place) == expected


def test_steps_that_send_the_same_have_equal_records() -> None:
    plan = make_plan(SWITCH, DATA, AVERAGE)
    made = [records_of(plan, Parts(AVERAGE), step, "buckets") for step in range(6)]
    assert made[0] == made[1] == made[2] != made[3] == made[4] == made[5]


def test_explain_covers_periodic_stages() -> None:
    params = {"w": torch.zeros(1000), "b": torch.zeros(10)}
    switch = tx.switch_after(5, tx.mean("data"), tx.every(3, tx.sum_over("data")))
    pipeline = tx.fuse(
        tx.chain(switch, tx.clip_by_global_norm(1.0)), tx.partition({"b": tx.sgd(0.1), "*": tx.adam(0.1)})
    )
    for step, sends in ((0, True), (4, True), (5, False), (6, False), (7, True), (8, False)):
        what = tx.explain(pipeline, params, {"data": 4}, at_step=step)
        *others, last, lastly = [(r.stage, r.when, len(r.messages)) for r in what.rows]
        assert [*others, *sorted([last, lastly])] == [
            (repr(switch), f"step {step}", int(sends)), ("clip_by_global_norm(1.0)", "each step", 0),
            *[("(the step's own counts)", f"step {step}", 1)] * (1 + (step == 7)), ("adam(lr=0.1)", "each step, 1 of 2 leaves", 0),
            ("sgd(lr=0.1)", "each step, 1 of 2 leaves", 0),
        ]  # fmt: skip
        text = str(what)
        assert ("psum(data)" in text) and f"step {step}" in text.splitlines()[-1]
        assert text.splitlines()[-1].startswith("total per rank and step")
        assert what.messages == 1 + sends + (step == 7)
        assert what.sent_bytes == sum(m.sent_bytes for row in what.rows for m in row.messages)
    assert tx.explain(pipeline, params, {"data": 4}) == tx.explain(pipeline, params, {"data": 4}, at_step=0)
    (first,) = tx.explain(pipeline, params, {"data": 4}).rows[0].messages
    assert first.sent_bytes == round(first.payload_bytes * 2 * 3 / 4)


def test_explain_takes_no_memory_for_huge_models() -> None:
    params = {f"p{i}": torch.empty(10**9, device="meta") for i in range(70)}
    what = tx.explain(tx.fuse(tx.mean("data"), tx.adamw(0.1)), params, {"data": 512})
    assert what.state_bytes == 70 * 8 * 10**9 + 4 and what.messages == 71


def test_explain_raises_on_stages_that_read_values() -> None:
    def peek(g: Any, s: Any, params: Any = None, **extra: Any) -> Any:
        return (g, s) if g["w"].sum().item() > 0 else (tx.psum(g, "data"), s)

    part = tx.chain(tx.mean("data"), tx.Transform(lambda p: (), peek))
    raises_text(TypeError, lambda: tx.explain(part, {"w": torch.zeros(3)}, {"data": 2}), "peek", "reads a tensor's value")  # fmt: skip


def test_explain_finds_periodic_stages_inside_others() -> None:
    """Messages and steps do not depend on the order of two wrappers."""
    params, mean = {"w": torch.zeros(1000), "v": torch.zeros(10)}, tx.mean("data")

    def sent(hook: tx.Transform | tx.Pipeline, step: int) -> list[Any]:
        found = tx.explain(hook, params, {"data": 4}, at_step=step)
        return [m for row in found.rows if row.stage[0] != "(" for m in row.messages]

    cast = lambda hook: tx.compress(torch.bfloat16, hook)  # noqa: E731
    want = [len(sent(tx.every(2, cast(mean)), step)) for step in range(4)]
    assert want == [0, 2, 0, 2]
    for hook in (
        cast(tx.every(2, mean)), tx.error_feedback(cast(tx.every(2, mean))), tx.masked(tx.every(2, cast(mean)), "*"),
        cast(tx.chain(tx.clip_by_value(1.0), tx.every(2, mean))),
    ):  # fmt: skip
        assert [len(sent(hook, step)) for step in range(4)] == want
    late = cast(tx.switch_after(1, tx.identity(), mean))
    assert [len(sent(late, step)) for step in range(3)] == [0, 2, 2]
    by_path = tx.partition({"w": tx.every(2, mean), "*": mean})
    assert [[m.payload_bytes for m in sent(by_path, step)] for step in range(2)] == [[40], [4000, 40]]
    average = tx.every(2, tx.average_parameters("data"))
    after = tx.fuse(tx.identity(), tx.sgd(0.1), tx.switch_after(3, average, average))
    assert [bool(sent(after, step)) for step in range(6)] == [False, True, True, False, True, False]  # step 2 flushes
    assert [len(sent(tx.skip_if_nonfinite(tx.every(2, mean)), step)) for step in range(2)] == [0, 1]


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


def test_explain_of_nested_axes() -> None:
    for axis, shown in ((("node", "local"), "node x local"), ("local", "local")):
        what = tx.explain(tx.mean(axis), {"w": torch.zeros(10)}, {"node": 2, "local": 4})
        assert [(m.axis, m.collective) for m in what.rows[0].messages] == [(shown, "psum")]
    keeps = tx.Transform(
        lambda params: optree.tree_map(torch.zeros_like, params), lambda g, s: (g, s), tx.Needs.NOTHING
    )
    pieces = tx.chain(tx.scatter_mean("local"), keeps)
    behind = tx.explain(tx.fuse(pieces, tx.sgd(0.1)), {"w": torch.zeros(64)}, {"node": 2, "local": 4}).rows[1]
    assert behind.state_bytes == 64 * 4 / 4, "of a rank's piece"
