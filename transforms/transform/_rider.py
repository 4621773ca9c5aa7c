"""The rider of a reduction: scalars that travel in its message.

A reduction gets words to send beside its values and returns their sums over the ranks. It does not look into them, so
that what ranks agree on costs no message of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from ._call import ALONE, Call
from ._lane import check_lane, encode_words, lane_dtype, wide_scalar

T = TypeVar("T")


class BucketSums:
    """What is made once in a step, in the call on its first bucket, for the calls on all its buckets.

    The sums of the rider are such: only the messages of the first bucket carry it.

    Every bucket runs the same reductions in the same order, so the n-th one of a bucket takes the sums of the n-th one of
    the first.

    Args:
        dtype: The dtype of words in messages that are not encoded.
        first: The `BucketSums` of the first bucket; None for the first itself.
    """

    dtype: torch.dtype

    __slots__ = ("_first", "_kept", "_made", "_next", "_pause", "dtype")

    def __init__(self, dtype: torch.dtype, first: BucketSums | None = None) -> None:
        self.dtype, self._first = dtype, first
        self._pause: Callable[[], bool] | None = None
        self._made: dict[tuple[int, str], Any] = {}  # by the number of the reduction
        self._next = self._kept = 0

    @property
    def is_first(self) -> bool:
        return self._first is None

    @contextlib.contextmanager
    def waiting(self, pause: Callable[[], bool]) -> Iterator[None]:
        """A context in which `pause` lets the first bucket's call go on; it returns whether there is anything to wait for."""
        self._pause = pause
        try:
            yield
        finally:
            self._pause = None

    def take(self) -> int:
        """The number of the reduction that begins, from 0."""
        self._next += 1
        return self._next - 1

    def keep(self, found: tuple[Tensor, dict[str, Tensor]]) -> None:
        """Keep the sums of the first bucket's next reduction."""
        self._made[self._kept, ""] = found
        self._kept += 1

    def of(self, number: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The sums of a reduction of the first bucket.

        Raises:
            RuntimeError: the first bucket has run fewer reductions.
        """
        found: tuple[Tensor, dict[str, Tensor]] = self._of_first(number, "")
        return found

    def once(self, number: int, name: str, make: Callable[[], T]) -> T:
        """What a reduction makes in the call on the first bucket.

        Args:
            number: The number of the reduction.
            name: The name of the value, one of several.
            make: Makes it.
        """
        if self._first is None:
            self._made[number, name] = made = make()
            return made
        found: T = self._of_first(number, name)
        return found

    def _of_first(self, number: int, name: str) -> Any:
        assert self._first is not None
        made, kept = self._first._made, self._first._kept
        while (number, name) not in made and self._pause is not None and self._pause():
            pass
        if (number, name) not in made:
            raise RuntimeError(
                f"a transform runs its reduction {number} on one bucket, but only {kept} on the first; a reduction must run on "
                f"every bucket, also where it has no leaves"
            )
        return made[number, name]


class Rider:
    """The scalars that travel with one reduction: words of its message, made from the lane of a call.

    In the calls on all buckets but the first there are none.
    """

    __slots__ = ("_lane", "_number", "_sums")

    def __init__(self, call: Call) -> None:
        check_lane(call.lane)
        self._sums = call.sums
        self._number = 0 if self._sums is None else self._sums.take()
        carries = self._sums is None or self._sums.is_first
        self._lane = dict(call.lane) if call.lane and carries else {}

    def without_words(self) -> Rider:
        """The same rider for messages that do not carry its words."""
        other = object.__new__(Rider)
        other._sums, other._number, other._lane = self._sums, self._number, {}
        return other

    @property
    def total(self) -> Tensor:
        """The sum of the ranks' factors in the first bucket's message, in a call on another bucket."""
        assert self._sums is not None
        return self._sums.of(self._number)[0]

    @property
    def goes_along(self) -> bool:
        """Whether this call's message carries the factor and the rider."""
        return self._sums is None or self._sums.is_first

    def once(self, name: str, make: Callable[[], T]) -> T:
        """What the reduction makes once for all buckets, in the call on the first one."""
        return make() if self._sums is None else self._sums.once(self._number, name, make)

    def dtype(self, leaves: Iterable[Tensor]) -> torch.dtype:
        """The dtype of words in a message with these leaves that is not encoded."""
        return lane_dtype(leaf.dtype for leaf in leaves) if self._sums is None else self._sums.dtype

    def words(
        self, dtype: torch.dtype, ranks: int, device: torch.device | None, factor: Tensor | None = None
    ) -> Tensor:
        """The words to send.

        Args:
            ranks: The number of ranks whose words are added in this dtype.
            factor: This rank's factor, to be the first scalar.
        """
        given = self._lane if factor is None else {"total": factor, **self._lane}
        if not given:
            return torch.empty(0, dtype=dtype, device=device)
        values = [wide_scalar(name, value, device, dtype, ranks) for name, value in given.items()]
        return encode_words(torch.stack(values), dtype, ranks)

    def settle(self, total: Tensor, sums: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of the factors and the sums of the lane by name, of this call's message or of the first bucket's.

        Args:
            total: The sum of the factors, 0-d float64; not read in the calls on other buckets.
            sums: The sums of the rider, (scalars,) float64.
        """
        if self._sums is not None and not self._sums.is_first:
            return self._sums.of(self._number)
        found = total, dict(zip(self._lane, sums.unbind(0), strict=True))
        if self._sums is not None:
            self._sums.keep(found)
        return found


EMPTY = Rider(ALONE)  # for a message beside the one that carries the rider


def first_of(sums: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the factors, 0-d, and those of the rider, of a message whose first scalar is the factor."""
    return sums[0], sums[1:]


def no_words() -> Tensor:
    """The sums of a rider in a call that carries none."""
    return torch.zeros(0, dtype=torch.float64)
