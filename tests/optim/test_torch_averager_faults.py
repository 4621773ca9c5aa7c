"""Faults of torch's model averagers and PostLocalSGDOptimizer that ours do not have. Where one of these fails, torch has fixed it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging import averagers

import fjoin
from tests.helpers import raises_text
from tests.optim.averager_problem import Torchs, made

LR = torch.optim.lr_scheduler


def params_with_gradients() -> list[nn.Parameter]:
    params = [nn.Parameter(torch.full((n,), float(dist.get_rank()))) for n in (2, 3)]
    for p in params:
        p.grad = torch.ones_like(p)
    return params


def optimizers(params: Any, period: int = 100) -> tuple[Any, Any]:
    """torch's class and ours, each around an SGD."""
    theirs = Torchs(torch.optim.SGD(params, 0.5), made("torch's", "periodic", period, 50))
    ours = fjoin.PostLocalSGDOptimizer(torch.optim.SGD(params, 0.5), made("ours", "periodic", period, 50))
    return theirs, ours


def memory(whose: str) -> Any:
    params = params_with_gradients()
    view = params[0].detach()  # as a flat buffer, or a captured graph, holds it
    before = [p.data_ptr() for p in params]
    made(whose, "periodic", 2).average_parameters(params)
    kept = [p.data_ptr() for p in params] == before
    return kept, len({p.untyped_storage().data_ptr() for p in params}), view[0].item(), params[0][0].item()


def test_parameters_still_move_into_one_storage(pool: Any) -> None:
    """Views taken before keep the old values."""
    for rank, theirs in enumerate(pool.run(2, memory, "torch's")):
        assert theirs == (False, 1, rank, 0.5), "torch averages in place now"
    assert pool.run(2, memory, "ours") == [(True, 2, 0.5, 0.5)] * 2


def no_gradients() -> Any:
    averager, p = made("torch's", "periodic", 2), nn.Parameter(torch.tensor(float(dist.get_rank())))
    reported = raises_text((ValueError, RuntimeError), lambda: averager.average_parameters([p]))  # type: ignore[arg-type]
    kept = p.item()
    made("ours", "periodic", 2).average_parameters([p])
    return reported, kept, p.item()


def test_parameters_without_gradients_are_still_refused(pool: Any) -> None:
    """This happens after `zero_grad()`, or if all trained parameters belong to another optimizer."""
    for rank, (reported, theirs, ours) in enumerate(pool.run(2, no_gradients)):
        assert "non-empty" in reported, "torch takes them now"
        assert theirs == rank and ours == 0.5


def other_gradients(whose: str) -> Any:
    """Rank 0 has used the first of two equally large parameters, rank 1 the second."""
    rank = dist.get_rank()
    params = [nn.Parameter(torch.full((2,), 10.0 * i + rank)) for i in (1, 2)]
    params[rank].grad = torch.ones(2)
    made(whose, "periodic", 2).average_parameters(params)
    return [p[0].item() for p in params]


def test_different_parameters_are_still_averaged_with_each_other(pool: Any) -> None:
    """Different parameters of one size are averaged: 10 on rank 0, 21 on rank 1. With other sizes ranks abort."""
    assert pool.run(2, other_gradients, "torch's") == [[15.5, 20.0], [11.0, 15.5]], "torch averages others now"
    assert pool.run(2, other_gradients, "ours") == [[10.5, 20.5]] * 2


def interface() -> Any:
    theirs, ours = optimizers(params_with_gradients())
    raises_text(TypeError, lambda: theirs.step(lambda: 3.0), "positional argument")
    assert ours.step(lambda: 3.0) == 3.0
    raises_text(AttributeError, lambda: theirs.defaults, "defaults")
    raises_text(AttributeError, lambda: theirs.register_step_post_hook(print), "_optimizer_step_post_hooks")
    raises_text(AttributeError, lambda: theirs.register_step_pre_hook(print), "_optimizer_step_pre_hooks")
    raises_text(AttributeError, lambda: theirs.register_state_dict_post_hook(print), "hooks")
    assert ours.defaults["lr"] == 0.5 and ours.register_step_post_hook(print)
    return True


def test_closures_defaults_and_hooks_are_still_missing(pool: Any) -> None:
    assert pool.run(1, interface) == [True]


def loaded() -> Any:
    rates = []
    for optimizer in optimizers(params_with_gradients()):
        optimizer.load_state_dict(optimizer.state_dict())
        for group in optimizer.param_groups:  # as a scheduler does
            group["lr"] = 0.25
        rates.append((optimizer.optim.param_groups[0]["lr"], optimizer.param_groups is optimizer.optim.param_groups))
    return rates


def test_rates_set_after_a_load_still_have_no_effect(pool: Any) -> None:
    """`param_groups` is the list from before the load, so a scheduler changes rates that no step uses."""
    assert pool.run(1, loaded) == [[(0.5, False), (0.25, True)]], "torch follows the optimizer's groups now"


def skipped() -> Any:
    counts = []
    for i in (0, 1):
        optimizer = optimizers([p := nn.Parameter(torch.ones(1))])[i]
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)  # type: ignore[attr-defined]
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale((p * (float("inf") if dist.get_rank() and step == 1 else 1.0)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        counts.append(optimizer.averager.step)
    return counts


def test_torch_still_does_not_count_steps_skipped_by_a_grad_scaler(pool: Any) -> None:
    """Rank 1 leaves out a step, so from then on the ranks average in different steps."""
    assert pool.run(2, skipped) == [[3, 3], [2, 3]], "torch counts it now"


def warmed_up(whose: str, kind: str) -> list[int]:
    averager = made(whose, kind, 4 if kind == "periodic" else {4: dist.get_world_size()}, 10)
    p, due = nn.Parameter(torch.zeros(1)), []
    p.grad = torch.ones(1)
    for step in range(24):
        with torch.no_grad():
            p.fill_(dist.get_rank())
        averager.average_parameters([p])
        due += [step] if p.item() == 0.5 else []
    return due


def test_the_warm_up_of_hierarchies_is_still_not_subtracted(pool: Any) -> None:
    """A hierarchy of one level differs from the periodic averager; ours have the same schedule."""
    for whose in ("torch's", "ours"):
        assert pool.run(2, warmed_up, whose, "periodic") == [[10, 14, 18, 22]] * 2
        assert pool.run(2, warmed_up, whose, "hierarchical") == [[12, 16, 20]] * 2, "torch subtracts it now"


def unchecked() -> Any:
    p = params_with_gradients()
    averager = made("torch's", "hierarchical", {2: 1, 0: 1})
    raises_text(ZeroDivisionError, lambda: averager.average_parameters(p))
    raises_text(ValueError, lambda: made("ours", "hierarchical", {2: 1, 0: 1}), "a period must be", "got 0")
    averager, seen = made("torch's", "hierarchical", {4: 1, 2: 1}), []
    for _ in range(4):
        seen.append(averager._find_process_group() is averager.period_process_group_dict[2])
        averager.step += 1
    raises_text(ValueError, lambda: made("ours", "hierarchical", {4: 1, 2: 1}), "got 2 after 4")
    return seen


def test_periods_of_a_hierarchy_are_still_hardly_checked(pool: Any) -> None:
    """Only the first period is checked; in descending order the longer period never has an effect."""
    assert pool.run(1, unchecked) == [[True, False, True, False]], "torch checks them now"


def fractional() -> Any:
    averager: Any = averagers.PeriodicModelAverager(2.5)  # type: ignore[arg-type]
    p, seen = params_with_gradients(), []
    for _ in range(6):
        before = p[0].data_ptr()
        averager.average_parameters(p)
        seen.append(p[0].data_ptr() != before)
    raises_text(ValueError, lambda: made("ours", "periodic", 2.5), "period", "2.5")
    return seen


def test_a_fractional_period_is_still_taken(pool: Any) -> None:
    """2.5 averages every 5 steps."""
    assert pool.run(1, fractional) == [[True, False, False, False, False, True]], "torch refuses it now"
