"""Wrong numbers of torch's Join with its own joinables and in training, and ours without them. Where a test fails, torch has fixed it."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from fjoin import transforms as tx
from tests.helpers import same_bits
from tests.oracle.torch_join import spread_after_first_step_of_epoch_2
from tests.oracle.whole_batch import make_batches, make_model, mean_loss
from tests.reducer.one_rank import train_one_rank
from tests.reducer.one_weight import joined, scalar, weight, x

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, of torch.jit
    from torch.distributed.optim import ZeroRedundancyOptimizer


def after_the_context(kind: str) -> Any:
    """torch's module keeps sending the messages of a Join, its count and its flag, in every later iteration."""
    ddp = scalar()
    optimizer = torch.optim.SGD(ddp.parameters(), 1.0)
    with joined(kind, [ddp, optimizer]):
        for _ in range(3):
            ddp(x(1.0)).backward()
    with pytest.MonkeyPatch.context() as patch:
        sent, kept = [], dist.all_reduce
        patch.setattr(dist, "all_reduce", lambda *args, **more: sent.append(1) or kept(*args, **more))
        ddp(x(1.0)).backward()
    with contextlib.suppress(KeyError), joined(kind, [ddp, optimizer]):
        raise KeyError
    return len(sent), ddp._join_config.enable


def stale_gradient(kind: str) -> float:
    """The documented example. Rank 0 has the gradient 1 once; rank 1 has 1, then 3 twice.

    Right is -(1 + 1)/2 - 3/2 - 3/2 = -4; the owner of the shard, out of input, takes -1 three times.
    """
    ddp = scalar()
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=1.0)
    with joined(kind, [ddp, zero]):
        for value in [[1.0], [1.0, 3.0, 3.0]][dist.get_rank()]:
            zero.zero_grad()
            ddp(x(value)).backward()
            zero.step()
    return weight(ddp)


def divisor_with_a_hook(kind: str, hook: bool) -> list[float]:
    """The gradients of the rank that has input longest, with divide_by_initial_world_size=False."""
    ddp, seen = scalar(), []
    if hook:
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), 1.0)
    with joined(kind, [ddp, optimizer], divide_by_initial_world_size=False):
        for _ in range([2, 4][dist.get_rank()]):
            optimizer.zero_grad()
            ddp(x(1.0)).backward()
            seen.append(float(ddp.module.weight.grad.item()))
    return seen


def end_of_a_window(kind: str) -> float:
    """Two micro-batches to a step; rank 0 ends within the second window. Seven of gradient 1, divided by two ranks, make -3.5."""
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


def python_reducer(kind: str) -> Any:
    """Its forward pass notifies no Join, which without knowledge of iterations cannot work."""
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        ddp = scalar()
    with pytest.MonkeyPatch.context() as patch:
        calls, kept = [], Join.notify_join_context
        patch.setattr(Join, "notify_join_context", staticmethod(lambda joinable: calls.append(1) or kept(joinable)))
        try:
            with joined(kind, [ddp], enable=False):
                ddp(x(1.0)).backward()
        except TypeError as error:
            return "python_reducer" in str(error) and "fjoin.join" in str(error)
    return len(calls)


# What torch's Join comes to on each rank, and ours.
FAULTS: list[tuple[Any, tuple[Any, ...], list[Any], list[Any]]] = [
    (after_the_context, (), [(2, True)] * 2, [(0, False)] * 2),
    (stale_gradient, (), [-3.0, -3.0], [-4.0, -4.0]),
    (divisor_with_a_hook, (False,), [[1.0] * 2, [1.0] * 4], [[1.0] * 2, [1.0] * 4]),
    (divisor_with_a_hook, (True,), [[1.0] * 2, [1.0, 1.0, 0.5, 0.5]], [[1.0] * 2, [1.0] * 4]),
    (end_of_a_window, (), [-3.0, -3.0], [-3.5, -3.5]),
    (python_reducer, (), [0], [True]),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("fault", "args", "theirs", "ours"), FAULTS, ids=[f"{row[0].__name__} {row[1]}" for row in FAULTS]
)
def test_torch_still_has_it_and_ours_has_not(
    pool: Any, fault: Any, args: tuple[Any, ...], theirs: list[Any], ours: list[Any]
) -> None:
    assert pool.run(len(theirs), quietly, fault.__name__, "torch", *args) == theirs, "torch has mended it"
    assert pool.run(len(ours), quietly, fault.__name__, "fjoin", *args) == ours


def quietly(name: str, *args: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return globals()[name](*args)


def error_memory(kind: str) -> Any:
    """PowerSGD on uneven inputs: (this rank's gradients, its error memory, movement, iterations, this rank's own iterations)."""
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


def test_residual_of_a_rank_without_input_keeps_changing(pool: Any) -> None:
    """No fault, in either Join: the errors of all ranks add up to the unsent part. If frozen, the sum would be wrong."""
    for kind in ("torch", "fjoin"):
        (given, kept, moved, iterations, own), (given_1, kept_1, moved_1, iterations_1, _) = pool.run(
            2, error_memory, kind
        )
        assert own == 3 and iterations == iterations_1 and torch.equal(moved, moved_1)
        assert kept.abs().max() > 0.1 and kept_1.abs().max() > 0.1
        assert (given + given_1 - kept - kept_1 - 2 * moved).abs().max() < 1e-12, kind


OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "sgd": (lambda p: torch.optim.SGD(p, 0.05), lambda: tx.sgd(0.05)),
    "momentum": (lambda p: torch.optim.SGD(p, 0.05, momentum=0.9), lambda: tx.sgd(0.05, momentum=0.9)),
    "adam": (lambda p: torch.optim.Adam(p, 0.05), lambda: tx.adam(0.05)),
}


def drift(name: str) -> tuple[tuple[float, float], dict[str, Any]]:
    batches = make_batches(0, [[4, 4, 4], [4]])[dist.get_rank()]
    theirs = spread_after_first_step_of_epoch_2(make_model, OPTIMIZERS[name][0], batches, mean_loss)
    ours = train_one_rank(batches, tx.fuse(tx.mean("data"), OPTIMIZERS[name][1]()), epochs=2, check=True)
    return theirs, ours


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_drifts_between_torchs_ranks(pool: Any, name: str) -> None:
    """The rank that is out of input does not step, and only parameters are broadcast at the end."""
    (theirs, a), (_, b) = pool.run(2, drift, name)
    ended, after = theirs
    assert ended == 0.0, "at the end of an epoch torch hides it"
    assert (after > 1e-4) == (name != "sgd"), after
    assert same_bits(a["params"], b["params"]) and same_bits(a["optimizer"], b["optimizer"])
    assert a["digests"] == b["digests"]
