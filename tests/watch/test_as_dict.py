"""Metrics as a flat dict, and what shows them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from tests.pool import Pool
from tests.training.small import step_of

PARAMS = {"w": torch.linspace(-1, 1, 3000).view(60, 50), "bias": torch.ones(50)}


def loss_fn(params: Any, x: Any) -> Any:
    return (x @ params["w"] + params["bias"]).square().mean(), {"sum": {"rows": len(x)}}


def batches(rank: int, count: int) -> list[Any]:
    draw = torch.Generator().manual_seed(rank)
    return [torch.randn(4 + rank, 60, generator=draw) for _ in range(count)]


CLIPPED = tx.chain(tx.mean("data"), tx.clip_by_global_norm(0.5))
PIPELINES: dict[str, Callable[[], tx.Pipeline]] = {
    "mean": lambda: tx.fuse(tx.mean("data"), tx.adamw(0.01)),
    "clipped": lambda: tx.fuse(CLIPPED, tx.adamw(0.01)),
    "zero": lambda: tx.zero(CLIPPED, tx.adamw(0.01), "data"),
    "int8": lambda: tx.fuse(tx.error_feedback(tx.compress(tx.int8(), tx.mean("data"))), tx.sgd(0.1)),
    "power_sgd": lambda: tx.fuse(tx.power_sgd("data", 2, min_compression_rate=1.0), tx.sgd(0.1)),
    "average": lambda: tx.fuse(tx.identity(), tx.sgd(0.1), after=tx.average_parameters("data")),
}


def numbers_of(name: str, transport: str) -> Any:
    mesh = fjoin.mesh({"data": -1}, transport=transport)
    step = fjoin.train_step(loss_fn, PIPELINES[name](), mesh=mesh, weight=len)
    state, found = step.init(PARAMS), []
    for i, batch in enumerate(step.join(batches(mesh.rank, 3))):
        state, metrics = step(state, batch)
        read = mesh.traffic.messages
        if i:
            found.append(metrics.as_dict())
        fjoin.show(1, [lambda numbers, number: None])(metrics)
        assert mesh.traffic.messages == read, "a look at the numbers sends nothing"
    step.close()
    return found


@pytest.mark.sample(4)
@pytest.mark.parametrize("transport", ["gloo", "shared"])
@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_sent_bytes_are_those_of_explain(pool: Pool, ranks: int, name: str, transport: str) -> None:
    want = tx.explain(PIPELINES[name](), PARAMS, {"data": ranks}).sent_bytes
    for found in pool.run(ranks, numbers_of, name, transport):
        for numbers in found:
            assert abs(numbers["rank/sent_bytes"] - want) <= 0.02 * want + 64, "pieces are not equal on all ranks"
            assert 0 <= numbers["rank/waited_s"] <= numbers["rank/step_s"] < 60
            assert numbers["ranks"] == ranks and numbers["rows"] == numbers["weight"] == sum(
                4 + r for r in range(ranks)
            )


NORMS = {
    "clipped": CLIPPED, "recorded": tx.chain(tx.mean("data"), tx.record_norm()),
    "before a clip": tx.chain(tx.mean("data"), tx.record_norm(), tx.clip_by_value(0.01)),
    "behind a codec": tx.chain(tx.compress(tx.float32(), tx.mean("data")), tx.record_norm()),
    "of pieces": tx.chain(tx.scatter_mean("data"), tx.record_norm()),
}  # fmt: skip


@pytest.mark.parametrize("name", NORMS)
def test_the_norm_and_the_rates_are_those_of_one_process(name: str) -> None:
    rate, steps = tx.cosine(0.1, 10), 4
    optimizer = tx.partition({("bias", "b"): tx.adamw(0.03), "*": tx.sgd(rate)})

    def one_rank(rank: int) -> Any:
        step = fjoin.train_step(loss_fn, tx.fuse(NORMS[name], optimizer), weight=len)
        state, found = step.init(PARAMS), []
        for batch in step.join(batches(rank, steps)):
            before = {path: p.clone() for path, p in state.params.items()}
            state, metrics = step(state, batch)
            found.append((before, metrics.as_dict("train/")))
        return found

    for i, ((params, numbers), (_, second)) in enumerate(zip(*tx.simulate(one_rank, {"data": 2}, [0, 1]), strict=True)):
        x = torch.cat([batches(rank, steps)[i] for rank in (0, 1)])
        grads = torch.func.grad(lambda p, x: loss_fn(p, x)[0])(params, x)
        norm = torch.linalg.vector_norm(torch.cat([g.reshape(-1) for g in grads.values()]))
        assert numbers["train/grad_norm"] == pytest.approx(float(norm), rel=1e-5)
        assert numbers["train/lr/bias+1"] == 0.03
        assert numbers["train/lr/*"] == pytest.approx(float(rate(torch.tensor(float(i)))))
        assert {k: v for k, v in numbers.items() if "rank/" not in k} == {
            k: v for k, v in second.items() if "rank/" not in k
        }


def test_calls_within_a_window_have_no_numbers() -> None:
    step = fjoin.train_step(loss_fn, PIPELINES["mean"](), accumulate=3)
    state, found, seconds = step.init(PARAMS), [], []
    for batch in batches(0, 6):
        begun = time.perf_counter()
        state, metrics = step(state, batch)
        seconds.append(time.perf_counter() - begun)
        found.append(metrics.as_dict())
    assert found[2]["rank/step_s"] > 0.6 * sum(seconds[:3]), "of all calls of the window"
    assert [bool(numbers) for numbers in found] == [False, False, True] * 2
    assert found[2]["rows"] == 12 and found[5]["lr"] == 0.01


def test_counters_of_steps_that_are_left_out() -> None:
    step, state = step_of(loss_fn, tx.dynamic_loss_scale(PIPELINES["clipped"](), init_scale=8.0), PARAMS)
    state, first = step(state, batches(0, 1)[0])
    state, second = step(state, torch.full((4, 60), torch.inf))
    state, third = step(state, batches(0, 1)[0])
    counted = [(one.as_dict()["skipped"], one.as_dict()["loss_scale"]) for one in (first, second, third)]
    assert counted == [(0, 8), (1, 4), (1, 4)] and "grad_norm" not in second.as_dict()
    assert first.as_dict()["grad_norm"] == third.as_dict()["grad_norm"] or third.as_dict()["grad_norm"] > 0


@pytest.mark.parametrize(
    ("optimizer", "want"),
    [
        (tx.inject_hyperparameters(tx.partition({"w": tx.sgd(0.1), "*": tx.adam(0.2)})), {"lr/w": 0.1, "lr/*": 0.2}),
        (tx.partition({"w": tx.partition({"w": tx.sgd(0.1)}), "*": tx.mixed_precision(tx.sgd(0.3))}), {"lr/w/w": 0.1, "lr/*": 0.3}),
        (tx.mixed_precision(tx.partition({"w": tx.frozen(), "*": tx.lion(lambda step: 0.4)})), {"lr/*": 0.4, "lr": 0.4}),
        (tx.partition({("w", "b", "c"): tx.sgd(0.1), "*": tx.adam(0.1)}), {"lr/w+2": 0.1, "lr/*": 0.1, "lr": 0.1}),
    ],
    ids=str,
)  # fmt: skip
def test_rates_inside_wrappers_and_partitions(optimizer: tx.Optimizer, want: dict[str, float]) -> None:
    """And those that are set while training."""
    step = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), optimizer))
    state, metrics = step(step.init(PARAMS), batches(0, 1)[0])
    assert {name: value for name, value in metrics.as_dict().items() if name.startswith("lr")} == want
    if "inject" in repr(optimizer):
        _, metrics = step(state.with_hyperparameters(lr=0.025), batches(0, 1)[0])
        assert {value for name, value in metrics.as_dict().items() if name.startswith("lr")} == {0.025}


def test_sums_with_the_names_of_other_numbers() -> None:
    def loss(params: Any, x: Any) -> Any:
        return (params["w"] * x).sum(), {"sum": {"loss": 9, "lr": 8, "own": 7}}

    step = fjoin.train_step(loss, tx.fuse(tx.mean("data"), tx.sgd(0.1)))
    _, metrics = step(step.init({"w": torch.ones(2)}), torch.ones(2))
    numbers = metrics.as_dict()
    assert [numbers[name] for name in ("loss", "sum/loss", "lr", "sum/lr", "own")] == [2.0, 9.0, 0.1, 8.0, 7.0]


class Bar:
    def __init__(self) -> None:
        self.shown: list[dict[str, str]] = []

    def set_postfix(self, numbers: dict[str, str]) -> None:
        self.shown.append(numbers)


class Writer:
    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))


def test_show_gives_them_to_lines_bars_writers_and_functions(capsys: pytest.CaptureFixture[str]) -> None:
    bar, writer, calls = Bar(), Writer(), list[Any]()

    def one_rank(rank: int) -> None:
        show = fjoin.show(2, [print, bar, writer, lambda numbers, step: calls.append((numbers, step))], prefix="train/")
        step, state = step_of(loss_fn, PIPELINES["mean"](), PARAMS, weight=len)
        for batch in step.join(batches(rank, 5)):
            state, metrics = step(state, batch)
            show(metrics, {"temperature": 2})

    tx.simulate(one_rank, {"data": 2}, [0, 1])
    assert [step for _, step in calls] == [1, 3]  # on rank 0 only
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[0].startswith("step 1: train/loss ") and "train/temperature 2" in lines[1]
    assert bar.shown[0]["train/weight"] == "9" and ("train/rows", 9.0, 3) in writer.scalars
    assert "train/steps_per_s" not in calls[0][0] and calls[1][0]["train/steps_per_s"] > 0
