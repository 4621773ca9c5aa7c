"""torch's own joinables in our Join: parameters and optimizer state equal on all ranks, and to one process."""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import max_diff, same_bits
from oracle import uneven_ddp
from ranks import Ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import fjoin

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, of torch.jit
    from torch.distributed.optim import ZeroRedundancyOptimizer


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).square().mean()


def batches_of(counts: list[int]) -> list[list[torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [[torch.randn(3, 4, generator=g, dtype=torch.float64) for _ in range(n)] for n in counts]


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


def state_of(optimizer: Any, params: list[Any]) -> list[Any]:
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        return []  # each rank has a part of it
    return [{k: torch.as_tensor(v).clone() for k, v in optimizer.state[p].items() if v is not None} for p in params]


def train(
    counts: list[int], optimizer: str = "adamw", *, order: str = "ddp first", hook: str = "none", window: int = 1, epochs: int = 2,
    by_world: bool = True, clip: bool = False, options: dict[str, Any] | None = None,
) -> Any:  # fmt: skip
    """Two epochs under our Join, a step afterwards on all ranks, and what is then left."""
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


@pytest.mark.parametrize("counts", [[3, 1], [0, 2, 4], [2, 2], [1, 3, 3]], ids=str)
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


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("by_world", [True, False])
@pytest.mark.parametrize("window", [1, 2])
def test_divisor_holds_with_every_hook(pool: Any, hook: str, by_world: bool, window: int) -> None:
    counts = [4, 1, 3]
    kwargs = {"hook": hook, "by_world": by_world, "window": window}
    tolerance = 2e-3 if hook == "wrapped" else 1e-12  # fp16
    results = pool.run(3, run, counts, "momentum", kwargs)
    check(results, counts, "momentum", tolerance, by_world=by_world, window=window)


@pytest.mark.parametrize(
    "options",
    [
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"bucket_cap_mb": 1e-5},
    ],
    ids=lambda o: next(iter(o)),
)
@pytest.mark.parametrize("counts", [[4, 1], [0, 3, 2]], ids=str)
def test_options_of_ddp(pool: Any, options: dict[str, Any], counts: list[int]) -> None:
    if options.get("static_graph"):
        counts = [max(n, 1) for n in counts]
    check(pool.run(len(counts), run, counts, "adamw", {"options": options}), counts)


def test_what_the_loop_does_before_a_step(pool: Any) -> None:
    """Clipping, which a rank without input must do too, is told to the Join."""
    results = pool.run(2, run, [3, 1], "momentum", {"clip": True})
    clip = lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01)  # noqa: E731
    check(results, [3, 1], "momentum", before_step=clip)


def shadow_a_static_graph() -> tuple[str, str]:
    ddp = DistributedDataParallel(make_model(), static_graph=True)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    try:
        with fjoin.Join([ddp, optimizer]):
            for batch in batches_of([2, 0])[dist.get_rank()]:
                loss(ddp, batch).backward()
                optimizer.step()
    except fjoin.FjoinError as error:
        return type(error).__name__, str(error)
    return "", ""


def test_a_static_graph_that_a_rank_has_never_run(pool: Any) -> None:
    """torch's own Join aborts the process here."""
    (kind, text), (kind_1, text_1) = pool.run(2, shadow_a_static_graph)
    assert (kind, kind_1) == ("PeerLost", "JoinError") and "static_graph" in text and "at least one batch" in text_1


def raise_in_loop(rank: int, report: Any, where: str) -> None:
    """Rank 1 fails before or within a backward pass, and stays alive; the time-out is 300 s."""
    import datetime

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            raise ValueError("bad batch")

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=300))
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), bucket_cap_mb=1e-5)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    try:
        with fjoin.Join([ddp, optimizer]):
            for i in range([2, 4, 4][rank]):
                out = ddp(torch.ones(2, 4))
                if rank == 1 and i == 2:
                    report("raising")
                    if where == "forward":
                        raise ValueError("bad batch")
                    out = Broken.apply(out)
                out.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    except Exception as error:
        report((type(error).__name__, str(error), getattr(error, "rank", None), getattr(error, "step", None)))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_on_one_rank_ends_the_others(where: str) -> None:
    """Also those that wait in the messages of the module itself."""
    with Ranks(3, raise_in_loop, where) as run:
        for rank, seconds, (kind, text, failed, step) in run.after("raising", 3):
            if rank == 1:
                assert (kind, text) == ("ValueError", "bad batch")
            else:
                assert kind == "PeerLost" and failed == 1 and step == 3 and "ValueError: bad batch" in text
                assert seconds < 2.0


def with_buffers(counts: list[int]) -> Any:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)
    g = torch.Generator().manual_seed(dist.get_rank())
    with fjoin.Join([ddp, optimizer]) as join:
        for _ in range(counts[dist.get_rank()]):
            loss(ddp, torch.randn(5, 4, generator=g)).backward()
            optimizer.step()
            optimizer.zero_grad()
    states = {k: v.clone() for k, v in ddp.module.state_dict().items()}
    return states, state_of(optimizer, list(ddp.module.parameters())), join.last_joiner


@pytest.mark.parametrize("counts", [[1, 4], [3, 0, 2]], ids=str)
def test_buffers_come_from_a_rank_that_has_input(pool: Any, counts: list[int]) -> None:
    """Statistics of BatchNorm are counted on as long as any rank trains, and end equal on all."""
    results = pool.run(len(counts), with_buffers, counts)
    for states, optimizer, last in results:
        assert same_bits((states, optimizer), results[0][:2])
        assert states["1.num_batches_tracked"] == max(counts) and last == counts.index(max(counts))


def with_a_buffer_hook(counts: list[int]) -> Any:
    """Buffers averaged by a hook after each forward pass, which torch's Join does not shadow."""

    def average(group: Any, buffers: dict[str, torch.Tensor]) -> None:
        for buffer in buffers.values():
            if buffer.is_floating_point():
                dist.all_reduce(buffer, group=group)
                buffer /= group.size()

    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    ddp._register_buffer_comm_hook(ddp.process_group, average)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    g = torch.Generator().manual_seed(dist.get_rank())
    with fjoin.Join([ddp, optimizer]):
        for _ in range(counts[dist.get_rank()]):
            loss(ddp, torch.randn(5, 4, generator=g)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {k: v.clone() for k, v in ddp.module.state_dict().items()}


def test_a_buffer_hook_is_shadowed(pool: Any) -> None:
    a, b = pool.run(2, with_a_buffer_hook, [1, 3])
    assert same_bits(a, b) and a["1.running_mean"].abs().max() > 0


def evaluate_inside() -> Any:
    """Forward passes without gradients, in eval mode and not, on one rank only."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    rank = dist.get_rank()
    with fjoin.Join([ddp, optimizer]) as join:
        for _ in range([2, 4][rank]):
            loss(ddp, torch.ones(5, 4) * rank).backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 1:
                with torch.no_grad():
                    ddp.eval()
                    ddp(torch.ones(2, 4))
                    ddp.train()
    return join.iterations, [p.detach().clone() for p in ddp.parameters()]


def test_an_evaluation_inside_is_harmless(pool: Any) -> None:
    (n, a), (m, b) = pool.run(2, evaluate_inside)
    assert n == m == 4 and same_bits(a, b)


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
    """All-reduces in an iteration besides that of the gradients, counted by the profiler."""
    ddp = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    join: Any = fjoin.Join([ddp, optimizer]) if kind == "fjoin" else ddp.join()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with join:
            for i in range(6):
                if i == 3:  # after the buckets have been rebuilt
                    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
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
    """One parameter is never used, one in the first iteration only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(4, 2)
        self.idle, self.once = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor, i: int) -> torch.Tensor:
        return self.a(x) * (self.once if i == 0 else 1)


def unused_parameters() -> Any:
    ddp = DistributedDataParallel(_Unused(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), 0.1, weight_decay=0.5)
    with fjoin.Join([ddp, optimizer]):
        for i in range([1, 4][dist.get_rank()]):
            optimizer.zero_grad()
            ddp(torch.ones(3, 4), i).square().mean().backward()
            optimizer.step()
    stepped = {name: p for name, p in ddp.module.named_parameters() if p in optimizer.state}
    return {name: float(optimizer.state[p]["step"]) for name, p in stepped.items()}, state_of(
        optimizer, list(stepped.values())
    )


def test_what_no_rank_uses_is_not_stepped(pool: Any) -> None:
    (steps, a), (steps_1, b) = pool.run(2, unused_parameters)
    assert steps == steps_1 == {"once": 1, "a.weight": 4, "a.bias": 4} and same_bits(a, b)


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


def failed_join() -> tuple[int, bool]:
    ddp = DistributedDataParallel(make_model())
    module = ddp.module
    with contextlib.suppress(KeyError), fjoin.Join([ddp], divide_by_initial_world_size=False):
        raise KeyError
    module(torch.ones(2, 4).double()).sum().backward()
    return len(ddp._forward_hooks), "_sync_buffers" in vars(ddp)


def test_a_failed_join_leaves_the_module_as_it_was(pool: Any) -> None:
    assert pool.run(1, failed_join) == [(0, False)]


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


def unknown_optimizer() -> list[str]:
    ddp = DistributedDataParallel(make_model())
    optimizer = torch.optim.Adam(ddp.parameters(), 0.1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with fjoin.Join([ddp]):
            for _ in range(2):
                loss(ddp, torch.ones(2, 4, dtype=torch.float64)).backward()
                optimizer.step()
                optimizer.zero_grad()
    return [str(w.message) for w in seen if "fall behind" in str(w.message)]


def test_an_optimizer_that_the_join_does_not_know(pool: Any) -> None:
    for texts in pool.run(2, unknown_optimizer):
        assert len(texts) == 1 and "Adam" in texts[0] and "Join([ddp, optimizer])" in texts[0]


def test_what_cannot_be_joined() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="communicates"):
        fjoin.Join([torch.optim.SGD(model.parameters(), 0.1)])
    joinable = fjoin.as_joinable(fjoin.transforms.JoinHook())
    with pytest.raises(TypeError, match="Linear"):
        fjoin.Join([joinable, copy.copy(model)])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(TypeError, match="ReduceLROnPlateau.*metrics"):
        fjoin.Join([joinable, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)])
    with pytest.raises(TypeError, match="LBFGS.*closure"):
        fjoin.Join([joinable, torch.optim.LBFGS(model.parameters())])
