"""The factors of a plain mean: who applies which, and when."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import Tensor

from ..transforms.base import Share


class Scaling(NamedTuple):
    """The factors of one rank's gradients. Those of a plain `mean` or `sum_over` are counted / total together.

        where                          seed of backward          before sending          after the sum
        train_step                     counted * 2^-k            -                       / (total * 2^-k)
        train_step, some float16       counted / window_weight   window_weight / total   -
        registered module              1                         counted                 / total
        registered, some float16       1                         counted / total         -
        any other hook, in train_step  counted / window_weight   / seed                  -

    - *counted*: the weight, or 1 for each rank of weight above 0, as `over` says; *total*: its sum over the ranks.
    - 2^-k is a power of two near 1 / ranks, so it loses no bit. If each of 2^k ranks counts 1, the sum is already the
      mean, and no kernel divides.
    - *window_weight*: the weight of the first call of an accumulation window; without a window it is counted.
      A registered module puts counted in its place, or 1 if its loss carries the weight (`handle.scale`).
    - Sums of float16 gradients would not fit. Therefore the ranks sum their weights first, and each sends its share of
      the mean.
    - Any other hook weighs the gradients itself, so the seed is divided out again.
    - The *late factor* of a 16-bit loss or of a loss scale is applied between backward and sending, by the reducer.
    - The optimizer's kernel divides by the last column, if it can; otherwise the step does.

    weighs: whether the reducer applies the weight, since no loss carries it.
    power_of_two: 2^-k; 1 if no loss carries the weight; None for any other hook.
    """

    weighs: bool = False
    power_of_two: float | None = None

    @classmethod
    def of(cls, ranks: int, weighs: bool) -> Scaling:
        return cls(weighs, 1.0 if weighs else 2.0 ** -math.floor(math.log2(ranks)))

    def seed(self, counted: float, window_weight: float, float16: bool) -> float:
        """The gradient of the loss from which backward starts."""
        return counted / window_weight if float16 or self.power_of_two is None else counted * self.power_of_two

    def before_sending_(self, grads: Tensor, window_weight: float, total: Any) -> None:
        """Scale gradients in place; `total` is None unless float16 is sent as a mean."""
        scaled = Share(window_weight, total).times(grads, in_place=True)
        if scaled is not grads:
            grads.copy_(scaled)

    def behind_sum(self, total: Any, float16: bool) -> Any:
        """What is left to divide the sums by."""
        return 1.0 if float16 or self.power_of_two is None else total * self.power_of_two
