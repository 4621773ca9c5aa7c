"""Buffers as part of the state: kept per rank, averaged or broadcast, by choice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fjoin
from fjoin import transforms as tx
from tests.helpers import max_diff, raises_text, same_bits, stepped

F64 = torch.float64
CHOICES: dict[str, Any] = {
    "keep": None, "average": lambda: tx.average_buffers("data"), "broadcast": lambda: tx.broadcast_buffers("data"),
    "every second": lambda: tx.every(2, tx.average_buffers("data")),
    "by path": lambda: tx.partition({"*mean": tx.average_buffers("data"), "*": tx.identity()}),
}  # fmt: skip
SIZES = [[3, 5], [], [4, 2, 6, 2]]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).double()


def batches_of(sizes: list[list[int]]) -> list[list[Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [[torch.randn(n, 4, generator=g, dtype=F64) + i for n in own] for i, own in enumerate(sizes)]


def ours(batches: list[Tensor], choice: str) -> Any:
    """The buffers after each step; learning rate 0, so that they depend on the batches alone."""
    apply, params, buffers = fjoin.functional(make_model())

    def loss_fn(params: Any, buffers: Any, batch: Tensor) -> Any:
        out, new = apply.with_buffers(params, buffers, batch)
        return out.square().mean(), None, new

    step = fjoin.train_step(
        loss_fn, tx.fuse(tx.mean("data"), tx.sgd(0.0)), mesh=fjoin.mesh({"data": -1}, ordered=True), weight=len,
        on_buffers=CHOICES[choice] and CHOICES[choice](),
    )  # fmt: skip
    state, seen = step.init(params, buffers), []
    for batch in step.join(batches):
        state, _ = step(state, batch)
        seen.append({path: b.clone() for path, b in state.buffers.items()})
    step.close()
    return seen


def on_processes(sizes: list[list[int]], choice: str) -> Any:
    return ours(batches_of(sizes)[dist.get_rank()], choice)


def reference(sizes: list[list[int]], choice: str) -> Any:
    """One module per rank in one process of plain torch."""
    models, batches = [make_model() for _ in sizes], batches_of(sizes)
    seen: list[list[Any]] = [[] for _ in sizes]
    for i in range(max(map(len, sizes))):
        live = [r for r, own in enumerate(sizes) if i < len(own)]
        for r in live:
            models[r](batches[r][i])
        norms = [model[1] for model in models]
        since = i - i % 2 if choice == "every second" else i  # the first step that counts in this average
        counted = [r for r, own in enumerate(sizes) if since < len(own)]
        weights = [sum(sizes[r][since : i + 1]) for r in counted]
        with torch.no_grad():
            for name in ("running_mean", "running_var"):
                values = [getattr(norms[r], name).clone() for r in counted]
                mean = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
                if (
                    choice == "average"
                    or (choice == "every second" and i % 2)
                    or (choice, name) == ("by path", "running_mean")
                ):
                    for norm in norms:
                        getattr(norm, name).copy_(mean)
                if choice == "broadcast":
                    for norm in norms:
                        getattr(norm, name).copy_(values[0])
            counts = [int(norms[r].num_batches_tracked) for r in counted]
            if choice == "broadcast" or choice == "average" or (choice == "every second" and i % 2):
                for norm in norms:
                    norm.num_batches_tracked.fill_(counts[0] if choice == "broadcast" else max(counts))
        for r, model in enumerate(models):
            seen[r].append({path: b.clone() for path, b in model.named_buffers()})
    return seen


@pytest.mark.parametrize("choice", CHOICES)
def test_buffers_equal_those_of_one_process(pool: Any, choice: str) -> None:
    want = reference(SIZES, choice)
    real = pool.run(3, on_processes, SIZES, choice)
    simulated = tx.simulate(lambda b: ours(b, choice), {"data": 3}, batches_of(SIZES))
    for own, simulated_own, wanted in zip(real, simulated, want, strict=True):
        assert len(own) == len(wanted) == 4
        assert max_diff(own, wanted) < 1e-14 and same_bits(own, simulated_own)
    if choice in ("average", "broadcast"):
        assert all(same_bits(own, real[0]) for own in real)


def counts_loss(params: Any, buffers: Any, batch: Tensor) -> Any:
    new = {"seen": buffers["seen"] | (batch > 0).any(), "n": buffers["n"] + 1, "x": batch.clone()}
    return (params["w"] * batch).sum(), None, new


def counting(pipeline: tx.Pipeline, **settings: Any) -> Any:
    step = fjoin.train_step(counts_loss, pipeline, weight=lambda b: float(b[0] != 7), **settings)
    buffers = {"seen": torch.tensor(False), "n": torch.tensor(0, dtype=torch.int32), "x": torch.zeros(2)}
    return step, step.init({"w": torch.ones(2)}, buffers)


@pytest.mark.parametrize("transform", [tx.average_buffers("data"), tx.broadcast_buffers("data")], ids=repr)
@pytest.mark.parametrize("on_device", [False, True])
def test_any_dtype_and_ranks_without_weight(transform: tx.Transform, on_device: bool) -> None:
    """Values of a rank without weight do not count; bool and int32 keep their dtype."""

    def one_rank(value: float) -> Any:
        step, state = counting(tx.fuse(tx.mean("data"), tx.sgd(0.1)), on_buffers=transform)
        step.run.step_check.grads.on_device = on_device
        state = stepped(step, state, (torch.full((2,), x) for x in (value, 7.0)))
        return {path: (b.dtype, b.tolist()) for path, b in state.buffers.items()}

    for out in tx.simulate(one_rank, {"data": 2}, [7.0, 3.0]):
        assert out == {"seen": (torch.bool, True), "n": (torch.int32, 1), "x": (torch.float32, [3.0, 3.0])}


@pytest.mark.parametrize("on_device", [False, True])
def test_skipped_step_changes_no_buffer(on_device: bool) -> None:
    step, state = counting(tx.skip_if_nonfinite(tx.fuse(tx.mean("data"), tx.sgd(0.1))))
    step.run.step_check.grads.on_device = on_device
    state = stepped(step, state, (torch.full((2,), x) for x in (1.0, float("nan"), 2.0)))
    assert state.buffers["n"] == 2 and state.buffers["x"].tolist() == [2.0, 2.0] and state.pipeline.skipped == 1


@pytest.mark.parametrize("on_device", [False, True])
def test_skipped_window_changes_no_buffer(on_device: bool) -> None:
    step, state = counting(tx.skip_if_nonfinite(tx.fuse(tx.mean("data"), tx.sgd(0.1))), accumulate=2)
    step.run.step_check.grads.on_device = on_device
    state = stepped(step, state, (torch.full((2,), x) for x in (1.0, 2.0, float("nan"), 3.0)))
    assert state.buffers["n"] == 2 and state.buffers["x"].tolist() == [2.0, 2.0]
    step, state = counting(tx.fuse(tx.mean("data"), tx.sgd(0.1)), accumulate=2)
    state, _ = step(state, torch.full((2,), float("nan")))
    raises_text(fjoin.NonFinite, lambda: step(state, torch.ones(2)), "loss")
    assert state.buffers["n"] == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_average_of_equal_buffers_is_exact(dtype: torch.dtype) -> None:
    """This holds for all weights and values up to the largest number of the dtype."""
    values = torch.tensor([1.0, 30.0, 0.1, torch.finfo(dtype).min]).to(dtype)

    def one_rank(weight: float) -> Any:
        return tx.average_buffers("data").update(values, (), weight=weight)[0]

    for weights in ([4096.0, 257.0, 3.0], [1e-8, 0.0, 1e-9]):
        assert all(torch.equal(out, values) for out in tx.simulate(one_rank, {"data": 3}, weights))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_numbers_of_any_kind_are_averaged(dtype: torch.dtype) -> None:
    factor = 1 + 2j if dtype.is_complex else 1
    held = [(torch.tensor(v) * factor).to(dtype) for v in ([1.0, 4.0], [3.0, -2.0])]

    def one_rank(buffer: Tensor, weight: float) -> Any:
        return tx.average_buffers("data").update({"b": buffer}, (), weight=weight)[0]["b"]

    for out in tx.simulate(one_rank, {"data": 2}, held, [1.0, 1.0]):
        assert torch.equal(out, (torch.tensor([2.0, 1.0]) * factor).to(dtype))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.uint16, torch.uint32, torch.int64], ids=str)
def test_counts_of_any_kind_become_the_largest(dtype: torch.dtype) -> None:
    most = torch.iinfo(dtype).max

    def one_rank(count: int, weight: float) -> Any:
        return tx.average_buffers("data").update(torch.tensor([count, 1]).to(dtype), (), weight=weight)[0]

    for out in tx.simulate(one_rank, {"data": 3}, [5, most - 1, most], [1.0, 1.0, 0.0]):
        assert out.dtype is dtype and out.tolist() == [most - 1, 1]


def test_raises_on_bad_input() -> None:
    pipeline = tx.fuse(tx.mean("data"), tx.sgd(0.1))
    raises_text(TypeError, lambda: counting(pipeline, on_buffers="mean"), "on_buffers", "'mean'")
    raises_text(ValueError, lambda: counting(pipeline, on_buffers=tx.accumulate(2, tx.average_buffers("data"))), "every")  # fmt: skip

    alone = fjoin.train_step(lambda p, b: (p["w"] * b).sum(), pipeline, on_buffers=tx.average_buffers("data"))
    raises_text(ValueError, lambda: alone.init({"w": torch.ones(2)}), "on_buffers", "no buffers")

    large = torch.tensor([1]).to(torch.uint64)
    raises_text(TypeError, lambda: tx.simulate(
        lambda: tx.average_buffers("data").update({"n": large}, (), weight=1)[0], {"data": 2}), "'n'", "uint64")  # fmt: skip

    step, state = counting(pipeline)
    step.run.passes._loss._loss_fn = lambda p, b, x: ((p["w"] * x).sum(), None, {**b, "n": b["n"].double()})
    raises_text(ValueError, lambda: step(state, torch.ones(2)), "'n'", "float64", "int32")

    def other_choices(mine: bool) -> None:
        counting(pipeline, on_buffers=tx.average_buffers("data") if mine else None)

    raises_text(
        fjoin.DesyncError, lambda: tx.simulate(other_choices, {"data": 3}, [True, True, False]),
        "rank 2 differs", "transform of buffers", "None there", "average_buffers('data')",
    )  # fmt: skip


def test_the_state_of_the_transform_of_buffers_can_be_read() -> None:
    apply, params, buffers = fjoin.functional(make_model())

    def loss_fn(params: Any, buffers: Any, batch: Tensor) -> Any:
        out, new = apply.with_buffers(params, buffers, batch)
        return out.square().mean(), None, new

    data = batches_of([[4] * 5])[0]
    step = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.sgd(0.0)), on_buffers=tx.ema(0.9))
    state = step.init(params, buffers)
    raises_text(ValueError, lambda: tx.ema_params(state.buffers, state.pipeline), "state.on_buffers")
    module = torch.optim.swa_utils.AveragedModel(
        make_model(), multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    model = make_model()
    for batch in data:
        state, _ = step(state, batch)
        model(batch)
        module.update_parameters(model)
    average = tx.ema_params(state.buffers, state.on_buffers)
    torch.testing.assert_close(average["1.running_mean"], module.module[1].running_mean)
    names = tx.to_state_dict(state.on_buffers)
    assert any("running_mean" in name for name in names)
    plain = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.sgd(0.0)))
    assert plain.init(params, buffers).on_buffers == ()


EQUAL = {
    "average": lambda: tx.average_buffers("data"),
    "broadcast": lambda: tx.broadcast_buffers("data"),
    "by path": lambda: tx.partition({"*mean": tx.average_buffers("data"), "*": tx.broadcast_buffers("data")}),
}


@pytest.mark.parametrize("how", EQUAL)
def test_an_average_over_time_behind_one_over_ranks_is_equal_on_all_ranks(how: str) -> None:
    """A rank that is out of input gets new buffers too, so its average over time goes on."""

    def one_rank(batches: list[Tensor]) -> Any:
        def loss_fn(params: Any, buffers: Any, batch: Tensor) -> Any:
            new = {path: b + batch.mean() for path, b in buffers.items()}
            return (params["w"] * batch).sum(), None, new

        step = fjoin.train_step(
            loss_fn, tx.fuse(tx.mean("data"), tx.sgd(0.0)), weight=len, on_buffers=tx.chain(EQUAL[how](), tx.ema(0.5))
        )
        start = {"mean": torch.zeros((), dtype=F64), "other": torch.zeros((), dtype=F64)}
        state, want = step.init({"w": torch.zeros(4, dtype=F64)}, start), None
        for batch in step.join(batches):
            state, _ = step(state, batch)
            want = {path: b if want is None else 0.5 * want[path] + 0.5 * b for path, b in state.buffers.items()}
        return tx.ema_params(state.buffers, state.on_buffers), want

    for average, want in tx.simulate(one_rank, {"data": 3}, batches_of(SIZES)):
        assert max_diff(average, want) < 1e-14 and float(want["mean"]) != 0
