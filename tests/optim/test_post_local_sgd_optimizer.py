"""PostLocalSGDOptimizer: torch's recipe, and the parts of torch.optim.Optimizer that torch's class lacks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as torchs_hook
from torch.nn.parallel import DistributedDataParallel

import fjoin
from tests.helpers import max_diff, raises_text, same_bits
from tests.optim.averager_problem import Torchs, made, torchs_averages_raise
from tests.oracle.whole_batch import make_batches, make_model, mean_loss

LR = torch.optim.lr_scheduler
BATCHES = make_batches(1, [[3] * 20] * 4)


def trained(ddp: DistributedDataParallel, optimizer: Any, steps: int = 20) -> Any:
    start = [p.detach().clone() for p in make_model().parameters()]
    scheduler = LR.StepLR(optimizer, 4, 0.8) if isinstance(optimizer, fjoin.PostLocalSGDOptimizer) else None
    other = LR.StepLR(optimizer.optim, 4, 0.8) if scheduler is None else scheduler
    for batch in BATCHES[dist.get_rank()][:steps]:
        optimizer.zero_grad()
        mean_loss(ddp, batch).backward()
        optimizer.step()
        other.step()
    return [p.detach() - q for p, q in zip(ddp.parameters(), start, strict=True)]


def recipe(whose: str, kind: str, args: Any, still: bool, adam: bool) -> Any:
    """Six passes with the mean over all ranks, then over pairs or none, with averages of the parameters."""
    subgroup, _ = dist.new_subgroups(group_size=2)
    ddp = DistributedDataParallel(make_model())
    local = torch.optim.Adam(ddp.parameters(), 0.01) if adam else torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)
    if whose == "torch's":
        ddp.register_comm_hook(torchs_hook.PostLocalSGDState(None, subgroup, 6, still), torchs_hook.post_localSGD_hook)
        theirs: Any = Torchs(local, made("torch's", kind, *args))
        return trained(ddp, theirs), theirs.averager.step
    with torchs_averages_raise():
        state = fjoin.ddp.PostLocalSGDState(None, subgroup, 6, still)
        fjoin.ddp.register(ddp, fjoin.ddp.post_localSGD_hook(state), state.mesh())
        ours = fjoin.PostLocalSGDOptimizer(local, made("ours", kind, *args))
        return trained(ddp, ours), ours.averager.step


@pytest.mark.sample(2)
@pytest.mark.parametrize("adam", [False, True], ids=["sgd", "adam"])
@pytest.mark.parametrize("still", [True, False], ids=["in the subgroup", "nowhere"])
def test_the_whole_recipe_is_torchs(pool: Any, still: bool, adam: bool) -> None:
    for kind, args in (("periodic", (4, 6)), ("hierarchical", ({2: 2, 4: 4}, 6))):
        ours, theirs = (pool.run(4, recipe, whose, kind, args, still, adam) for whose in ("ours", "torch's"))
        for (mine, steps), (torchs, torchs_steps) in zip(ours, theirs, strict=True):
            assert max_diff(mine, torchs) < 1e-10 and steps == torchs_steps == 20
        assert max_diff(ours[0][0], ours[3][0]) > 1e-6


# -- the shape of a torch.optim.Optimizer, on one rank ---------------------------------------------------


def small(averager: Any = None, **options: Any) -> tuple[nn.Module, fjoin.PostLocalSGDOptimizer]:
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, **options)
    return model, fjoin.PostLocalSGDOptimizer(inner, averager or fjoin.PeriodicModelAverager(2, 3))


def steps(model: nn.Module, optimizer: Any, n: int = 3, first: int = 0) -> dict[str, Any]:
    for batch in BATCHES[0][first : first + n]:
        optimizer.zero_grad()
        mean_loss(model, batch).backward()
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_groups_state_and_defaults_are_those_of_the_optimizer() -> None:
    model, optimizer = small()
    assert isinstance(optimizer, torch.optim.Optimizer)
    steps(model, optimizer)
    assert optimizer.param_groups is optimizer.optim.param_groups and optimizer.state is optimizer.optim.state
    assert optimizer.defaults is optimizer.optim.defaults and optimizer.defaults["momentum"] == 0.9
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 0.5})
    assert [group["lr"] for group in optimizer.optim.param_groups] == [0.1, 0.5]
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    assert repr(optimizer).startswith("PostLocalSGDOptimizer(SGD (") and "PeriodicModelAverager(period=2" in repr(
        optimizer
    )


def test_closures() -> None:
    (a, _), b = small(), make_model()
    theirs = torch.optim.LBFGS(b.parameters(), 0.5)
    ours = fjoin.PostLocalSGDOptimizer(torch.optim.LBFGS(a.parameters(), 0.5), fjoin.PeriodicModelAverager(2))
    losses = []
    for net, optimizer in ((a, ours), (b, theirs)):

        def closure(net: nn.Module = net, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            loss = mean_loss(net, BATCHES[0][0])
            loss.backward()
            return loss

        losses.append(optimizer.step(closure))
    assert torch.equal(*losses) and ours.averager.step == 1 and max_diff([*a.parameters()], [*b.parameters()]) == 0
    assert small()[1].step(lambda: 3.0) == 3.0 and small()[1].step() is None


def test_step_hooks() -> None:
    model, optimizer = small()
    calls: list[str] = []
    handles = [
        optimizer.register_step_pre_hook(lambda opt, args, kwargs: calls.append(f"before {opt is optimizer}")),
        optimizer.register_step_post_hook(lambda opt, args, kwargs: calls.append(f"after {opt.averager.step}")),
    ]
    steps(model, optimizer, 1)
    assert calls == ["before True", "after 1"]
    for handle in handles:
        handle.remove()
    steps(model, optimizer, 1)
    assert len(calls) == 2


@pytest.mark.parametrize("scheduler", [
    lambda o: LR.OneCycleLR(o, max_lr=0.5, total_steps=20), lambda o: LR.ReduceLROnPlateau(o),
    lambda o: LR.SequentialLR(o, [LR.ConstantLR(o), LR.ExponentialLR(o, 0.9)], [2]),
])  # fmt: skip
def test_schedulers(scheduler: Any) -> None:
    (a, ours), b = small(), make_model()
    theirs = torch.optim.SGD(b.parameters(), 0.1, momentum=0.9)
    for model, optimizer in ((a, ours), (b, theirs)):
        rates = scheduler(optimizer)
        for i in range(6):
            steps(model, optimizer, 1, i)
            rates.step(*([1.0] if isinstance(rates, LR.ReduceLROnPlateau) else []))
    assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
    assert max_diff([*a.parameters()], [*b.parameters()]) == 0


def torchs_states() -> Any:
    model, theirs = make_model(), None
    theirs = Torchs(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), made("torch's", "periodic", 4))
    steps(model, theirs)
    other, ours = small()
    other.load_state_dict(model.state_dict())
    ours.load_state_dict(saved := theirs.state_dict())
    assert saved["step"] == 3, "the caller's stays as it is"
    theirs_again = Torchs(torch.optim.SGD(other.parameters(), 0.1, momentum=0.9), made("torch's", "periodic", 4))
    theirs_again.load_state_dict(ours.state_dict())
    return ours.averager.step, theirs_again.averager.step, max_diff(ours.state_dict(), theirs.state_dict())


def test_states_are_interchangeable_with_torch(pool: Any) -> None:
    assert pool.run(1, torchs_states) == [(3, 3, 0)]


def test_a_state_without_a_step_warns() -> None:
    model, optimizer = small()
    steps(model, optimizer)
    with pytest.warns(UserWarning, match="starts at step 0"):
        optimizer.load_state_dict(optimizer.optim.state_dict())
    assert optimizer.averager.step == 0


def test_custom_averager() -> None:
    """It counts, and records its parameters."""

    class Counted:
        step = seen = 0

        def average_parameters(self, params: Any) -> None:
            self.step, self.seen = self.step + 1, sum(len(group["params"]) for group in params)

    model, optimizer = small(averager := Counted())
    steps(model, optimizer)
    assert (averager.step, averager.seen) == (3, 4)


# -- other parts of a training loop ------------------------------------------------------------------------


def scaled(fused: bool, whose: str) -> Any:
    """Rank 1's loss is infinite in step 1, so its optimizer leaves out that step; the average is still taken."""
    params = [nn.Parameter(torch.ones(3))]
    inner = torch.optim.SGD(params, 0.5, fused=fused)
    optimizer = fjoin.PostLocalSGDOptimizer(inner, fjoin.PeriodicModelAverager(2, 1))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)  # type: ignore[attr-defined]
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        factor = float("inf") if dist.get_rank() and step == 1 else 1.0
        scaler.scale((params[0] * factor).sum()).backward()
        if whose == "unscaled":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        seen.append(params[0][0].item())
    return seen, hasattr(inner, "found_inf"), optimizer.averager.step


@pytest.mark.parametrize("whose", ["scaled", "unscaled"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_that_leaves_out_a_step_on_one_rank(pool: Any, fused: bool, whose: str) -> None:
    """Rank 0 goes from 1 to 0.5 and 0; rank 1 to 0.5, where it stays; then both have 0.25."""
    assert pool.run(2, scaled, fused, whose) == [([0.5, 0.25, -0.25], False, 3)] * 2


def no_host() -> Any:
    state = fjoin.ddp.PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=1)
    reported = raises_text(ValueError, state.mesh, "LOCAL_WORLD_SIZE", "new_subgroups")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        shape = state.mesh().shape
        ddp = DistributedDataParallel(make_model())
        handle = fjoin.ddp.register(ddp, fjoin.ddp.post_localSGD_hook(state), state.mesh())
    grads = []
    for _ in range(2):
        ddp.zero_grad()
        mean_loss(ddp, BATCHES[dist.get_rank()][0]).backward()
        grads.append([p.grad.clone() for p in ddp.parameters() if p.grad is not None])
    odd = dist.new_group([0, 2]), dist.new_group([1, 3])
    scattered = fjoin.ddp.PostLocalSGDState(None, odd[dist.get_rank() % 2], 1)
    raises_text(ValueError, scattered.mesh, "consecutive ranks", "new_subgroups")
    return bool(reported), shape, handle.step, grads


def test_the_state_of_the_hook(pool: Any) -> None:
    """The default subgroup is the ranks of the host."""
    runs = pool.run(4, no_host)
    for rank, (reported, shape, step, (first, second)) in enumerate(runs):
        assert reported and shape == {"node": 2, "local": 2} and step == 2
        assert same_bits(first, runs[0][3][0]) and same_bits(second, runs[rank // 2 * 2][3][1])
    assert max_diff(runs[0][3][1], runs[2][3][1]) > 1e-3
