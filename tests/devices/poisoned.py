"""Messages that arrive at their wait, and not before: until then their memory holds NaN, and nobody may write to it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fjoin.groups import GroupAxis

# Collectives that send their argument itself; the others send a copy.
SENT = {"all_gather", "all_to_all", "all_to_all_single", "psum_scatter", "ppermute"}


class Seen:
    """What was seen of the messages of one rank.

    Attributes:
        begun: The number of messages.
        written: Messages whose memory was written to before they were awaited.
    """

    def __init__(self) -> None:
        self.begun = 0
        self.written: list[str] = []
        self._under_way: dict[Poisoned, str] = {}

    def begins(self, work: Poisoned, text: str) -> None:
        self.begun += 1
        self._under_way[work] = text

    def ends(self, work: Poisoned, changed: bool) -> None:
        text = self._under_way.pop(work, None)
        if changed and text is not None:
            self.written.append(text)

    @property
    def faults(self) -> list[str]:
        never = [f"never waited for: {text}" for text in self._under_way.values()]
        return [f"written to while under way: {text}" for text in self.written] + never


def poison(x: Tensor) -> None:
    """Fill with NaN, or with bits that are no usual number."""
    with quietly(x):
        x.view(-1).view(torch.uint8).fill_(0x5A) if not x.is_floating_point() else x.fill_(math.nan)


@contextlib.contextmanager
def quietly(x: Tensor) -> Iterator[None]:
    """Messages of torch write into memory without a new version."""
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(x):
        yield


def bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(-1).view(torch.uint8).clone()


class Poisoned:
    """A message that has been sent and awaited in secret.

    Args:
        memory: What must not be written to until the wait.
        finish: Puts the result there.
    """

    def __init__(self, seen: Seen, text: str, memory: Tensor, finish: Callable[[], Any]) -> None:
        self._seen, self._memory, self._finish = seen, memory, finish
        self._before: Tensor | None = bits(memory)
        seen.begins(self, text)

    def arrived(self) -> bool:
        return True

    def wait(self) -> Any:
        before, self._before = self._before, None
        if before is None:  # a second wait does nothing
            return None
        self._seen.ends(self, not torch.equal(before, bits(self._memory)))
        return self._finish()

    __call__ = wait


@contextlib.contextmanager
def poisoned() -> Iterator[Seen]:
    """All messages of this process's axes are late."""
    seen, inside = Seen(), [False]

    def once(old: Callable[..., Any], late: Callable[..., Any]) -> Callable[..., Any]:
        """A method, which other methods of the axis call as it was."""

        def method(axis: Any, *args: Any, **kwargs: Any) -> Any:
            if inside[0]:
                return old(axis, *args, **kwargs)
            inside[0] = True
            try:
                return late(old, axis, *args, **kwargs)
            finally:
                inside[0] = False

        return method

    def reduce(old: Any, axis: Any, buffer: Tensor) -> Any:
        if not buffer.numel():
            return old(axis, buffer)
        copy = buffer.detach().clone()
        work = old(axis, copy)
        work.wait()
        poison(buffer)

        def finish() -> None:
            with quietly(buffer):
                buffer.copy_(copy)

        return Poisoned(seen, f"psum of {buffer.numel()} {buffer.dtype}", buffer, finish)

    def begin(old: Any, axis: Any, op: str, x: Tensor, arg: Any) -> Any:
        result = old(axis, op, x, arg)()
        return Poisoned(
            seen, f"{op} of {tuple(x.shape)} {x.dtype}", x if op in SENT else x.reshape(-1)[:0], lambda: result
        )

    def gather(old: Any, axis: Any, flat: Tensor, sizes: Sequence[int], rank: int, **options: Any) -> Any:
        copy, start = flat.detach().clone(), sum(sizes[:rank])
        old(axis, copy, sizes, rank, **options).wait()
        for other in (flat[:start], flat[start + sizes[rank] :]):  # the own piece can be read
            poison(other)

        def finish() -> None:
            with quietly(flat):
                flat.copy_(copy)

        return Poisoned(seen, f"gather of {flat.numel()} {flat.dtype}", flat, finish)

    late: dict[str, Any] = {"begin_reduce": reduce, "begin": begin, "begin_gather": gather}
    with contextlib.ExitStack() as stack:
        for name, made in late.items():
            stack.enter_context(mock.patch.object(GroupAxis, name, once(vars(GroupAxis)[name], made)))
        yield seen
