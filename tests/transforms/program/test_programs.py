"""The programs of pipelines, written by hand, and the executor."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fjoin import transforms as tx
from fjoin.transforms.pipelines import Agree, Effect, Ends, Gather, Judge, Stages, execute, make_plan
from fjoin.transforms.pipelines._program import Keep, Observe, Parts, Step, program

DATA, NODES = {"data": 4}, {"node": 2, "local": 2}
MEAN, NODE, LOCAL = tx.mean("data"), tx.mean("node"), tx.mean("local")
SCATTER, VOTE = tx.scatter_mean("local"), tx.masked(MEAN, "*.weight")
AVERAGE, STATE = tx.every(2, tx.average_parameters("data")), tx.every(4, tx.average_state("data"))
OWN = Agree("verdict", ())  # each rank decides for itself
RIDES, ALONE = Agree("begin", ("data",), rides=True), Agree("begin", ("data",), late=True)
FIRST, CODED = Agree("begin", ("data",)), tx.compress(tx.int8(), MEAN)

# hook, the parts of the pipeline, axes, step, where it runs, and the operations but for those that all programs have.
PROGRAMS: dict[str, Any] = {
    "a mean": (MEAN, Parts(), DATA, 0, "buckets", [Stages((MEAN,)), RIDES]),
    "a mean of a module": (MEAN, Parts(), DATA, 0, "module", [Agree("begin", ("data",)), Stages((MEAN,))]),
    "a mean, then an average": (MEAN, Parts(AVERAGE), DATA, 0, "buckets", [Stages((MEAN,)), RIDES]),
    "an optimizer's state": (MEAN, Parts(None, STATE), DATA, 0, "buckets", [Stages((MEAN,)), RIDES]),
    "encoded": (CODED, Parts(), DATA, 0, "buckets", [FIRST, Stages((CODED,))]),
    "one leaf": (VOTE, Parts(), DATA, 0, "buckets", [FIRST, Stages((VOTE,), partial=True), Agree("verdict", ("data",))]),
    "nothing, then an average": (tx.identity(), Parts(AVERAGE), DATA, 0, "buckets", [ALONE, Stages(()), OWN]),
    "a switch before": (
        tx.switch_after(3, MEAN, tx.identity()), Parts(AVERAGE), DATA, 2, "buckets",
        [FIRST, Stages((tx.switch_after(3, MEAN, tx.identity()),))],
    ),
    "a switch after": (tx.switch_after(3, MEAN, tx.identity()), Parts(AVERAGE), DATA, 3, "buckets", [ALONE, None, OWN]),
    "local steps of nodes": (
        LOCAL, Parts(tx.every(2, tx.average_parameters("node"))), NODES, 0, "buckets",
        [Agree("begin", ("node", "local"), late=True), Stages((LOCAL,)), Agree("begin", ("local",), rides=True)],
    ),
    "pieces": (
        tx.chain(SCATTER, NODE), Parts(shards="local"), NODES, 0, "buckets",
        [
            Agree("begin", ("node", "local")), Agree("share", ("local",)), Stages((SCATTER, NODE)),
            Agree("pieces", ("local",)),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_match_the_table(name: str) -> None:
    hook, parts, axes, step, place, expected = PROGRAMS[name]
    ends = [part for part in (parts.after, parts.on_state) if part is not None]
    found = program(make_plan(hook, axes, *ends), parts, step, place)
    expected = [Stages((hook,)) if op is None else op for op in expected]
    at = next(i for i, op in enumerate(expected) if isinstance(op, Stages))
    expected.insert(at + 1, Observe())
    after = [Ends(parts.after, "params")] if parts.after else []
    state = [Ends(parts.on_state, "optimizer")] if parts.on_state else []
    gather = [Gather(parts.shards)] if parts.shards else []
    assert list(found) == [*expected, Judge(), Step(), *after, *state, *gather, Keep()]


def test_operations_of_two_kinds_differ() -> None:
    assert len({Observe(), Judge(), Step(), Keep()}) == 4


def test_steps_that_send_the_same_have_equal_programs() -> None:
    plan = make_plan(tx.switch_after(3, MEAN, tx.identity()), DATA, AVERAGE)
    made = [program(plan, Parts(AVERAGE), step, "buckets") for step in range(6)]
    assert made[0] == made[1] == made[2] != made[3] == made[4] == made[5]
    assert program(make_plan(MEAN, DATA), Parts(), 0, "buckets") == program(
        make_plan(tx.mean("data"), DATA), Parts(), 9, "buckets"
    )


class Listed:
    """A memory that lists what it is asked for."""

    def __init__(self, pauses: bool = False) -> None:
        self.seen: list[str] = []
        self._pauses = pauses

    def stages(self, op: Stages) -> bool:
        self.seen.append("stages")
        return not self._pauses

    def observe(self) -> None:
        self.seen.append("observe")

    def judge(self, op: Judge) -> Effect:
        self.seen.append("judge")
        return Effect(True, False)

    def agree(self, op: Agree) -> None:
        self.seen.append(op.moment)

    def step(self, effect: Effect) -> None:
        self.seen.append(f"step {effect.steps}")

    def ends(self, op: Ends, effect: Effect) -> None:
        self.seen.append(f"ends on {op.on}")

    def gather(self, op: Gather, effect: Effect) -> None:
        self.seen.append(f"gather over {op.axis}")

    def keep(self, effect: Effect) -> None:
        self.seen.append("keep")


def test_the_executor_runs_operations_in_their_order() -> None:
    parts, memory = Parts(AVERAGE, STATE, "data"), Listed()
    effect = execute(program(make_plan(MEAN, DATA, AVERAGE, STATE), parts, 0, "buckets"), memory)
    assert effect == Effect(True, False)
    assert memory.seen == [
        "stages", "observe", "begin", "judge", "step False", "ends on params", "ends on optimizer", "gather over data", "keep"
    ]  # fmt: skip


def test_a_hook_alone_has_no_optimizer() -> None:
    memory = Listed()
    parts = Parts(used=("data",), steps=False)
    execute(program(make_plan(VOTE, DATA), parts, 0, "module"), memory, Effect(True))
    assert memory.seen == ["begin", "stages", "observe", "used", "keep"]


def test_program_ends_within_a_window() -> None:
    memory = Listed(pauses=True)
    assert execute(program(make_plan(MEAN, DATA), Parts(), 0, "buckets"), memory) is None
    assert memory.seen == ["stages"]


def test_a_flush_has_the_ends_only() -> None:
    memory = Listed()
    execute(Parts(AVERAGE, None, "data").ends, memory, Effect(False))
    assert memory.seen == ["ends on params", "gather over data"]


def test_a_step_of_a_pipeline_is_its_program() -> None:
    """A rank's parameters by the pipeline, and by the plain formula: sgd with momentum on the weighted mean."""
    pipeline = tx.fuse(MEAN, tx.sgd(0.5, momentum=0.5), after=AVERAGE)

    def rank(value: float, weight: float) -> Any:
        params = {"w": torch.ones(2, dtype=torch.float64)}
        state = pipeline.init({"w": torch.ones(2, dtype=torch.float64)})
        for _ in range(3):
            params, state = pipeline.step(
                params, {"w": torch.full((2,), value, dtype=torch.float64)}, state, weight=weight
            )
        return params["w"][0].item(), state.step

    mean, momentum, expected = (1 * 1 + 3 * 2 + 5 * 0) / 3, 0.0, 1.0
    for _ in range(3):
        momentum = 0.5 * momentum + mean
        expected -= 0.5 * momentum
    for found, steps in tx.simulate(rank, {"data": 3}, [1.0, 3.0, 5.0], [1.0, 2.0, 0.0]):
        assert abs(found - expected) < 1e-12 and steps == 3
