"""Two ranks in one process, of which the other one sends what this one sends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fjoin.groups import Communicator
from fjoin.transforms.axes import Axis


class _Work:
    def __init__(self, wait: Callable[[], Any]) -> None:
        self.wait = wait


class EchoAxis(Axis):
    """An axis of two ranks whose messages are under way until they are awaited."""

    size = 2

    def index(self) -> Tensor:
        return torch.tensor(0)

    def _sends(
        self, op: str, reads: Sequence[Tensor], writes: Sequence[Tensor], result: Any = None
    ) -> Callable[[], Any]:
        """A message with what it reads and writes; the returned function waits for it and returns `result`."""
        return lambda: result

    def begin(self, op: str, x: Tensor, arg: Any) -> Callable[[], Tensor]:
        x = x.contiguous()
        with _disable_current_modes():
            out = self._value(op, x.detach(), arg)
        return self._sends(op, [x], [out], out)

    def _value(self, op: str, x: Tensor, arg: Any) -> Tensor:
        if op == "all_gather":
            return torch.stack([x, x])
        if op == "psum_scatter":
            return x[0] * 2
        if op == "all_to_all":
            return torch.stack([x[0], x[0]])
        if op == "all_to_all_single":
            rows = x[: arg[1][0]] if len(x) >= arg[1][0] else x.new_zeros(arg[1][0], *x.shape[1:])
            others = x.new_zeros(arg[1][1], *x.shape[1:])
            others[: len(rows)] = rows[: len(others)]
            return torch.cat([rows, others])
        return x * 2 if op == "psum" else x.clone()

    def run(self, op: str, x: Tensor, arg: Any) -> Tensor:
        return self.begin(op, x, arg)()

    def run_(self, x: Tensor) -> Tensor:
        self.begin_reduce(x).wait()
        return x

    def begin_reduce(self, buffer: Tensor) -> Any:
        with _disable_current_modes(), torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(buffer):
            buffer.mul_(2)
        return _Work(self._sends("psum", [], [buffer]))

    def begin_gather(self, flat: Tensor, sizes: Sequence[int], rank: int) -> Any:
        """The other rank's piece stays as it is."""
        own, other = flat[: sizes[0]], flat[sizes[0] :]
        return _Work(self._sends("gather", [own], [other]))


class EchoMesh(Communicator):
    def __init__(self, axis: EchoAxis | None = None) -> None:
        super().__init__({"data": 2}, {"data": EchoAxis() if axis is None else axis}, 0)

    def _exchange(self, occasion: str, value: Any, combine: Callable[[list[Any]], Any], axes: tuple[str, ...]) -> Any:
        return combine([value, value])
