"""Graphs of a device on CPU tensors: a capture takes up operations and undoes them, and a replay runs them again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self
from unittest import mock

import optree
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fjoin.agreement import _step_record
from fjoin.training.passes import _loss
from fjoin.transforms import _devices
from fjoin.transforms.optimizers import _sgd
from fjoin.transforms.optimizers.adam import _adam
from fjoin.transforms.optimizers.wrappers import _inject
from fjoin.transforms.schedules._schedules import value_at
from fjoin.transforms.step_param import _formula
from tests.devices.echo import EchoAxis, _Work
from tests.devices.streams import Streams


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in optree.tree_leaves(tree) if isinstance(x, Tensor)]


class _Tensors:
    """A set of tensors by identity."""

    def __init__(self) -> None:
        self._held: dict[int, Tensor] = {}

    def add(self, x: Tensor) -> None:
        self._held[id(x)] = x

    def __contains__(self, x: Tensor) -> bool:
        return id(x) in self._held


class Graph(TorchDispatchMode):
    """A captured graph. Like a device, it reads and writes always the same memory, with the numbers it was captured with."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self._made, self._held = set[int](), list[Any]()
        self._before: dict[int, tuple[Any, Tensor]] = {}
        self.replays, self.freed = 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.name() == "aten::_local_scalar_dense" and not self._on_host(args[0]):
            raise RuntimeError("operation not permitted when stream is capturing")
        for i, spec in enumerate(func._schema.arguments):
            if spec.alias_info is not None and spec.alias_info.is_write:
                self._keep(_tensors(args[i] if i < len(args) else kwargs.get(spec.name)))
        given = {x.untyped_storage()._cdata for x in _tensors((args, kwargs))}
        out = func(*args, **kwargs)
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        made = [x for x in _tensors(out) if x.untyped_storage()._cdata not in given]
        self._made |= {x.untyped_storage()._cdata for x in made}
        self._held.append(out)
        if not view and "empty" not in func.name():
            self._calls.append((func, args, kwargs, made))
        return out

    def _on_host(self, x: Tensor) -> bool:
        """Whether a tensor lies on the host: hyperparameters in a state do, 0-d float64 tensors in memory of their own."""
        storage = x.untyped_storage()
        return x.dtype is torch.float64 and storage.nbytes() == 8 and storage._cdata not in self._made

    def _keep(self, tensors: Sequence[Tensor]) -> None:
        for x in tensors:
            storage = x.untyped_storage()
            if storage._cdata not in self._made and storage._cdata not in self._before:
                self._before[storage._cdata] = storage, storage.clone()

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for storage, values in self._before.values():
            storage.copy_(values)
        with torch.no_grad():
            for _, _, _, made in self._calls:
                for x in made:
                    if x.is_floating_point():
                        x.detach().fill_(torch.nan)  # a capture computes nothing
        if error[0] is not None and issubclass(error[0], RuntimeError):
            raise RuntimeError("operation failed due to a previous error during capture")

    def replay(self) -> None:
        self.replays += 1
        with torch._C._AutoDispatchBelowAutograd():
            for func, args, kwargs, made in self._calls:
                out = func(*args, **kwargs)
                for to, x in zip(made, _tensors(out) if made else (), strict=True):
                    to.detach().copy_(x)

    def reset(self) -> None:
        self.freed = True

    def pool(self) -> str:
        return "pool"


class Axis(EchoAxis):
    """Messages are operations, which graphs take up."""

    def begin(self, op: str, x: Tensor, arg: Any) -> Callable[[], Tensor]:
        out = self._value(op, x.contiguous().detach(), arg)
        return lambda: out

    def begin_reduce(self, buffer: Tensor) -> Any:
        with torch.no_grad():
            buffer.mul_(2)
        return _Work(lambda: None)


class _Unordered(Streams):
    """Streams whose order nobody checks."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def graphs() -> Iterator[list[Graph]]:
    """The steps of this thread are on a device with graphs; yields those that are made."""
    made = list[Graph]()

    def new(pool: Any = None) -> Graph:
        made.append(Graph())
        return made[-1]

    def write(values: list[float], into: Tensor) -> None:
        into.copy_(torch.tensor(values, dtype=into.dtype))

    def of_device(value: Tensor) -> Tensor:
        return value.detach().to(torch.float64)

    def rate_of_device(lr: Any, step: Tensor) -> Any:
        value = value_at(lr, step)
        return value.to(torch.float32) if isinstance(value, Tensor) else value

    def rate_at(lr: Any, step: Tensor) -> Tensor:
        value = _formula.rate_at(lr, step)
        scheduled.add(value)
        return value

    on, scheduled = mock.patch.object, _Tensors()
    with (
        on(_inject, "rate_at", rate_at),
        on(_inject, "readable_without_sync", lambda value: value not in scheduled),
        on(_sgd, "kernel_lr", rate_of_device),
        on(_adam, "kernel_lr", rate_of_device),
        on(_devices, "new_graph", new),
        on(_devices, "write", write),
        on(_step_record, "host_number", of_device),
        on(_loss, "host_number", of_device),
        _Unordered().used(),
    ):
        yield made
