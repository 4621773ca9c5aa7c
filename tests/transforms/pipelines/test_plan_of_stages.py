"""The needs of chains and wrappers, and what ranks sum beside their gradients."""

from __future__ import annotations

import itertools
from typing import Any

import optree
import pytest
import torch

from fjoin import transforms as tx
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
RIDES, FIRST = SentRecords(rides=True), SentRecords((("data",),))
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
    "local steps of nodes": (
        LOCAL, Parts(tx.every(2, tx.average_parameters("node"))), NODES, 0, "buckets", SentRecords(rides=True, apart=True),
    ),
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
