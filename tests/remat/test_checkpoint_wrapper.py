"""Modules that compute their activations again are the modules themselves, by all their names; torch's arguments."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import io
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.algorithms._checkpoint.checkpoint_wrapper as torchs
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import fjoin
from fjoin.transforms import checkpoint_policies as policies
from tests.helpers import raises_text
from tests.transforms.remat.transformer import Count, exact_host


class Block(nn.Module):
    def __init__(self, width: int = 4, norm: bool = True) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, 8), nn.Linear(8, width)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return x + scale * self.last(torch.tanh(self.norm(self.first(x))))


def model(norm: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(norm=norm), nn.Dropout(0.25), Block(norm=norm), nn.Linear(4, 2))


def is_block(module: nn.Module) -> bool:
    return isinstance(module, Block)


WRAPS: dict[str, Any] = {
    "default": fjoin.checkpoint_wrapper,
    "reentrant": functools.partial(fjoin.checkpoint_wrapper, checkpoint_impl=fjoin.CheckpointImpl.REENTRANT),
    "policy": functools.partial(fjoin.checkpoint_wrapper, policy=policies.dots_saveable, preserve_rng_state=True),
    "without batches": functools.partial(fjoin.checkpoint_wrapper, policy=policies.dots_with_no_batch_dims_saveable),
    "host": fjoin.offload_wrapper,
    "twice": lambda module: fjoin.checkpoint_wrapper(fjoin.checkpoint_wrapper(module)),
    "checkpoint_fn": functools.partial(fjoin.checkpoint_wrapper, checkpoint_fn=torch.utils.checkpoint.checkpoint, use_reentrant=False),
}  # fmt: skip


@exact_host()
def trained(own: nn.Module, steps: int = 3) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(own.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        own(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
    return list(own.parameters()), list(own.buffers())


@pytest.mark.parametrize("how", WRAPS)
def test_training_matches_the_plain_model(how: str) -> None:
    want, own = trained(model()), model()
    fjoin.apply_activation_checkpointing(own, WRAPS[how], is_block)
    got = trained(own)
    if how == "checkpoint_fn":  # torch's own updates a BatchNorm twice
        counts = [int(x) for x in got[1] if x.dtype is torch.int64]
        assert counts == [6, 6] and not torch.equal(got[1][0], want[1][0])
        got, want = got[:1], want[:1]
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("how", WRAPS)
def test_names_match_the_plain_model(how: str) -> None:
    plain, own = model(), model()
    fjoin.apply_activation_checkpointing(own, WRAPS[how], is_block)
    for names in ("named_parameters", "named_buffers", "named_modules", "named_children"):
        assert [n for n, _ in getattr(own, names)()] == [n for n, _ in getattr(plain, names)()]
    assert list(own.state_dict()) == list(plain.state_dict())
    assert isinstance(own[0], Block) and own[0] is not plain[0]
    other = model()
    with torch.no_grad():
        other[0].first.weight.zero_()
    own.load_state_dict(other.state_dict())
    assert not own[0].first.weight.any()
    plain.load_state_dict(own.state_dict())


def of_rows(module: nn.Module, params: Any, x: Tensor) -> Any:
    """The gradients for each row."""
    grad = torch.func.grad(lambda p, row: torch.func.functional_call(module, p, (row,)).square().sum())
    return torch.func.vmap(grad, (None, 0))(params, x)


def test_functional_call_and_functional() -> None:
    plain, own = model(norm=False).eval(), model(norm=False).eval()
    fjoin.apply_activation_checkpointing(own, check_fn=is_block)
    x, params = torch.ones(3, 4), {name: p.detach() for name, p in plain.named_parameters()}

    def grads(module: nn.Module) -> Any:
        return torch.func.grad(lambda p: torch.func.functional_call(module, p, (x,)).square().sum())(params)

    torch.testing.assert_close(grads(own), grads(plain), rtol=0, atol=0)
    torch.testing.assert_close(of_rows(own, params, x), of_rows(plain, params, x), rtol=0, atol=0)
    linear = fjoin.checkpoint_wrapper(nn.Linear(4, 4))
    torch.func.functional_call(linear, dict(linear.named_parameters()), (x,))
    apply, own_params, _ = fjoin.functional(own)
    assert list(own_params) == [name for name, _ in plain.named_parameters()]
    assert apply is not None


@pytest.mark.parametrize("how", ["default", "twice", "host"])
def test_copies_and_saved_modules(how: str) -> None:
    own = model(norm=False)
    fjoin.apply_activation_checkpointing(own, WRAPS[how], is_block)
    file = io.BytesIO()
    torch.save(own, file)
    file.seek(0)
    for again in (copy.deepcopy(own), torch.load(file, weights_only=False)):
        assert (
            type(again[0]) is not Block
            and type(again[0]).__name__ == type(own[0]).__name__
            and again[0].first.weight is not own[0].first.weight
        )
        torch.testing.assert_close(trained(copy.deepcopy(again)), trained(copy.deepcopy(own)), rtol=0, atol=0)


def test_forward_of_the_module_itself() -> None:
    block, calls = Block(norm=False), itertools.count()
    own_forward = block.forward

    def counted(x: Tensor, **kwargs: Any) -> Tensor:
        next(calls)
        return own_forward(x, **kwargs)

    block.forward = counted
    fjoin.checkpoint_wrapper(block)(torch.ones(2, 4), scale=2.0).sum().backward()
    assert next(calls) == 2


def test_wraps_the_same_modules_as_torch() -> None:
    def wrapped(**options: Any) -> list[str]:
        own = nn.Sequential(Block(), nn.Sequential(Block(), nn.Linear(4, 64)))
        fjoin.apply_activation_checkpointing(own, **options)
        return [name for name, module in own.named_modules() if type(module).__name__.startswith("Checkpointed")]

    def of_torch(**options: Any) -> list[str]:
        own = nn.Sequential(Block(), nn.Sequential(Block(), nn.Linear(4, 64)))
        torchs.apply_activation_checkpointing(own, **options)
        found = [name for name, module in own.named_modules() if isinstance(module, torchs.CheckpointWrapper)]
        return [name.replace("_checkpoint_wrapped_module.", "") for name in found]

    by_size = functools.partial(size_based_auto_wrap_policy, min_num_params=80)
    for options in (
        {}, {"check_fn": is_block}, {"auto_wrap_policy": ModuleWrapPolicy({Block})}, {"auto_wrap_policy": by_size},
        {"check_fn": lambda module: isinstance(module, nn.Linear)},
    ):  # fmt: skip
        assert sorted(wrapped(**options)) == sorted(of_torch(**options)) != []


def in_ddp(how: str | None) -> list[Tensor]:
    own = model(norm=False)
    if how is not None:
        fjoin.apply_activation_checkpointing(own, WRAPS[how], is_block)
    return [p.detach() for p in trained(DistributedDataParallel(own), 2)[0]]


def in_fsdp(how: str | None) -> list[Tensor]:
    own = model(norm=False)
    if how is not None:
        fjoin.apply_activation_checkpointing(own, WRAPS[how], is_block)
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for module in own:
        if is_block(module):
            fully_shard(module, mesh=mesh)
    fully_shard(own, mesh=mesh)
    assert [name for name, _ in own.named_parameters()] == [name for name, _ in model(norm=False).named_parameters()]
    return [p.detach().full_tensor() for p in trained(own, 2)[0]]


@pytest.mark.sample(2)
@pytest.mark.parametrize("how", ["default", "policy", "host"])
@pytest.mark.parametrize("run", [in_ddp, in_fsdp])
def test_on_processes(pool: Any, run: Any, how: str) -> None:
    for got, want in zip(pool.run(2, run, how), pool.run(2, run, None), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_bad_input() -> None:
    raises_text(TypeError, lambda: fjoin.checkpoint_wrapper(torch.sin), "module")
    raises_text(TypeError, lambda: fjoin.checkpoint_wrapper(Block(), contexts=None), "'contexts'")
    raises_text(ValueError, lambda: fjoin.offload_wrapper(Block())(torch.ones(2, 4)), "on the CPU already")
    compiled = Block()
    compiled.compile(backend="eager")
    raises_text(ValueError, lambda: fjoin.checkpoint_wrapper(compiled), "compile")


@pytest.mark.parametrize("name", ["checkpoint_wrapper", "apply_activation_checkpointing", "offload_wrapper"])
def test_arguments_match_torch(name: str) -> None:
    """Names, order and kinds are equal."""
    ours, theirs = (inspect.signature(getattr(owner, name)).parameters.values() for owner in (fjoin, torchs))
    of_torch = [(one.name, one.kind) for one in theirs]
    assert [(one.name, one.kind) for one in ours] == of_torch
    assert [one.name for one in fjoin.CheckpointImpl] == [one.name for one in torchs.CheckpointImpl]


# -- the arguments of torch.utils.checkpoint.checkpoint ------------------------------------------------------------------


def selective() -> Any:
    """Every second product of matrices is kept, counted anew in each call."""
    counts = itertools.count()

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = op is torch.ops.aten.addmm.default and next(counts) % 2 == 0
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


SERVED: dict[str, list[Any]] = {
    "use_reentrant": [True, False, None],
    "context_fn": [selective, functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])],
    "determinism_check": ["default", "none"], "respect_saved_tensors_hooks": [True, False, None],
    "debug": [False, True], "early_stop": [True, False], "preserve_rng_state": [True, False],
}  # fmt: skip


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def products(module: nn.Module) -> int:
    """How many products of matrices run in the backward pass."""
    out = module(torch.ones(3, 4)).sin().sum()
    with Count() as count:
        out.backward()
    return count.of.get("addmm", 0)


def gradients(module: nn.Module) -> list[Tensor]:
    module(torch.ones(3, 4)).sin().sum().backward()
    return [p.grad for p in module.parameters()]


def test_the_tables_have_all_arguments_of_torch() -> None:
    own = [
        p.name
        for p in inspect.signature(torch.utils.checkpoint.checkpoint).parameters.values()
        if p.kind is p.KEYWORD_ONLY
    ]
    named = {*own} or {*SERVED} - {"preserve_rng_state"}
    of_newer_torch = {"respect_saved_tensors_hooks"}  # from 2.14 on
    assert named | {"preserve_rng_state"} | of_newer_torch == {*SERVED}


def test_saved_tensor_hooks_receive_the_tensors_of_a_policy() -> None:
    seen: list[torch.Size] = []
    module = fjoin.checkpoint_wrapper(layers(), policy=policies.dots_saveable)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (seen.append(x.shape), x)[1], lambda x: x):
        out = module(torch.ones(3, 4)).sum()
    assert seen.count(torch.Size([3, 8])) == 2, "the results of two products"
    out.backward()


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in SERVED.items() for value in values])
def test_supported_arguments(name: str, value: Any) -> None:
    wrapped = fjoin.checkpoint_wrapper(layers(), **{name: value})
    for _ in range(2):
        torch.testing.assert_close(gradients(wrapped), gradients(layers()), rtol=0, atol=0)
        wrapped.zero_grad()


def test_raises_on_contexts_without_a_policy() -> None:
    for name in ("early_stop", "preserve_rng_state"):
        raises_text(TypeError, lambda: fjoin.checkpoint_wrapper(layers(), **{name: "no"}), name)  # noqa: B023
    both = fjoin.checkpoint_wrapper(layers(), context_fn=lambda: (contextlib.nullcontext(), contextlib.nullcontext()))
    raises_text(TypeError, lambda: both(torch.ones(3, 4)), "create_selective_checkpoint_contexts", "policy=")
    two = fjoin.checkpoint_wrapper(layers(), context_fn=selective, policy=policies.dots_saveable)
    raises_text(TypeError, lambda: two(torch.ones(3, 4)), "policy")


def test_torch_policy_saves_the_same_tensors() -> None:
    """Of its contexts, one of two products."""
    own = fjoin.checkpoint_wrapper(layers(), context_fn=selective)
    assert products(own) == 1 < products(fjoin.checkpoint_wrapper(layers())) == 2


def test_early_stop() -> None:
    runs = itertools.count()

    class Ends(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out = x.sin().sin()
            next(runs)
            return out

    for early, want in ((True, 1), (False, 2)):
        before = next(runs)
        fjoin.checkpoint_wrapper(Ends(), early_stop=early)(torch.ones(2, requires_grad=True)).sum().backward()
        assert next(runs) - before - 1 == want
