"""Checks of arguments, with one text for all, and the errors of the pure half."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias


class FjoinError(RuntimeError):
    """Base of the errors that name a rank and a step.

    Attributes:
        rank: The rank that is at fault, or None.
        step: The step in which the error was detected, or None.
    """

    rank: int | None
    step: int | None

    def __init__(self, message: str, *, rank: int | None = None, step: int | None = None) -> None:
        super().__init__(message)
        self.rank, self.step = rank, step


class DesyncError(FjoinError):
    """The ranks do not run the same program: another pipeline, shape, dtype, order or parameter value."""


class CollectiveMismatch(RuntimeError):
    """Ranks of one axis did not call the same collective on the same shapes in the same order."""


class UnboundAxis(NameError):
    """A collective named an axis that is not bound."""


class DonatedState(FjoinError):
    """A state was used again after a step, or `with_hyperparameters`, had taken its memory."""


# One axis, or several axes used as one.
AxisName: TypeAlias = str | tuple[str, ...]
Count: TypeAlias = int  # of a factory's argument: at least 1
Index: TypeAlias = int  # of a factory's argument: at least 0


def is_number(value: Any) -> bool:
    """Whether a value is a real number; a bool does not count as one."""
    return type(value) is float or (isinstance(value, numbers.Real) and not isinstance(value, bool))


def is_finite(value: Any) -> bool:
    """Whether a number is finite as a float, which a whole number beyond 1.8e308 is not."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def as_float(name: str, value: Any) -> float:
    """A number as a float.

    Raises:
        ValueError: a whole number beyond 1.8e308.
    """
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must fit a float, got a number of {int(value).bit_length()} bits") from None


def finite(**values: Any) -> None:
    """Raise unless all are finite numbers.

    Raises:
        ValueError: a number that is not finite.
        TypeError: no number.

    >>> finite(start=0.5)
    """
    for name, value in values.items():
        if not is_number(value):
            raise TypeError(f"{name} must be a number, got {value!r}")
        if not is_finite(value):
            raise ValueError(f"{name} must be a finite number, got {value!r}")


def whole_number(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """The value, if it is an int in a range.

    Raises:
        ValueError: it is not; a bool does not count as one.

    >>> whole_number("steps", 3, least=1)
    3
    """
    fine = isinstance(value, int) and not isinstance(value, bool)
    if fine and (least is None or value >= least) and (most is None or value <= most):
        return value  # type: ignore[no-any-return]
    within = "" if least is None else f", at least {least}" if most is None else f" from {least} to {most}"
    raise ValueError(f"{name} must be a whole number{within}, got {value!r}")


def positive(name: str, value: Any, zero: bool = False) -> float:
    """The value, if it is a finite number above 0; `zero`: or 0.

    Raises:
        ValueError: it is not; a bool does not count as one.

    >>> positive("eps", 0, zero=True)
    0
    """
    fine = is_number(value) and is_finite(value)
    if fine and (value > 0 or (zero and value == 0)):
        return value  # type: ignore[no-any-return]
    raise ValueError(f"{name} must be a finite number that is {'not negative' if zero else 'above 0'}, got {value!r}")


def axis_sizes(sizes: Any, most: int) -> dict[str, int]:
    """Axis name -> number of ranks, if there are at most `most` ranks in all.

    Raises:
        TypeError: no mapping; an axis that is not named by a string.
        ValueError: no axis; a size that is no whole number, at least 1; more ranks.

    >>> axis_sizes({"data": 4}, most=8)
    {'data': 4}
    """
    if not isinstance(sizes, Mapping) or not all(isinstance(name, str) for name in sizes):
        raise TypeError(f"axes must be a mapping from names to numbers of ranks, got {sizes!r}")
    if not sizes:
        raise ValueError("axes is empty; pass at least one, for example {'data': 4}")
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"axis {name!r} must have a whole number of ranks, at least 1, got {size!r}")
    if math.prod(sizes.values()) > most:
        raise ValueError(f"the axes {dict(sizes)!r} have more ranks in all than {most}, the most there are")
    return dict(sizes)


def flag(name: str, value: Any) -> bool:
    """The value, if it is True or False.

    Raises:
        TypeError: it is neither.

    >>> flag("scaled", True)
    True
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def axis_names(axis: Any) -> tuple[str, ...]:
    """The names of an axis, or of several.

    Raises:
        TypeError: neither a string nor a tuple of strings.
        ValueError: a name occurs twice.

    >>> axis_names(("node", "local"))
    ('node', 'local')
    """
    if isinstance(axis, str):
        return (axis,)
    if not isinstance(axis, tuple) or not all([isinstance(name, str) for name in axis]):
        raise TypeError(f"an axis is named by a string, several by a tuple of strings, got {axis!r}")
    if len(set(axis)) < len(axis):
        raise ValueError(f"axis {axis!r} names an axis twice; name each once")
    return axis


def some_axes(name: str, axis: Any) -> None:
    """Raise unless `axis` names one axis or several.

    Raises:
        TypeError, ValueError: as `axis_names`; none is named.
    """
    if not axis_names(axis):
        raise ValueError(f"{name} needs at least one axis, got {axis!r}")


def iterable(name: str, value: Any) -> None:
    """Raise TypeError unless one can iterate over `value`.

    >>> iterable("loader", [1, 2])
    """
    if not hasattr(value, "__iter__") and not hasattr(value, "__getitem__"):
        raise TypeError(f"{name} must be iterable, got {value!r}")


def one_axis(name: str, axis: Any) -> str:
    """The name of the axis, if it is one.

    Raises:
        ValueError: it is no name, or several.

    >>> one_axis("scatter_mean", ("data",))
    'data'
    """
    if isinstance(axis, str):
        return axis
    if isinstance(axis, tuple) and len(axis) == 1 and isinstance(axis[0], str):
        return axis[0]
    raise ValueError(f"{name} takes one axis, got {axis!r}")


def real(of: Mapping[str, Any], where: str) -> None:
    """Raise TypeError for a complex leaf, which cannot be encoded.

    >>> real({"w": torch.zeros(2)}, "power_sgd")
    """
    for path, leaf in of.items():
        if leaf.is_complex():
            raise TypeError(
                f"{where}: the gradient at {path!r} is complex ({leaf.dtype}); let partition give it to a mean of its own, or make "
                f"its parameter a real one by torch.view_as_real"
            )


def text(name: str, value: Any) -> str:
    """A nonempty string.

    Raises:
        TypeError: anything else.
    """
    if not isinstance(value, str) or not value:
        raise TypeError(f"{name} takes names that are nonempty strings, got {value!r}")
    return value


# The checks of the arguments of a factory, by their annotations.
CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "bool": flag,
    "AxisName": some_axes,
    "Count": functools.partial(whole_number, least=1),
    "Index": functools.partial(whole_number, least=0),
}
