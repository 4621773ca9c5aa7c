"""Values that wait elsewhere come back as they were, and leave nothing behind."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fjoin import transforms as tx
from fjoin.transforms import checkpoint_policies as policies
from fjoin.transforms.rematerialization._offload import Host, Stashed
from tests.helpers import raises_text

from .transformer import Transformer, tokens


@pytest.mark.usefixtures("host")
def test_nothing_is_left_after_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    handles, put_exact = list[weakref.ref[Stashed]](), Host.put

    def put(host: Host, values: Sequence[Tensor]) -> list[Any]:
        found = put_exact(host, values)
        handles.extend(weakref.ref(one) for one in found if isinstance(one, Stashed))
        return found

    monkeypatch.setattr(Host, "put", put)

    def block(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(x @ w) @ w)

    again = tx.remat(block, policies.everything_saveable, "cpu")
    x, w = torch.randn(64, 64), torch.randn(64, 64, requires_grad=True)
    for _ in range(2):
        out = again(again(x, w), w)
        assert any(one() is not None for one in handles)
        out.sum().backward()
        assert all(one() is None for one in handles)  # although the graph is alive


@pytest.mark.usefixtures("host")
def test_arguments_that_are_results_wait_too_and_parameters_do_not() -> None:
    w, x = torch.randn(50, 50, requires_grad=True), torch.randn(20, 50)

    def residuals(*args: Tensor) -> dict[str, str]:
        def f(w: Tensor, x: Tensor) -> Tensor:
            return tx.remat(lambda h, w: torch.tanh(h @ w), offload="cpu")(torch.sin(x @ w), w).sum()

        return {one.name.split(" at ")[0]: one.where for one in tx.saved_residuals(f, *args)}

    assert residuals(w, x) == {"argument 0": "device", "argument 1": "device", "sin": "cpu", "mm": "device"}


@pytest.mark.usefixtures("host")
def test_caller_may_write_into_offloaded_arguments() -> None:
    x = torch.randn(5, requires_grad=True)
    h = x * 2
    out = tx.remat(lambda h: torch.tanh(h), offload="cpu")(h)
    h.data.zero_()
    out.sum().backward()
    torch.testing.assert_close(x.grad, 2 * (1 - torch.tanh(2 * x.detach()) ** 2))


# -- on machines without an accelerator -----------------------------------------------------------------------------------


def test_raises_on_offload_of_cpu_values_to_the_cpu() -> None:
    x = torch.ones(3, requires_grad=True)
    named = policies.save_and_offload_only_these_names(names_which_can_be_saved=[], names_which_can_be_offloaded=["h"])
    for policy, offload in (
        (policies.everything_saveable, "cpu"), (policies.offload_dot_with_no_batch_dims(), "cpu"), (None, "cpu"), (named, None),
    ):  # fmt: skip
        f = tx.remat(lambda x: torch.tanh(tx.checkpoint_name(x.view(1, 3) @ x.view(3, 1), "h")), policy, offload)
        raises_text(ValueError, lambda: f(x * 2), "on the CPU already")  # noqa: B023
    (meta,) = Host().put([torch.ones(3, device="meta")])
    assert not isinstance(meta, Tensor)


def test_values_on_the_cpu_stay_beside_those_of_an_accelerator() -> None:
    """A kernel on a GPU may have a seed on the CPU."""
    seed = torch.zeros((), dtype=torch.int64)
    with FakeTensorMode():
        x = torch.empty(3, device="cuda")
    moved, kept = Host().put([x, seed])
    assert kept is seed and moved is not x


# -- on a GPU -----------------------------------------------------------------------------------------------------------

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.nccl
@gpu
def test_pinned_memory_on_a_gpu() -> None:
    model, x = Transformer(6, width=256).cuda(), tokens(16, 256).cuda()

    def step(wrap: Any) -> tuple[Any, int]:
        model.zero_grad()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        out = model(x, wrap)
        kept = torch.cuda.memory_allocated() - before
        out.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None], kept

    want, plain = step(lambda block: block)
    for policy in (
        None, policies.everything_saveable, policies.dots_saveable, policies.offload_dot_with_no_batch_dims(),
    ):  # fmt: skip
        for _ in range(3):
            got, kept = step(lambda block: tx.remat(block, policy, "cpu"))  # noqa: B023
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
            assert kept < 0.4 * plain


@pytest.mark.nccl
@gpu
def test_copies_run_beside_the_computation() -> None:
    model, x = Transformer(6, width=256).cuda(), tokens(16, 256).cuda()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        model(x, lambda block: tx.remat(block, policies.everything_saveable, "cpu")).backward()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type is torch.autograd.DeviceType.CUDA]
    copies = {
        event.device_resource_id for event in events if "Memcpy DtoH" in event.name or "Memcpy HtoD" in event.name
    }
    others = {event.device_resource_id for event in events if "gemm" in event.name}
    if not events:
        pytest.skip("torch's profiler sees no kernels on this machine")
    assert copies and others and not copies & others


@pytest.mark.nccl
@gpu
def test_a_caller_on_a_gpu_may_write_at_once() -> None:
    x = torch.randn(1 << 24, device="cuda", requires_grad=True)
    h = x * 2
    out = tx.remat(torch.tanh, policies.everything_saveable, "cpu")(h)
    want = 2 * (1 - torch.tanh(2 * x.detach()) ** 2)
    h.data.zero_()
    out.data.zero_()
    out.sum().backward()
    torch.testing.assert_close(x.grad, want)
