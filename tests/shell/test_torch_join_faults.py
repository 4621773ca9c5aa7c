"""Faults of torch's Join with its own joinables, and ours without them. Where a test fails, torch has been mended."""

from __future__ import annotations

import contextlib
import datetime
import warnings
from typing import Any

import torch
import torch.distributed as dist
from ranks import Ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

import fjoin

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, of torch.jit
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer


def scalar() -> DistributedDataParallel:
    """y = w x with w = 0 and float64: the gradient of w is the input."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    return DistributedDataParallel(model)


def weight(ddp: DistributedDataParallel) -> float:
    return float(ddp.module.weight.item())


def x(value: float) -> torch.Tensor:
    return torch.tensor([[value]], dtype=torch.float64)


def joined(kind: str, joinables: list[Any], **kwargs: Any) -> Any:
    """torch's Join takes no plain optimizers; ours is given them."""
    if kind == "torch":
        return Join([j for j in joinables if hasattr(j, "join_hook")], **kwargs)
    return fjoin.Join(joinables, **kwargs)


def after_the_context(kind: str) -> tuple[int, bool]:
    """All-reduces of one iteration after the context has ended."""
    ddp = scalar()
    optimizer = torch.optim.SGD(ddp.parameters(), 1.0)
    with joined(kind, [ddp, optimizer]):
        for _ in range(3):
            ddp(x(1.0)).backward()
    sent = 0
    kept = dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal sent
        sent += 1
        return kept(*args, **kwargs)

    dist.all_reduce = counted
    try:
        ddp(x(1.0)).backward()
    finally:
        dist.all_reduce = kept
    with contextlib.suppress(KeyError), joined(kind, [ddp, optimizer]):
        raise KeyError
    return sent, ddp._join_config.enable


def test_j1_the_configuration_stays_after_the_context(pool: Any) -> None:
    """torch's module goes on sending the messages of a Join, its count and its flag, in every later iteration."""
    assert pool.run(2, after_the_context, "torch") == [(2, True)] * 2
    assert pool.run(2, after_the_context, "fjoin") == [(0, False)] * 2


def stale_gradient(kind: str) -> float:
    """The documented example. Rank 0 has the gradient 1 once; rank 1 has 1, then 3 twice."""
    ddp = scalar()
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=1.0)
    inputs = [[1.0], [1.0, 3.0, 3.0]][dist.get_rank()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with joined(kind, [ddp, zero]):
            for value in inputs:
                zero.zero_grad()
                ddp(x(value)).backward()
                zero.step()
    return weight(ddp)


def test_j2_a_joined_rank_steps_with_its_last_gradient_again(pool: Any) -> None:
    """Right is -(1 + 1)/2 - 3/2 - 3/2 = -4; the owner of the shard, out of input, takes -1 three times."""
    assert pool.run(2, stale_gradient, "torch") == [-3.0, -3.0]
    assert pool.run(2, stale_gradient, "fjoin") == [-4.0, -4.0]


def divisor_with_a_hook(kind: str, hook: bool) -> list[float]:
    """The gradients of the rank that has input longest, with divide_by_initial_world_size=False."""
    ddp = scalar()
    if hook:
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), 1.0)
    seen = []
    with joined(kind, [ddp, optimizer], divide_by_initial_world_size=False):
        for _ in range([2, 4][dist.get_rank()]):
            optimizer.zero_grad()
            ddp(x(1.0)).backward()
            seen.append(float(ddp.module.weight.grad.item()))
    return seen


def test_j5_the_divisor_is_forgotten_with_a_hook(pool: Any) -> None:
    for kind, hook, want in (
        ("torch", False, [1.0] * 4), ("torch", True, [1.0, 1.0, 0.5, 0.5]), ("fjoin", False, [1.0] * 4), ("fjoin", True, [1.0] * 4),
    ):  # fmt: skip
        assert pool.run(2, divisor_with_a_hook, kind, hook)[1] == want, (kind, hook)


def end_of_a_window(kind: str) -> float:
    """Two micro-batches to a step; rank 0 ends within the second window."""
    ddp = scalar()
    optimizer = torch.optim.SGD(ddp.parameters(), 1.0)
    with joined(kind, [ddp, optimizer]):
        for i in range([3, 4][dist.get_rank()]):
            accumulates = i % 2 == 0
            with ddp.no_sync() if accumulates else contextlib.nullcontext():
                ddp(x(1.0)).backward()
            if not accumulates:
                optimizer.step()
                optimizer.zero_grad()
    return weight(ddp)


def test_j6_a_window_that_is_not_complete_is_lost(pool: Any) -> None:
    """Seven micro-batches of gradient 1, divided by two ranks, make -3.5."""
    assert pool.run(2, end_of_a_window, "torch") == [-3.0, -3.0]
    assert pool.run(2, end_of_a_window, "fjoin") == [-3.5, -3.5]


# -- what makes torch hang or abort, in processes of its own with a time-out of 3 s --------------------


def _hangs(rank: int, report: Any, what: str, kind: str) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=3))
    ddp = scalar()
    try:
        report(PROGRAMS[what](ddp, rank, kind))
    except Exception as error:
        report(f"{type(error).__name__}: {error}")


def zero_first(ddp: DistributedDataParallel, rank: int, kind: str) -> Any:
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=1.0)
    with joined(kind, [zero, ddp]):
        for _ in range([1, 3][rank]):
            zero.zero_grad()
            ddp(x(1.0)).backward()
            zero.step()
    return weight(ddp)


def mixed_windows(ddp: DistributedDataParallel, rank: int, kind: str) -> Any:
    """Rank 0 has ended; of the others one is within a window while the other synchronises."""
    optimizer = torch.optim.SGD(ddp.parameters(), 1.0)
    with joined(kind, [ddp, optimizer]):
        for i in range([0, 2, 2][rank]):
            with ddp.no_sync() if (i, rank) == (0, 1) else contextlib.nullcontext():
                ddp(x(1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weight(ddp)


def evaluate(ddp: DistributedDataParallel, rank: int, kind: str) -> Any:
    """A rank with input runs the module once without gradients while another has ended."""
    optimizer = torch.optim.SGD(ddp.parameters(), 1.0)
    with joined(kind, [ddp, optimizer]):
        for _ in range([1, 3][rank]):
            ddp(x(1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 1:
                with torch.no_grad():
                    ddp(x(1.0))
    return weight(ddp)


def local_sgd(ddp: DistributedDataParallel, rank: int, kind: str) -> Any:
    """Each rank steps with its own gradients, and parameters are averaged after every step."""
    alone, _ = dist.new_subgroups(1)
    state = post_localSGD_hook.PostLocalSGDState(None, alone, 0, post_local_gradient_allreduce=False)
    ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=1, warmup_steps=0)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(ddp.parameters(), 1.0), averager)
    with joined(kind, [ddp, optimizer]):
        for _ in range([1, 3][rank]):
            ddp(x(1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weight(ddp)


def buffer_hook(ddp: DistributedDataParallel, rank: int, kind: str) -> Any:
    """Buffers averaged by a hook after each forward pass."""

    def average(group: Any, buffers: dict[str, torch.Tensor]) -> None:
        for buffer in buffers.values():
            if buffer.is_floating_point():
                dist.all_reduce(buffer, group=group)
                buffer /= group.size()

    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2)).double())
    ddp._register_buffer_comm_hook(ddp.process_group, average)
    with joined(kind, [ddp]):
        for _ in range([1, 3][rank]):
            ddp(torch.tensor([[1.0], [2.0]]).double()).sum().backward()
    return float(ddp.module[1].num_batches_tracked)


def in_forward(ddp: DistributedDataParallel, rank: int, kind: str) -> Any:
    """A model that communicates in its forward pass: its inputs are divided by their mean over the ranks."""

    def normed(value: float) -> torch.Tensor:
        mean = x(value)
        dist.all_reduce(mean)
        return x(value) / (mean / 2)

    if kind == "fjoin":
        loop = fjoin.join(range([1, 3][rank]))
        for _ in loop:
            optimizer = torch.optim.SGD(ddp.parameters(), 1.0)
            (ddp(normed(1.0)) * loop.scale).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weight(ddp)
    with joined(kind, [ddp]):
        for _ in range([1, 3][rank]):
            ddp(normed(1.0)).backward()
    return weight(ddp)


def exception(ddp: DistributedDataParallel, rank: int, kind: str) -> Any:
    with joined(kind, [ddp]):
        for i in range(3):
            if (rank, i) == (1, 1):
                raise ValueError("bad batch")
            ddp(x(1.0)).backward()
    return 0.0


PROGRAMS = {
    "zero first": zero_first, "no_sync": mixed_windows, "eval": evaluate, "local sgd": local_sgd,
    "buffer hook": buffer_hook, "in forward": in_forward, "exception": exception,
}  # fmt: skip


def outcomes(what: str, kind: str, ranks: int) -> list[Any]:
    """What each rank reports; a process that aborts reports nothing."""
    with Ranks(ranks, _hangs, what, kind) as run:
        found: dict[int, Any] = {}
        with contextlib.suppress(AssertionError):
            for _ in range(ranks):
                rank, _, value = run.next(7.0 if kind == "torch" else 15.0)
                found[rank] = value
        return [found.get(rank, "nothing") for rank in range(ranks)]


def test_j3_zero_before_ddp() -> None:
    theirs = outcomes("zero first", "torch", 2)
    assert not all(isinstance(value, float) for value in theirs), theirs
    assert outcomes("zero first", "fjoin", 2) == [-2.0, -2.0]


def test_j7_ranks_that_disagree_on_no_sync() -> None:
    """torch times out; here it is said what is wrong."""
    theirs = outcomes("no_sync", "torch", 3)
    assert not any(isinstance(value, float) for value in theirs), theirs
    ours = outcomes("no_sync", "fjoin", 3)
    assert ours[1].startswith("JoinError") and "inside no_sync" in ours[1] and "rank 2" in ours[1]
    assert all(value.startswith("PeerLost: rank 1 failed") and "no_sync" in value for value in (ours[0], ours[2])), ours


def test_j8_an_evaluation_inside() -> None:
    theirs = outcomes("eval", "torch", 2)
    assert not all(isinstance(value, float) for value in theirs), theirs
    assert outcomes("eval", "fjoin", 2) == [-2.0, -2.0]


def test_j9_model_averaging_is_not_shadowed() -> None:
    """Right is -1, then -1.5 and -2: a rank without input does not move by itself, and is averaged."""
    theirs = outcomes("local sgd", "torch", 2)
    assert not all(isinstance(value, float) for value in theirs), theirs
    assert outcomes("local sgd", "fjoin", 2) == [-2.0, -2.0]


def test_j10_a_buffer_hook_is_not_shadowed() -> None:
    theirs = outcomes("buffer hook", "torch", 2)
    assert not all(isinstance(value, float) for value in theirs), theirs
    assert outcomes("buffer hook", "fjoin", 2) == [3.0, 3.0]


def test_j11_a_collective_in_the_forward_pass() -> None:
    """The loop of fjoin.join runs it on all ranks; inputs are 1 after the division, so that each step is -1."""
    theirs = outcomes("in forward", "torch", 2)
    assert not all(isinstance(value, float) for value in theirs), theirs
    assert outcomes("in forward", "fjoin", 2) == [-3.0, -3.0]


def python_reducer(kind: str) -> tuple[int, str]:
    """How often a forward pass notifies its Join."""
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        ddp = scalar()
    calls, kept = 0, Join.notify_join_context

    def counted(joinable: Any) -> Any:
        nonlocal calls
        calls += 1
        return kept(joinable)

    Join.notify_join_context = staticmethod(counted)  # type: ignore[method-assign]
    try:
        with joined(kind, [ddp], enable=False):
            ddp(x(1.0)).backward()
    except TypeError as error:
        return calls, str(error)
    finally:
        Join.notify_join_context = staticmethod(kept)  # type: ignore[method-assign]
    return calls, ""


def test_j12_a_python_reducer_notifies_no_join(pool: Any) -> None:
    assert pool.run(1, python_reducer, "torch") == [(0, "")], "without a Join's knowledge of iterations it cannot work"
    ((_, text),) = pool.run(1, python_reducer, "fjoin")
    assert "python_reducer" in text and "fjoin.join" in text


def error_memory(kind: str) -> Any:
    """PowerSGD on uneven inputs: (gradients of this rank, what its memory holds, movement, iterations, of which alone)."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(6, 6, bias=False).double())
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1
    )
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), 1.0)
    start, given, moved = ddp.module.weight.detach().clone(), torch.zeros(6, 6).double(), []
    g = torch.Generator().manual_seed(dist.get_rank())
    with joined(kind, [ddp, optimizer]):
        for _ in range([3, 6][dist.get_rank()]):
            gradient = torch.randn(6, 6, generator=g).double()
            inputs = torch.eye(6).double()
            (ddp(inputs) * gradient.T).sum().backward()  # whose gradient is this matrix
            given += gradient
            optimizer.step()
            optimizer.zero_grad()
            moved.append(1)
    kept = sum((error.view(6, 6) for error in state.error_dict.values()), torch.zeros(6, 6).double())
    return given, kept, start - ddp.module.weight.detach(), state.iter, len(moved)


def test_j13_the_error_memory_of_a_rank_without_input_goes_on(pool: Any) -> None:
    """It must: the errors of all ranks together are what has not been sent yet. Frozen, the sum would be wrong."""
    for kind in ("torch", "fjoin"):
        (given, kept, moved, iterations, own), (given_1, kept_1, moved_1, iterations_1, _) = pool.run(
            2, error_memory, kind
        )
        assert own == 3 and iterations == iterations_1 and torch.equal(moved, moved_1)
        assert kept.abs().max() > 0.1 and kept_1.abs().max() > 0.1
        assert (given + given_1 - kept - kept_1 - 2 * moved).abs().max() < 1e-12, kind


def test_j14_an_exception_on_one_rank() -> None:
    """torch's others wait for the time-out of 3 s and are not told; more in test_join_errors.py."""
    theirs, own = outcomes("exception", "torch", 2)
    assert own == "ValueError: bad batch" and theirs.startswith("RuntimeError") and "bad batch" not in theirs
    told, own = outcomes("exception", "fjoin", 2)
    assert own == "ValueError: bad batch" and told.startswith("PeerLost: rank 1 failed") and "bad batch" in told
