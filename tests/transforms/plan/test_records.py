"""What the ranks of pipelines sum beside their gradients, written by hand."""

from __future__ import annotations

from typing import Any

import pytest

from fjoin import transforms as tx
from fjoin.transforms.pipelines import Parts, Records, make_plan, records_of

DATA, NODES = {"data": 4}, {"node": 2, "local": 2}
MEAN, NODE, LOCAL = tx.mean("data"), tx.mean("node"), tx.mean("local")
SCATTER, VOTE = tx.scatter_mean("local"), tx.masked(MEAN, "*.weight")
AVERAGE, STATE = tx.every(2, tx.average_parameters("data")), tx.every(4, tx.average_state("data"))
CODED, SWITCH = tx.compress(tx.int8(), MEAN), tx.switch_after(3, MEAN, tx.identity())
RIDES, FIRST = Records(rides=True), Records((("data",),))
ALONE = Records(apart=True, verdict=True)  # each rank decides for itself, and hears of the others a step later

# hook, the parts of the pipeline, axes, step, where it runs, and the records.
RECORDS: dict[str, Any] = {
    "a mean": (MEAN, Parts(), DATA, 0, "buckets", RIDES),
    "a mean of a module": (MEAN, Parts(), DATA, 0, "module", FIRST),
    "a mean, then an average": (MEAN, Parts(AVERAGE), DATA, 0, "buckets", RIDES),
    "an optimizer's state": (MEAN, Parts(None, STATE), DATA, 0, "buckets", RIDES),
    "a mean over one rank": (MEAN, Parts(), {"data": 1, "model": 4}, 0, "buckets", Records(((),), apart=True, verdict=True)),
    "encoded": (CODED, Parts(), DATA, 0, "buckets", FIRST),
    "one leaf": (VOTE, Parts(), DATA, 0, "buckets", Records((("data",),), verdict=True)),
    "one leaf, without an optimizer": (VOTE, Parts(steps=False), DATA, 0, "module", FIRST),
    "nothing, then an average": (tx.identity(), Parts(AVERAGE), DATA, 0, "buckets", ALONE),
    "a switch before": (SWITCH, Parts(AVERAGE), DATA, 2, "buckets", FIRST),
    "a switch after": (SWITCH, Parts(AVERAGE), DATA, 3, "buckets", ALONE),
    "local steps of nodes": (
        LOCAL, Parts(tx.every(2, tx.average_parameters("node"))), NODES, 0, "buckets", Records(rides=True, apart=True),
    ),
    "pieces": (
        tx.chain(SCATTER, NODE), Parts(), NODES, 0, "buckets", Records((("node", "local"), ("local",)), pieces="local"),
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
