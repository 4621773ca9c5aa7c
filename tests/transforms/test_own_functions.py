"""Functions as their users write them: stages without keywords, optimizers without guards, objects of other libraries."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from fjoin.transforms.base import fingerprint
from tests.helpers import raises_text, same_bits

Index: TypeAlias = str  # a word that fjoin's own factories have for whole numbers

STAGES: dict[str, Any] = {
    "three arguments": lambda g, s, params=None: (g, s), "two arguments": lambda g, s: (g, s),
    "a weight": lambda g, s, params=None, *, weight=None: (g, s), "any positions": lambda *args: args[:2],
    "all keywords": lambda g, s, params=None, **extra: (g, s),
}  # fmt: skip


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_needs_no_keywords(name: str) -> None:
    """In every wrapper and pipeline the result equals that without the stage."""
    own = tx.Transform(lambda p: (), STAGES[name])
    around = {
        "alone": lambda t: t, "chain": lambda t: tx.chain(t, tx.mean("data")), "masked": lambda t: tx.masked(t, "w"),
        "partition": lambda t: tx.partition({"w": t, "*": tx.identity()}), "every": lambda t: tx.every(2, t),
        "switch_after": lambda t: tx.switch_after(1, t, tx.identity()), "accumulate": lambda t: tx.accumulate(2, t),
        "skip": lambda t: tx.skip_if_nonfinite(t),
    }  # fmt: skip
    params = {"w": torch.ones(2), "b": torch.ones(3)}

    def run(stage: tx.Transform, wrapper: str) -> Any:
        made = around[wrapper](stage)
        if isinstance(made, tx.Pipeline):
            return ()
        pipeline, p = tx.fuse(made, tx.sgd(0.1)), params
        state = pipeline.init(p)
        for _ in range(4):
            p, state = pipeline.step(p, params, state, weight=2.0)
        return p

    for wrapper in around:
        if wrapper == "skip":
            continue
        got, want = (tx.simulate(lambda s=s: run(s, wrapper), {"data": 2}) for s in (own, tx.identity()))  # noqa: B023
        assert same_bits(got, want), wrapper
    step = fjoin.train_step(lambda p, b: (p["w"] * b).sum(), tx.fuse(tx.chain(own, tx.mean("data")), tx.sgd(0.1)))
    assert torch.equal(step(step.init({"w": torch.ones(2)}), torch.ones(2))[0].params["w"], torch.full((2,), 0.9))


def test_adapted_stages_are_told_apart() -> None:
    one, other = (tx.Transform(lambda p: (), f) for f in (lambda g, s: (g, s), lambda g, s: (2 * g, s)))
    assert one != other and fingerprint(one) != fingerprint(other)
    raises_text(TypeError, lambda: tx.Transform(lambda p: (), lambda g: g), "update(grads, state", "takes 1")


class State(NamedTuple):
    step: Tensor
    velocity: Tensor


def _init(p: Tensor) -> State:
    return State(torch.zeros(()), torch.zeros_like(p))


def _pure(p: Tensor, g: Tensor, s: State) -> tuple[Tensor, State]:
    velocity = 0.9 * s.velocity + g
    return p - 0.1 * velocity, State(s.step + 1, velocity)


def _in_place(p: Tensor, g: Tensor, s: State) -> None:
    s.velocity.mul_(0.9).add_(g)
    p.sub_(s.velocity, alpha=0.1)
    s.step.add_(1)


def _lists(ps: list[Tensor], gs: list[Tensor], ss: list[State]) -> None:
    for p, g, s in zip(ps, gs, ss, strict=True):
        s.velocity.mul_(0.9).add_(g)
        p.sub_(s.velocity, alpha=0.1)
    ss[0].step.add_(1)


@pytest.mark.parametrize("lists", [None, _lists])
def test_an_optimizer_needs_no_guards(lists: Any) -> None:
    """As docs/your-own-transform.md writes one: the same steps as tx.sgd with that momentum, wherever it stands."""
    opt = tx.Optimizer(_init, _pure, _in_place, lists)
    fjoin.testing.check_optimizer(lambda: opt)
    params, own = {"w": torch.ones(4), "b": torch.ones(2)}, tx.sgd(0.1, momentum=0.9)
    wrapped = {
        "alone": lambda o: tx.fuse(tx.mean("data"), o), "zero": lambda o: tx.zero(tx.mean("data"), o, "data"),
        "partition": lambda o: tx.fuse(tx.mean("data"), tx.partition({"w": o, "*": tx.frozen()})),
        "mixed_precision": lambda o: tx.fuse(tx.mean("data"), tx.mixed_precision(o)),
        "local": lambda o: tx.local_sgd(o, tx.mean("data"), 2), "skips": lambda o: tx.skip_if_nonfinite(tx.fuse(tx.mean("data"), o)),
    }  # fmt: skip

    def train(pipeline: tx.Pipeline) -> Any:
        step = fjoin.train_step(lambda p, b: (p["w"].square() * b).sum() + p["b"].square().sum(), pipeline)
        state = step.init(params)
        for value in (1.0, float("inf"), 2.0) if "skip" in repr(pipeline) else (1.0, 2.0):
            state, _ = step(state, torch.full((4,), value))
        return step.flush(state).clone().params

    for make in wrapped.values():
        got, want = (tx.simulate(lambda o=o: train(make(o)), {"data": 2}) for o in (opt, own))  # noqa: B023
        for a, b in zip(got, want, strict=True):
            for path in params:
                torch.testing.assert_close(a[path], b[path], rtol=1e-6, atol=1e-6)


def test_numbers_of_numpy() -> None:
    assert tx.every(np.int64(4), tx.mean("data")) == tx.every(4, tx.mean("data"))
    assert tx.sgd(np.float32(0.5)) == tx.sgd(0.5)
    step = fjoin.train_step(
        lambda p, b: ((p["w"] * b).sum(), {"sum": {"n": np.float32(3.0), "m": np.int64(2)}}),
        tx.fuse(tx.mean("data"), tx.sgd(0.1)),
    )
    _, metrics = step(step.init({"w": torch.ones(2)}), torch.ones(2))
    assert metrics.sums == {"n": 3.0, "m": 2.0}


def test_words_for_types_in_a_factory_of_a_user_are_the_users() -> None:
    @tx.factory
    def at_index(index: Index) -> tx.Transform:
        return tx.stateless(lambda grads: grads)

    assert isinstance(at_index("a label"), tx.Transform)
