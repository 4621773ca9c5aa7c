"""What a sharded module refuses, on all ranks; and what works beside it: evaluation, checkpoints of activations, the compiler."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import fjoin
from fjoin import transforms as tx
from tests.fsdp.gpt import full, loss_of, make_batches, make_model, shard
from tests.helpers import max_diff, raises_text

SGD, MEAN = tx.sgd(0.1), tx.mean("data")
PLAIN = tx.fuse(MEAN, SGD)
register = fjoin.fsdp.register


def over(*dims: int) -> Any:
    names = ("replicate", "data")[-len(dims) :]
    return init_device_mesh("cpu", dims, mesh_dim_names=names)


def sharded(**options: Any) -> Any:
    return shard(make_model(), over(2), **options)


def handle(pipeline: tx.Pipeline = PLAIN, **options: Any) -> Any:
    model = sharded(**options)
    return model, register(model, pipeline)


def loss(model: Any) -> Any:
    return loss_of(model, make_batches(0, False)[0])


def in_part() -> None:
    model = make_model()
    fully_shard(model.blocks[0], mesh=over(2))
    fully_shard(model, mesh=over(2), ignored_params={model.head.weight})
    register(model, PLAIN)


def over_two() -> None:
    model = make_model()
    fully_shard(model.blocks[0], mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("other",)))
    fully_shard(model, mesh=over(2))
    register(model, PLAIN)


def in_columns() -> None:
    model = torch.nn.Linear(4, 4, bias=False)
    fully_shard(model, mesh=over(2), shard_placement_fn=lambda p: Shard(1))
    register(model, PLAIN)


def stepped_by_torch() -> None:
    model, _ = handle()
    torch.optim.SGD(model.parameters(), 0.1).step()


def plain_backward() -> None:
    model, _ = handle()
    loss(model).backward()


def stepped(*syncs: bool, twice: bool = False, closed: bool = False) -> None:
    model, one = handle()
    if closed:
        one.close()
    for sync in syncs:
        one.backward(loss(model), 1.0, sync=sync)
    one.step()
    if twice:
        one.step()


def in_float16() -> None:
    model, one = handle(mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
    one.backward(loss(model).float())


def not_finite() -> None:
    model, one = handle()
    one.backward(loss(model) * (float("nan") if dist.get_rank() else 1.0))
    before = full(model)
    try:
        one.step()
    finally:
        assert not max_diff(full(model), before)


def other_pipelines() -> None:
    register(sharded(), tx.fuse(MEAN, tx.sgd(0.1 + dist.get_rank())))


def twice() -> None:
    model, one = handle()
    one.close()
    register(model, PLAIN)
    register(model, PLAIN)


def weighed(weight: Any, dtype: torch.dtype = torch.float64) -> None:
    model, one = handle()
    one.backward(loss(model).to(dtype), weight)


def flushed_apart() -> None:
    _, one = handle()
    one.run.state = one.run.state._replace(step=dist.get_rank())
    one.flush()


def in_a_step() -> None:
    step = fjoin.train_step(lambda params, batch: params["w"].sum(), tx.fuse(MEAN, SGD, sharded_over="data"))
    step.init({"w": torch.ones(2)})


def in_windows(*syncs: bool) -> None:
    model, one = handle(tx.fuse(tx.mean("data", "live"), SGD))
    for sync in syncs:
        one.backward(loss(model), sync=sync)


def not_finite_of_live() -> None:
    model, one = handle(tx.fuse(tx.mean("data", "live"), SGD))
    one.backward(loss(model) * (float("nan") if dist.get_rank() else 1.0))
    one.step()


def dropped_between() -> None:
    model, one = handle()
    one.backward(loss(model))
    model.zero_grad()
    one.backward(loss(model))


def frozen_after() -> None:
    model, one = handle()
    model.head.weight.requires_grad_(False)
    one.backward(loss(model))
    one.step()


def saved_within(folder: str) -> None:
    model, one = handle()
    one.backward(loss(model), sync=False)
    fjoin.save(folder, {"model": one}, 0)


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return (self.b if dist.get_rank() else self.a)(x).square().sum() * 1.0


def other_experts() -> None:
    model = fully_shard(Experts(), mesh=over(2))
    one = register(model, PLAIN)
    one.backward(model(torch.ones(3, 4)))
    one.step()


def flushed_when_closed() -> None:
    _, one = handle()
    one.close()
    one.close()
    one.flush()


def whole_of_another() -> None:
    _, one = handle()
    one.whole({"other": torch.ones(2)})


V, T, R = ValueError, TypeError, RuntimeError
ROWS: list[tuple[Callable[[], Any], type[Exception], tuple[str, ...]]] = [
    (lambda: register(make_model(), PLAIN), T, ("after fully_shard(model)", "GPT")),
    (in_part, T, ("'head.weight' is trained, but not sharded", "ignored_params")),
    (over_two, T, ("other=2", "shard over one mesh")),
    (in_columns, T, ("'weight' has the placement", "shard_placement_fn")),
    (lambda: register(shard(make_model(), over(1, 2)), PLAIN), T, ("a mesh of 2 dims", "grid['data']", "mean(('replicate', 'data'))")),
    (lambda: register(sharded(), MEAN), T, ("takes a pipeline", "mean('data')", "fuse")),
    (lambda: register(sharded(), tx.fuse(tx.mean(("data", "b")), SGD)), V, ("the axes ['b', 'data']", "mesh=")),
    (lambda: register(sharded(), PLAIN, mesh=fjoin.mesh({"a": 2, "b": 1})), V, ("must begin with mean('a')",)),
    (lambda: register(sharded(), PLAIN, mesh=3), T, ("mesh must be a Mesh", "3")),
    (lambda: register(sharded(), tx.zero(MEAN, SGD, "data")), V, ("must begin with mean('data')", "scatter_mean")),
    (lambda: register(sharded(), tx.fuse(tx.compress(tx.int8(), MEAN), SGD)), V, ("must begin with mean('data')", "compress")),
    (lambda: register(sharded(), tx.fuse(tx.accumulate(2, MEAN), SGD)), V, ("must begin with mean('data')",)),
    (lambda: register(sharded(), tx.fuse(tx.chain(MEAN, tx.power_sgd("data")), SGD)), V, ("communicates over 'data' behind",)),
    (lambda: register(sharded(), tx.local_sgd(SGD, MEAN, every=2)), V, ("must begin with mean('data')", "identity")),
    (stepped_by_torch, R, ("SGD steps 'scale'", "fjoin.fsdp.register steps already")),
    (plain_backward, R, ("handle.backward(loss, weight)",)),
    (lambda: stepped(), R, ("handle.backward(loss, weight) before each step",)),
    (lambda: stepped(True, twice=True), R, ("before each step",)),
    (lambda: stepped(False), R, ("sync=True",)),
    (lambda: stepped(True, False), R, ("sync=True",)),
    (lambda: stepped(True, closed=True), R, ("closed", "register the module again")),
    (in_float16, T, ("float16", "reduce_dtype")),
    (twice, V, ("registered already", "close()")),
    (lambda: register(handle()[0].blocks[0], PLAIN), V, ("or a part of it", "registered already")),
    (lambda: in_windows(False), V, ("over='weight'",)),
    (lambda: in_windows(True, True), V, ("over='weight'",)),
    (not_finite_of_live, fjoin.NonFinite, ("step 0", "skip_if_nonfinite")),
    (dropped_between, R, ("no parameter has a gradient", "zero_grad()")),
    (frozen_after, R, ("'head.weight' was frozen after", "tx.frozen()")),
    (lambda: saved_within("never"), R, ("within a window", "after handle.step()")),
    (other_experts, fjoin.DesyncError, ("parameters without a gradient", "set_reduce_scatter_unused_params")),
    (flushed_when_closed, R, ("this handle was closed",)),
    (whole_of_another, V, ("'other' is no parameter",)),
    (lambda: weighed(-1.0), V, ("weight", "-1.0")),
    (lambda: weighed("x"), T, ("weight", "'x'")),
    (lambda: weighed(3.0, torch.bfloat16), V, ("bfloat16", "float32")),
    (not_finite, fjoin.NonFinite, ("step 0", "skip_if_nonfinite")),
    (other_pipelines, fjoin.DesyncError, ("rank 1 differs from rank 0 in its pipeline", "sgd(lr=1.1)")),
    (flushed_apart, fjoin.DesyncError, ("handle.flush", "step")),
    (in_a_step, T, ("sharded_over", "loop of one's own")),
    (lambda: fjoin.Join([sharded()]), V, ("FSDPGPT", "fjoin.join(loader)")),
]  # fmt: skip


def refused(i: int) -> str:
    call, kind, words = ROWS[i]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return raises_text(kind, call, *words)


@pytest.mark.parametrize("i", range(len(ROWS)))
def test_it_is_refused_on_all_ranks(pool: Any, i: int) -> None:
    pool.run(2, refused, i)
