"""torch's types of communication hooks in modules: results as torch's, refused arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from tests.ddp.comm_hook_problem import QUANTIZED, TORCHS, TYPES, torchs_state
from tests.ddp.register_problem import EVEN, SMALL
from tests.helpers import max_diff, raises_text, same_bits
from tests.oracle.whole_batch import make_batches, make_model, mean_loss


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
    for batch in make_batches(1, EVEN, torch.float32)[dist.get_rank()] * 2:
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


# -- names -----------------------------------------------------------------------------------------


def test_every_torch_hook_type_is_supported() -> None:
    assert len(TYPES) == 10
    for name in TYPES:
        assert fjoin.ddp.comm_hook(name, "x") == fjoin.ddp.comm_hook(DDPCommHookType[name], "x")
    for builtin in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):
        assert fjoin.ddp.comm_hook(builtin) == fjoin.ddp.comm_hook(builtin.name)  # type: ignore[arg-type]


def test_other_types_are_refused() -> None:
    for given in ("ALL_REDUCE", "allreduce", None, 3, torch.float16, TORCHS["ALLREDUCE"]):
        for call in (fjoin.ddp.comm_hook, lambda kind: fjoin.ddp.register_ddp_comm_hook(kind, make_model())):
            raises_text(TypeError, lambda: call(given), repr(given), *TYPES)  # type: ignore[arg-type]  # noqa: B023


def refused() -> None:
    ddp, rank = DistributedDataParallel(make_model()), dist.get_rank()
    alone, state = [dist.new_group([r]) for r in range(2)][rank], torchs_state("POWER_SGD")
    for args, over, kind, *texts in (
        (("NOOP", ddp, alone), {}, ValueError, f"[{rank}]", "[0, 1]"),
        (("POWER_SGD", ddp, state), {}, TypeError, "PowerSGDState", "comm_hook"),
        (("NOOP", ddp), {"optimizer": torch.optim.SGD}, TypeError, "SGD"), (("ALLREDUCE", ddp), {"over": "ranks"}, ValueError, "'ranks'"),
    ):  # fmt: skip
        raises_text(kind, lambda: fjoin.ddp.register_ddp_comm_hook(*args, **over), *texts)  # type: ignore[arg-type]  # noqa: B023
    fjoin.ddp.register_ddp_comm_hook("NOOP", ddp, dist.new_group([0, 1]))
    raises_text(ValueError, lambda: fjoin.ddp.register_ddp_comm_hook("NOOP", ddp), "a communication hook already")


def test_raises_on_bad_input(pool: Any) -> None:
    pool.run(2, refused)
    raises_text(ValueError, lambda: fjoin.ddp.post_localSGD_hook(1, subgroup="lokal"), "'lokal'", "('node', 'local')")
    raises_text(TypeError, lambda: fjoin.ddp.powerSGD_hook(use_error_feedback="no"), "use_error_feedback", "'no'")  # type: ignore[arg-type]
    raises_text(ValueError, lambda: fjoin.ddp.comm_hook("NOOP", over="xx"), "over", "'xx'")  # type: ignore[arg-type]
