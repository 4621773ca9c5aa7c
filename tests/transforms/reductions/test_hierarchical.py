"""The mean in two levels is the mean over both axes, and sends less across nodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from tests.helpers import max_diff, raises_text, same_bits

SHAPES = [
    {"node": 2, "local": 2}, {"node": 2, "local": 3}, {"node": 3, "local": 2}, {"node": 1, "local": 3},
    {"node": 3, "local": 1},
]  # fmt: skip


def _grads(rank: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(rank)
    shapes: list[tuple[str, tuple[int, ...]]] = [("a", (5, 3)), ("b", ()), ("none", (0, 2))]
    return {name: torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for name, shape in shapes}


def _one_rank(hook: tx.Transform, as_tensor: bool) -> Any:
    rank = int(tx.axis_index(("node", "local")))
    weight: Any = float(rank % 4)  # some have none, a whole node maybe
    grads = {k: v * float("nan") for k, v in _grads(rank).items()} if weight == 0 else _grads(rank)
    weight = torch.tensor(weight, dtype=torch.float64) if as_tensor else weight
    return hook.update(grads, hook.init(grads), weight=weight)


@pytest.mark.sample(2)
@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("over", ["weight", "live", "world"])
@pytest.mark.parametrize("axes", SHAPES, ids=str)
def test_result_matches_the_mean_over_both_axes(axes: dict[str, int], over: Any, as_tensor: bool) -> None:
    two, one = tx.hierarchical_mean("local", "node", over=over), tx.mean(("node", "local"), over)
    got, want = (tx.simulate(lambda: _one_rank(hook, as_tensor), axes) for hook in (two, one))  # noqa: B023
    for (out, _), (expected, _) in zip(got, want, strict=True):
        assert max_diff(out, expected) < 1e-15
        assert same_bits(out, got[0][0])


@pytest.mark.sample(3)
@pytest.mark.parametrize("axes", SHAPES, ids=str)
def test_nothing_is_lost_between_nodes(axes: dict[str, int]) -> None:
    """The results and all residuals equal the inputs, also where a whole node has no input for a while."""

    def one_rank(hook: tx.Transform) -> Any:
        rank, node = int(tx.axis_index(("node", "local"))), int(tx.axis_index("node"))
        state, given, came, total = hook.init(_grads(0)), _zeros(), _zeros(), 1.0
        for step in range(8):
            weight = 0.0 if (node + step) % 3 == 0 and step < 7 else 1.0 + rank
            grads = _grads(100 * step + rank)
            out, state = hook.update(
                grads if weight else {k: v * float("nan") for k, v in grads.items()}, state, weight=weight
            )
            total = float(tx.psum(weight, ("node", "local"))) or total
            came = {k: v + out[k] for k, v in came.items()}
            given = {k: v + weight * grads[k] / total for k, v in given.items()}
        return came, given, state.error

    for hook in (
        tx.error_feedback(tx.compress(tx.int4(block=4), tx.hierarchical_mean("local", "node"))),
        tx.error_feedback(tx.compress(tx.qsgd(3, block=4), tx.hierarchical_mean("local", "node"), seed=1)),
    ):  # fmt: skip
        results = tx.simulate(lambda: one_rank(hook), axes)  # noqa: B023
        for key in ("a", "b"):
            residual, given = (sum(r[i][key] for r in results) for i in (2, 1))
            assert (results[0][0][key] + residual - given).abs().max() < 1e-3, key
        assert axes["node"] == 1 or any(r[2]["a"].abs().max() > 0 for r in results)


def _zeros() -> dict[str, Tensor]:
    return {k: torch.zeros_like(v) for k, v in _grads(0).items()}


@pytest.mark.parametrize("over", ["weight", "live", "world"])
@pytest.mark.parametrize("axes", SHAPES, ids=str)
def test_encoded_across_nodes(axes: dict[str, int], over: Any) -> None:
    """Near the mean, and the same on all ranks."""
    hook = tx.compress(tx.int8(), tx.hierarchical_mean("local", "node", over=over))
    got = tx.simulate(lambda: _one_rank(hook, False), axes)
    want = tx.simulate(lambda: _one_rank(tx.mean(("node", "local"), over), False), axes)
    for (out, _), (expected, _) in zip(got, want, strict=True):
        assert max_diff(out, expected) < (0.03 if axes["node"] > 1 else 1e-15)
        assert same_bits(out, got[0][0])


def test_bytes_between_nodes() -> None:
    params = {"w": torch.ones(1_000_000)}
    axes = {"node": 8, "local": 8}

    def sent(hook: tx.Transform, axis: str) -> int:
        return sum(m.sent_bytes for row in tx.explain(hook, params, axes).rows for m in row.messages if axis in m.axis)

    floats = sent(tx.mean("node"), "node")
    assert sent(tx.hierarchical_mean("local", "node"), "node") < 1.01 * floats / 8
    assert sent(tx.compress(tx.int8(), tx.hierarchical_mean("local", "node")), "node") < 0.26 * floats / 8


def trained(hook: str) -> Any:
    mesh = fjoin.mesh({"node": 2, "local": 2}, timeout_s=60)
    made = {
        "floats": tx.hierarchical_mean("local", "node"),
        "int8": tx.compress(tx.int8(block=8), tx.hierarchical_mean("local", "node")),
    }[hook]

    def loss_fn(params: Any, batch: Tensor) -> Tensor:
        return ((batch @ params["w"]).tanh() * params["v"]).square().mean()

    step = fjoin.train_step(
        loss_fn,
        tx.fuse(tx.chain(made, tx.clip_by_global_norm(1.0)), tx.adamw(0.05)),
        mesh=mesh,
        weight=len,
        bucket_bytes=8,
    )
    state = step.init({"w": torch.full((5, 3), 0.3), "v": torch.full((3,), 0.5)})
    g = torch.Generator().manual_seed(mesh.rank)
    for batch in step.join([torch.randn(3 + mesh.rank, 5, generator=g) for _ in range(4 - mesh.rank)]):
        state, metrics = step(state, batch)
    out = {k: p.clone() for k, p in state.params.items()}, metrics.weight
    step.close()
    return out


@pytest.mark.sample(3)
@pytest.mark.parametrize("hook", ["floats", "int8"])
def test_in_a_step_on_processes(pool: Any, hook: str) -> None:
    """Four ranks of uneven input, per bucket during backward, as in the simulator."""
    real, simulated = pool.run(4, trained, hook), tx.simulate(lambda: trained(hook), {"node": 2, "local": 2})
    for (params, weight), (sim, sim_weight) in zip(real, simulated, strict=True):
        assert same_bits(params, real[0][0]) and max_diff(params, sim) < 1e-5 and weight == sim_weight == 3.0


def test_raises_on_bad_input() -> None:
    raises_text(ValueError, lambda: tx.hierarchical_mean("data", "data"), "two axes", "'data'")
    raises_text(ValueError, lambda: tx.hierarchical_mean("local", "node", over="all"), "over", "'all'")
