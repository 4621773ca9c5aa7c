"""The messages given to torch.distributed by a program, and their announcement by `explain`."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from fjoin.transforms.axes import Message
from fjoin.transforms.pipelines import Explanation

# Of each function which argument is sent.
_SENDS: dict[str, int | None] = {
    "all_reduce": 0, "broadcast": 0, "all_gather": 1, "all_gather_into_tensor": 1, "all_to_all": 1,
    "all_to_all_single": 1, "reduce_scatter": 1, "reduce_scatter_tensor": 1, "all_gather_single": 1, "reduce_scatter_single": 1,
    "barrier": None,
}  # fmt: skip


class Sent(NamedTuple):
    name: str
    elements: int
    dtype: str
    bytes: int


_LOCK, _WATCHING, _KEPT = threading.Lock(), list[list[Sent]](), dict[str, Any]()


def _watch(name: str, place: int | None) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        named = [kwargs[key] for key in ("tensor", "input_tensor", "input") if key in kwargs]
        given = [] if place is None else args[place] if place < len(args) else named[0]
        parts = [given] if isinstance(given, Tensor) else given
        dtypes, elements = ", ".join(sorted({str(x.dtype) for x in parts})), sum(x.numel() for x in parts)
        for sent in _WATCHING:
            sent.append(Sent(name, elements, dtypes, sum(map(_size, parts))))
        return _KEPT[name](*args, **kwargs)

    return call


@contextlib.contextmanager
def watched() -> Iterator[list[Sent]]:
    """Each message of this process's calls of `torch.distributed.<name>`, in their order. Threads may watch at one time."""
    sent: list[Sent] = []
    with _LOCK:
        for name, place in _SENDS.items() if not _WATCHING else ():
            _KEPT[name] = getattr(dist, name)
            setattr(dist, name, _watch(name, place))
        _WATCHING.append(sent)
    try:
        yield sent
    finally:
        with _LOCK:
            _WATCHING[:] = [one for one in _WATCHING if one is not sent]
            for name, function in _KEPT.items() if not _WATCHING else ():
                setattr(dist, name, function)


def announced(what: Explanation) -> list[Message]:
    """The messages of an explanation."""
    return [m for row in what.rows for m in row.messages]


def _size(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _rows_for_others(
    out: Tensor, x: Tensor, taken: Any = None, given: Any = None, group: Any = None, **more: Any
) -> int:
    own = (
        _size(x) // dist.get_world_size(group)
        if given is None
        else _size(x) // max(len(x), 1) * given[dist.get_rank(group)]
    )
    return _size(x) - own


# Function of torch.distributed -> the bytes that a call sends from this process to others; an all_reduce as by a ring.
_TO_OTHERS: dict[str, Any] = {
    "all_reduce": lambda x, *_, group=None, **more: round(_size(x) * 2 * (1 - 1 / dist.get_world_size(group))),
    "all_to_all_single": _rows_for_others,
    "all_gather": lambda outs, x, *_, group=None, **more: _size(x) * (dist.get_world_size(group) - 1),
    "batch_isend_irecv": lambda ops: sum(_size(op.tensor) for op in ops if op.op is dist.isend),
}


@contextlib.contextmanager
def sent_to_others() -> Iterator[list[int]]:
    """The bytes that each call sends from this process to others."""
    sent: list[int] = []

    def counted(function: Any, count: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            sent.append(count(*args, **kwargs))
            return function(*args, **kwargs)

        return functools.wraps(function)(call)

    with contextlib.ExitStack() as stack:
        for name, count in _TO_OTHERS.items():
            stack.enter_context(mock.patch.object(dist, name, counted(getattr(dist, name), count)))
        yield sent
