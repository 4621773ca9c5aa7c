"""The presets with the names of torch's hooks: on the same buckets as torch's own, in modules, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType, post_localSGD_hook
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from tests.ddp.comm_hook_problem import HALF, QUANTIZED, SIZES, TORCHS, TYPES, called, holder, own, torchs_state
from tests.ddp.register_problem import EVEN, SMALL
from tests.helpers import max_diff, raises_text, same_bits
from tests.oracle import comm_hooks as oracle
from tests.oracle.whole_batch import make_batches, make_model, mean_loss

# -- buckets ---------------------------------------------------------------------------------------


def by_torch(name: str, kind: str, dtype: torch.dtype) -> list[Tensor]:
    _, params = holder(dtype)
    grads = own(kind, dtype)
    if name not in QUANTIZED:
        return oracle.run(TORCHS[name], torchs_state(name), params, grads)
    raises_text(RuntimeError, lambda: oracle.run(TORCHS[name], None, params, grads), "IndexError")
    with oracle.gathers_as_nccl():
        return oracle.run(TORCHS[name], None, params, grads)


def by_us(name: str, kind: str, dtype: torch.dtype) -> list[Tensor]:
    ddp, params = holder(dtype)
    return called(ddp, fjoin.ddp.register_ddp_comm_hook(name, ddp), params, own(kind, dtype))


def both(pool: Any, name: str, ranks: int, kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """torch's result and ours by bucket, equal on all ranks; the ranks' gradients; their mean."""
    theirs, ours = pool.run(ranks, by_torch, name, kind, dtype), pool.run(ranks, by_us, name, kind, dtype)
    for result in (theirs, ours):
        assert name == "NOOP" or all(same_bits(other, result[0]) for other in result)
    grads = [[oracle.flats(rank, SIZES, kind, dtype)[i] for rank in range(ranks)] for i in range(len(SIZES))]
    means = [sum(flat.double() for flat in bucket) / ranks for bucket in grads]
    return list(zip(theirs[0], ours[0], grads, means, strict=True))


@pytest.mark.sample(2)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", [name for name in TYPES if name not in QUANTIZED])
def test_results_are_exact_without_rounding(pool: Any, name: str, ranks: int) -> None:
    for theirs, ours, grads, mean in both(pool, name, ranks, "whole"):
        want = grads[0].double() if name == "NOOP" else mean
        assert torch.equal(theirs.double(), want) and ours.dtype == theirs.dtype
        if name in HALF and ranks == 3:  # a decoded value is multiplied with a third, which float32 has not
            assert (ours.double() - want).abs().max() < 1e-5
        else:
            assert torch.equal(ours.double(), want)


@pytest.mark.sample(2)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", HALF)
def test_half_precision_hooks_are_more_accurate_than_torch(pool: Any, name: str, ranks: int) -> None:
    """Each value is rounded once, and the mean once more on three ranks; torch rounds quotients and partial sums too."""
    for theirs, ours, grads, mean in both(pool, name, ranks, "any"):
        most = sum(flat.double().abs() for flat in grads) / ranks  # errors are proportional to this
        assert ((ours - mean).abs() <= HALF[name] * (most + (ranks > 2) * most) * 1.01 + 1e-7).all()
        assert ((theirs - mean).abs() <= HALF[name] * 2 * ranks * most + 1e-7).all()
        assert (ours - mean).norm() < (theirs - mean).norm()


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_means(pool: Any, name: str, ranks: int) -> None:
    """On two ranks torch's codes, but where a value is half-way between two. On three, half a step for each rank's codes and half
    a step for the mean's."""
    for theirs, ours, grads, mean in both(pool, name, ranks, "any"):
        steps = sum(map(oracle.step, grads)) / ranks
        assert (theirs - mean).abs().max() < 0.51 * steps
        if ranks == 2:
            off = (ours - theirs).abs()
            assert off.max() < 1.01 * steps and (off > 1e-6).float().mean() < 0.01
        assert (ours - mean).abs().max() < (0.51 if ranks == 2 else 1.02) * steps


def empty_or_zero(name: str) -> Any:
    """In modules of one number, and with gradients that are all zeros."""
    seen = []
    for shape in ((), (1,), (40, 40)):
        ddp = DistributedDataParallel(nn.ParameterList([torch.zeros(shape)]))
        handle = fjoin.ddp.register_ddp_comm_hook(name, ddp)
        params = [list(ddp.module.parameters())]
        for value in (0.0, 1.0 + dist.get_rank()):
            seen += called(ddp, handle, params, [torch.full((params[0][0].numel(),), value)])
    return [(out.numel(), out.min().item(), out.max().item()) for out in seen]


def of_all_types() -> list[Any]:
    return [empty_or_zero(name) for name in TYPES]


def test_single_numbers_and_zero_gradients(pool: Any) -> None:
    for rank, of_types in enumerate(pool.run(2, of_all_types)):
        for name, seen in zip(TYPES, of_types, strict=True):
            want = rank + 1.0 if name == "NOOP" else 1.5
            for (n, low, high), value, size in zip(seen, (0.0, want) * 3, (1, 1, 1, 1, 1600, 1600), strict=True):
                assert n == size and (low, high) == pytest.approx((value, value), abs=1e-2), name


# -- PowerSGD, which reducer/test_wire.py compares with torch's -----------------------------------------


def after_999(name: str) -> Any:
    """The 1000th pass and the next two, with the settings of the types themselves."""
    ddp = DistributedDataParallel(nn.ParameterList([torch.zeros(12, 12)]))
    params, state = [list(ddp.module.parameters())], torchs_state(name)
    handle = fjoin.ddp.register_ddp_comm_hook(name, ddp)
    saved = handle.state_dict()
    assert saved["hook"]["0.inner.step"] == state.iter == 0
    saved["step"] = state.iter = 999
    handle.load_state_dict(saved)
    flat, seen = oracle.flats(dist.get_rank(), [144], "any")[0], []
    for i in range(3):
        seen.append(called(ddp, handle, params, [flat])[0])
        if i and "BATCHED" in name:
            raises_text(AssertionError, lambda: oracle.run(TORCHS[name], state, params, [flat]))
        else:
            seen.append(oracle.run(TORCHS[name], state, params, [flat])[0])
    return seen


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [name for name in TYPES if "POWER" in name])
def test_compression_begins_after_a_thousand_passes(pool: Any, name: str) -> None:
    """Torch's hook does the same or raises. The ranks of the matrices are compared, since random factors differ."""
    (ours, theirs, *later), other = pool.run(2, after_999, name)
    assert torch.equal(ours, theirs) and same_bits([ours, theirs, *later], other)
    assert len(later) == (2 if "BATCHED" in name else 4)
    for result in later:
        assert torch.linalg.matrix_rank(result.view(12, 12), rtol=1e-4) == (2 if "RANK2" in name else 1)
        assert 0.1 < (result - ours).norm() / ours.norm() < 3


# -- post-local SGD --------------------------------------------------------------------------------


def local(whose: str, still: bool) -> list[list[Tensor]]:
    ddp, params = holder()
    mesh = fjoin.mesh({"node": 2, "local": 2})
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    seen = []
    if whose == "ours":
        handle = fjoin.ddp.register(ddp, fjoin.ddp.post_localSGD_hook(2, still), mesh)
        for _ in range(4):
            seen.append(called(ddp, handle, params, own("whole")))
    else:
        state = post_localSGD_hook.PostLocalSGDState(None, pairs[dist.get_rank() // 2], 2, still)
        for _ in range(4):
            seen.append(oracle.run(post_localSGD_hook.post_localSGD_hook, state, params, own("whole")))
    return seen


@pytest.mark.parametrize("still", [True, False], ids=["in the subgroup", "nowhere"])
def test_post_local_sgd(pool: Any, still: bool) -> None:
    """Two passes average over four ranks, then two over pairs; results are bitwise equal to torch's."""
    grads = [oracle.flats(rank, SIZES, "whole") for rank in range(4)]
    ours, theirs = pool.run(4, local, "ours", still), pool.run(4, local, "torch's", still)
    for rank, (mine, torchs) in enumerate(zip(ours, theirs, strict=True)):
        assert same_bits(mine, torchs)
        pair = grads[rank // 2 * 2 : rank // 2 * 2 + 2] if still else [grads[rank]]
        for step, among in enumerate([grads, grads, pair, pair]):
            for i, bucket in enumerate(mine[step]):
                assert torch.equal(bucket, sum(flat[i] for flat in among) / len(among))


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
