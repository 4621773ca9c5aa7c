"""Weights of ranks, their sums, and the share of a rank in a mean."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .checks import CHECKS, is_finite
from .devices import divided, scaled
from .trees import Tree, plain, readable_without_sync, to_device, where

_LEAST, _MOST = 1e-30, 1e30

Over: TypeAlias = Literal["weight", "live", "world"]
Number: TypeAlias = float | Tensor  # a number where the host knows it, otherwise 0-d float64


def check_over(over: Any) -> None:
    if over not in ("weight", "live", "world"):
        raise ValueError(f"over must be 'weight', 'live' or 'world', got {over!r}")


CHECKS["Over"] = lambda where, over: check_over(over)


def weight_of(weight: Any) -> Number:
    """A weight as a number, or as a 0-d float64 tensor where Python cannot read it now; None is 1.

    A tensor that is on a device or under a transform becomes NaN where it is out of range, and so do the sums with it.

    Raises:
        ValueError: a weight that is neither 0 nor from 1e-30 to 1e30, or a tensor that is not 0-d.
        TypeError: no number.
    """
    if weight is None:
        return 1.0
    if not isinstance(weight, Tensor):
        return host_weight("weight", weight)
    if weight.dim():
        raise ValueError(f"weight must be a scalar, got a tensor of shape {tuple(weight.shape)}")
    if weight.is_complex():
        raise TypeError(f"weight must be a number, got a tensor of {weight.dtype}")
    wide = weight.to(torch.float64)
    if readable_without_sync(wide):
        return host_weight("weight", wide)
    return torch.where((wide == 0) | ((wide >= _LEAST) & (wide <= _MOST)), wide, torch.full_like(wide, math.nan))


def check_weight(weight: Any) -> Tensor:
    """`weight_of` as a tensor."""
    return torch.as_tensor(weight_of(weight), dtype=torch.float64)


def host_weight(name: str, weight: Any) -> float:
    """The weight as a float, from a number, or from a tensor or an array of one element.

    Weights have bounds, because their sums, and sums of their products with losses, are sent in float32. Only their
    ratios count.

    Raises:
        ValueError: neither 0 nor from 1e-30 to 1e30; several elements.
        TypeError: no number.
    """
    try:
        weight = weight.item() if hasattr(weight, "item") else weight
    except (RuntimeError, ValueError):
        raise ValueError(f"{name} must be a scalar, got {weight!r}") from None
    if not isinstance(weight, numbers.Real):
        raise TypeError(f"{name} must be a number, got {weight!r}")
    number: Any = weight  # numbers.Real has no order to a checker of types
    if number == 0 or _LEAST <= number <= _MOST:
        return float(weight)
    if not is_finite(number) or number < 0:
        expected = "a finite number that is not negative"
        raise ValueError(f"{name} must be {expected}, got {weight!r}; a rank without input has weight 0")
    remedy = "only the ratios of the ranks' weights count, so multiply all of them by one number"
    raise ValueError(f"{name} must be 0, or from {_LEAST:g} to {_MOST:g}, got {weight!r}; {remedy}")


def check_exact(loss: Tensor, weight: float) -> None:
    """Raise ValueError where a loss that must carry its weight would round it: in 16 bits, unless it is a power of two."""
    if loss.dtype.itemsize < 4 and math.frexp(weight)[0] not in (0.0, 0.5):
        why = f"the loss must carry this rank's weight, {weight!r}, and {loss.dtype} would round products with it"
        remedy = "return the loss as float32, such as loss.float(), or use weights that are powers of two"
        raise ValueError(f"{why}; {remedy}")


def stacked(values: Iterable[Number], device: torch.device | None) -> Tensor:
    """Numbers as a vector of float64 on a device, made without a copy from the host."""
    scalars = [
        to_device(device, value, torch.float64)
        if isinstance(value, Tensor)
        else torch.full((), value, dtype=torch.float64, device=device)
        for value in values
    ]
    return torch.stack(scalars)


class Totals(NamedTuple):
    """Sums over ranks."""

    weight: Number  # of their weights
    live: Number  # the number of them with weight
    any_live: bool | Tensor  # whether any has weight


def totals_of(weight: Number, live: Number) -> Totals:
    """The sums over ranks of their weights, and of 1 for each with weight.

    A NaN is weight, so that it is not passed over.
    """
    return Totals(weight, live, weight != 0)


class Share(NamedTuple):
    """The factor of this rank's values in a mean over ranks, weight / total, or in a sum, weight."""

    weight: Number  # of this rank, or of the ranks that share the values
    total: Number | None  # of all ranks; None for a sum
    any_live: bool | Tensor = True  # whether any rank has weight

    def times(self, x: Tensor, plus: Tensor | None = None, in_place: bool = False) -> Tensor:
        """The factor times a tensor, in its dtype; a 16-bit product is rounded once. A weight of 0 gives exactly 0, even
        if the tensor holds NaN.

        Equal weights of n ranks divide by n, as torch does.

        Args:
            plus: A tensor to add, in at least the same precision; it is left out where no rank has weight.
            in_place: Whether the product may be written over the tensor.
        """
        weight, total = self.weight, self.total
        if plus is not None:
            if isinstance(total, float) and isinstance(weight, float) and weight:
                return torch.add(plus, x, alpha=weight / total)
            own = plus + self.times(x)
            return self.where_any_live(own, torch.zeros_like(own))
        if isinstance(weight, Tensor):
            weight = to_device(x.device, weight)
            none = weight == 0
            some = torch.where(none, torch.ones_like(weight), weight)
            out = scaled(x, some) if total is None else divided(x, _on(x.device, total) / some)
            out = torch.where(none, torch.zeros_like(out), out)
        elif weight == 0:
            out = x.zero_() if in_place else torch.zeros_like(x)
            if not plain(x):  # a derivative's backward pass sends too, on all ranks
                out = torch.where(torch.ones((), dtype=torch.bool, device=x.device), out, x)
        elif total is None:
            out = x if weight == 1.0 else x.mul_(weight) if in_place else x * weight
        elif isinstance(total, Tensor):
            total = _on(x.device, total)
            out = divided(x, total if weight == 1.0 else total / weight)
        else:
            ratio = total / weight
            out = x if ratio == 1.0 else x.div_(ratio) if in_place else x / ratio
        return out

    def of(self, leaves: list[Tensor], in_place: bool = False) -> list[Tensor]:
        """`times` of each leaf."""
        if self.total is None and isinstance(self.weight, float) and self.weight == 1.0:
            return leaves
        return [self.times(leaf, in_place=in_place) for leaf in leaves]

    def behind_sum(self, leaves: list[Tensor]) -> bool:
        """Whether to divide by the total after the sum of weight * leaf, and not before: all but float16 holds such
        sums.

        So equal values have their value as the mean, and 16-bit numbers are rounded less often.
        """
        return self.total is not None and all([leaf.dtype is not torch.float16 for leaf in leaves])

    def divided(self, sums: list[Tensor]) -> list[Tensor]:
        """Fresh sums of weight * leaf, divided by the total, maybe in place; by nothing where it is 0."""
        total = self.total
        if not sums or (isinstance(total, float) and total in (0.0, 1.0)):
            return sums
        total = nonzero_or_one(total)
        if plain(sums) and all([leaf.dtype.itemsize >= 4 for leaf in sums]):
            torch._foreach_div_(sums, total)
            return sums
        if isinstance(total, float):
            return [leaf / total for leaf in sums]
        return [divided(leaf, to_device(leaf.device, total)) for leaf in sums]

    def any_live_on(self, device: torch.device) -> Tensor:
        """`any_live` as a 0-d bool tensor, made without a wait for a device."""
        if isinstance(self.any_live, bool):
            return torch.full((), self.any_live, dtype=torch.bool, device=device)
        return to_device(device, self.any_live)

    def where_any_live(self, new: Tree, old: Tree) -> Tree:
        """The result of a reduction of values that persist between steps, or its input if no rank has weight.

        The mean without weights is 0. That is right for gradients, which then change nothing, but not for parameters.
        """
        if isinstance(self.any_live, bool):
            return new if self.any_live else old
        return where(self.any_live, new, old)


def _on(device: torch.device, value: Number) -> Any:
    return to_device(device, value) if isinstance(value, Tensor) else value


def no_weight() -> Tensor:
    """The sum of the weights of no calls, 0-d float64."""
    return torch.zeros((), dtype=torch.float64)


def nonzero_or_one(total: Any) -> Any:
    """The total, a number or a tensor, with 1 in place of 0, so an empty sum stays 0."""
    if not isinstance(total, Tensor):
        return total or 1.0
    return torch.where(total == 0, torch.ones_like(total), total)
