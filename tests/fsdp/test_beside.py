"""A sharded module beside what people use with it: evaluation, checkpointed activations, the compiler, mixed precision."""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy

import fjoin
from fjoin import transforms as tx
from fjoin.transforms.base import trees
from tests.fsdp.gpt import (
    VOCABULARY,
    Case,
    full,
    in_one_process,
    loss_of,
    make_batches,
    make_model,
    mesh_of,
    shard,
    tokens,
    train,
)
from tests.helpers import max_diff

CASE = Case(lambda: tx.fuse(tx.chain(tx.mean("data"), tx.clip_by_global_norm(0.5)), tx.sgd(0.1, momentum=0.9)))


def wrapped(kind: str) -> Any:
    model = make_model()
    for i, block in enumerate(model.blocks):
        if kind == "torch's checkpoints":
            model.blocks[i] = checkpoint_wrapper(block)
        elif kind == "our checkpoints":
            model.blocks[i] = fjoin.checkpoint_wrapper(block)
        elif kind == "compiled":
            model.blocks[i] = torch.compile(block, backend="aot_eager", fullgraph=True)
        elif kind == "compiled in place":
            block.compile(backend="aot_eager", fullgraph=True)
    return model


def trained(kind: str) -> Any:
    model = shard(wrapped(kind), mesh_of(CASE, 2)[0])
    handle = fjoin.fsdp.register(model, CASE.pipeline())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler, which looks at gradients
        train(model, handle, CASE, dist.get_rank(), None)
    return handle.whole(handle.params())


KINDS = [
    "torch's checkpoints",
    "our checkpoints",
    *(pytest.param(one, marks=pytest.mark.long) for one in ("compiled", "compiled in place")),
]


@pytest.mark.parametrize("kind", KINDS)
def test_wrapped_blocks_are_trained_alike(pool: Any, kind: str) -> None:
    want = in_one_process(CASE, 2)[0][0]
    for params in pool.run(2, trained, kind):
        assert max_diff(params, want) < 1e-12  # by the names of the blocks inside


def in_bfloat16(masters: bool) -> Any:
    """float32 shards that are gathered as bfloat16; or bfloat16 shards whose optimizer has masters in float32."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if masters else torch.float32
    policy = MixedPrecisionPolicy(None if masters else torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(make_model(dtype=dtype), mesh_of(CASE, 2)[0], mp_policy=policy)
    sgd = tx.sgd(0.1, momentum=0.9)
    handle = fjoin.fsdp.register(model, tx.fuse(tx.mean("data"), tx.mixed_precision(sgd) if masters else sgd))
    train(model, handle, CASE, dist.get_rank(), None)
    assert all(p.dtype is dtype for p in model.parameters())
    return {path: p.float() for path, p in full(model).items()}


@pytest.mark.parametrize("masters", [False, True])
def test_mixed_precision(pool: Any, masters: bool) -> None:
    case = Case(lambda: tx.fuse(tx.mean("data"), tx.sgd(0.1, momentum=0.9)))
    want = {path: p.float() for path, p in in_one_process(case, 2)[0][0].items()}
    start = {path: p.detach().float() for path, p in make_model().named_parameters()}
    for params in pool.run(2, in_bfloat16, masters):
        assert max_diff(params, want) < 0.02 < 0.2 < max_diff(start, want)


def evaluated() -> Any:
    model = shard(make_model(), mesh_of(CASE, 2)[0])
    fjoin.fsdp.register(model, CASE.pipeline())
    none = id((own := make_batches(dist.get_rank()))[1])
    loop = fjoin.join(own, weight=lambda batch: 0 if id(batch) == none else tokens(batch))
    found = fjoin.evaluate(lambda batch: {"loss": loss_of(model, batch), "sum": {"n": tokens(batch)}}, loop)
    return found.means["loss"], found.sums["n"], found.batches


def test_evaluation_of_uneven_inputs(pool: Any) -> None:
    """A rank that is out of input runs the model for the others, and counts no batch twice, nor one of weight 0."""
    batches = [batch for rank in range(2) for i, batch in enumerate(make_batches(rank)) if i != 1]
    model = make_model()
    total = sum(map(tokens, batches))
    mean = sum(tokens(batch) * loss_of(model, batch).item() for batch in batches) / total
    for found in pool.run(2, evaluated):
        assert found == (pytest.approx(mean, rel=1e-12), total, len(batches))


def looked_at() -> Any:
    """Torch leaves the root whole behind a forward pass, for a backward pass; here it runs beside all changes."""
    model = shard(make_model(), mesh_of(CASE, 2)[0])

    def look() -> float:
        with torch.no_grad():
            return float(loss_of(model, make_batches(0)[0]))

    look()
    handle, seen = fjoin.fsdp.register(model, CASE.pipeline()), []
    for batch in (loop := fjoin.join(make_batches(dist.get_rank()), weight=tokens)):
        handle.backward(loss_of(model, batch), loop.weight)
        look()
        handle.step()
        seen.append(look())
    whole = handle.whole(handle.params())
    handle.run.take([(p, torch.zeros_like(p)) for p in handle.run.local().values()], handle.pipeline)
    return whole, seen, look()


def test_a_look_at_the_loss_changes_nothing(pool: Any) -> None:
    want, model, zero = in_one_process(CASE, 2)[0][0], make_model(), torch.log(torch.tensor(float(VOCABULARY)))
    with torch.no_grad():
        for path, p in model.named_parameters():
            p.copy_(want[path])
    for params, seen, last in pool.run(2, looked_at):
        assert max_diff(params, want) < 1e-12 and last == pytest.approx(float(zero))
        assert seen[-1] == pytest.approx(loss_of(model, make_batches(0)[0]).item(), rel=1e-12)


def looked_at_by_torch() -> Any:
    model, found = shard(make_model(), mesh_of(CASE, 2)[0]), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in make_batches(0, False)[:2]:
        loss = loss_of(model, batch)
        found.append(loss.item())
        loss.backward()
        with torch.no_grad():
            loss_of(model, batch)
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_a_look_between_backward_and_step_is_a_fault_of_torch(pool: Any) -> None:
    """The root computes the next batch with the parameters of before, without a word."""
    model, want = make_model(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in make_batches(0, False)[:2]:
        loss = loss_of(model, batch)
        want.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for first, second in pool.run(2, looked_at_by_torch):
        assert first == pytest.approx(want[0], rel=1e-12) and abs(second - want[1]) > 1e-3


def after_a_slip() -> Any:
    model = shard(make_model(), mesh_of(CASE, 2)[0])
    handle = fjoin.fsdp.register(model, CASE.pipeline())
    with pytest.raises(RuntimeError, match="call handle.backward"):
        loss_of(model, make_batches(0)[0]).backward()
    train(model, handle, CASE, dist.get_rank(), None)
    return handle.whole(handle.params())


def test_a_backward_pass_without_the_handle_leaves_the_module_usable(pool: Any) -> None:
    want = in_one_process(CASE, 2)[0][0]
    for params in pool.run(2, after_a_slip):
        assert max_diff(params, want) < 1e-12


def mixed() -> Any:
    """The loss of a rank depends on the logits of all ranks, so its backward pass mixes the ranks' losses."""
    mesh = fjoin.mesh({"data": -1})
    model = shard(make_model(), mesh_of(CASE, 2)[0])
    handle = fjoin.fsdp.register(model, CASE.pipeline(), mesh=mesh)
    batch = make_batches(dist.get_rank())[0]
    with fjoin.bind(mesh):
        logits = model(batch[0])
        mean = tx.psum(tokens(batch) * logits.mean((0, 1)), "data") / tx.psum(float(tokens(batch)), "data")
        loss = torch.nn.functional.cross_entropy((logits - mean).flatten(0, 1), batch[1])
        handle.backward(loss, tokens(batch))
    handle.step()
    return full(model)


def test_a_loss_that_communicates_carries_the_weight(pool: Any) -> None:
    model, batches = make_model(), [make_batches(rank)[0] for rank in range(2)]
    total, logits = sum(map(tokens, batches)), [model(batch[0]) for batch in batches]
    mean = sum(tokens(batch) * each.mean((0, 1)) for batch, each in zip(batches, logits, strict=True)) / total
    losses = [
        torch.nn.functional.cross_entropy((x - mean).flatten(0, 1), y)
        for x, (_, y) in zip(logits, batches, strict=True)
    ]
    sum(loss * (tokens(batch) / total) for loss, batch in zip(losses, batches, strict=True)).backward()  # type: ignore[union-attr]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    torch.optim.SGD(model.parameters(), 0.1).step()
    want = {path: p.detach() for path, p in model.named_parameters()}
    for params in pool.run(2, mixed):
        assert max_diff(params, want) < 1e-12


def judged_on_a_device() -> Any:
    """As on a device: the host reads no number of a step before the next one."""
    model = shard(make_model(), mesh_of(CASE, 2)[0])
    handle, batch = fjoin.fsdp.register(model, CASE.pipeline()), make_batches(0)[0]
    with mock.patch.object(trees, "readable_without_sync", lambda x: False):
        train(model, handle, CASE, dist.get_rank(), None)
        trained = full(model)
        handle.backward(loss_of(model, batch) * (float("nan") if dist.get_rank() else 1.0))
        handle.step()
    kept = full(model)
    handle.backward(loss_of(model, batch))
    with pytest.raises(fjoin.NonFinite, match="step 5"):
        handle.step()
    return trained, kept


def test_a_device_tells_one_step_later(pool: Any) -> None:
    want = in_one_process(CASE, 2)[0][0]
    for trained, kept in pool.run(2, judged_on_a_device):
        assert max_diff(trained, want) < 1e-12 and not max_diff(trained, kept)
