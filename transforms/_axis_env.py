"""The axes bound in each thread: axis name -> interpreter of its collectives."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ._errors import UnboundAxis

# One axis, or several axes used as one.
AxisName: TypeAlias = str | tuple[str, ...]


class Axis:
    """An interpreter of collectives over one named set of ranks.

    `run(op, x, arg)` takes and returns plain tensors, with n the size of the axis:

        psum, pmax, pmin, pbroadcast (arg: source), ppermute (arg: pairs)   (...) -> (...)
        all_gather                                                          (...) -> (n, ...)
        psum_scatter                                                        (n, ...) -> (...)
        all_to_all                                                          (n, ...) -> (n, ...)
        all_to_all_single (arg: rows to each rank, rows from each)          (rows, ...) -> (others, ...)

    `token` is None, or a tensor that marks the level of torch.func.vmap that is this axis.
    """

    size: int
    token: Tensor | None = None

    def index(self) -> Tensor:
        raise NotImplementedError

    def run(self, op: str, x: Tensor, arg: Any) -> Tensor:
        raise NotImplementedError

    def begin(self, op: str, x: Tensor, arg: Any) -> Callable[[], Tensor]:
        """Start `run`; the returned function waits for the message and returns the result."""
        out = self.run(op, x, arg)
        return lambda: out

    def run_(self, x: Tensor) -> Tensor:
        """psum of a tensor that may be overwritten."""
        return self.run("psum", x, None)

    def start_(self, x: Tensor) -> Callable[[], object]:
        """Start psum of a flat tensor in place; the returned function waits for the message."""
        x.copy_(self.run("psum", x, None))
        return lambda: None

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat tensor for `start_`, whose values are arbitrary."""
        return torch.empty(numel, dtype=dtype, device=device)

    def joint(self, axes: tuple[str, ...]) -> Axis | None:
        """One axis that covers several axes at once, this one included; None if there is none."""
        return None

    def note(self, what: str) -> None:
        """Record a description of the floats in the next message of bytes; the simulator compares it between ranks."""

    def check_rows(self, width: int, give: tuple[int, ...], take: tuple[int, ...]) -> None:
        """Record the numbers of rows in the next all_to_all_single of bytes; the simulator compares them."""


class _Threads(threading.local):
    def __init__(self) -> None:
        self.axes: dict[str, Axis] = {}
        self.weight: float = 1.0


_THREADS = _Threads()


def bound() -> dict[str, Axis]:
    """The axes bound in this thread, by name."""
    return _THREADS.axes


def under_vmap() -> bool:
    """Whether any axis bound here is a level of torch.func.vmap."""
    return any(axis.token is not None for axis in _THREADS.axes.values())


@contextlib.contextmanager
def bind_axes(axes: dict[str, Axis]) -> Iterator[None]:
    """Bind axis names in this thread inside a with block; the outer bindings are restored after it."""
    before = _THREADS.axes
    _THREADS.axes = {**before, **axes}
    try:
        yield
    finally:
        _THREADS.axes = before


def current_weight() -> float:
    """This rank's weight in the current step: 0 where its batch is replayed only to match the other ranks' collectives.

    A train_step binds it around `loss_fn`; elsewhere it is 1.

    >>> from fjoin import transforms as tx
    >>> tx.current_weight()
    1.0
    """
    return _THREADS.weight


@contextlib.contextmanager
def bind_weight(weight: float) -> Iterator[None]:
    """Set the result of `current_weight` in this thread inside a with block."""
    before, _THREADS.weight = _THREADS.weight, weight
    try:
        yield
    finally:
        _THREADS.weight = before


def lookup(name: str) -> Axis:
    """The interpreter of an axis.

    Raises:
        UnboundAxis: nothing binds `name` here.
    """
    if not isinstance(name, str):
        raise TypeError(f"an axis is named by a string, got {name!r}")
    axis = _THREADS.axes.get(name)
    if axis is None:
        raise UnboundAxis(
            f"unbound axis name {name!r}. Bound here: {sorted(_THREADS.axes)}. Run the function under "
            f"`with fjoin.bind(fjoin.mesh({{{name!r}: -1}})):` or `simulate(fn, {{{name!r}: 4}}, ...)`."
        )
    return axis


class One(Axis):
    """A world of one: every collective is its own identity."""

    size = 1

    def start_(self, x: Tensor) -> Callable[[], object]:
        return lambda: None

    def index(self) -> Tensor:
        return torch.tensor(0)

    def run(self, op: str, x: Tensor, arg: Any) -> Tensor:
        if op == "all_gather":
            return x.unsqueeze(0).clone()
        if op == "psum_scatter":
            return x.squeeze(0).clone()
        if op == "ppermute" and (0, 0) not in arg:
            return torch.zeros_like(x)
        return x.clone()
