"""The operations of a step. They are dataclasses, since NamedTuples without fields are equal whatever their class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from ..transform._transform import Transform


@dataclass(frozen=True)
class Stages:
    """Starts the stages of the hook on the gradients; `Observe` waits for their last messages.

    Where an `Agree` of the step `rides`, the record travels in these messages.

    partial: whether they leave some gradients as each rank's own, although ranks step together, as `masked(mean(...))` does. A rank
        without weight then gives zeros.
    """

    parts: tuple[Transform, ...]
    partial: bool = False


@dataclass(frozen=True)
class Observe:
    """Waits for the messages of the hook, and looks at the gradients: whether they are finite, and their norm."""


@dataclass(frozen=True)
class Agree:
    """The ranks of some axes agree on numbers, by the sum of a record of each of them.

    moment: "begin": weights, loss, the user's sums, what is known before the gradients. "verdict": whether the gradients
        after the hook are finite, their norm, and where nothing needs it earlier what "begin" has. "pieces": a verdict of
        pieces, over the axis that shards. "used": the parameters that some rank has used.
    rides: whether it travels in the messages of the hook; otherwise in one of its own.
    late: whether it may be read in the next step, if nothing in this one needs it.
    """

    moment: Literal["begin", "verdict", "pieces", "used"]
    axes: tuple[str, ...]
    rides: bool = False
    late: bool = False


@dataclass(frozen=True)
class Judge:
    """Decides on the effect of the step, from what has been agreed on."""


@dataclass(frozen=True)
class Step:
    """Runs the optimizer on what this rank steps."""


@dataclass(frozen=True)
class Ends:
    """Runs a transform of the parameters, of the optimizer's state or of the buffers at the end of the step."""

    part: Transform
    on: Literal["params", "optimizer", "buffers"]


@dataclass(frozen=True)
class Gather:
    """Gives all ranks of an axis the parameters that each has stepped.

    ended: whether a transform at the end of the step may have changed them in a step without effect too.
    """

    axis: str
    ended: bool = False


@dataclass(frozen=True)
class Keep:
    """Takes the new states, or keeps the old ones with advanced counters."""


Op: TypeAlias = Stages | Observe | Agree | Judge | Step | Ends | Gather | Keep
Program: TypeAlias = tuple[Op, ...]
