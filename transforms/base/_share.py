"""The factor of a rank in a reduction: its weight, or 1 if it has weight."""

from __future__ import annotations

import math
import numbers
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ._call import Call
from ._check import is_finite
from ._tree import Tree, readable_without_sync, to_device, where
from .devices import scaled

_LEAST, _MOST = 1e-30, 1e30

Unit: TypeAlias = float | Tensor  # a power of two that scales gradients in messages
Over: TypeAlias = Literal["weight", "live", "world"]


def check_over(over: Any) -> None:
    if over not in ("weight", "live", "world"):
        raise ValueError(f"over must be 'weight', 'live' or 'world', got {over!r}")


def check_weight(weight: Any) -> Tensor:
    """The weight as a 0-d float64 tensor; None is 1.

    A tensor that Python cannot read, since it is on a device or under a transform, becomes NaN where it is out of
    range, and so do the sums with it.

    Raises:
        ValueError: a weight that is neither 0 nor from 1e-30 to 1e30, or a tensor that is not 0-d.
        TypeError: no number.
    """
    if weight is None:
        return torch.ones((), dtype=torch.float64)
    if isinstance(weight, Tensor):
        if weight.dim():
            raise ValueError(f"weight must be a scalar, got a tensor of shape {tuple(weight.shape)}")
        if weight.is_complex():
            raise TypeError(f"weight must be a number, got a tensor of {weight.dtype}")
        wide = weight.to(torch.float64)
        if readable_without_sync(wide):
            known_weight("weight", wide.item())
            return wide
        return torch.where((wide == 0) | ((wide >= _LEAST) & (wide <= _MOST)), wide, torch.full_like(wide, math.nan))
    return torch.tensor(known_weight("weight", weight), dtype=torch.float64)


def host_weight(name: str, weight: Any) -> float:
    """The weight as a float, from a number, or from a tensor or an array of one element.

    Raises:
        ValueError, TypeError: as `known_weight`; several elements.
    """
    if hasattr(weight, "item"):
        try:
            weight = weight.item()
        except (RuntimeError, ValueError):
            raise ValueError(f"{name} must be a scalar, got {weight!r}") from None
    return known_weight(name, weight)


def known_weight(name: str, weight: Any) -> float:
    """The weight as a float.

    Weights have bounds, because their sums, and sums of their products with losses, are sent in float32. Only their
    ratios count.

    Raises:
        ValueError: neither 0 nor from 1e-30 to 1e30.
        TypeError: no number.
    """
    if not isinstance(weight, numbers.Real):
        raise TypeError(f"{name} must be a number, got {weight!r}")
    number: Any = weight  # numbers.Real has no order to a checker of types
    if number == 0 or _LEAST <= number <= _MOST:
        return float(weight)
    if not is_finite(number) or number < 0:
        raise ValueError(
            f"{name} must be a finite number that is not negative, got {weight!r}; a rank without input has weight 0"
        )
    raise ValueError(
        f"{name} must be 0, or from {_LEAST:g} to {_MOST:g}, got {weight!r}; only the ratios of the ranks' weights count, so "
        f"multiply all of them by one number"
    )


class RankWeight(NamedTuple):
    """The factor of a rank in a reduction."""

    factor: Tensor  # the factor of its gradients in the sum, 0-d float64
    known: float | None  # the factor where the host knows it; 1 and 0 then cost nothing

    def to(self, device: torch.device | None) -> RankWeight:
        """The same factor on a device, without a copy from the host where it is a number."""
        if self.known is None or device is None or device == self.factor.device:
            return self._replace(factor=to_device(device, self.factor))
        return self._replace(factor=torch.full((), self.known, dtype=self.factor.dtype, device=device))

    def masked(self, x: Tensor) -> Tensor:
        """`x`, or zeros if this rank's factor is 0, whatever `x` contains: 0 * nan would be nan."""
        if self.known is None:
            return torch.where(to_device(x.device, self.factor) > 0, x, torch.zeros_like(x))
        return x if self.known else torch.zeros_like(x)

    def times(self, x: Tensor, unit: Unit = 1.0) -> Tensor:
        """`x` times the factor and a unit; zeros if the factor is 0. A 16-bit product is rounded once."""
        x = self.masked(x)
        if self.known is None or isinstance(unit, Tensor):
            return scaled(x, self.factor * unit)
        return x if self.known * unit in (0.0, 1.0) else x * (self.known * unit)


def share_of(weight: Any, over: Over) -> RankWeight:
    """The factor of a rank: its weight for over="weight"; otherwise 1 if it has weight, and 0 if not.

    Raises:
        ValueError: as `check_weight` does.
    """
    factor = check_weight(weight)
    known = None if isinstance(weight, Tensor) else 1.0 if weight is None else float(weight)
    if over == "weight":
        return RankWeight(factor, known)
    counted = torch.where(factor.isnan(), factor, (factor > 0).to(factor.dtype))
    return RankWeight(counted, None if known is None else float(known > 0))


def share_in(call: Call, over: Over) -> RankWeight:
    """The factor in a reduction of what this rank has: of its own gradients, or of a mean that it shares with others.

    Behind a reduction a mean over the weights counts by the weights of the ranks that share it, one over the live ranks
    by their number. All groups have equally many ranks, so that one over the world counts them alike.

    Raises:
        ValueError: as `check_weight` does.
    """
    of_group = None if call.group is None else {"weight": call.group.weight, "live": call.group.live}.get(over)
    return share_of(call.weight, over) if of_group is None else RankWeight(check_weight(of_group), None)


def divisor_of(over: Over | None, total: Any, ranks: int) -> Any:
    """The divisor of a sum over ranks: 1 for a sum, the number of ranks over the world, otherwise the total of their factors.

    Args:
        total: A number, or a 0-d tensor; so is the divisor of a mean.
    """
    if over is None:
        return 1.0
    if over != "world":
        return total
    return torch.full_like(total, ranks) if isinstance(total, Tensor) else float(ranks)


def unless_idle(total: Tensor, new: Tree, old: Tree, persistent: bool) -> Tree:
    """The result of a reduction, or with `persistent` its input if no rank has weight.

    The mean without weights is 0. That is right for gradients, which then change nothing, but not for parameters.
    """
    return where(total != 0, new, old) if persistent else new


def lacks_unit(unit: float | None, leaf: Tensor) -> bool:
    """Whether a sum of weight * gradient waits for the sum of the weights, to be scaled by `unit_near`."""
    return unit is None and leaf.dtype is torch.float16


def unit_near(total: Tensor) -> Tensor:
    """The power of two near 1 / total, 0-d: the sum of weight * gradient * unit fits float16 where the mean does."""
    return torch.where(total > 0, torch.exp2(-torch.floor(torch.log2(total))), torch.ones_like(total))


def nonzero_or_one(divisor: Tensor) -> Tensor:
    """The divisor with 1 in place of 0, so an empty sum stays 0."""
    return torch.where(divisor == 0, torch.ones_like(divisor), divisor)
