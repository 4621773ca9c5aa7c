"""Pipelines in torch's fully_shard: each kind of stage against one process on the batches of all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import fjoin
from fjoin import transforms as tx
from tests.fsdp.gpt import Case, frozen_model, full, in_one_process, mesh_of, shard, train
from tests.helpers import max_diff

SGD = tx.sgd(0.1, momentum=0.9)
INT8 = tx.error_feedback(tx.compress(tx.int8(block=4), tx.mean("replicate")))
CLIP = tx.clip_by_global_norm(0.5)
MATRICES = {"blocks.*.up.weight": tx.muon(0.02), "blocks.*.qkv.weight": tx.muon(0.02), "*": SGD}
PARTS = {"*.bias": tx.adamw(0.01), "embed.*": tx.frozen(), "*": SGD}


def fused(*rest: Any, over: Any = "weight", optimizer: Any = SGD, axis: Any = "data", **options: Any) -> tx.Pipeline:
    return tx.fuse(tx.chain(tx.mean(axis, over), *rest), optimizer, **options)


CASES = {
    "late division, clip": Case(lambda: fused(CLIP)),
    "live": Case(lambda: fused(over="live"), over="live"),
    "world": Case(lambda: fused(over="world"), over="world"),
    "an idle rank has NaN": Case(lambda: fused(), idle_nan=True),
    "skip": Case(lambda: tx.skip_if_nonfinite(fused(CLIP)), poisoned=1),
    "loss scale": Case(lambda: tx.dynamic_loss_scale(fused(CLIP), init_scale=8.0, growth_interval=2)),
    "average": Case(lambda: fused(after=tx.ema(0.9))),
    "window, clip": Case(lambda: fused(CLIP), window=2),
    "parts by path": Case(lambda: fused(optimizer=tx.partition(PARTS)), tolerance=1e-10),
    "schedule": Case(lambda: fused(CLIP, optimizer=tx.sgd(tx.linear(0.2, 0.01, 4)))),
    "clip by value, norm": Case(lambda: fused(tx.clip_by_value(0.01), tx.record_norm())),
    "muon": Case(lambda: fused(CLIP, optimizer=tx.partition(MATRICES))),
    "muon, average": Case(lambda: fused(optimizer=tx.partition(MATRICES), after=tx.ema(0.9))),
    "lamb": Case(lambda: fused(optimizer=tx.lamb(0.01)), tolerance=1e-10),
    "adafactor": Case(lambda: fused(optimizer=tx.adafactor(0.01)), tolerance=1e-4),
    "frozen parameters": Case(lambda: fused(CLIP), frozen_model),
    "replicas": Case(lambda: fused(CLIP, axis=("replicate", "data")), replicas=2),
    "replicas, average": Case(lambda: fused(axis=("replicate", "data"), after=tx.ema(0.9)), replicas=2),
    "int8 between replicas": Case(lambda: fused(INT8, optimizer=tx.sgd(0.1)), replicas=2, tolerance=1e-3),
    "local SGD": Case(lambda: tx.local_sgd(SGD, tx.mean("replicate"), every=2, hook=tx.mean("data")), uneven=False, replicas=2),
    "DiLoCo": Case(lambda: tx.diloco(SGD, tx.mean("replicate"), every=2, hook=tx.mean("data")), uneven=False, replicas=2),
}  # fmt: skip


def trained(name: str) -> Any:
    case = CASES[name]
    ranks, rank = dist.get_world_size(), dist.get_rank()
    over, _, mesh = mesh_of(case, ranks)
    model = shard(case.make(), over)
    handle = fjoin.fsdp.register(model, case.pipeline(), mesh=mesh)
    train(model, handle, case, rank, mesh)
    handle.flush()
    averages = {}
    if case.pipeline().after is not None and "average" in name:
        averages = handle.whole(tx.ema_params(handle.params(), handle.pipeline))
    assert not max_diff(handle.whole(handle.params()), {path: full(model)[path] for path in handle.run.leaves})
    return full(model), averages, handle.skipped


# In the long run each case on 2, 3 and 4 ranks.
SHORT = {
    "late division, clip": 3, "an idle rank has NaN": 2, "skip": 3, "loss scale": 2, "window, clip": 3, "parts by path": 2,
    "muon, average": 3, "frozen parameters": 2, "replicas": 4, "int8 between replicas": 4, "local SGD": 4, "DiLoCo": 4,
}  # fmt: skip
ROWS = [
    pytest.param(name, ranks, marks=() if SHORT.get(name) == ranks else pytest.mark.long)
    for name, case in CASES.items()
    for ranks in ((2, 3, 4) if case.replicas == 1 else (4,))
]


@pytest.mark.parametrize(("name", "ranks"), ROWS, ids=str)
def test_a_sharded_model_is_trained_as_in_one_process(pool: Any, name: str, ranks: int) -> None:
    case = CASES[name]
    want = in_one_process(case, ranks)
    start = dict(case.make().named_parameters())
    for rank, (params, averages, skipped) in enumerate(pool.run(ranks, trained, name)):
        new, state = want[rank * case.replicas // ranks]
        for path, p in params.items():
            if path not in new:
                assert torch.equal(p, start[path])
        moved = max_diff(new, {path: start[path].detach() for path in new})
        assert moved > 1e-3 and max_diff({path: params[path] for path in new}, new) < case.tolerance
        if averages:
            assert max_diff(averages, tx.ema_params(new, state)) < case.tolerance
        assert skipped == (case.poisoned is not None)
