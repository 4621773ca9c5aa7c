"""torch's types of communication hooks in modules: results as torch's, announced sizes, torch never called, refused arguments."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from tests.ddp.comm_hook_problem import HOOKS, ONE_OF_EACH, QUANTIZED, TORCHS, TYPES, torchs_state
from tests.ddp.register_problem import EVEN, SMALL
from tests.helpers import max_diff, raises_text, same_bits
from tests.oracle.whole_batch import make_batches, make_model, mean_loss
from tests.traffic import announced, watched


def trained(name: str, whose: str) -> Any:
    ddp = DistributedDataParallel(make_model(dtype=torch.float32), **SMALL)
    handle = None
    if whose == "ours":
        handle = fjoin.ddp.register_ddp_comm_hook(DDPCommHookType[name], ddp, ddp.process_group)
    elif whose == "fused":
        handle = fjoin.ddp.register_ddp_comm_hook(name, ddp, optimizer=tx.sgd(0.1, momentum=0.9))
    elif whose == "torch's":
        hook = TORCHS[name]
        ddp.register_comm_hook(torchs_state(name), (lambda s, bucket: hook(s, bucket)) if "BF16" in name else hook)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)
    for _ in range(2):
        for batch in make_batches(1, EVEN, torch.float32)[dist.get_rank()]:
            ddp.zero_grad()
            mean_loss(ddp, batch).backward()
            if whose != "fused":
                optimizer.step()
    assert handle is None or handle.step == 6
    return {path: p.detach().clone() for path, p in ddp.module.named_parameters()}


# The allowed deviation after six steps, relative to the distance moved.
ROOM = {"FP16_COMPRESS": 2e-3, "BF16_COMPRESS": 0.02, "QUANTIZE_PER_TENSOR": 0.03, "QUANTIZE_PER_CHANNEL": 0.03}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", TYPES)
def test_in_a_module(pool: Any, name: str) -> None:
    """In two buckets from the second pass on: as torch's hook where that runs, near the module without a hook elsewhere."""
    start = {path: p.detach().float() for path, p in make_model().named_parameters()}
    ours, fused = pool.run(2, trained, name, "ours"), pool.run(2, trained, name, "fused")
    plain = pool.run(2, trained, name, "none")[0]
    theirs = pool.run(2, trained, name, "torch's") if name not in QUANTIZED else [plain] * 2
    assert same_bits(ours[0], ours[1]) == (name != "NOOP")
    for mine, stepped, torchs in zip(ours, fused, theirs, strict=True):
        assert max_diff(mine, stepped) < 1e-6
        for path, p in start.items():
            way = (torchs[path] - p).norm()
            assert way > 1e-2 and (mine[path] - torchs[path]).norm() <= ROOM.get(name, 1e-6) * way, path
            if name != "NOOP":
                assert (mine[path] - plain[path]).norm() <= ROOM.get(name, 1e-6) * (plain[path] - p).norm(), path


def uneven(whose: str, over: str) -> Any:
    ddp = DistributedDataParallel(make_model(), **SMALL)
    if whose == "ours":
        handle = fjoin.ddp.register_ddp_comm_hook("ALLREDUCE", ddp, over=over)  # type: ignore[arg-type]
    else:
        ddp.register_comm_hook(None, TORCHS["ALLREDUCE"])
    rank, seen = dist.get_rank(), []
    with TorchJoin([ddp]):
        for batch in make_batches(1, [[3, 2], [5]])[rank]:
            ddp.zero_grad()
            if whose == "ours":
                handle.weight(1 + 2 * rank)
            mean_loss(ddp, batch).backward()
            seen.append(torch.cat([p.grad.flatten() for p in ddp.parameters() if p.grad is not None]))
    return seen


def test_ranks_have_equal_weights_as_in_torch(pool: Any) -> None:
    """All ranks have equal weights, one without input sends zeros; over="weight" uses the ranks' weights."""
    theirs = pool.run(2, uneven, "torch's", "")
    for mine, torchs in zip(pool.run(2, uneven, "ours", "world"), theirs, strict=True):
        assert len(mine) == len(torchs) and all(map(torch.allclose, mine, torchs))
    local = [
        torch.autograd.grad(mean_loss(model, batches[0]), list(model.parameters()))
        for batches in make_batches(1, [[3, 2], [5]])
        for model in [make_model()]
    ]
    want = torch.cat([(a + 3 * b).flatten() / 4 for a, b in zip(*local, strict=True)])
    assert torch.allclose(pool.run(2, uneven, "ours", "weight")[1][0], want)


# -- messages --------------------------------------------------------------------------------------


def messages(name: str) -> Any:
    ddp = DistributedDataParallel(make_model(dtype=torch.float32), **SMALL)
    handle = fjoin.ddp.register_ddp_comm_hook(name, ddp)
    sent: list[Any] = []
    said = [handle.explain()]
    for step, batch in enumerate(make_batches(1, [[2] * 3] * 3, torch.float32)[dist.get_rank()]):
        ddp.zero_grad()
        with watched() as seen:
            mean_loss(ddp, batch).backward()
        sent.append(sorted((one.bytes, one.dtype) for one in seen))
        said.append(handle.explain(at_step=step))
    return sent, [sorted((m.payload_bytes, str(m.dtype)) for m in announced(what)) for what in said]


@pytest.mark.gloo
@pytest.mark.sample(6)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_what_is_announced_is_sent(pool: Any, name: str, ranks: int) -> None:
    """Bytes and dtypes of all messages, by watching torch.distributed: before the first pass for that, then for the last."""
    for sent, said in pool.run(ranks, messages, name):
        assert sent == said[1:] and sent[0] == said[0]
        assert bool(sent[0]) == (name != "NOOP")


# -- names -----------------------------------------------------------------------------------------


def without_torchs(name: str) -> dict[str, Tensor]:
    """With torch's hooks gutted, so that whatever holds them raises."""

    def gone(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("this is torch's hook")

    kept = {hook: hook.__code__ for hook in HOOKS}
    try:
        for hook in HOOKS:
            assert isinstance(hook, types.FunctionType) and not hook.__closure__
            hook.__code__ = gone.__code__
        for hook in HOOKS:
            raises_text(AssertionError, lambda: hook(None, None), "torch's hook")  # noqa: B023
        return trained(name, "ours")
    finally:
        for hook, code in kept.items():
            hook.__code__ = code


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_torch_hooks_are_not_called(pool: Any, name: str) -> None:
    for with_them, without in zip(pool.run(2, trained, name, "ours"), pool.run(2, without_torchs, name), strict=True):
        assert same_bits(with_them, without)


def test_every_torch_hook_type_is_supported() -> None:
    assert len(TYPES) == 10
    for name in TYPES:
        assert fjoin.ddp.comm_hook(name, "x") == fjoin.ddp.comm_hook(DDPCommHookType[name], "x")
    for builtin in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):
        assert fjoin.ddp.comm_hook(builtin) == fjoin.ddp.comm_hook(builtin.name)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given",
    ["ALL_REDUCE", "allreduce", None, 3, torch.float16, TORCHS["ALLREDUCE"]],
    ids=lambda v: getattr(v, "__name__", repr(v)),
)
def test_other_types_are_refused(given: Any) -> None:
    raises_text(TypeError, lambda: fjoin.ddp.comm_hook(given), repr(given), *TYPES)
    raises_text(TypeError, lambda: fjoin.ddp.register_ddp_comm_hook(given, make_model()), *TYPES)  # type: ignore[arg-type]


def refused() -> bool:
    ddp = DistributedDataParallel(make_model())
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    register = fjoin.ddp.register_ddp_comm_hook
    raises_text(ValueError, lambda: register("NOOP", ddp, alone), f"[{dist.get_rank()}]", "[0, 1]")
    raises_text(TypeError, lambda: register("POWER_SGD", ddp, torchs_state("POWER_SGD")), "PowerSGDState", "comm_hook")
    raises_text(TypeError, lambda: register("NOOP", make_model()), "Sequential")  # type: ignore[arg-type]
    raises_text(TypeError, lambda: register("NOOP", ddp, optimizer=torch.optim.SGD), "SGD")  # type: ignore[arg-type]
    raises_text(ValueError, lambda: register("ALLREDUCE", ddp, over="ranks"), "'ranks'")  # type: ignore[arg-type]
    register("NOOP", ddp, dist.new_group([0, 1]))
    raises_text(ValueError, lambda: register("NOOP", ddp), "a communication hook already")
    return True


def test_raises_on_bad_input(pool: Any) -> None:
    assert all(pool.run(2, refused))
    raises_text(ValueError, lambda: fjoin.ddp.post_localSGD_hook(-1), "-1")
    raises_text(ValueError, lambda: fjoin.ddp.post_localSGD_hook(1, subgroup="lokal"), "'lokal'", "('node', 'local')")
    raises_text(ValueError, lambda: fjoin.ddp.quantization_perchannel_hook(bucket_size=0), "bucket_size", "0")
    raises_text(TypeError, lambda: fjoin.ddp.powerSGD_hook(use_error_feedback="no"), "use_error_feedback", "'no'")  # type: ignore[arg-type]
    raises_text(ValueError, lambda: fjoin.ddp.comm_hook("NOOP", over="xx"), "over", "'xx'")  # type: ignore[arg-type]
    raises_text(ValueError, lambda: fjoin.ddp.powerSGD_hook("data"), "matrix_approximation_rank", "'data'")  # type: ignore[arg-type]
