"""Buffers as part of the state: kept per rank, averaged or broadcast, by choice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fjoin
from fjoin import transforms as tx
from tests.helpers import judged, max_diff, raises_text, same_bits, seen_by, stepped
from tests.training.small import MEAN_SGD, step_of

F64, NAN = torch.float64, float("nan")
AVERAGE, BROADCAST = tx.average_buffers("data"), tx.broadcast_buffers("data")
CHOICES: dict[str, Any] = {
    "keep": None, "average": AVERAGE, "broadcast": BROADCAST, "every second": tx.every(2, AVERAGE),
    "by path": tx.partition({"*mean": AVERAGE, "*": tx.identity()}),
}  # fmt: skip
SIZES = [[3, 5], [], [4, 2, 6, 2]]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).double()


def batches_of(sizes: list[list[int]]) -> list[list[Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [[torch.randn(n, 4, generator=g, dtype=F64) + i for n in own] for i, own in enumerate(sizes)]


def step_of_model(**settings: Any) -> Any:
    """Learning rate 0, so that the buffers depend on the batches alone."""
    apply, params, buffers = fjoin.functional(make_model())

    def loss_fn(params: Any, buffers: Any, batch: Tensor) -> Any:
        out, new = apply.with_buffers(params, buffers, batch)
        return out.square().mean(), None, new

    return step_of(loss_fn, tx.fuse(tx.mean("data"), tx.sgd(0.0)), params, buffers, weight=len, **settings)


def ours(batches: list[Tensor], choice: str) -> Any:
    """The buffers after each step."""
    step, state = step_of_model(mesh=fjoin.mesh({"data": -1}, ordered=True), on_buffers=CHOICES[choice])
    seen = seen_by(lambda state, _: {path: b.clone() for path, b in state.buffers.items()}, step, state, step.join(batches))  # fmt: skip
    step.close()
    return seen


def reference(sizes: list[list[int]], choice: str) -> Any:
    """One module per rank in one process of plain torch."""
    models, batches = [make_model() for _ in sizes], batches_of(sizes)
    seen: list[list[Any]] = [[] for _ in sizes]
    for i in range(max(map(len, sizes))):
        for model, own in zip(models, batches, strict=True):
            if i < len(own):
                model(own[i])
        since = i - i % 2 if choice == "every second" else i  # the first step that counts in this average
        counted = [r for r, own in enumerate(sizes) if since < len(own)]
        weights = [sum(sizes[r][since : i + 1]) for r in counted]
        due = choice in ("average", "by path") or (choice == "every second" and i % 2)
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            values = [getattr(models[r][1], name).clone() for r in counted]
            if choice == "broadcast":
                value = values[0]
            elif not due or (choice == "by path" and name != "running_mean"):
                continue
            elif values[0].is_floating_point():
                value = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
            else:
                value = max(values)
            for model in models:
                getattr(model[1], name).copy_(value)
        for r, model in enumerate(models):
            seen[r].append({path: b.clone() for path, b in model.named_buffers()})
    return seen


@pytest.mark.parametrize("choice", CHOICES)
def test_buffers_equal_those_of_one_process(pool: Any, choice: str) -> None:
    want = reference(SIZES, choice)
    real = pool.each(ours, batches_of(SIZES), choice)
    simulated = tx.simulate(lambda b: ours(b, choice), {"data": 3}, batches_of(SIZES))
    for own, simulated_own, wanted in zip(real, simulated, want, strict=True):
        assert len(own) == len(wanted) == 4
        assert max_diff(own, wanted) < 1e-14 and same_bits(own, simulated_own)
    if choice in ("average", "broadcast"):
        assert all(same_bits(own, real[0]) for own in real)


# -- any dtype, ranks without weight, and steps that are left out --------------------------------------


def counts_loss(params: Any, buffers: Any, batch: Tensor) -> Any:
    new = {"seen": buffers["seen"] | (batch > 0).any(), "n": buffers["n"] + 1, "x": batch.clone()}
    return (params["w"] * batch).sum(), None, new


def counted(batches: list[float], pipeline: tx.Pipeline = MEAN_SGD, on_device: bool = False, **settings: Any) -> Any:
    """The state after the batches; a batch of 7 has no weight."""
    buffers = {"seen": torch.tensor(False), "n": torch.tensor(0, dtype=torch.int32), "x": torch.zeros(2)}
    step, state = step_of(counts_loss, pipeline, None, buffers, weight=lambda b: float(b[0] != 7), **settings)
    return stepped(judged(step, on_device), state, (torch.full((2,), x) for x in batches))


@pytest.mark.parametrize("transform", [AVERAGE, BROADCAST], ids=repr)
@pytest.mark.parametrize("on_device", [False, True])
def test_any_dtype_and_ranks_without_weight(transform: tx.Transform, on_device: bool) -> None:
    """Values of a rank without weight do not count; bool and int32 keep their dtype."""

    def one_rank(value: float) -> Any:
        state = counted([value, 7.0], on_device=on_device, on_buffers=transform)
        return {path: (b.dtype, b.tolist()) for path, b in state.buffers.items()}

    for out in tx.simulate(one_rank, {"data": 2}, [7.0, 3.0]):
        assert out == {"seen": (torch.bool, True), "n": (torch.int32, 1), "x": (torch.float32, [3.0, 3.0])}


@pytest.mark.parametrize("on_device", [False, True])
def test_a_step_or_window_that_is_skipped_changes_no_buffer(on_device: bool) -> None:
    skips = tx.skip_if_nonfinite(MEAN_SGD)
    for batches, window in (([1.0, NAN, 2.0], 1), ([1.0, 2.0, NAN, 3.0], 2)):
        state = counted(batches, skips, on_device, accumulate=window)
        assert state.buffers["n"] == 2 and state.buffers["x"].tolist() == [2.0, 2.0] and state.pipeline.skipped == 1


# A dtype with the counts, or values, of ranks of weights 1, 1 and 0, and what comes of them.
KINDS = [
    *((dtype, [[5, 1], [torch.iinfo(dtype).max - 1, 1], [torch.iinfo(dtype).max, 1]], [torch.iinfo(dtype).max - 1, 1])
      for dtype in (torch.uint8, torch.int8, torch.uint16, torch.uint32, torch.int64)),
    *((dtype, [[1.0, 4.0], [3.0, -2.0], [NAN, 0.0]], [2.0, 1.0]) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)),
    *((dtype, [[1 + 2j, 4 + 8j], [3 + 6j, -2 - 4j], [9, 9]], [2 + 4j, 1 + 2j]) for dtype in (torch.complex64, torch.complex128)),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "held", "want"), KINDS, ids=lambda v: str(v) if isinstance(v, torch.dtype) else "")
def test_numbers_of_any_kind(dtype: torch.dtype, held: list[Any], want: list[Any]) -> None:
    """Values are averaged; of counts the largest is kept."""

    def one_rank(buffer: Tensor, weight: float) -> Any:
        return AVERAGE.update({"b": buffer.to(dtype)}, (), weight=weight)[0]["b"]

    for out in tx.simulate(one_rank, {"data": 3}, [torch.tensor(v) for v in held], [1.0, 1.0, 0.0]):
        assert out.dtype is dtype and torch.equal(out, torch.tensor(want).to(dtype))


def test_raises_on_bad_input() -> None:
    raises_text(TypeError, lambda: counted([], on_buffers="mean"), "on_buffers", "'mean'")
    raises_text(ValueError, lambda: counted([], on_buffers=tx.accumulate(2, AVERAGE)), "every")
    alone = fjoin.train_step(lambda p, b: (p["w"] * b).sum(), MEAN_SGD, on_buffers=AVERAGE)
    raises_text(ValueError, lambda: alone.init({"w": torch.ones(2)}), "on_buffers", "no buffers")
    large = {"n": torch.tensor([1]).to(torch.uint64)}
    raises_text(TypeError, lambda: tx.simulate(lambda: AVERAGE.update(large, (), weight=1), {"data": 2}), "'n'", "uint64")  # fmt: skip
    count = {"n": torch.tensor(0, dtype=torch.int32)}
    step, state = step_of(lambda p, b, x: ((p["w"] * x).sum(), None, {"n": b["n"].double()}), buffers=count)
    raises_text(ValueError, lambda: step(state, torch.ones(2)), "'n'", "float64", "int32")
    raises_text(
        fjoin.DesyncError, lambda: tx.simulate(lambda of: counted([], on_buffers=of), {"data": 3}, [AVERAGE, AVERAGE, None]),
        "rank 2 differs", "transform of buffers", "None there", "average_buffers('data')",
    )  # fmt: skip


# -- averages over time --------------------------------------------------------------------------------


def test_the_state_of_the_transform_of_buffers_can_be_read() -> None:
    step, state = step_of_model(on_buffers=tx.ema(0.9))
    raises_text(ValueError, lambda: tx.ema_params(state.buffers, state.pipeline), "state.on_buffers")
    model = make_model()
    module = torch.optim.swa_utils.AveragedModel(
        make_model(), multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    for batch in batches_of([[4] * 5])[0]:
        state, _ = step(state, batch)
        model(batch)
        module.update_parameters(model)
    average = tx.ema_params(state.buffers, state.on_buffers)
    torch.testing.assert_close(average["1.running_mean"], module.module[1].running_mean)
    assert any("running_mean" in name for name in tx.to_state_dict(state.on_buffers))
    assert step_of_model()[1].on_buffers == ()
