"""What `over` means on nested axes: a mean in nodes, then one between them, in each pair of kinds; and in two levels."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx

NODES = {"node": 2, "local": 2}
GRADS = [1.0, 2.0, 6.0, 9.0]
WEIGHTS: dict[str, list[float]] = {
    "equal": [1.0, 1.0, 1.0, 0.0], "uneven": [1.0, 3.0, 5.0, 0.0], "a node without": [2.0, 3.0, 0.0, 0.0]
}  # fmt: skip
KINDS = ("weight", "live", "world")


def counts(weights: list[float]) -> dict[str, float]:
    """Of some ranks, per kind: the sum of their weights, the number of those with input, their number."""
    return {"weight": sum(weights), "live": sum(w > 0 for w in weights), "world": len(weights)}


def by_hand(first: str, second: str, weights: list[float]) -> float:
    """Each node's mean, times the node's count of the second kind, divided by that count of all ranks."""
    total = 0.0
    for node in (slice(0, 2), slice(2, 4)):
        own, of = weights[node], counts(weights[node])
        factors = own if first == "weight" else [float(w > 0) for w in own]
        summed = sum(f * g for f, g in zip(factors, GRADS[node], strict=True))
        total += of[second] * summed / (of[first] or 1.0)
    return total / counts(weights)[second]


CHAINS: dict[str, Callable[..., tx.Transform]] = {
    "mean": lambda first, second: tx.chain(tx.mean("local", first), tx.mean("node", second)),
    "pieces": lambda first, second: tx.chain(tx.scatter_mean("local", first), tx.mean("node", second)),
    "encoded": lambda first, second: tx.chain(
        tx.compress(tx.float32(), tx.mean("local", first)), tx.compress(tx.float32(), tx.mean("node", second))
    ),
}


def purely(hook: tx.Transform, grad: float, weight: float) -> float:
    pipeline, params = tx.fuse(hook, tx.sgd(1.0)), {"w": torch.zeros(40, dtype=torch.float64)}
    new, _ = pipeline.step(params, {"w": params["w"] + grad}, pipeline.init(params), weight=weight)
    assert (new["w"] == new["w"][0]).all()
    return -new["w"][0].item()


def by_step(hook: tx.Transform, grad: float, weight: float) -> float:
    step = fjoin.train_step(
        lambda p, b: (p["w"] * b).sum(), tx.fuse(hook, tx.sgd(1.0)), mesh=fjoin.mesh(NODES), weight=lambda b: weight
    )
    state, _ = step(step.init({"w": torch.zeros(40, dtype=torch.float64)}), grad)
    return -state.params["w"][0].item()


def on_ranks(hook: tx.Transform, case: str) -> list[float]:
    return [
        out
        for run in (purely, by_step)[: 2 if case == "uneven" else 1]
        for out in tx.simulate(lambda g, w: run(hook, g, w), NODES, GRADS, WEIGHTS[case])  # noqa: B023
    ]


@pytest.mark.parametrize(("form", "first", "second"), list(itertools.product(CHAINS, KINDS, KINDS)))
def test_a_chain_of_two_means(form: str, first: str, second: str) -> None:
    """The chain runs in the pure pipeline and, with uneven weights, in a train step."""
    for case, weights in WEIGHTS.items():
        found = on_ranks(CHAINS[form](first, second), case)
        assert found == pytest.approx([by_hand(first, second, weights)] * (8 if case == "uneven" else 4), abs=1e-6), (
            case
        )


@pytest.mark.sample(2)
@pytest.mark.parametrize("over", KINDS)
@pytest.mark.parametrize("case", WEIGHTS)
def test_both_axes_at_once(case: str, over: Any) -> None:
    """A mean over both axes is the chain of two means of its kind by definition, and so is the hierarchical one."""
    weights = WEIGHTS[case]
    factors = weights if over == "weight" else [float(w > 0) for w in weights]
    want = sum(f * g for f, g in zip(factors, GRADS, strict=True)) / counts(weights)[over]
    assert by_hand(over, over, weights) == pytest.approx(want)
    for hook in (
        tx.mean(("node", "local"), over), tx.hierarchical_mean("local", "node", over=over),
        tx.compress(tx.float32(), tx.hierarchical_mean("local", "node", over=over)),
        tx.compress(tx.float32(), tx.mean(("node", "local"), over)),
    ):  # fmt: skip
        assert on_ranks(hook, case) == pytest.approx([want] * (8 if case == "uneven" else 4), abs=1e-6)


@pytest.mark.parametrize("over", ["weight", "live", "world"])
def test_behind_a_chain_the_weight_is_that_of_all_ranks(over: Any) -> None:
    for make in (CHAINS["mean"], CHAINS["encoded"]):

        def one_rank(weight: float) -> float:
            seen: list[Any] = []
            look = tx.Transform(lambda p: (), lambda g, s, p=None, *, weight=None: (g, seen.append(weight) or s))
            hook, g = tx.chain(make(over, over), look), {"w": torch.ones(4)}  # noqa: B023
            hook.update(g, hook.init(g), weight=weight)
            return float(seen[0])

        assert tx.simulate(one_rank, NODES, WEIGHTS["uneven"]) == [sum(WEIGHTS["uneven"])] * 4


BESIDE_ONE: dict[str, Callable[[], tuple[tx.Transform, tx.Transform]]] = {
    "encoded": lambda: tuple(tx.compress(tx.int8(), tx.mean(axis)) for axis in (("data", "model"), "data")),
    "behind": lambda: (tx.chain(tx.mean("model"), tx.mean("data")), tx.mean("data")),
    "before": lambda: (tx.chain(tx.mean("data"), tx.mean("model")), tx.mean("data")),
}


@pytest.mark.parametrize("name", BESIDE_ONE)
def test_an_axis_of_one_rank_sends_nothing(name: str) -> None:
    params = {"w": torch.zeros(45)}
    here, there = BESIDE_ONE[name]()

    both, one = {"data": 4, "model": 1}, {"data": 4}
    assert tx.explain(here, params, both).payload_bytes == tx.explain(there, params, one).payload_bytes


def test_bytes_between_nodes() -> None:
    params = {"w": torch.ones(1_000_000)}
    axes = {"node": 8, "local": 8}

    def sent(hook: tx.Transform, axis: str) -> int:
        return sum(m.sent_bytes for row in tx.explain(hook, params, axes).rows for m in row.messages if axis in m.axis)

    floats = sent(tx.mean("node"), "node")
    assert sent(tx.hierarchical_mean("local", "node"), "node") < 1.01 * floats / 8
    assert sent(tx.compress(tx.int8(), tx.hierarchical_mean("local", "node")), "node") < 0.26 * floats / 8
