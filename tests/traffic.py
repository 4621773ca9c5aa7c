"""The messages given to torch.distributed by a program, and their announcement by `explain`."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from fjoin.transforms.axes import Message
from fjoin.transforms.pipelines import Explanation

# Of each function which argument is sent.
_SENDS: dict[str, int | None] = {
    "all_reduce": 0, "broadcast": 0, "all_gather": 1, "all_gather_into_tensor": 1, "all_to_all": 1,
    "all_to_all_single": 1, "reduce_scatter": 1, "reduce_scatter_tensor": 1, "barrier": None,
}  # fmt: skip


class Sent(NamedTuple):
    name: str
    elements: int
    dtype: str
    bytes: int


_LOCK, _WATCHING, _KEPT = threading.Lock(), list[list[Sent]](), dict[str, Any]()


def _watch(name: str, place: int | None) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        given = [] if place is None else args[place] if place < len(args) else kwargs["tensor"]
        parts = [given] if isinstance(given, Tensor) else given
        dtypes, size = (
            ", ".join(sorted({str(x.dtype) for x in parts})),
            sum(x.numel() * x.element_size() for x in parts),
        )
        for sent in _WATCHING:
            sent.append(Sent(name, sum(x.numel() for x in parts), dtypes, size))
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


@contextlib.contextmanager
def sent_to_others() -> Iterator[list[int]]:
    """The bytes that each call of `torch.distributed` sends from this process to others; an all_reduce as by a ring."""
    sent: list[int] = []
    kept = {
        name: getattr(dist, name) for name in ("all_reduce", "all_to_all_single", "all_gather", "batch_isend_irecv")
    }

    def size(x: Tensor) -> int:
        return x.numel() * x.element_size()

    def all_reduce(x: Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        n = dist.get_world_size(group)
        sent.append(round(size(x) * 2 * (n - 1) / n))
        return kept["all_reduce"](x, *args, group=group, **kwargs)

    def all_to_all_single(
        out: Tensor, x: Tensor, taken: Any = None, given: Any = None, group: Any = None, **kwargs: Any
    ) -> Any:
        n, rank = dist.get_world_size(group), dist.get_rank(group)
        own = size(x) // n if given is None else size(x) // max(len(x), 1) * given[rank]
        sent.append(size(x) - own)
        return kept["all_to_all_single"](out, x, taken, given, group=group, **kwargs)

    def all_gather(outs: Any, x: Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        sent.append(size(x) * (dist.get_world_size(group) - 1))
        return kept["all_gather"](outs, x, *args, group=group, **kwargs)

    def batch_isend_irecv(ops: list[Any]) -> Any:
        sent.append(sum(size(op.tensor) for op in ops if op.op is dist.isend))
        return kept["batch_isend_irecv"](ops)

    new = {
        "all_reduce": all_reduce, "all_to_all_single": all_to_all_single, "all_gather": all_gather,
        "batch_isend_irecv": batch_isend_irecv,
    }  # fmt: skip
    for name, function in new.items():
        setattr(dist, name, functools.wraps(kept[name])(function))
    try:
        yield sent
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)
