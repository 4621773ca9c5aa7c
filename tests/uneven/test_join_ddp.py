"""torch's own joinables in our Join: parameters and optimizer state equal on all ranks, and to one process."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from tests.ddp.ddp_problem import ZeroRedundancyOptimizer, batches_of, loss, make_model, state_of
from tests.helpers import max_diff, same_bits
from tests.oracle import uneven_ddp

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 0.05),
    "zero": lambda p: ZeroRedundancyOptimizer(p, torch.optim.AdamW, lr=0.05),
}
HOOKS: dict[str, Any] = {
    "none": None,
    "allreduce": default_hooks.allreduce_hook,
    "wrapped": default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
}


def train(
    counts: list[int], optimizer: str = "adamw", *, order: str = "ddp first", hook: str = "none", window: int = 1, epochs: int = 2,
    by_world: bool = True, clip: bool = False, options: dict[str, Any] | None = None,
) -> Any:  # fmt: skip
    """Train two epochs under our Join and take a step afterwards on all ranks; returns the remaining state."""
    ddp = DistributedDataParallel(make_model(), **(options or {}))
    if HOOKS[hook] is not None:
        ddp.register_comm_hook(None, HOOKS[hook])
    stepper = OPTIMIZERS[optimizer](ddp.parameters())

    def before_step() -> None:
        if clip:
            nn.utils.clip_grad_norm_(ddp.parameters(), 0.01)

    joinables = [ddp, stepper] if order == "ddp first" else [stepper, ddp]
    for _ in range(epochs):
        with fjoin.Join(joinables, divide_by_initial_world_size=by_world, before_step=before_step):
            for i, batch in enumerate(batches_of(counts)[dist.get_rank()]):
                accumulates = (i + 1) % window != 0
                with ddp.no_sync() if accumulates else contextlib.nullcontext():
                    loss(ddp, batch).backward()
                if not accumulates:
                    before_step()
                    stepper.step()
                    stepper.zero_grad()
        stepper.zero_grad()
    params = list(ddp.module.parameters())
    return [p.detach().clone() for p in params], state_of(stepper, params)


def check(
    results: list[Any], counts: list[int], optimizer: str = "adamw", tolerance: float = 1e-12, **settings: Any
) -> None:
    plain = "adamw" if optimizer == "zero" else optimizer
    settings.setdefault("epochs", 2)
    params, state = uneven_ddp.train(make_model(), OPTIMIZERS[plain], batches_of(counts), loss, **settings)
    start = list(make_model().parameters())
    assert counts == [0] * len(counts) or max_diff(params, [p.detach() for p in start]) > 1e-3
    for own, own_state in results:
        assert max_diff(own, params) < tolerance
        assert same_bits((own, own_state), results[0]), "ranks differ"
        if own_state:
            assert max_diff(own_state, state) < tolerance


@pytest.mark.sample(4)
@pytest.mark.parametrize("counts", [[3, 1], [0, 2, 4], [2, 2], [1, 3, 3], [3], [2, 0, 1, 3]], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("order", ["ddp first", "optimizer first"])
def test_ddp_and_optimizer(pool: Any, counts: list[int], optimizer: str, order: str) -> None:
    """Nothing drifts, no gradient is stale, in either order: over two epochs, and in optimizer state."""
    kwargs = {"order": order}
    check(pool.run(len(counts), run, counts, optimizer, kwargs), counts, optimizer)


def run(counts: list[int], optimizer: str, kwargs: dict[str, Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of unused parameters and of ZeRO
        return train(counts, optimizer, **kwargs)


@pytest.mark.sample(2)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("by_world", [True, False])
@pytest.mark.parametrize("window", [1, 2])
def test_divisor_holds_with_every_hook(pool: Any, hook: str, by_world: bool, window: int) -> None:
    counts = [4, 1, 3]
    kwargs = {"hook": hook, "by_world": by_world, "window": window}
    tolerance = 2e-3 if hook == "wrapped" else 1e-12  # fp16
    results = pool.run(3, run, counts, "momentum", kwargs)
    check(results, counts, "momentum", tolerance, by_world=by_world, window=window)


def train_registered(counts: list[int], over: Any, window: int) -> list[Tensor]:
    """Two epochs of a module whose pipeline steps in its backward passes; nobody says a weight."""
    ddp = DistributedDataParallel(make_model())
    fjoin.ddp.register(ddp, tx.fuse(tx.mean("data", over=over), tx.sgd(0.05, momentum=0.9)))
    for _ in range(2):
        with fjoin.Join([ddp]):
            for i, batch in enumerate(batches_of(counts)[dist.get_rank()]):
                accumulates = (i + 1) % window != 0
                with ddp.no_sync() if accumulates else contextlib.nullcontext():
                    loss(ddp, batch).backward()
                if not accumulates:
                    ddp.zero_grad()
        ddp.zero_grad()
    return [p.detach().clone() for p in ddp.module.parameters()]


@pytest.mark.sample(3)
@pytest.mark.parametrize("counts", [[4, 1, 3], [3, 1, 1], [0, 5, 4]], ids=str)
@pytest.mark.parametrize("over", ["weight", "live", "world"])
@pytest.mark.parametrize("window", [1, 2])
def test_registered_windows_that_ranks_leave_open_count(pool: Any, counts: list[int], over: Any, window: int) -> None:
    """A rank that ends within a window of no_sync passes brings their gradients to the others' next step."""
    want = uneven_ddp.train(
        make_model(), lambda params: torch.optim.SGD(params, 0.05, momentum=0.9), batches_of(counts), loss,
        epochs=2, by_world=over == "world", window=window, of_window=True,
    )[0]  # fmt: skip
    for params in pool.run(3, train_registered, counts, over, window):
        assert max_diff(params, want) < 1e-12


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "options",
    [
        {"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True},
        {"bucket_cap_mb": 1e-5},
    ],
    ids=lambda o: next(iter(o)),
)  # fmt: skip
@pytest.mark.parametrize("counts", [[4, 1], [0, 3, 2]], ids=str)
def test_options_of_ddp(pool: Any, options: dict[str, Any], counts: list[int]) -> None:
    if options.get("static_graph"):
        counts = [max(n, 1) for n in counts]
    check(pool.run(len(counts), run, counts, "adamw", {"options": options}), counts)


def test_clipping_before_a_step(pool: Any) -> None:
    """Clipping, which a rank without input must do too, is passed to the Join."""
    results = pool.run(2, run, [3, 1], "momentum", {"clip": True})
    clip = lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01)  # noqa: E731
    check(results, [3, 1], "momentum", before_step=clip)


def two_ddps(counts: list[int]) -> Any:
    models = [DistributedDataParallel(make_model()) for _ in range(2)]
    optimizers = [torch.optim.Adam(model.parameters(), 0.05) for model in models]
    with fjoin.Join([*models, *optimizers]):
        for batch in batches_of(counts)[dist.get_rank()]:
            for factor, model in zip((1, 2), models, strict=True):  # one after the other, in the order of the list
                (factor * loss(model, batch)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return [[p.detach().clone() for p in model.parameters()] for model in models]


def test_several_ddps(pool: Any) -> None:
    counts = [3, 1]
    for results in pool.run(2, two_ddps, counts):
        for factor, own in zip((1, 2), results, strict=True):
            want, _ = uneven_ddp.train(
                make_model(),
                lambda p: torch.optim.Adam(p, 0.05),
                batches_of(counts),
                lambda m, b, f=factor: f * loss(m, b),
            )
            assert max_diff(own, want) < 1e-12


def scheduled(counts: list[int]) -> Any:
    ddp = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with fjoin.Join([ddp, optimizer, schedule]):
        for batch in batches_of(counts)[dist.get_rank()]:
            loss(ddp, batch).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return [p.detach().clone() for p in ddp.parameters()], schedule.get_last_lr()


def test_a_schedule_that_steps_in_every_iteration(pool: Any) -> None:
    (a, lr), (b, lr_b) = pool.run(2, scheduled, [4, 1])
    assert same_bits(a, b) and lr == lr_b == [0.1 * 0.5**4]


def messages_in_join(kind: str) -> float:
    """All-reduces in an iteration in addition to that of the gradients, counted by the profiler."""
    ddp = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    join: Any = fjoin.Join([ddp, optimizer]) if kind == "fjoin" else ddp.join()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with join:
            for i in range(6):
                if i == 3:  # after the buckets have been rebuilt
                    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True)
                    profile.__enter__()
                loss(ddp, torch.ones(2, 4, dtype=torch.float64)).backward()
                optimizer.step()
                optimizer.zero_grad()
            profile.__exit__(None, None, None)
    return sum(e.name in ("c10d::allreduce_", "c10d::alltoall_base_") for e in profile.events()) / 3


def test_one_message_where_torch_sends_two(pool: Any) -> None:
    ours, theirs = pool.run(2, messages_in_join, "fjoin"), pool.run(2, messages_in_join, "torch")
    # The backward pass of DDP launches from C++, which this profiler does not always see: compare the difference.
    assert [t - o for t, o in zip(theirs, ours, strict=True)] == [1.0, 1.0], (ours, theirs)


class _Unused(nn.Module):
    """One parameter is never used, one in the first iteration only, one is frozen, and one is used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(4, 2)
        self.idle, self.once = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: torch.Tensor, once: bool) -> torch.Tensor:
        return self.a(self.a(x) @ self.a.weight) * self.frozen * (self.once if once else 1)


def unused_parameters(counts: list[int]) -> Any:
    ddp = DistributedDataParallel(_Unused(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), 0.1, weight_decay=0.5)
    with fjoin.Join([ddp, optimizer]):
        for i in range(counts[dist.get_rank()]):
            optimizer.zero_grad()
            ddp(torch.ones(3, 4), i == 0).square().mean().backward()
            optimizer.step()
    stepped = {name: p for name, p in ddp.module.named_parameters() if p in optimizer.state}
    return {name: float(optimizer.state[p]["step"]) for name, p in stepped.items()}, state_of(
        optimizer, list(stepped.values())
    )


@pytest.mark.parametrize("counts", [[1, 4], [1, 4, 0, 2]], ids=str)
def test_parameters_unused_on_all_ranks_are_not_stepped(pool: Any, counts: list[int]) -> None:
    (steps, first), *_ = found = pool.run(len(counts), unused_parameters, counts)
    assert steps == {"once": 1, "a.weight": 4, "a.bias": 4} and all(same_bits(one, (steps, first)) for one in found)


class _ByRank(nn.Module):
    """Each rank uses another branch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])

    def forward(self, x: torch.Tensor) -> Any:
        return self.branches[dist.get_rank()](x)


def other_branches(counts: list[int]) -> Any:
    ddp = DistributedDataParallel(_ByRank(), static_graph=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), 0.1)
    with fjoin.Join([ddp, optimizer]):
        for _ in range(counts[dist.get_rank()]):
            optimizer.zero_grad()
            ddp(torch.ones(3, 4)).square().mean().backward()
            optimizer.step()
    return state_of(optimizer, [p for p in ddp.parameters() if p in optimizer.state])


def test_a_static_graph_whose_ranks_use_different_parameters(pool: Any) -> None:
    a, b = pool.run(2, other_branches, [2, 5])
    assert len(a) == 4 and same_bits(a, b)


def in_any_order(order: list[int]) -> Any:
    """DDP, two optimizers and a schedule, and clipping that must happen once in an iteration."""
    ddp = DistributedDataParallel(make_model())
    params = list(ddp.parameters())
    optimizers = [torch.optim.SGD(part, 0.1, momentum=0.9) for part in (params[:2], params[2:])]
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.5)
    calls = 0

    def halve() -> None:
        nonlocal calls
        calls += 1
        for p in params:
            p.grad.mul_(0.5)

    joinables = [ddp, *optimizers, schedule]
    with fjoin.Join([joinables[i] for i in order], before_step=halve):
        for batch in batches_of([1, 4])[dist.get_rank()]:
            loss(ddp, batch).backward()
            halve()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()
    return calls, [p.detach().clone() for p in params], [state_of(o, o.param_groups[0]["params"]) for o in optimizers]


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 0, 2, 1], [1, 3, 2, 0]], ids=str)
def test_steps_follow_backward_and_schedules_follow_steps(pool: Any, order: list[int]) -> None:
    a, b = pool.run(2, in_any_order, order)
    assert a[0] == b[0] == 4 and same_bits(a[1:], b[1:])


def inside_bind() -> bool:
    ddp = DistributedDataParallel(make_model())
    with fjoin.bind(fjoin.mesh({"data": -1})):
        before = len(dist.distributed_c10d._world.pg_map)
        for _ in range(3):
            fjoin.evaluate(lambda x: {"m": x}, [1.0])
        with fjoin.Join([ddp, fjoin.as_joinable(fjoin.transforms.JoinHook())]):
            pass
        return len(dist.distributed_c10d._world.pg_map) == before


def test_the_default_group_is_used_inside_bind_too(pool: Any) -> None:
    assert pool.run(2, inside_bind) == [True, True]
