"""Ranks that run other programs or are at other places in one get an error; a rank that is only late is awaited.

Several train_steps over one mesh are called in the same order on all ranks.
"""

from __future__ import annotations

import datetime
import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from tests.helpers import judged, raises_text, same_bits
from tests.ranks import ends
from tests.training.small import MEAN_SGD, product, step_of

X = torch.ones(2)


def params() -> Any:
    return {"w": torch.ones(2)}


def run_other_code(rank: int, what: str) -> None:
    other = rank == 1
    mesh = fjoin.mesh({"data": -1, "node": 1} if what == "shape" and other else {"data": -1}, timeout_s=300)
    if what == "one mesh more" and other:
        fjoin.mesh({"data": -1}, timeout_s=300)
    if what == "evaluate" and other:
        fjoin.evaluate(lambda batch: {}, [], mesh=mesh)
    step = fjoin.train_step(product, MEAN_SGD, mesh=mesh)
    state = step.init(params(), sync=None if what == "sync" and other else "broadcast")
    if what == "plain loop" and other:
        state, _ = step(state, X)
    for epoch in (0, 1):
        throws = other and what == ("throw" if epoch == 0 else "throw later")
        replays = "replay" if what == "replay" and other else "shadow"
        for batch in step.join([X], throw_on_early_termination=throws, when_exhausted=replays):
            state, _ = step(state, batch)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("what", "parts"),
    [
        ("nothing", None), ("shape", ["rank 1 makes a mesh of shape {'data': 3, 'node': 1}"]),
        ("one mesh more", ["rank 1 in fjoin.mesh", "in step.init"]),
        ("evaluate", ["rank 1 in fjoin.evaluate", "rank 0 in step.init"]),
        ("sync", ["rank 1 differs", "sync: None there"]), ("plain loop", ["rank 1 differs", "loop: a loop without step.join there"]),
        ("throw", ["rank 1 differs", "throw_on_early_termination=True"]),
        ("throw later", ["settings of step.join", "throw_on_early_termination"]),
        ("replay", ["rank 1 differs", "when_exhausted='replay'"]),
    ],
)  # fmt: skip
def test_a_rank_that_runs_other_code_raises_before_the_first_message(what: str, parts: list[str] | None) -> None:
    for end in ends(3, run_other_code, what):
        if parts is None:
            assert end.kind == "fine", end
        else:
            assert end.kind in ("DesyncError", "PeerLost") and all(part in end.text for part in parts), end
            assert end.rank in (1, None) or what in ("one mesh more", "throw later"), end


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        ({"pipeline": tx.fuse(tx.mean("data"), tx.sgd(0.2))}, ["pipeline", "sgd(lr=0.2)", "sgd(lr=0.1)"]),
        ({"pipeline": tx.fuse(tx.mean("data", over="live"), tx.sgd(0.1))}, ["pipeline", "over='live'"]),
        ({"pipeline": tx.fuse(tx.compress(tx.int8(16), tx.mean("data")), tx.sgd(0.1))}, ["pipeline", "block=16"]),
        ({"params": {"w": torch.ones(3)}}, ["parameters", "w: float32[3]", "w: float32[2]"]),
        ({"params": {"w": torch.ones(2, dtype=torch.float64)}}, ["parameters", "float64"]),
        ({"params": {"w": torch.ones(2), "v": torch.ones(1)}}, ["parameters", "2 of them", "1"]),
        ({"settings": {"bucket_bytes": 7}}, ["bucket_bytes", "7"]),
        ({"settings": {"accumulate": 2}}, ["accumulate", "2"]),
        ({"settings": {"weight": len}}, ["weight", "weight(batch)", "1 for each rank"]),
        ({"buffers": {"n": torch.ones(1)}}, ["buffers"]),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else None,
)
def test_another_program_on_one_rank(change: dict[str, Any], texts: list[str]) -> None:
    def one_rank(odd: bool) -> str:
        mine = change if odd else {}
        step = fjoin.train_step(product, mine.get("pipeline", MEAN_SGD), **mine.get("settings", {}))
        return raises_text(
            fjoin.DesyncError,
            lambda: step.init(mine.get("params", params()), mine.get("buffers")), "Nothing has been sent", *texts,
        )  # fmt: skip

    for text in tx.simulate(one_rank, {"data": 3}, [False, True, False]):
        assert text.startswith("rank 1 differs from rank 0 in its")


def test_other_names_of_sums_on_one_rank() -> None:
    def one_rank(name: str) -> str:
        step, state = step_of(lambda p, b: (product(p, b), {"sum": {name: 1}}))
        return raises_text(fjoin.DesyncError, lambda: step(state, X), "['a']", "['b']", "on rank 1")

    tx.simulate(one_rank, {"data": 2}, ["a", "b"])
    step, state = step_of(lambda p, b: (product(p, b), {"sum": {f"n{len(seen)}": seen.append(1) or 1}}))
    seen: list[int] = []
    state, _ = step(state, X)
    raises_text(ValueError, lambda: step(state, X), "['n1']", "['n0']", "must stay the same")


# -- several train_steps over one mesh --

HOOKS: dict[str, Any] = {
    "mean": lambda: tx.mean("data"), "clip": lambda: tx.chain(tx.mean("data"), tx.clip_by_global_norm(1e4)),
    "int8": lambda: tx.compress(tx.int8(), tx.mean("data")), "noop": lambda: tx.identity(),
    "twice": lambda: tx.chain(tx.mean("data"), tx.mean("data", over="live")), "left out": lambda: tx.mean("data"),
}  # fmt: skip


def pipeline_of(hook: str) -> tx.Pipeline:
    if hook == "local":
        return tx.local_sgd(tx.sgd(1.0), tx.mean("data"), 9)
    pipeline = tx.fuse(HOOKS[hook](), tx.sgd(1.0), after=tx.average_parameters("data") if hook == "noop" else None)
    return tx.skip_if_nonfinite(pipeline) if hook == "left out" else pipeline


def three_steps(hook: str, mesh: Any, on_device: bool = False) -> Any:
    pipeline = pipeline_of(hook)
    steps = [
        judged(fjoin.train_step(lambda p, b, k=k: (p["w"] * b * k).sum(), pipeline, mesh=mesh), on_device)
        for k in (1, 2, 3)
    ]
    return steps, [step.init({"w": torch.zeros(3)}) for step in steps]


def in_another_order(hook: str, on_device: bool = False) -> None:
    """All ranks have the error, and their states still have the values from before the odd step."""
    mesh = fjoin.mesh({"data": -1}, timeout_s=60)
    steps, states = three_steps(hook, mesh, on_device)
    for i in (0, 1, 2):
        states[i], _ = steps[i](states[i], 1.0)
    before = [state.clone() for state in states]

    def odd() -> None:
        order = (1, 2, 0) if mesh.rank == 1 else (0, 1, 2)
        for i in order * 3:  # on a device the host knows two steps later
            states[i], _ = steps[i](states[i], 1.0)

    if hook == "local":  # known one step later
        raises_text(fjoin.DesyncError, odd, "step 1", "different train_steps", "each has taken its own step")
        return
    raises_text(fjoin.DesyncError, odd, "different train_steps", "same order", "nothing has changed")
    assert all(same_bits(a.params, b.params) for a, b in zip(before, states, strict=True))


@pytest.mark.sample(3)
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("hook", [*HOOKS, "local"])
def test_different_step_order_raises_before_any_change(hook: str, on_device: bool) -> None:
    for ranks in (2, 3):
        tx.simulate(lambda: in_another_order(hook, on_device), {"data": ranks})


# -- each rank with another kind of message: an error on both, and no wrong number --

TIMEOUT_S = 3.0
SGD = tx.sgd(1.0)
PIPELINES: dict[str, Callable[[], tx.Pipeline]] = {
    "mean": lambda: tx.fuse(tx.mean("data"), SGD),
    "int8": lambda: tx.fuse(tx.compress(tx.int8(), tx.mean("data")), SGD),
    "local": lambda: tx.local_sgd(SGD, tx.mean("data"), 3),
}
KINDS = ("step", "flush", "join", "average", "other step", "pass", "module flush")


class Program:
    """Three train_steps and a registered module on one mesh, each with a step of -1 behind it.

    The module has taken two: in its second pass it has cut its buckets anew, in messages of torch's own.
    """

    def __init__(self, pipeline: str, transport: str) -> None:
        self.mesh = mesh = fjoin.mesh({"data": -1}, timeout_s=TIMEOUT_S, transport=transport)
        made = {
            "step": PIPELINES[pipeline](),
            "other step": PIPELINES[pipeline](),
            "average": tx.local_sgd(SGD, tx.mean("data"), 1),
        }
        self.steps = {name: fjoin.train_step(product, of, mesh=mesh) for name, of in made.items()}
        self.states = {name: step.init({"w": torch.zeros(3)}) for name, step in self.steps.items()}
        self.model = DistributedDataParallel(torch.nn.Linear(3, 1, bias=False))
        torch.nn.init.zeros_(self.model.module.weight)
        self.handle = fjoin.ddp.register(self.model, tx.local_sgd(SGD, tx.mean("data"), 3), mesh)
        for kind in ("step", "other step", "average", "pass", "pass"):
            self.do(kind)

    def do(self, kind: str) -> None:
        if kind in self.steps:
            self.states[kind], _ = self.steps[kind](self.states[kind], 1.0)
        elif kind == "flush":
            self.states["step"] = self.steps["step"].flush(self.states["step"])
        elif kind == "join":
            for batch in self.steps["step"].join([1.0]):
                self.states["step"], _ = self.steps["step"](self.states["step"], batch)
        elif kind == "pass":
            self.model.zero_grad()
            self.model(torch.ones(1, 3)).sum().backward()
        else:
            self.handle.flush()

    def values(self) -> list[float]:
        """What each of the four has come to."""
        found = [state.params["w"][0].item() for state in self.states.values()]
        return [*found, self.model.module.weight[0, 0].item()]


def apart(pipeline: str, transport: str, first: str, second: str) -> Any:
    """This rank's kind of message, then one more of each kind: the error, whether in time, and the last values."""
    program = Program(pipeline, transport)
    start, error, typed = time.monotonic(), "", True
    try:
        program.do((first, second)[program.mesh.rank])
        for kind in ("step", "flush", "other step", "average", "pass", "module flush"):
            program.do(kind)
    except Exception as caught:
        error, typed = f"{type(caught).__name__}: {caught}", isinstance(caught, fjoin.FjoinError)
    return error, typed, time.monotonic() - start, program.values()


def check(first: str, second: str, results: list[Any]) -> None:
    """Equal kinds work; others end in an error of fjoin's on both ranks, with whole steps of -1 behind them."""
    for error, typed, seconds, values in results:
        assert bool(error) == (first != second) and typed, error
        assert (first, second) != ("step", "other step") or "different train_steps" in error, error
        assert seconds < 2 * TIMEOUT_S, error
        assert all(value in (-1.0, -2.0, -3.0, -4.0, -5.0) for value in values), (error, values)
    assert first != second or results[0][3] == results[1][3]


PAIRS = list(itertools.combinations_with_replacement(KINDS, 2))
OF_ONE_SIZE = [("step", "flush"), ("step", "other step"), ("flush", "other step"), ("pass", "module flush")]
ON_GLOO = [*OF_ONE_SIZE, *(pytest.param(kind, kind, marks=pytest.mark.long) for kind in KINDS)]
OF_OTHER_SIZES = [
    ("step", "join"), ("step", "average"), ("flush", "join"), ("join", "average"), ("step", "pass"), ("join", "pass"),
]  # fmt: skip


@pytest.mark.sample(8)
@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_two_kinds_of_messages_in_shared_memory(pool: Any, first: str, second: str, pipeline: str) -> None:
    check(first, second, pool.run(2, apart, pipeline, "shared", first, second))


@pytest.mark.parametrize(("first", "second"), ON_GLOO)
def test_two_kinds_of_messages_on_gloo(pool: Any, first: str, second: str) -> None:
    check(first, second, pool.run(2, apart, "mean", "gloo", first, second))


def on_a_process(rank: int, first: str, second: str) -> Any:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=2 * TIMEOUT_S))
    return apart("mean", "gloo", first, second)


@pytest.mark.long
@pytest.mark.xfail(
    strict=True, reason="gloo ends one of the processes, whose message is too long, where an error is meant on both"
)
@pytest.mark.parametrize(("first", "second"), OF_OTHER_SIZES)
def test_messages_of_other_sizes_on_gloo(first: str, second: str) -> None:
    check(first, second, [end.value for end in ends(2, on_a_process, first, second)])
