"""The context of a call of `update`, and the scalars that ride with its messages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ._lane import check_lane, encode_words, lane_dtype, wide_scalar


class Group(NamedTuple):
    """The ranks that share a gradient behind a reduction. Behind several, those of all their axes."""

    weight: Any  # the sum of their weights
    live: Any  # the number of them with weight; None where nothing has counted it
    axes: tuple[str, ...]  # the axes that they have been reduced over


# The keywords that an `update` gets where it names them, each with the value that means that it was not given.
KEYWORDS: Mapping[str, Any] = {
    "weight": None,
    "lane": None,
    "step": None,
    "persistent": False,
    "flush": False,
    "donated": False,
    "sharded_over": None,
}
_NEVER_IN_EXTRA = ("flush", "donated")  # only by name: who hands on `**extra` need not know what they ask for


class Call:
    """What one call of `Transform.update` may know. It is not changed: `inside` makes another one.

    Attributes:
        weight: This rank's share in the step's mean, a number or a 0-d tensor; None is 1. Behind a reduction: its total.
        lane: Named scalars that are summed along with the gradients, or None.
        step: The number of the pipeline's steps before this one, a host integer, equal on all ranks. Periods and warm-ups
            depend on it. None: a transform counts its own calls.
        persistent: The input is parameters or buffers, which persist between steps. A reduction returns them unchanged
            where no rank has weight, since a mean without weights is 0.
        flush: No step has been taken; a transform that has gathered the weights of several steps runs now.
        donated: No caller needs the gradients any more, so `update` may write into them. No two of them share memory.
        sharded_over: The axis over which the input is sharded; None where each rank has all of it.
        group: The ranks behind a reduction; None before the first.
        unit: A power of two that makes sums of weight * gradient fit float16; None: a reduction sums the weights first.
        wire: The codec of the messages, in an encoded transform.
        memory: The residuals of this call, inside error feedback.
        sums: For a call on one of several buckets: the sums that only the first bucket's messages carry.
        extra: Keywords that are not of fjoin, for the transforms that name them.
        handed: The names of the keywords beside which this context was given to a transform that takes keywords. It hands
            them on itself, or not.
    """

    __slots__ = (
        "donated",
        "extra",
        "flush",
        "group",
        "handed",
        "lane",
        "memory",
        "persistent",
        "sharded_over",
        "step",
        "sums",
        "unit",
        "weight",
        "wire",
    )

    weight: Any
    lane: Mapping[str, Any] | None
    step: int | None
    persistent: bool
    flush: bool
    donated: bool
    sharded_over: str | None
    group: Group | None
    unit: float | None
    wire: Any  # a `Codec`
    memory: Any  # a `ResidualMemory`
    sums: BucketSums | None
    extra: Mapping[str, Any]
    handed: frozenset[str]

    def __init__(
        self,
        weight: Any = None,
        lane: Mapping[str, Any] | None = None,
        step: int | None = None,
        *,
        donated: bool = False,
        unit: float | None = None,
    ) -> None:
        self.weight, self.lane, self.step, self.donated, self.unit = weight, lane, step, donated, unit
        self.persistent = self.flush = False
        self.sharded_over = self.group = self.wire = self.memory = self.sums = None
        self.extra, self.handed = _NOTHING, _NONE

    def inside(self, **changes: Any) -> Call:
        """The context of a call inside this one, with some attributes changed.

        Another weight is that of a rank by itself: what earlier reductions have counted does not go with it.

        Raises:
            TypeError: a name that is no attribute.
        """
        new: Call = object.__new__(Call)
        new.weight, new.lane, new.step, new.donated = self.weight, self.lane, self.step, self.donated
        new.persistent, new.flush = self.persistent, self.flush
        new.sharded_over, new.group = self.sharded_over, self.group
        new.unit, new.wire, new.memory = self.unit, self.wire, self.memory
        new.sums, new.extra, new.handed = self.sums, self.extra, self.handed
        if "weight" in changes:
            new.group = None
        for name, value in changes.items():
            if name not in _SLOTS:
                raise TypeError(f"a call has no {name!r}; it has {', '.join(sorted(_SLOTS))}")
            setattr(new, name, value)
        return new

    def keyword(self, name: str) -> Any:
        """The value of a keyword for a transform that takes keywords."""
        if name == "lane" and self.sums is not None and not self.sums.is_first:
            return None  # it is sent with the first bucket only
        return getattr(self, name)

    def keywords(self, named: Collection[str], others: bool, required: Collection[str] = ()) -> dict[str, Any]:
        """The keywords for an `update`.

        Args:
            named: The names in its signature.
            others: Whether it takes any keyword. It then gets `call` too, to hand on what has no keyword.
            required: The names without a default.
        """
        found: dict[str, Any] = {}
        for name, unset in KEYWORDS.items():
            value = self.keyword(name)
            if name in named:
                if value is not unset or name in required:
                    found[name] = value
            elif others and name not in _NEVER_IN_EXTRA and (value is not unset or name in ("weight", "lane")):
                found[name] = value
        for name in _INTERNAL.intersection(named):
            if getattr(self, name) is not None:
                found[name] = getattr(self, name)
        for name, value in self.extra.items():
            if others or name in named:
                found[name] = value
        if others:
            found["call"] = self.inside(donated=False, handed=frozenset(KEYWORDS.keys() & found.keys()))
        return found


_SLOTS = frozenset(Call.__slots__)
_INTERNAL = frozenset(("unit", "wire", "memory"))  # keywords only for who names them
NAMES = _INTERNAL | KEYWORDS.keys()
_NOTHING: Mapping[str, Any] = {}
_NONE = frozenset[str]()
ALONE = Call()  # a call by hand without keywords


def call_of(keywords: Mapping[str, Any]) -> Call:
    """The context of a call with keywords.

    A `call` among them is the context that an outer transform got in `**extra` and hands on, with what has no keyword.
    Keywords beside it win: a transform that calls another one with `weight=...` gives it another weight, and one that does
    not hand on a keyword that it got gives it none.
    """
    if not keywords:
        return ALONE
    given = dict(keywords)
    call, changes = ALONE, {}
    if isinstance(given.get("call"), Call):
        call = given.pop("call")
        changes = {name: KEYWORDS[name] for name in call.handed if name not in given}
        if call.handed:
            changes["handed"] = _NONE
    if hasattr(given.get("sums"), "is_first"):
        changes["sums"] = given.pop("sums")
    for name in NAMES.intersection(given):  # `NAMES & given.keys()` is not traced by torch 2.11
        value = given.pop(name)
        if value is not (call.keyword(name) if name in KEYWORDS else getattr(call, name)):
            changes[name] = value
    if given and any(call.extra.get(name, call) is not value for name, value in given.items()):
        changes["extra"] = {**call.extra, **given}
    return call.inside(**changes) if changes else call


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
