"""ZeroRedundancyOptimizer equals the unsharded optimizer of torch, in plain and in hooked mode, and in a Join."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.nn.parallel import DistributedDataParallel

import fjoin
from tests.helpers import raises_text
from tests.optim.zero_classes import CLASSES, HOOKED, Plain, Sparse, Unserved
from tests.traffic import sent_to_others, watched

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, of torch.jit
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook
    from torch.distributed.optim import ZeroRedundancyOptimizer


class Model(nn.Module):
    """With parameters that are unused, frozen, used late, without dims, and not contiguous."""

    def __init__(self, matrices: bool, number: bool) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7, bias=not matrices)
        self.unused = nn.Linear(3, 3, bias=not matrices)
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)
        self.late = nn.Linear(5, 7, bias=not matrices)
        self.last = nn.Linear(7, 12, bias=not matrices)
        self.more = nn.Module()
        if not matrices:
            self.more.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self.more.scale = nn.Parameter(torch.ones(() if number else 1))

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        x = self.last((self.first(x) + self.late(x) if step > 1 else self.first(x)).tanh())
        if hasattr(self.more, "conv"):
            x = self.more.scale * self.more.conv(x.view(-1, 3, 2, 2))
        return x.square().mean() * self.frozen.sum()


def model(name: str = "") -> Model:
    torch.manual_seed(0)
    return Model(name == "Muon", not name or name in HOOKED).double()


def groups(of: nn.Module) -> list[dict[str, Any]]:
    """Two, neither in the order of the module."""
    ps = list(of.parameters())[::-1]
    return [{"params": ps[1::2], "lr": 0.03}, {"params": ps[::2]}]


def ddp_of(module: nn.Module) -> Any:
    return DistributedDataParallel(module, find_unused_parameters=True)


def hook(ddp: Any, zero: Any, make: Any = fjoin.ddp.hook_with_zero_step) -> None:
    ddp.register_comm_hook(None, make(allreduce_hook, ddp, zero))


def set_rates(optimizer: Any, step: int) -> None:
    """A rate that rises from the start, so that states differ that take it before their first gradient."""
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * (0.5 + 0.1 * step)


def batch(i: int) -> Tensor:
    """On ranks the part of one."""
    whole = torch.randn(30, 5, generator=torch.Generator().manual_seed(i)).double()
    return whole.chunk(dist.get_world_size())[dist.get_rank()] if dist.is_initialized() else whole


def train(ddp: Any, optimizer: Any, steps: range, rates: bool = True) -> dict[str, Tensor]:
    for i in steps:
        if rates:
            set_rates(optimizer, i)
        optimizer.zero_grad()
        ddp(batch(i), i).backward()
        optimizer.step()
    own = getattr(ddp, "module", ddp)
    return {path: p.detach().clone(memory_format=torch.contiguous_format) for path, p in own.named_parameters()}


@contextlib.contextmanager
def without_torchs() -> Iterator[None]:
    """A context in which torch's implementation fails."""
    with pytest.MonkeyPatch.context() as patch:
        for holder, name in (
            (ZeroRedundancyOptimizer, "__init__"),
            (ddp_zero_hook, "hook_with_zero_step"),
            (ddp_zero_hook, "_hook_with_zero_step_setup"),
        ):
            patch.setattr(holder, name, lambda *args, **kwargs: pytest.fail("torch's implementation ran"))
        yield


def of_torch(name: str, state: Any, weights: Any, steps: range) -> tuple[Any, Any]:
    """The parameters and the state of the unsharded optimizer in one process, on whole batches."""
    make, arguments, _ = CLASSES[name]
    own = model(name)
    optimizer = make(groups(own), **arguments)
    if state is not None:
        own.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(state))
    return train(own, optimizer, steps), optimizer.state_dict()


def of_zero(name: str, mode: str, state: Any, weights: Any, steps: range) -> tuple[Any, Any]:
    """The same on this rank's part of each batch. A state is loaded into an optimizer of other hyperparameters."""
    make, arguments, first = CLASSES[name]
    ddp = ddp_of(model(name))
    if state is not None:
        arguments = first
        ddp.module.load_state_dict(weights)
    with without_torchs():
        zero = fjoin.ZeroRedundancyOptimizer(
            groups(ddp.module), make, overlap_with_ddp=mode == "hooked", parameters_as_bucket_view=mode == "views", **arguments
        )  # fmt: skip
        if mode == "hooked":
            hook(ddp, zero)
        if state is not None:
            before = copy.deepcopy(state)
            zero.load_state_dict(state)
            torch.testing.assert_close(state, before, rtol=0, atol=0)  # the caller's stays as it is
        params = train(ddp, zero, steps)
        last = dist.get_world_size() - 1
        zero.consolidate_state_dict(last)
        return params, zero.state_dict() if dist.get_rank() == last else None


def same(got: tuple[Any, Any], want: tuple[Any, Any], frozen_or_unused: set[int]) -> None:
    torch.testing.assert_close(got[0], want[0], rtol=1e-7, atol=1e-10)
    for ours, torchs in zip(got[1]["param_groups"], want[1]["param_groups"], strict=True):
        assert [ours.get(key) for key in ("params", "lr", "count", "momentum")] == [
            torchs.get(key) for key in ("params", "lr", "count", "momentum")
        ]
    mine, theirs = ({index for index, state in one[1]["state"].items() if state} for one in (got, want))
    assert mine ^ theirs <= frozen_or_unused
    for index in theirs - frozen_or_unused:
        leaves, kinds = optree.tree_flatten(got[1]["state"][index], none_is_leaf=True)
        wanted, wanted_kinds = optree.tree_flatten(want[1]["state"][index], none_is_leaf=True)
        assert kinds == wanted_kinds
        for leaf, other in zip(leaves, wanted, strict=True):
            if other is None:
                assert leaf is None
            else:
                torch.testing.assert_close(leaf, other, rtol=1e-7, atol=1e-10, check_dtype=False)


CASES = [(name, "") for name in CLASSES] + [(name, mode) for mode in ("hooked", "views") for name in HOOKED]


@pytest.mark.sample(6)
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_training_matches_torch_and_states_load_anywhere(pool: Any, name: str, mode: str) -> None:
    own = model(name)
    order = [p for group in groups(own) for p in group["params"]]
    idle = [own.frozen, *own.unused.parameters()]
    out = {i for i, p in enumerate(order) if any(p is one for one in idle)}
    middle, end = of_torch(name, None, None, range(3)), of_torch(name, None, None, range(5))
    got = pool.run(2, of_zero, name, mode, None, None, range(3))
    weights, state = got[0][0], got[1][1]
    assert all(torch.equal(p, got[1][0][path]) for path, p in weights.items())
    same((weights, state), middle, out)
    # On with ours in torch's optimizer, with torch's in ours, and with ours on other numbers of ranks.
    same(of_torch(name, state, weights, range(3, 5)), end, out)
    for ranks, (w, s) in [(1, middle), (3, (weights, state)), (2, (weights, state))]:
        got = pool.run(ranks, of_zero, name, mode, s, w, range(3, 5))
        same((got[0][0], got[-1][1]), end, out)


# -- beside torch's on the same ranks ----------------------------------------------------------------------


def adamw(ddp: Any, kind: str) -> Any:
    params = ddp.parameters()
    if kind == "torch's":
        return torch.optim.AdamW(params, lr=0.01)
    zero = fjoin.ZeroRedundancyOptimizer(params, torch.optim.AdamW, overlap_with_ddp="hooked" in kind, lr=0.01)
    if "hooked" in kind:
        hook(ddp, zero)
    return zero


def joined(kind: str) -> Any:
    """Uneven inputs: rank r has 5 - r batches; and on, with even inputs."""
    ddp = ddp_of(model())
    optimizer = adamw(ddp, kind)
    order = [optimizer, ddp] if kind == "zero first" else [ddp, optimizer]
    # With a hook the module's shadow pass steps, so that torch's Join needs only the module.
    with TorchJoin([ddp]) if kind == "hooked, torch's Join" else fjoin.Join(order):
        train(ddp, optimizer, range(5 - dist.get_rank()), rates=False)
    for i in (5, 6):
        params = train(ddp, optimizer, range(i, i + 1), rates=False)
    return params


def added(kind: str) -> Any:
    """A group is added, as one thaws a part of a module."""
    ddp = ddp_of(model())
    ps = [p for p in ddp.parameters() if p.requires_grad]
    zero = fjoin.ZeroRedundancyOptimizer
    optimizer: Any = (
        torch.optim.AdamW(ps[:2], lr=0.01) if kind == "torch's" else zero(ps[:2], torch.optim.AdamW, lr=0.01)
    )
    train(ddp, optimizer, range(2))
    optimizer.add_param_group({"params": ps[2:], "lr": 0.02})
    return train(ddp, optimizer, range(2, 5))


def scaled(kind: str) -> Any:
    """Five steps with a GradScaler, the third of which overflows on one rank."""
    ddp = ddp_of(model().float())
    make = Plain if kind.startswith("of one's own") else torch.optim.SGD
    options: dict[str, Any] = {} if make is Plain else {"momentum": 0.9}
    optimizer: Any = (
        make(ddp.parameters(), lr=0.01, **options) if kind.endswith("torch's")
        else fjoin.ZeroRedundancyOptimizer(ddp.parameters(), make, lr=0.01, **options)
    )  # fmt: skip
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for i in range(5):
        optimizer.zero_grad()
        loss = ddp(batch(i).float(), i) * (float("inf") if i == 2 and dist.get_rank() == 1 else 1.0)
        scaler.scale(loss).backward()
        if i % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return {path: p.detach().clone() for path, p in ddp.named_parameters()} | {
        "scale": torch.tensor(scaler.get_scale())
    }


# A program, torch's way in it, and ours.
BESIDE = [
    *((joined, "torch's", kind) for kind in ("zero last", "zero first", "hooked, torch's Join", "hooked, ours")),
    (added, "torch's", "ours"), (scaled, "torch's", "ours"), (scaled, "of one's own, torch's", "of one's own"),
]  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("program", "theirs", "ours"), BESIDE, ids=[f"{row[0].__name__} {row[2]}" for row in BESIDE])
def test_programs_come_to_the_same_as_with_torchs_optimizer(
    pool: Any, program: Any, theirs: str, ours: str, ranks: int
) -> None:
    """Of uneven inputs torch's own class makes steps with stale gradients, which test_torch_faults shows, or hangs."""
    want = pool.run(ranks, program, theirs)[0]
    for got in pool.run(ranks, program, ours):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def hooked(kind: str) -> Any:
    """A module whose hook steps: the parameters after one pass and after five, and what is sent."""
    ddp = ddp_of(model())
    with without_torchs():
        zero = fjoin.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=0.01)
        hook(ddp, zero, getattr(fjoin.ddp, kind))
        found, sent, reduced = [], [], 0
        for i in range(5):
            with sent_to_others() as messages, watched() as seen:
                found.append(train(ddp, zero, range(i, i + 1)))
            sent.append(sum(messages))
            reduced = max([one.elements for one in seen if one.name == "all_reduce"], default=0)
            with watched() as by_step:
                zero.step()
            assert not by_step and all(p.grad is None for p in ddp.parameters())
    return found[0], found[-1], sent, reduced


@pytest.mark.parametrize("kind", ["hook_with_zero_step", "hook_with_zero_step_interleaved"])
def test_hooks_step_from_the_first_pass_on(pool: Any, kind: str) -> None:
    for ranks in (2, 3):
        want = [pool.run(ranks, plain, steps)[0] for steps in (1, 5)]
        found = pool.run(ranks, hooked, kind)
        elements = sum(value.numel() for path, value in want[0].items() if path != "frozen")
        for first, last, _, reduced in found:
            torch.testing.assert_close([first, last], want, rtol=1e-6, atol=1e-6)
            assert reduced < elements / 4, "gradients must not be all-reduced"
        total = sum(max(sent[1:]) for *_, sent, _ in found)
        assert total <= 2 * (ranks - 1) * 8 * elements + 600 * ranks  # an all-reduce, with padding and counts


def plain(steps: int) -> Any:
    ddp = ddp_of(model())
    return train(ddp, torch.optim.AdamW(ddp.parameters(), lr=0.01), range(steps))


def unserved(kind: Any) -> str:
    ddp = ddp_of(nn.Linear(5, 7))
    zero = fjoin.ZeroRedundancyOptimizer(ddp.parameters(), kind)
    ddp(torch.ones(2, 5)).sum().backward()
    zero.step()
    return raises_text(TypeError, lambda: zero.consolidate_state_dict(0), "consist of tensors")


@pytest.mark.parametrize(("kind", "text"), [(Unserved, "a Generator"), (Sparse, "memory format")])
def test_a_state_that_cannot_travel_is_an_error_on_all_ranks(pool: Any, kind: Any, text: str) -> None:
    assert sum(text in found for found in pool.run(2, unserved, kind)) == 1, "on the rank that owns it"
