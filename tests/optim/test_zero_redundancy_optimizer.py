"""ZeroRedundancyOptimizer equals the unsharded optimizer of torch, in plain and in hooked mode, and in a Join."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from tests.ddp.ddp_problem import ZeroRedundancyOptimizer
from tests.helpers import raises_text
from tests.traffic import sent_to_others, watched

CLASSES = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), "Adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "foreach": False}), "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True}), "Adadelta": (torch.optim.Adadelta, {}),
    "NAdam": (torch.optim.NAdam, {}), "Adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
}  # fmt: skip


class Unknown(torch.optim.SGD):
    """A class that fjoin does not know."""


CLASSES["of one's own"] = (Unknown, {"lr": 0.1, "momentum": 0.9})


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 27))
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.conv(self.layers(x).view(-1, 3, 3, 3)).square().mean()


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def groups(of: nn.Module) -> Any:
    """A parameter group with a learning rate of its own."""
    ps = list(of.parameters())
    return [{"params": ps[:3]}, {"params": ps[3:], "lr": 0.02}]


def batches(n: int) -> list[Tensor]:
    gen = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randn(4, 20, generator=gen) for _ in range(n)]


def values(of: nn.Module) -> dict[str, Tensor]:
    return {path: p.detach().clone(memory_format=torch.contiguous_format) for path, p in of.named_parameters()}


def train(name: str, ours: bool, views: bool = False, steps: int = 5) -> Any:
    """The parameters, and the whole state on rank 0."""
    with without_torchs():
        return _train(name, ours, views, steps)


def _train(name: str, ours: bool, views: bool, steps: int) -> Any:
    make, arguments = CLASSES[name]
    ddp = DistributedDataParallel(model())
    if ours:
        optimizer: Any = fjoin.ZeroRedundancyOptimizer(groups(ddp), make, parameters_as_bucket_view=views, **arguments)
    else:
        optimizer = make(groups(ddp), **arguments)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for batch in batches(steps):
        optimizer.zero_grad()
        ddp(batch).backward()
        optimizer.step()
        scheduler.step()
    if ours:
        optimizer.consolidate_state_dict(to=0)
        return values(ddp.module), optimizer.state_dict() if dist.get_rank() == 0 else None
    return values(ddp.module), optimizer.state_dict()


def close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    for path, value in want.items():
        torch.testing.assert_close(got[path], value, rtol=tolerance, atol=tolerance, msg=path)


@pytest.mark.sample(5)
@pytest.mark.parametrize("ranks, views", [(2, False), (3, True)])
@pytest.mark.parametrize("name", CLASSES)
def test_it_is_the_unsharded_optimizer(pool: Any, name: str, ranks: int, views: bool) -> None:
    (want, state), *_ = pool.run(ranks, train, name, False)
    (_, whole), *_ = got = pool.run(ranks, train, name, True, views)
    for params, _ in got:
        close(params, want)
        assert all(torch.equal(value, got[0][0][path]) for path, value in params.items())
    for index, fields in state["state"].items():
        if index == 0:  # a frozen parameter, for which Adagrad has a state
            continue
        assert whole["state"][index].keys() == fields.keys()
        for key, value in fields.items():
            torch.testing.assert_close(whole["state"][index][key], value, rtol=1e-5, atol=1e-7, check_dtype=False)
    assert [group["lr"] for group in whole["param_groups"]] == [group["lr"] for group in state["param_groups"]]


def resumed(saved: Any, steps: int) -> Any:
    ddp = DistributedDataParallel(model())
    ddp.module.load_state_dict(saved[0], strict=True)
    zero = fjoin.ZeroRedundancyOptimizer(groups(ddp), torch.optim.AdamW, lr=0.01)
    before = copy.deepcopy(saved[1])
    zero.load_state_dict(saved[1])
    torch.testing.assert_close(saved[1], before, rtol=0, atol=0)  # the state of the caller stays as it is
    for batch in torch.randn(steps, 4, 20, generator=torch.Generator().manual_seed(9)):
        zero.zero_grad()
        ddp(batch).backward()
        zero.step()
    return values(ddp.module)


def test_a_state_loads_into_another_number_of_ranks(pool: Any) -> None:
    saved = pool.run(3, train, "AdamW", True)[0]
    found = [pool.run(ranks, resumed, saved, 3)[0] for ranks in (1, 2, 3)]
    for other in found[1:]:
        close(other, found[0])


def added(ours: bool) -> Any:
    ddp = DistributedDataParallel(model())
    ps = [p for p in ddp.parameters() if p.requires_grad]
    first, later = ps[:2], ps[2:]
    optimizer: Any = (
        fjoin.ZeroRedundancyOptimizer(first, torch.optim.AdamW, lr=0.01) if ours else torch.optim.AdamW(first, lr=0.01)
    )
    for i, batch in enumerate(batches(5)):
        if i == 2:
            optimizer.add_param_group({"params": later, "lr": 0.02})
        optimizer.zero_grad()
        ddp(batch).backward()
        optimizer.step()
    return values(ddp.module)


def test_groups_can_be_added(pool: Any) -> None:
    want = pool.run(2, added, False)[0]
    for got in pool.run(2, added, True):
        close(got, want)


def joined(kind: str) -> Any:
    """Uneven inputs: rank r has 5 - r batches."""
    ddp = DistributedDataParallel(model())
    optimizer: Any = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    if kind != "whole":
        late = kind.startswith("hooked")
        optimizer = fjoin.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=late, lr=0.01)
        if late:
            ddp.register_comm_hook(None, fjoin.ddp.hook_with_zero_step(fjoin.ddp.allreduce_hook, ddp, optimizer))
    order = [optimizer, ddp] if kind == "zero first" else [ddp, optimizer]
    # With a hook the module's shadow pass steps, so that torch's Join needs only the module.
    context: Any = TorchJoin([ddp]) if kind == "hooked, torch's" else fjoin.Join(order)
    with context:
        for batch in batches(5 - dist.get_rank()):
            optimizer.zero_grad()
            ddp(batch).backward()
            optimizer.step()
    for _ in range(2):  # and on, with even inputs
        optimizer.zero_grad()
        ddp(batches(1)[0]).backward()
        optimizer.step()
    return values(ddp.module)


@pytest.mark.sample(2)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", ["zero last", "zero first", "hooked, torch's", "hooked, ours"])
def test_uneven_inputs(pool: Any, kind: str, ranks: int) -> None:
    """torch's own class steps with stale gradients, or hangs; see test_torch_join_hangs."""
    want = pool.run(ranks, joined, "whole")[0]
    for got in pool.run(ranks, joined, kind):
        close(got, want)


class Setter(fjoin.Joinable):
    """Sets the gradients by a message of its own, as in torch's test of its class; ranks without input add nothing."""

    join_device = property(lambda self: torch.device("cpu"))
    join_process_group = property(lambda self: dist.group.WORLD)

    def __init__(self, param: nn.Parameter) -> None:
        super().__init__()
        self.param = param

    def join_hook(self, **kwargs: Any) -> Any:
        hook = fjoin.JoinHook()
        hook.main_hook = lambda: self.set(0.0)  # type: ignore[method-assign]
        return hook

    def set(self, value: float) -> None:
        fjoin.Join.notify_join_context(self)
        self.param.grad = torch.full((3,), value)
        dist.all_reduce(self.param.grad)


def without_a_module(kind: str) -> list[Tensor]:
    """Rank r has 4 - r inputs of value 1 + r."""
    param = nn.Parameter(torch.zeros(3))
    setter, sgd = Setter(param), torch.optim.SGD([param], lr=1.0)
    optimizer: Any = {
        "sgd": lambda: sgd,
        "zero": lambda: fjoin.ZeroRedundancyOptimizer([param], torch.optim.SGD, lr=1.0),
        "torch's zero": lambda: ZeroRedundancyOptimizer([param], torch.optim.SGD, lr=1.0),
        "local": lambda: fjoin.PostLocalSGDOptimizer(sgd, fjoin.PeriodicModelAverager(2)),
    }[kind]()
    with fjoin.Join([setter, optimizer]):
        for _ in range(4 - dist.get_rank()):
            setter.set(1.0 + dist.get_rank())
            optimizer.step()
    return [param.detach().clone()]


@pytest.mark.parametrize("kind", ["sgd", "zero", "torch's zero", "local"])
def test_a_join_whose_first_joinable_is_a_users_own(pool: Any, kind: str) -> None:
    for ranks in (1, 3):
        want = [torch.full((3,), -float(sum((4 - r) * (1 + r) for r in range(ranks))))]
        assert all(torch.equal(got[0], want[0]) for got in pool.run(ranks, without_a_module, kind))


@contextlib.contextmanager
def without_torchs() -> Iterator[None]:
    """A context in which torch's implementation fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook
        from torch.distributed.optim import zero_redundancy_optimizer
    with pytest.MonkeyPatch.context() as patch:
        for holder, name in (
            (zero_redundancy_optimizer.ZeroRedundancyOptimizer, "__init__"),
            (ddp_zero_hook, "hook_with_zero_step"),
            (ddp_zero_hook, "_hook_with_zero_step_setup"),
        ):
            patch.setattr(holder, name, lambda *args, **kwargs: pytest.fail("torch's implementation ran"))
        yield


def hooked(steps: int, kind: str) -> Any:
    """A module whose hook steps, and a check that no all_reduce of gradients runs."""
    with without_torchs():
        return _hooked(steps, kind)


def _hooked(steps: int, kind: str) -> Any:
    ddp = DistributedDataParallel(model())
    zero = fjoin.ZeroRedundancyOptimizer(groups(ddp), torch.optim.AdamW, overlap_with_ddp=True, lr=0.01)
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    make = {"": fjoin.ddp.hook_with_zero_step, "interleaved": fjoin.ddp.hook_with_zero_step_interleaved}[kind]
    ddp.register_comm_hook(None, make(allreduce_hook, ddp, zero))
    scheduler, sent, reduced, first = torch.optim.lr_scheduler.StepLR(zero, 2, 0.5), [], 0, None
    for batch in batches(steps):
        zero.zero_grad()
        with sent_to_others() as messages:
            ddp(batch).backward()
        sent.append(sum(messages))
        with watched() as seen:
            zero.step()
        assert not seen
        scheduler.step()
        assert all(p.grad is None for p in ddp.parameters())
        first = first or values(ddp.module)
    last = values(ddp.module)
    with watched() as seen:
        ddp(batches(1)[0]).backward()
    reduced = max((one.elements for one in seen if one.name == "all_reduce"), default=0)
    zero.consolidate_state_dict(to=dist.get_world_size() - 1)
    whole = zero.state_dict() if dist.get_rank() == dist.get_world_size() - 1 else None
    return first, sent, reduced, last, whole


@pytest.mark.parametrize("kind", ["", "interleaved"])
def test_hooks_step_from_the_first_pass_on(pool: Any, kind: str) -> None:
    for ranks in (2, 3):
        one, many = (pool.run(ranks, train, "AdamW", False, False, steps)[0] for steps in (1, 5))
        found = pool.run(ranks, hooked, 5, kind)
        elements = sum(value.numel() for path, value in one[0].items() if path != "frozen")
        for first, sent, reduced, last, _ in found:
            close(first, one[0])
            close(last, many[0])  # with the scheduler's learning rates
            assert reduced < elements / 4, "gradients must not be all-reduced"
            assert len(sent) == 5
        total = sum(max(sent[1:]) for _, sent, _, _, _ in found)
        assert total <= 2 * (ranks - 1) * 4 * elements + 600 * ranks  # an all-reduce, with padding and counts
        assert found[-1][4] is not None and len(found[-1][4]["state"]) == len(one[0]) - 1


def test_input_that_cannot_be_used(pool: Any) -> None:
    pool.run(1, bad_input)


def bad_input() -> None:
    ps = [nn.Parameter(torch.ones(3))]
    zero = fjoin.ZeroRedundancyOptimizer
    raises_text(TypeError, lambda: zero(ps, nn.Linear), "optimizer_class", "torch.optim")
    raises_text(TypeError, lambda: zero(ps, tx.partition, parts={"*": tx.sgd(0.1)}), "by path")
    raises_text(ValueError, lambda: zero([], torch.optim.SGD), "empty")
    raises_text(ValueError, lambda: zero(ps, torch.optim.SGD, lr=-1.0), "-1.0")
    made = zero(ps, torch.optim.SGD, lr=0.1)
    raises_text(RuntimeError, made.state_dict, "consolidate_state_dict")
    raises_text(RuntimeError, lambda: made.state[ps[0]], "consolidate_state_dict")
    raises_text(ValueError, lambda: made.load_state_dict({"state": {}, "param_groups": []}), "groups of []")
    late = zero(ps, torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    for early in (late.step, late.consolidate_state_dict):
        raises_text(RuntimeError, early, "hook_with_zero_step")
    ddp = DistributedDataParallel(nn.Linear(2, 1))
    raises_text(TypeError, lambda: TorchJoin([ddp, made]), "fjoin.Join([ddp, zero])")
    ps[0].grad = torch.ones(3).to_sparse()
    raises_text(TypeError, made.step, "sparse gradients are not supported", "sparse=False")
    hook = fjoin.ddp.hook_with_zero_step
    raises_text(ValueError, lambda: hook(tx.mean("data"), ddp, made), "overlap_with_ddp=True")
    raises_text(ValueError, lambda: hook(tx.mean("data"), ddp, late), "exactly")
    lion = zero(ddp.parameters(), tx.lion, overlap_with_ddp=True)

    def allreduce_hook(state: Any, bucket: Any) -> Any: ...  # a user's own of the name of one of torch's

    for bad in (len, allreduce_hook):
        raises_text(TypeError, lambda bad=bad: hook(bad, ddp, lion), "hook must be")


def scaled(kind: str) -> Any:
    """Five steps with a GradScaler, the third of which overflows."""
    ddp = DistributedDataParallel(model())
    make: Any = {"ours": fjoin.ZeroRedundancyOptimizer, "of one's own": fjoin.ZeroRedundancyOptimizer}.get(kind)
    if make is None:
        optimizer: Any = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    else:
        optimizer = make(ddp.parameters(), Unknown if kind == "of one's own" else torch.optim.SGD, lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for i, batch in enumerate(batches(5)):
        optimizer.zero_grad()
        scaler.scale(ddp(batch) * (float("inf") if i == 2 and dist.get_rank() == 1 else 1.0)).backward()
        if i % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return values(ddp.module), scaler.get_scale()


@pytest.mark.parametrize("kind", ["ours", "of one's own"])
def test_with_a_grad_scaler(pool: Any, kind: str) -> None:
    want, scale = pool.run(2, scaled, "torch's")[0]
    for got, found in pool.run(2, scaled, kind):
        close(got, want)
        assert found == scale
