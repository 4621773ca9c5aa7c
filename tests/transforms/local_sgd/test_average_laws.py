"""Averages of parameters obey the laws of averages, and each law is broken by a wrong average."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from fjoin.testing import LAWS

SGD = tx.sgd(0.7, momentum=0.9, nesterov=True)
AVERAGES: dict[str, Callable[[], tx.Transform]] = {
    "every call": lambda: tx.average_parameters("data"), "live": lambda: tx.average_parameters("data", over="live"),
    "periodic": lambda: tx.every(3, tx.average_parameters("data"), first=1),
    "two axes": lambda: tx.every(2, tx.average_parameters(("local", "node"))),
    "mean": lambda: tx.every(2, tx.mean("data")), "outer": lambda: tx.outer_step(tx.mean("data"), SGD, 3),
    "outer, int8": lambda: tx.outer_step(tx.error_feedback(tx.compress(tx.int8(), tx.mean("data"))), SGD, 2),
    "outer, later": lambda: tx.outer_step(tx.mean("data"), tx.adam(0.1), 3, delay=2),
}  # fmt: skip


@pytest.mark.parametrize("law", LAWS["average"])
@pytest.mark.parametrize("name", AVERAGES)
def test_average(name: str, law: Any) -> None:
    law(AVERAGES[name])


def in_buckets(buckets: list[tuple[str, ...]], copied: slice) -> Callable[[], tx.Transform]:
    """An average in buckets, of which only some are copied back, as torchft's bucketized DiLoCo copies only the last."""

    def update(values: Any, state: Any, params: Any = None, *, weight: Any = None, **extra: Any) -> Any:
        new = dict(values)
        for paths in buckets[copied]:
            mean = tx.average_parameters("data")
            some = {path: values[path] for path in paths}
            new.update(mean.update(some, mean.init(some), weight=weight)[0])
        return new, state

    return lambda: tx.Transform(lambda params: (), update)


BUCKETS: list[tuple[str, ...]] = [("layer.weight", "layer.bias"), ("scale", "none")]


def own_share(values: Any, state: Any, params: Any = None, *, weight: Any = None, **extra: Any) -> Any:
    mean = {path: tx.pmean(v, "data") for path, v in values.items()}
    return {path: torch.lerp(mean[path], v, 1e-12) for path, v in values.items()}, state


def plain(values: Any, state: Any, params: Any = None, **extra: Any) -> Any:
    return {path: tx.pmean(v, "data") for path, v in values.items()}, state


def drifting(values: Any, state: Any, params: Any = None, *, weight: Any = None, **extra: Any) -> Any:
    """A momentum that moves on without input."""
    return {path: tx.pmean(v, "data") * 0.9 for path, v in values.items()}, state


BROKEN: dict[str, Callable[[], tx.Transform]] = {
    "makes_ranks_equal": in_buckets(BUCKETS, slice(-1, None)),
    "gives_the_average_to_ranks_without_input": lambda: tx.Transform(lambda params: (), plain),
    "keeps_parameters_without_input": lambda: tx.Transform(lambda params: (), drifting),
}


@pytest.mark.parametrize("law", LAWS["average"])
def test_each_law_can_fail(law: Any) -> None:
    with pytest.raises(AssertionError):
        law(BROKEN[law.__name__])


def test_a_difference_in_the_last_bit_is_found() -> None:
    with pytest.raises(AssertionError, match="makes_ranks_equal: .* differs between ranks"):
        fjoin.testing.check_average(lambda: tx.Transform(lambda params: (), own_share))


def test_a_bucket_that_is_not_copied_back_is_found_and_all_buckets_are_right() -> None:
    with pytest.raises(AssertionError, match=r"never averaged: \['layer.bias', 'layer.weight'\]"):
        fjoin.testing.check_average(in_buckets(BUCKETS, slice(-1, None)))
    fjoin.testing.check_average(in_buckets(BUCKETS, slice(None)))
