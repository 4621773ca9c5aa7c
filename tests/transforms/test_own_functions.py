"""Functions as their users write them, of whatever kind; optimizers without guards, objects of other libraries."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx

Index: TypeAlias = str  # a word that fjoin's own factories have for whole numbers


def _plain(grads: Any, state: Any, params: Any = None, *, weight: Any = None) -> Any:
    return grads * weight, state


def _named(grads: Any, state: Any, params: Any = None, *, by: float = 1.0, weight: Any = None) -> Any:
    return grads * weight * by, state


def _first(by: float, grads: Any, state: Any, params: Any = None, *, weight: Any = None) -> Any:
    return grads * weight * by, state


class Scaled:
    def update(self, grads: Any, state: Any, params: Any = None, *, weight: Any = None) -> Any:
        return grads * weight, state

    def __call__(self, grads: Any, state: Any, params: Any = None, *, weight: Any = None) -> Any:
        return grads * weight, state

    @staticmethod
    def still(grads: Any, state: Any, *, weight: Any = None) -> Any:
        return grads * weight, state

    @classmethod
    def of_class(cls, grads: Any, state: Any, *, weight: Any = None) -> Any:
        return grads * weight, state


KINDS: dict[str, Any] = {
    "function": _plain, "partial": functools.partial(_named, by=1.0),
    "partial by place": functools.partial(_first, 1.0),
    "partial of a partial": functools.partial(functools.partial(_named), by=1.0), "bound method": Scaled().update,
    "static method": Scaled.still, "class method": Scaled.of_class, "object": Scaled(), "decorated": functools.wraps(_plain)(lambda *args,
        **keywords: _plain(*args, **keywords)),
    "compiled": torch.compile(_plain, backend="eager"),
    "compiled method": torch.compile(Scaled().update, backend="eager"), "cached": functools.lru_cache(None)(_plain),
    "only by place": lambda grads, state, params=None, /, *, weight=None: (grads * weight, state),
}  # fmt: skip


def three_times(value: Any) -> Any:
    """The transform, and copies of it with other fields."""
    made = tx.Transform(lambda params: (), KINDS[value] if isinstance(value, str) else value)
    again = dataclasses.replace(made, needs=tx.Needs.LEAVES)
    return (
        made,
        again,
        dataclasses.replace(again, facts=tx.Facts(silent=True)),
        dataclasses.replace(made, facts=tx.Facts(pauses=True)),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_update_gets_the_keywords_it_names(kind: str) -> None:
    """`accepts` inspects the given function, not its wrappers."""
    for part in three_times(kind):
        assert part.accepts("weight") and not part.accepts("flush") and not part.accepts("donated")
        g = torch.tensor(2.0)
        out, _ = part.update(g, (), g, weight=3.0, step=0, persistent=True)
        assert out.item() == 6.0
        inside = tx.chain(tx.every(1, part), tx.masked(tx.identity(), "*"))
        assert inside.update(g, inside.init(g), g, weight=3.0, step=0)[0].item() == 6.0


def test_an_update_may_take_fewer_arguments() -> None:
    """None by name, or a keyword by its place; an unset keyword keeps the default."""
    g = torch.tensor(2.0)
    for update in (
        lambda g, s, params=None: (g, s),
        lambda g, s: (g, s),
        lambda *args: args[:2],
        lambda g, s, params=None, **extra: (g, s),
    ):
        hook = tx.chain(tx.every(1, tx.Transform(lambda params: (), update)), tx.clip_by_value(9.0))
        assert (
            hook.update(g, hook.init(g), g, weight=3.0, step=0)[0] is not None
            and hook.update(g, hook.init(g))[0] == 2.0
        )
    for update in (lambda g, s, params=None, weight=7.0: (g * weight, s), lambda g, s, weight=7.0: (g * weight, s)):
        made = tx.Transform(lambda params: (), update)
        assert made.update(g, ())[0] == 14.0 and made.update(g, (), g, weight=2.0)[0] == 4.0


def test_copy_with_another_update_takes_its_keywords() -> None:
    hook = tx.mean("data")
    copied = dataclasses.replace(hook, update=lambda grads, state, params=None, *, weight=None: (grads, state))
    assert "wire" in hook.facts.takes and copied.facts.takes == {"weight"}


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
