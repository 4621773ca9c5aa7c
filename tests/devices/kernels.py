"""The kernels that a step launches, in order, with their shapes and the numbers that they are given."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import optree
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fjoin
from fjoin import transforms as tx
from fjoin.records import DeviceReads
from fjoin.training._passes import Passes
from tests.devices.echo import EchoAxis, EchoMesh
from tests.devices.memory import Memory

Make = Callable[[], tx.Pipeline]


class Kernel(NamedTuple):
    op: str
    shapes: tuple[Any, ...]
    numbers: tuple[Any, ...]


class Kernels(TorchDispatchMode):
    """The operations of this thread, without views and without those of the model itself.

    Attributes:
        seen: Those that launch something.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Kernel] = []
        self.muted = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        returns, name = func._schema.returns, func.name()
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        given: Any = (args, kwargs)
        leaves = optree.tree_leaves(given)
        elsewhere = any(isinstance(x, Tensor) and x.is_meta for x in [*leaves, *optree.tree_leaves(out)])
        if not self.muted and not view and "empty" not in name and elsewhere:
            shapes = tuple(tuple(x.shape) if x.is_meta else "host" for x in leaves if isinstance(x, Tensor))
            numbers = tuple(x for x in leaves if isinstance(x, (bool, int, float)) or x is None)
            # A 0-d tensor of the host is a number to a kernel.
            numbers += tuple(x.item() for x in leaves if isinstance(x, Tensor) and not x.is_meta and not x.dim())
            self.seen.append(Kernel(name, shapes, numbers))
        return out

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        self.muted, before = True, self.muted
        try:
            yield
        finally:
            self.muted = before


def steps(
    make: Make, shapes: dict[str, tuple[int, ...]], weights: list[float], memory: Memory | None = None, **options: Any
) -> list[list[Kernel]]:
    """The kernels of each step of the first of two ranks, outside the forward and backward passes of the model.

    Tensors without data stand for those of a device. The gradients of the loss are of the parameters' shapes.

    Args:
        memory: Counts the bytes of these tensors; it is reset before each step.
    """
    kernels, out = Kernels(), list[list[Kernel]]()
    run = Passes._run

    def forward(passes: Any, *args: Any) -> Any:
        with kernels.quiet():
            return run(passes, *args)

    def loss_fn(params: Any, batch: float) -> Tensor:
        return _Loss.apply(kernels, *params.values())

    on = mock.patch.object
    with on(DeviceReads, "add", lambda *args: None), on(Passes, "_run", forward), kernels_without_meta():
        modes = contextlib.ExitStack()
        modes.enter_context(memory or contextlib.nullcontext())
        params = {path: torch.empty(shape, device="meta") for path, shape in shapes.items()}
        step = fjoin.train_step(loss_fn, make(), mesh=EchoMesh(_Counted(kernels)), weight=lambda w: w, **options)
        state = step.init(params, sync=None)
        del params
        with modes, kernels:
            for weight in weights:
                kernels.seen = []
                if memory is not None:
                    memory.reset()
                state, _ = step(state, weight)
                out.append(kernels.seen)
    return out


class _Counted(EchoAxis):
    """Each message is a launch too."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def _sends(self, op: str, reads: Any, writes: Any, result: Any = None) -> Any:
        self._kernels.seen.append(Kernel(f"message {op}", tuple(tuple(x.shape) for x in [*reads, *writes]), ()))
        return super()._sends(op, reads, writes, result)


class _Loss(torch.autograd.Function):
    """A loss whose gradients are made without kernels that count."""

    @staticmethod
    def forward(ctx: Any, kernels: Kernels, *params: Tensor) -> Tensor:
        ctx.kernels = kernels
        ctx.save_for_backward(*params)
        return torch.empty((), device=params[0].device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with ctx.kernels.quiet():
            return None, *(torch.empty_like(p) for p in ctx.saved_tensors)


@contextlib.contextmanager
def kernels_without_meta() -> Iterator[None]:
    """Kernels of torch's that it has only for tensors with data."""
    library = torch.library.Library("aten", "IMPL")
    for name in ("_fused_sgd_", "_fused_sgd_.tensor_lr", "_fused_adam_.tensor_lr", "_fused_adamw_.tensor_lr"):
        library.impl(name, lambda *args, **kwargs: None, "Meta")
    try:
        yield
    finally:
        library._destroy()


SMALL = {"a": (3, 4), "b": (4,), "c": (4, 3)}


def baked(make: Make, **options: Any) -> list[str]:
    """The differences between the kernels of two steps of other weights, in words: numbers of the host that kernels get."""
    *_, first, second = steps(make, SMALL, [1.0, 2.0, 3.0, 5.0], **options)
    if len(first) != len(second):
        return [f"{len(first)} kernels and {len(second)} kernels"]
    return [
        f"{a.op}: {a.shapes} {a.numbers} and {b.op}: {b.shapes} {b.numbers}"
        for a, b in zip(first, second, strict=True)
        if a != b
    ]


def copied(kernels: list[Kernel]) -> list[Kernel]:
    """Copies from the host. A 0-d tensor of the host may be a number to other kernels."""
    return [kernel for kernel in kernels if "host" in kernel.shapes and "copy" in kernel.op]
