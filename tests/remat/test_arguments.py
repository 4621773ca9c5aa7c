"""The arguments of torch.utils.checkpoint.checkpoint in checkpoint_wrapper: served, or an error that says what to do."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torchs
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import fjoin
from fjoin.transforms import checkpoint_policies as policies
from tests.helpers import raises_text


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
REFUSED: dict[str, list[tuple[Any, type[Exception], str]]] = {
    "early_stop": [("no", TypeError, "early_stop")],
    "preserve_rng_state": [("no", TypeError, "preserve_rng_state")],
}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def gradients(module: nn.Module) -> list[Tensor]:
    module(torch.ones(3, 4)).sin().sum().backward()
    return [p.grad for p in module.parameters()]


def test_the_tables_have_all_arguments_of_torch() -> None:
    own = [p.name for p in inspect.signature(torchs.checkpoint).parameters.values() if p.kind is p.KEYWORD_ONLY]
    named = {*own} or {*SERVED} - {"preserve_rng_state"}
    of_newer_torch = {"respect_saved_tensors_hooks"}  # from 2.14 on
    assert named | {"preserve_rng_state"} | of_newer_torch == {*SERVED}


def test_saved_tensor_hooks_receive_the_tensors_of_a_policy() -> None:
    seen: list[torch.Size] = []
    module = fjoin.checkpoint_wrapper(model(), policy=policies.dots_saveable)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (seen.append(x.shape), x)[1], lambda x: x):
        out = module(torch.ones(3, 4)).sum()
    assert seen.count(torch.Size([3, 8])) == 2, "the results of two products"
    out.backward()


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in SERVED.items() for value in values])
def test_supported_arguments(name: str, value: Any) -> None:
    wrapped = fjoin.checkpoint_wrapper(model(), **{name: value})
    for _ in range(2):
        torch.testing.assert_close(gradients(wrapped), gradients(model()), rtol=0, atol=0)
        wrapped.zero_grad()


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in REFUSED.items() for case in cases])
def test_raises_on_unsupported_arguments(name: str, case: tuple[Any, type[Exception], str]) -> None:
    value, kind, text = case
    raises_text(kind, lambda: fjoin.checkpoint_wrapper(model(), **{name: value}), text)


def test_raises_on_contexts_without_a_policy() -> None:
    both = fjoin.checkpoint_wrapper(model(), context_fn=lambda: (contextlib.nullcontext(), contextlib.nullcontext()))
    raises_text(TypeError, lambda: both(torch.ones(3, 4)), "create_selective_checkpoint_contexts", "policy=")
    two = fjoin.checkpoint_wrapper(model(), context_fn=selective, policy=policies.dots_saveable)
    raises_text(TypeError, lambda: two(torch.ones(3, 4)), "policy")


class Products(TorchDispatchMode):
    """Counts the products of matrices that run."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


def products(module: nn.Module) -> int:
    """How many run in the backward pass."""
    out = module(torch.ones(3, 4)).sin().sum()
    with Products() as products:
        out.backward()
    return products.count


def test_torch_policy_saves_the_same_tensors() -> None:
    own, of_torch = fjoin.checkpoint_wrapper(model(), context_fn=selective), OfTorch(model(), selective)
    assert products(own) == 1 < products(fjoin.checkpoint_wrapper(model())) == 2
    assert products(of_torch) == 1


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


class OfTorch(nn.Module):
    def __init__(self, inner: nn.Module, context_fn: Any) -> None:
        super().__init__()
        self.inner, self._context_fn = inner, context_fn

    def forward(self, x: Tensor) -> Any:
        return torchs.checkpoint(self.inner, x, use_reentrant=False, context_fn=self._context_fn)
