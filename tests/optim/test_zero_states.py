"""ZeroRedundancyOptimizer: changing hyperparameters, states of all kinds, and what it refuses."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from tests.helpers import raises_text


def values(model: nn.Module) -> dict[str, Tensor]:
    return {path: p.detach().clone() for path, p in model.named_parameters()}


def close(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def with_hook(ddp: Any, **settings: Any) -> Any:
    made = fjoin.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1, **settings)
    ddp.register_comm_hook(None, fjoin.ddp.hook_with_zero_step(fjoin.ddp.allreduce_hook, ddp, made))
    return made


def small() -> Any:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Linear(4, 3))


def late_momentum() -> str:
    ddp = small()
    optimizer = with_hook(ddp)
    ddp(torch.ones(2, 4)).sum().backward()
    optimizer.param_groups[0]["momentum"] = 0.9
    return raises_text(
        ValueError, lambda: ddp(torch.ones(2, 4)).sum().backward(), "momentum is 0.9", "begin with a small momentum"
    )


def test_raises_if_momentum_starts_late(pool: Any) -> None:
    pool.run(2, late_momentum)


def loaded() -> Any:
    """Go on from a saved state."""
    ddp = small()
    made = with_hook(ddp, momentum=0.9)
    for _ in range(2):
        ddp(torch.ones(2, 4)).square().sum().backward()
    made.consolidate_state_dict(0)
    saved = [made.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(saved)
    again = DistributedDataParallel(copy.deepcopy(ddp.module))
    other = fjoin.ZeroRedundancyOptimizer(
        again.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1, momentum=0.9
    )
    again.register_comm_hook(None, fjoin.ddp.hook_with_zero_step(fjoin.ddp.allreduce_hook, again, other))
    other.load_state_dict(saved[0])
    for module in (ddp, again):
        module(torch.ones(2, 4)).square().sum().backward()
    return values(ddp.module), values(again.module)


def test_a_hook_goes_on_from_a_saved_state(pool: Any) -> None:
    for whole, resumed in pool.run(2, loaded):
        close(resumed, whole)


def around_another() -> Any:
    """Go on from the state of an optimizer that keeps master copies."""
    ddp = DistributedDataParallel(nn.Linear(4, 3).bfloat16())
    made = fjoin.ZeroRedundancyOptimizer(ddp.parameters(), masters, lr=0.1)
    again_on(ddp, made)
    for rank in range(dist.get_world_size()):
        made.consolidate_state_dict(rank)
        if rank == dist.get_rank():
            saved = made.state_dict()
    resumed = DistributedDataParallel(copy.deepcopy(ddp.module))
    other = fjoin.ZeroRedundancyOptimizer(resumed.parameters(), masters, lr=0.5)
    other.load_state_dict(saved)
    again_on(ddp, made)
    again_on(resumed, other)
    saved["state"][0]["inner.step"] = torch.tensor(-1.0)
    raises_text(ValueError, lambda: other.load_state_dict(saved), "shape (3, 4), step is -1")
    return values(ddp.module), values(resumed.module)


def again_on(ddp: Any, optimizer: Any) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        ddp(torch.ones(2, 4).bfloat16()).square().sum().backward()
        optimizer.step()


def masters(lr: float) -> tx.Optimizer:
    return tx.mixed_precision(tx.adamw(lr))


def test_a_state_with_master_copies_is_loaded(pool: Any) -> None:
    for whole, resumed in pool.run(2, around_another):
        assert all(torch.equal(value, resumed[path]) for path, value in whole.items())


def refused() -> None:
    ddp = small()
    weight, bias = ddp.module.weight, ddp.module.bias
    made = fjoin.ZeroRedundancyOptimizer([weight], torch.optim.SGD, lr=0.1)
    raises_text(ValueError, lambda: made.add_param_group({"params": [bias], "maximize": True}), "'maximize' cannot differ")  # fmt: skip
    ddp(torch.ones(2, 4)).sum().backward()
    made.step()
    raises_text(TypeError, lambda: copy.deepcopy(made), "state_dict")
    for late in (False, True):
        raises_text(
            ValueError,
            lambda late=late: fjoin.ZeroRedundancyOptimizer(
                [{"params": [weight]}, {"params": [bias], "nesterov": True}],
                torch.optim.SGD,
                overlap_with_ddp=late,
                lr=0.1,
            ),
            "'nesterov' cannot differ",
        )
    late = with_hook(ddp)
    late.grad_scale = torch.ones(())  # as a GradScaler does
    raises_text(RuntimeError, late.step, "dynamic_loss_scale")


def test_raises_on_unsupported_input(pool: Any) -> None:
    pool.run(2, refused)
