"""Messages travel during backward: shown with delays injected into layers and messages, on a clock that only these advance; streams."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fjoin
from fjoin import transforms as tx
from tests.helpers import by_hand, in_backward

LAYERS = [f"p{i}" for i in range(4)]


class Clock:
    """The time of one rank: the work of a layer takes 1, a message takes 1 from its launch, and everything else takes 0."""

    now = 0


class Late:
    """A message on its way: those of one rank travel side by side."""

    def __init__(self, work: Any, order: list[str], clock: Clock) -> None:
        self._work, self._order, self._clock, self._end = work, order, clock, clock.now + 1

    def wait(self, *limit: Any) -> Any:
        self._clock.now = max(self._clock.now, self._end)
        self._order.append("arrived")
        return self._work.wait(*limit)


@contextlib.contextmanager
def slow_messages(order: list[str], clock: Clock) -> Iterator[None]:
    """Record the messages given to torch.distributed, and delay them; two ranks sum by swapping."""
    reduce, swap = dist.all_reduce, dist.all_to_all_single

    def slow_reduce(x: Any, *args: Any, **kwargs: Any) -> Any:
        order.append("max" if dist.ReduceOp.MAX in args else "sum")
        return Late(reduce(x, *args, **kwargs), order, clock)

    def slow_swap(*args: Any, **kwargs: Any) -> Any:
        order.append("sum")
        return Late(swap(*args, **kwargs), order, clock)

    dist.all_reduce, dist.all_to_all_single = slow_reduce, slow_swap
    try:
        yield
    finally:
        dist.all_reduce, dist.all_to_all_single = reduce, swap


def two_messages(grads: Any, state: Any) -> Any:
    """The second message needs the result of the first."""
    summed = tx.psum(grads, "data")
    largest = tx.pmax({path: g.abs() for path, g in summed.items()}, "data")
    return {path: g / (1 + largest[path]) for path, g in summed.items()}, state


HOOKS: dict[str, Any] = {"mean": lambda: tx.mean("data"), "two messages": lambda: by_hand(two_messages)}


class Layers(torch.nn.Module):
    """Whose backward pass writes down the gradients, each of which takes 1."""

    def __init__(self, order: list[str], clock: Clock) -> None:
        super().__init__()
        self._order, self._clock = order, clock
        for name in LAYERS:
            self.register_parameter(name, torch.nn.Parameter(torch.ones(8)))

    def _slow(self, name: str) -> None:
        self._clock.now += 1
        self._order.append(f"gradient of {name}")

    def forward(self, x: Any) -> Any:
        for name in LAYERS:
            x = in_backward(x * getattr(self, name), functools.partial(self._slow, name))
        return x.sum()


def third_time(hook: str, in_module: bool) -> tuple[list[str], int]:
    """Gradients and messages in the order in which they came, and the time, of a step or of a pass of a module, which has cut its
    buckets anew by then."""
    order, clock, x = list[str](), Clock(), torch.ones(8)
    layers = Layers(order, clock)
    if in_module:
        ddp = torch.nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=1e-5)
        fjoin.ddp.register(ddp, HOOKS[hook]())
        run = lambda: ddp(x).backward()  # noqa: E731
    else:
        apply, params, _ = fjoin.functional(layers)
        pipeline = tx.fuse(HOOKS[hook](), tx.sgd(0.1))
        step = fjoin.train_step(lambda p, x: apply(p, {}, x), pipeline, mesh=fjoin.mesh({"data": -1}), bucket_bytes=1)
        held = [step.init(params)]
        run = lambda: held.append(step(held.pop(), x)[0])  # noqa: E731
    with slow_messages(order, clock):
        for _ in range(3):
            order.clear()
            start = clock.now
            run()
    return order, clock.now - start


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("hook", "messages", "time"),
    [
        ("mean", ["sum"] * 4, 4 + 1),  # one after the other: 4 of backward, 4 of messages
        ("two messages", ["sum"] * 4 + ["max"] * 4, 4 + 2 + 1),  # 4 and 8, and 1 of the lane, which travels alone
    ],
)
def test_messages_overlap_with_backward(pool: Any, hook: str, messages: list[str], time: int) -> None:
    """First messages hide behind backward, second ones behind each other."""
    for order, took in pool.run(2, third_time, hook, False):
        assert order.index("sum") < order.index("gradient of p0"), order
        assert [what for what in order if what in ("sum", "max")][: len(messages)] == messages, order
        if "max" in messages:  # all of them leave before the first of them is waited for
            first, last = (order.index("max"), len(order) - 1 - order[::-1].index("max"))
            assert order[first:last].count("arrived") == 3, order  # the other buckets' sums
        assert took == time


@pytest.mark.gloo
@pytest.mark.parametrize(("hook", "time"), [("mean", 4 + 1), ("two messages", 4 + 2)])
def test_messages_overlap_with_backward_in_a_module(pool: Any, hook: str, time: int) -> None:
    for order, took in pool.run(2, third_time, hook, True):
        assert order.index("sum") < order.index("gradient of p0"), order
        assert took == time, order


def steps_of(clip: bool) -> list[list[str]]:
    """For each of two steps, when messages arrived and buckets were stepped."""
    order: list[str] = []
    sgd = tx.sgd(0.1)

    def step_param_(*args: Any, **guards: Any) -> None:
        order.append("stepped")
        sgd.step_param_(*args, **guards)

    def loss_fn(params: Any, batch: Any) -> Any:
        return sum((params[name] * batch).sum() for name in LAYERS)

    clips = [tx.clip_by_global_norm(1.0)] if clip else []
    pipeline = tx.fuse(tx.chain(tx.mean("data"), *clips), dataclasses.replace(sgd, step_param_=step_param_))
    step = fjoin.train_step(loss_fn, pipeline, mesh=fjoin.mesh({"data": -1}), bucket_bytes=1)
    state, orders = step.init({name: torch.ones(8) for name in LAYERS}), []
    with slow_messages(order, Clock()):
        for _ in range(2):
            order.clear()
            state, _ = step(state, torch.ones(8))
            orders.append([what for what in order if what != "sum"])
    step.close()
    return orders


@pytest.mark.gloo
def test_no_bucket_is_stepped_before_all_have_arrived(pool: Any) -> None:
    for clip in (False, True):
        for orders in pool.run(2, steps_of, clip):
            assert orders == [["arrived"] * 4 + ["stepped"] * 4] * 2, orders
