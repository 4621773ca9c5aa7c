"""The optimizer that keeps parameters unchanged."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..spec._spec import factory
from ..step_param._inplace import new_step
from ..step_param._optimizer import Optimizer


class FrozenState(NamedTuple):
    step: Tensor  # calls, 0-d float32


@factory
def frozen() -> Optimizer:
    """Keeps parameters unchanged; for a part of `partition`.

    Returns:
        An `Optimizer`. State: `FrozenState(step)`.

    Same as: optax.set_to_zero.

    >>> from fjoin import transforms as tx
    >>> opt = tx.partition({"embed.*": tx.frozen(), "*": tx.sgd(0.1)})
    """

    def init_param(param: Tensor) -> FrozenState:
        return FrozenState(new_step(param))

    def step_param(param: Tensor, grad: Tensor, state: FrozenState) -> tuple[Tensor, FrozenState]:
        del grad
        return param, FrozenState(state.step + 1)

    def step_param_(
        param: Tensor,
        grad: Tensor,
        state: FrozenState,
        *,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        del param, grad, grad_scale
        state.step.add_(1 if found_inf is None else 1 - found_inf)

    return Optimizer(init_param, step_param, step_param_)
