"""The context of one call of a transform."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ._rider import BucketSums


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
