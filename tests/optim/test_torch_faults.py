"""Faults of torch's averagers, PostLocalSGDOptimizer and ZeroRedundancyOptimizer, asserted on torch's own classes.

Where one of these fails, torch has fixed it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import fjoin
from tests.helpers import raises_text
from tests.optim.averager_problem import Torchs, made
from tests.traffic import watched

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
    from torch.distributed.optim import ZeroRedundancyOptimizer

# -- averagers: what torch's sees, or ours -----------------------------------------------------------------


def own(*sizes: int) -> list[nn.Parameter]:
    """Parameters with the value of the rank, and with gradients."""
    params = [nn.Parameter(torch.full((n,), float(dist.get_rank()))) for n in sizes or (2, 3)]
    for p in params:
        p.grad = torch.ones_like(p)
    return params


def memory(whose: str) -> Any:
    """Parameters move into one storage, so that a view, as of a flat buffer or a captured graph, keeps the old values."""
    params = own()
    view, before = params[0].detach(), [p.data_ptr() for p in params]
    made(whose, "periodic", 2).average_parameters(params)
    kept, storages = [p.data_ptr() for p in params] == before, {p.untyped_storage().data_ptr() for p in params}
    return kept, len(storages), view[0].item() == params[0][0].item() == 0.5


def no_gradients(whose: str) -> Any:
    """Parameters without gradients are refused: after `zero_grad()`, or if all that is trained is another optimizer's."""
    p = nn.Parameter(torch.tensor(float(dist.get_rank())))
    try:
        made(whose, "periodic", 2).average_parameters([p])
    except (ValueError, RuntimeError) as error:
        return "non-empty" in str(error) and p.item() == dist.get_rank()
    return p.item()


def other_gradients(whose: str) -> Any:
    """Rank 0 has used the first of two equally large parameters, rank 1 the second. With other sizes ranks abort."""
    rank = dist.get_rank()
    params = [nn.Parameter(torch.full((2,), 10.0 * i + rank)) for i in (1, 2)]
    params[rank].grad = torch.ones(2)
    made(whose, "periodic", 2).average_parameters(params)
    return [p[0].item() for p in params]


def warmed_up(whose: str) -> list[list[int]]:
    """A hierarchy of one level does not subtract the warm-up, other than the periodic averager; ours keep this schedule."""
    found = []
    for kind, period in (("periodic", 4), ("hierarchical", {4: dist.get_world_size()})):
        averager, (p,), due = made(whose, kind, period, 10), own(1), []
        for step in range(24):
            with torch.no_grad():
                p.fill_(dist.get_rank())
            averager.average_parameters([p])
            due += [step] if p.item() == 0.5 else []
        found.append(due)
    return found


def periods(whose: str) -> Any:
    """Only the first period of a hierarchy is checked; in descending order the longer one has no effect; 2.5 is 5."""
    if whose == "ours":
        for kind, period in (("hierarchical", {2: 1, 0: 1}), ("hierarchical", {4: 1, 2: 1}), ("periodic", 2.5)):
            raises_text(ValueError, lambda kind=kind, period=period: made(whose, kind, period), "got")  # type: ignore[misc]
        return "refused"
    raises_text(ZeroDivisionError, lambda: made(whose, "hierarchical", {2: 1, 0: 1}).average_parameters(own()))
    averager, descending, fractional, p = made(whose, "hierarchical", {4: 1, 2: 1}), [], [], own()
    for _ in range(4):
        descending.append(averager._find_process_group() is averager.period_process_group_dict[2])
        averager.step += 1
    averager = made(whose, "periodic", 2.5)
    for _ in range(6):
        before = p[0].data_ptr()
        averager.average_parameters(p)
        fractional.append(p[0].data_ptr() != before)
    return [step for step, due in enumerate(descending) if due], [step for step, due in enumerate(fractional) if due]


# -- PostLocalSGDOptimizer ---------------------------------------------------------------------------------


def optimizer(whose: str, params: Any) -> Any:
    inner = torch.optim.SGD(params, 0.5)
    return (Torchs if whose == "torch's" else fjoin.PostLocalSGDOptimizer)(inner, made(whose, "periodic", 100, 50))


def lacks(whose: str) -> list[str]:
    """Closures, defaults and hooks are missing."""
    one, found = optimizer(whose, own()), []
    calls: dict[str, Callable[[], Any]] = {
        "closure": lambda: one.step(lambda: 3.0), "defaults": lambda: one.defaults["lr"],
        "post hook": lambda: one.register_step_post_hook(print), "pre hook": lambda: one.register_step_pre_hook(print),
        "state hook": lambda: one.register_state_dict_post_hook(print),
    }  # fmt: skip
    for name, call in calls.items():
        try:
            call()
        except (TypeError, AttributeError):
            found.append(name)
    return found


def loaded(whose: str) -> Any:
    """`param_groups` is the list from before a load, so a scheduler changes rates that no step uses."""
    one = optimizer(whose, own())
    one.load_state_dict(one.state_dict())
    for group in one.param_groups:  # as a scheduler does
        group["lr"] = 0.25
    return one.optim.param_groups[0]["lr"], one.param_groups is one.optim.param_groups


def skipped(whose: str) -> int:
    """A step that a scaler leaves out on rank 1 is not counted there, so that the ranks then average in different steps."""
    one, scaler = optimizer(whose, [p := nn.Parameter(torch.ones(1))]), torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        one.zero_grad()
        scaler.scale((p * (float("inf") if dist.get_rank() and step == 1 else 1.0)).sum()).backward()
        scaler.step(one)
        scaler.update()
    return one.averager.step  # type: ignore[no-any-return]


# -- ZeroRedundancyOptimizer -------------------------------------------------------------------------------


def zero_of(whose: str, model: nn.Module, **settings: Any) -> Any:
    cls: Any = ZeroRedundancyOptimizer if whose == "torch's" else fjoin.ZeroRedundancyOptimizer
    return cls(model.parameters(), torch.optim.AdamW, lr=0.1, **settings)


def broadcasts(whose: str) -> Any:
    """A broadcast for each of 8 parameters; a load makes the entries of other ranks' parameters None in the caller's dict."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    zero = zero_of(whose, model)
    model(torch.ones(2, 4)).sum().backward()
    with watched() as sent:
        zero.step()
    changed = 0
    zero.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        saved = zero.state_dict()
        before = copy.deepcopy(saved)
        zero.load_state_dict(saved)
        changed = sum(saved["state"][i] is None for i in before["state"])
    return sum(one.name == "broadcast" for one in sent), changed


def on_gloo(whose: str) -> bool:
    """The overlap is refused on gloo."""
    model = DistributedDataParallel(nn.Linear(4, 4))
    zero = zero_of(whose, model, overlap_with_ddp=True)
    hook = hook_with_zero_step if whose == "torch's" else fjoin.ddp.hook_with_zero_step
    try:
        hook(allreduce_hook, model, zero)
    except RuntimeError as error:
        return "may meet hangs" in str(error)
    return False


def overlapped(whose: str) -> list[bool]:
    """Whether parameters move in each of five passes; the learning rate is 0 from the fourth on."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    zero = zero_of(whose, model, overlap_with_ddp=True)
    hook = hook_with_zero_step if whose == "torch's" else fjoin.ddp.hook_with_zero_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend", lambda group=None: "nccl")
        made = hook(allreduce_hook, model, zero)
    model.register_comm_hook(None, made)
    moves = []
    for i in range(5):
        if i == 3:
            zero.param_groups[0]["lr"] = 0.0
        before = [p.detach().clone() for p in model.parameters()]
        zero.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        moves.append(any(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)))
    return moves


# What torch's gives on each rank, and ours.
FAULTS: list[tuple[Callable[[str], Any], list[Any], list[Any]]] = [
    (memory, [(False, 1, False)] * 2, [(True, 2, True)] * 2),
    (no_gradients, [True] * 2, [0.5] * 2),
    (other_gradients, [[15.5, 20.0], [11.0, 15.5]], [[10.5, 20.5]] * 2),
    (warmed_up, [[[10, 14, 18, 22], [12, 16, 20]]] * 2, [[[10, 14, 18, 22], [12, 16, 20]]] * 2),
    (periods, [([0, 2], [0, 5])], ["refused"]),
    (lacks, [["closure", "defaults", "post hook", "pre hook", "state hook"]], [[]]),
    (loaded, [(0.5, False)], [(0.25, True)]),
    (skipped, [3, 2], [3, 3]),
    (broadcasts, [(8, 4), (8, 0)], [(0, 0)] * 2),
    (on_gloo, [True] * 2, [False] * 2),
    (overlapped, [[False, False, True, True, True]] * 2, [[True, True, True, False, False]] * 2),
]


@pytest.mark.parametrize(("fault", "theirs", "ours"), FAULTS, ids=[row[0].__name__ for row in FAULTS])
def test_torch_still_has_it_and_ours_has_not(pool: Any, fault: Any, theirs: list[Any], ours: list[Any]) -> None:
    assert pool.run(len(theirs), fault, "torch's") == theirs, "torch has mended it"
    assert pool.run(len(ours), fault, "ours") == ours
