"""A step that is captured as a graph equals one that is not, to the bit; what cannot be captured is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import optree
import pytest
import torch

import fjoin
from fjoin import transforms as tx
from fjoin.training.state._held_states import HeldStates
from fjoin.transforms import _devices
from tests.devices.echo import EchoMesh
from tests.devices.graphs import Axis, graphs
from tests.devices.test_streams import PIPELINES

MEAN = tx.mean("data")
REFUSED = {
    "power_sgd": "change with the steps",
    "zero, overlapped": "overlap_gather",
    "zero, int8 gather": "gather",
    "local": "does not reduce over all ranks",
    "accumulate": "accumulate",
    "state kept": "donate=False",
}
MORE: dict[str, tuple[Callable[[], tx.Pipeline], dict[str, Any]]] = {
    "loss scale": (lambda: tx.dynamic_loss_scale(tx.fuse(MEAN, tx.sgd(0.1)), 8.0, growth_interval=3), {}),
    "ema": (lambda: tx.fuse(MEAN, tx.adamw(0.1), after=tx.ema(0.9)), {}),
    "injected schedule": (lambda: tx.fuse(MEAN, tx.inject_hyperparameters(tx.adamw(tx.warmup_cosine(0.1, 2, 9)))), {}),
    "norm": (lambda: tx.fuse(tx.chain(MEAN, tx.record_norm()), tx.lion(0.01)), {}),
    "muon": (lambda: tx.fuse(MEAN, tx.partition({"[bd]": tx.sgd(0.1, momentum=0.5), "*": tx.muon(0.1)})), {}),
}
ALL = {**PIPELINES, **MORE}


def loss_fn(p: Any, batch: torch.Tensor) -> tuple[torch.Tensor, Any]:
    hidden = torch.tanh(batch @ p["a"] + p["b"])
    loss = ((hidden @ p["c"] + p["d"]) ** 2).mean()
    return loss, {"sum": {"samples": len(batch)}, "first": hidden[0]}


def run(name: str, sizes: list[int], bad: int = -1, **options: Any) -> tuple[list[Any], Any]:
    """The metrics of steps on batches of these sizes, and the last parameters."""
    make, own = ALL[name]
    torch.manual_seed(0)
    params = {"a": torch.randn(3, 4), "b": torch.zeros(4), "c": torch.randn(4, 3), "d": torch.zeros(3)}
    batches = [torch.randn(n, 3) for n in sizes]
    if bad >= 0:
        batches[bad][0, 0] = torch.nan
    step = fjoin.train_step(loss_fn, make(), mesh=EchoMesh(Axis()), weight=len, bucket_bytes=40, **{**own, **options})
    state, seen = step.init(params), list[Any]()
    for i, batch in enumerate(batches):
        try:
            state, metrics = step(state, batch)
        except fjoin.NonFinite as error:
            seen.append((i, str(error)))
            break
        seen.append(metrics)
    step.close() if bad < 0 else None
    numbers = [
        m
        if isinstance(m, tuple)
        else ({k: v for k, v in m.as_dict().items() if not k.startswith("rank/")}, m.aux["first"])
        for m in seen
    ]
    return numbers, state


def tensors_in(state: Any) -> list[torch.Tensor]:
    return [x for x in optree.tree_leaves([state.params, state.pipeline]) if isinstance(x, torch.Tensor)]


SIZES = [2, 2, 5, 2, 2, 5, 3, 2, 5, 5, 2, 5, 2]  # the graph of size 2 is captured in its fourth step


@pytest.mark.parametrize("name", [name for name in ALL if name not in REFUSED])
def test_the_same_bits(name: str) -> None:
    with graphs() as made:
        want, state = run(name, SIZES)
        assert not made
        got, captured = run(name, SIZES, capture=True)
        assert [graph.replays for graph in made] == [4, 2]
    # With a weight of the device a residual is clipped in other steps of rounding.
    rtol = 1e-6 if name == "fed back" else 0.0
    for got_one, p in zip(tensors_in(captured), tensors_in(state), strict=True):
        torch.testing.assert_close(got_one, p, rtol=rtol, atol=rtol)
    for (a, first), (b, other) in zip(want, got, strict=True):
        assert a == pytest.approx(b, rel=rtol, abs=0.0)
        torch.testing.assert_close(first, other, rtol=rtol, atol=0.0)


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    for name in ("mean", "clipped", "int8"):
        with graphs() as made:
            want, state = run(name, [2] * 9, bad=4)
            got, captured = run(name, [2] * 9, bad=4, capture=True)
            assert made[0].replays == 3 and want[-1] == got[-1] and want[-1][0] == 6
            for path, p in state.params.items():
                assert torch.equal(p, captured.params[path]) and torch.isfinite(p).all()


@pytest.mark.parametrize("fault", ["numbers", "states", "batch"])
def test_each_part_that_changes_between_steps_is_needed(fault: str) -> None:
    """A graph that keeps the numbers, the states or the batch of its capture computes something else."""
    nothing: Any = lambda *args: None  # noqa: E731
    patches = {
        "numbers": mock.patch.object(_devices, "write", nothing),
        "states": mock.patch.object(HeldStates, "write_back", nothing),
        "batch": mock.patch.object(torch, "_foreach_copy_", nothing),
    }
    name = "ema" if fault == "states" else "mean"
    with graphs() as made:
        want, state = run(name, SIZES)
        with patches[fault]:
            got, other = run(name, SIZES, capture=True)
    assert made and any(not torch.equal(a, b) for a, b in zip(tensors_in(state), tensors_in(other), strict=True))


def with_buffers(p: Any, buffers: Any, batch: Any) -> Any:
    hidden = torch.tanh(batch["x"] @ p["a"]) * batch["factor"]
    mean = 0.9 * buffers["mean"] + 0.1 * hidden.detach().mean(0)
    return (hidden**2).mean() + 0.0 * tx.current_weight(), None, {"mean": mean}


def test_loops_buffers_and_hyperparameters() -> None:
    """Batches as dicts, buffers that are averaged, a loop over a loader, and another rate in the middle."""

    def trained(capture: bool) -> Any:
        pipeline = tx.fuse(MEAN, tx.inject_hyperparameters(tx.adamw(0.1)))
        step = fjoin.train_step(
            with_buffers, pipeline, mesh=EchoMesh(Axis()), on_buffers=tx.average_buffers("data"), capture=capture
        )
        state = step.init({"a": torch.eye(3)}, {"mean": torch.zeros(3)})
        for epoch in range(2):
            torch.manual_seed(epoch)
            for i, batch in enumerate(step.join([{"x": torch.randn(4, 3), "factor": 2.0} for _ in range(6)])):
                state, metrics = step(state, batch)
                if i in (1, 4):
                    state = state.with_hyperparameters(lr=0.1 / (i + 2))
        assert metrics.loss > 0
        state = step.flush(state)
        step.close()
        state, metrics = step(state, {"x": torch.ones(4, 3), "factor": 1.0})
        return [state.params["a"], state.buffers["mean"]]

    with graphs() as made:
        want, got = trained(False), trained(True)
        assert [graph.replays for graph in made] == [3, 1]
    assert all(map(torch.equal, want, got))


def steps(loss: Any, batches: list[Any], pipeline: Any = None, dtype: torch.dtype = torch.float32) -> Any:
    step = fjoin.train_step(loss, pipeline or tx.fuse(MEAN, tx.sgd(0.1)), mesh=EchoMesh(Axis()), capture=True)
    state = step.init({"w": torch.ones(3, dtype=dtype)})
    for batch in batches:
        state, _ = step(state, batch)
    return state


def plain(p: Any, batch: Any) -> torch.Tensor:
    return (p["w"] * batch["x"]).sum()


def reads(p: Any, batch: Any) -> torch.Tensor:
    return plain(p, batch) * (1.0 if plain(p, batch).float().item() else 2.0)


def counts() -> Any:
    calls = [0]

    def loss(p: Any, batch: Any) -> Any:
        calls[0] += 1
        return plain(p, batch), {"sum": {"calls": calls[0]}}

    return loss


X = {"x": torch.ones(3)}
DICE = tx.fuse(tx.quantized_mean("data", tx.int8(stochastic=True)), tx.sgd(0.1))
WORDS: dict[str, tuple[Callable[[], Any], str]] = {
    "a read": (lambda: steps(reads, [X] * 4), "could not be captured: operation not permitted"),
    "a count": (lambda: steps(counts(), [X] * 4), r"aux\['sum'\]\['calls'\]\": 1\} and then"),
    "another device": (lambda: steps(plain, [{"x": torch.ones(3, device="meta")}]), r"batch\['x'\] lies on meta"),
    "an object": (lambda: steps(plain, [{**X, "y": object()}]), r"batch\['y'\] is a object"),
    "dice": (
        lambda: steps(plain, [X] * 4, DICE),
        r"int8.*a number of the host that changes, hook\[.*: 1 and then 2",
    ),
    "float16": (lambda: steps(plain, [X], dtype=torch.float16), "float16 gradients"),
}


@pytest.mark.parametrize("case", WORDS)
def test_errors_say_what_stands_against_a_graph(case: str) -> None:
    run, words = WORDS[case]
    with graphs(), pytest.raises((ValueError, fjoin.CaptureError), match=words):
        run()


def test_graphs_are_of_accelerators_and_real_ranks() -> None:
    with pytest.raises(ValueError, match="the parameters lie on the cpu, and graphs are of accelerators"):
        steps(plain, [])
    step = fjoin.train_step(plain, tx.fuse(MEAN, tx.sgd(0.1)), capture=True)
    with pytest.raises(ValueError, match="graphs are of accelerators"):
        step.init({"w": torch.ones(3)})


def test_a_batch_with_a_number_that_changes_gets_no_graph() -> None:
    with graphs() as made, pytest.warns(UserWarning, match="64 different forms") as warned:
        state = steps(plain, [{**X, "i": i} for i in range(66)])
    assert not made and state.step == 66 and warned[0].filename == __file__


def test_a_failed_capture_leaves_the_state_as_it_was() -> None:
    step_ = fjoin.train_step(reads, tx.fuse(MEAN, tx.sgd(0.5)), mesh=EchoMesh(Axis()), capture=True)
    with graphs():
        state = step_.init({"w": torch.ones(3)})
        for _ in range(3):
            state, _ = step_(state, X)
        with pytest.raises(fjoin.CaptureError):
            step_(state, X)
        assert torch.equal(state.params["w"], torch.full((3,), -1.0))
