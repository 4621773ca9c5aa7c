"""Ranks that run other programs or are at other places in one get an error; a rank that is only late is awaited.

Several train_steps over one mesh are called in the same order on all ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

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
