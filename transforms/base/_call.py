"""The context of a call of `update`, and this rank's share in it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from .checks import AxisName, axis_names
from .shares import Number, Over, Share, Totals, check_over, stacked, totals_of, weight_of
from .trees import device_of, readable_without_sync

# The keywords that an `update` gets if it names them or takes `**extra`, each with its value if it is not given.
IN_EXTRA: Mapping[str, Any] = {"weight": None, "step": None, "persistent": False, "sharded_over": None}
# And those that it gets only if it names them: they ask for something that it must know how to do.
KEYWORDS: Mapping[str, Any] = {**IN_EXTRA, "flush": False, "donated": False, "wire": None, "memory": None}


class Call:
    """What one call of `Transform.update` may know. It is not changed: `inside` makes another one.

    Attributes:
        step: The number of the pipeline's steps before this one, a host integer, equal on all ranks. Periods and
            warm-ups depend on it. None: a transform counts its own calls.
        persistent: The input is parameters or buffers, which persist between steps. A reduction returns them unchanged
            where no rank has weight, since a mean without weights is 0.
        flush: No step has been taken; a transform that has gathered the weights of several steps runs now.
        donated: No caller needs the gradients any more, so `update` may write into them. No two of them share memory.
        sharded_over: The axis over which the input is sharded; None if each rank has all of it.
        axes: The axes over which the input has been reduced already.
        wire: The codec of the messages, in an encoded transform.
        memory: The residuals of this call, inside error feedback.
        extra: Keywords that are not of fjoin, for the transforms that name them.
        handed: The keywords that the outer update received. If it does not pass one on, the inner update gets none.
    """

    # The sum of a tensor over axes, the number of their ranks, and the check of a weight that is given to gradients.
    # The room of the axes lies above this one, and sets them.
    psum: ClassVar[Callable[[Tensor, AxisName], Tensor]]
    axis_size: ClassVar[Callable[[AxisName], int]]
    check_late_weight: ClassVar[Callable[..., None]]

    step: int | None
    donated: bool
    persistent = flush = False
    sharded_over: str | None = None
    axes: tuple[str, ...] = ()
    wire: Any = None  # a `Codec`
    memory: Any = None  # a `ResidualMemory`
    extra: Mapping[str, Any] = MappingProxyType({})
    handed: Collection[str] = ()

    def __init__(self, weight: Any = None, step: int | None = None, *, donated: bool = False) -> None:
        self._weight, self.step, self.donated = weight, step, donated
        self._totals: dict[frozenset[str], Totals | Callable[[], Totals]] = {}

    @property
    def weight(self) -> Any:
        """This rank's weight in the step's mean, a number or a 0-d tensor; None is 1.

        After a reduction: that of all its ranks.
        """
        return self.totals().weight if self.axes else self._weight

    def share(self, axis: AxisName, over: Over = "weight", device: torch.device | None = None) -> Share:
        """The factor of this rank's values in a mean over axes, after the sum over all their ranks.

            over="weight"   w / sum of w
            over="live"     [w > 0] / sum of [w > 0]
            over="world"    [w > 0] / number of ranks

        The ranks send their weights in one message of 16 bytes, in the first call for these axes. Over the world they
        send none, unless something is kept where no rank has weight: parameters, residuals. So all ranks must ask for
        the same shares. After a reduction over other axes w is the weight of the ranks that share its result, and for
        the world 1.

        Args:
            device: Where the message is made, if the host does not know the weight.

        >>> from fjoin import transforms as tx
        >>> def one_rank(grad, weight):
        ...     return tx.psum(tx.Call(weight).share("data").times(grad), "data")
        >>> tx.simulate(one_rank, {"data": 2}, [torch.tensor(1.0), torch.tensor(4.0)], [2, 1])
        [tensor(2.), tensor(2.)]
        """
        check_over(over)
        if over == "world" and not self.persistent and self.memory is None:
            return Share(1.0 if self.axes else _counts(weight_of(self._weight)), float(Call.axis_size(axis)))
        own, sums = self.totals((), device), self.totals(axis, device)
        if over == "weight":
            return Share(own.weight, sums.weight, sums.any_live)
        if over == "live":
            return Share(own.live, sums.live, sums.any_live)
        return Share(1.0 if self.axes else own.live, float(Call.axis_size(axis)), sums.any_live)

    def totals(self, axis: AxisName = (), device: torch.device | None = None) -> Totals:
        """The sums of the weights, over the axes that have been reduced over and these; see `share`."""
        more = axis_names(axis) if axis else ()
        # Over axes of one rank there is nothing to sum.
        all_of = (*self.axes, *more)
        key = frozenset([name for name in all_of if Call.axis_size(name) > 1] if all_of else ())
        again = not set(self.axes).isdisjoint(more)
        known = None if again else self._totals.get(key)
        if known is not None:
            if not isinstance(known, Totals):
                known = self._totals[key] = known()
            return known
        if not key:
            weight = weight_of(self._weight)
            found = totals_of(weight, _counts(weight))
        else:  # behind reductions of the ranks that share their result; those may have asked for no share
            own = self.totals((), device) if self.axes and more else self.inside(axes=()).totals((), device)
            words = stacked((own.weight, own.live), device or device_of(()))
            summed = Call.psum(words, more or self.axes)
            found = totals_of(*(summed.tolist() if readable_without_sync(summed) else summed.unbind(0)))
        if not again:
            self._totals[key] = found
        return found

    def know(self, axes: Collection[str], totals: Totals | Callable[[], Totals]) -> None:
        """Let the call, and those inside it with the same weight, know the sums of the weights over these axes.

        Args:
            totals: The sums, or a function that waits for them.
        """
        self._totals[frozenset((*self.axes, *axes))] = totals

    def inside(self, **changes: Any) -> Call:
        """The context of a call inside this one, with some attributes changed.

        Another weight is that of a rank by itself: reductions and sums from before do not belong to it.

        Raises:
            TypeError: a name that is no attribute.
        """
        new: Call = object.__new__(Call)
        new.__dict__.update(self.__dict__)
        if "weight" in changes:
            new._weight, new._totals, new.axes = changes.pop("weight"), {}, ()
        for name, value in changes.items():
            if not hasattr(new, name):
                raise TypeError(f"a call has no {name!r}")
            setattr(new, name, value)
        return new


def call_of(keywords: Mapping[str, Any]) -> Call:
    """The context of a call with keywords.

    A `call` among them is the context that an outer transform got in `**extra` and hands on, with what has no keyword.
    Keywords beside it win: a transform that calls another one with `weight=...` gives it another weight, and one that
    does not hand on a keyword that it got gives it none.
    """
    given = dict(keywords)
    call = given.pop("call", None) or Call()
    changes = {name: given.pop(name, KEYWORDS[name]) for name in KEYWORDS if name in given or name in call.handed}
    changes = {name: value for name, value in changes.items() if value is not getattr(call, name)}
    return call.inside(**changes, handed=(), extra={**call.extra, **given}) if keywords else call


def _counts(weight: Number) -> Number:
    """1 for a rank with weight, 0 for another one; NaN stays."""
    if isinstance(weight, Tensor):
        return torch.where(weight.isnan(), weight, (weight > 0).to(weight.dtype))
    return float(weight > 0)
