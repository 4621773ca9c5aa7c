"""torch's PostLocalSGDOptimizer: an optimizer, and an average of the parameters after its steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from ..transforms.base import checks
from ._optimizer import step_as


class PostLocalSGDOptimizer(torch.optim.Optimizer):
    """A torch.optim.Optimizer that steps another one, then averages the parameters as an averager says.

    - `param_groups`, `state` and `defaults` are those of `optim`, also after `load_state_dict`, so that torch's
      schedulers work.
    - `state_dict` is that of `optim`, with the averager's step under "step". The states of torch's class can be loaded.
    - The optimizer's state is never averaged.
    - Hooks of `state_dict` and `load_state_dict` are those of `optim`: register them there.
    - It works with torch.amp.GradScaler: a rank that leaves out a step still takes part in the average.

    Args:
        optim: The optimizer of this rank: of torch, or a `fjoin.Optimizer`.
        averager: A `PeriodicModelAverager`, a `HierarchicalModelAverager`, or any object with `step` and
            `average_parameters(params)`, such as torch's averagers. Its `warmup_steps` should be equal to
            `start_localSGD_iter` of the communication hook.

    Raises:
        TypeError: `optim` is no torch.optim.Optimizer.

    Same as: torch.distributed.optim.PostLocalSGDOptimizer.

    >>> model = torch.nn.Linear(2, 1)
    >>> averager = fjoin.PeriodicModelAverager(period=4, warmup_steps=100)
    >>> optimizer = fjoin.PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)
    >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    >>> model(torch.ones(3, 2)).sum().backward()
    >>> optimizer.step()
    >>> scheduler.step()
    >>> optimizer.param_groups[0]["lr"], optimizer.state_dict()["step"]
    (0.05, 1)
    """

    optim: torch.optim.Optimizer
    averager: Any

    _step_supports_amp_scaling = True  # a GradScaler then calls `step` on all ranks, and sets grad_scale and found_inf

    def __init__(self, optim: torch.optim.Optimizer, averager: Any) -> None:
        if not isinstance(optim, torch.optim.Optimizer):
            raise TypeError(
                f"PostLocalSGDOptimizer: optim must be a torch.optim.Optimizer, or a fjoin.Optimizer, got {optim!r}"
            )
        self.__setstate__({"optim": optim, "averager": averager})

    # Properties, since loading a state gives the optimizer a new list of groups and a new dict of states.
    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optim.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optim.defaults

    def __getstate__(self) -> dict[str, Any]:
        return {"optim": self.optim, "averager": self.averager}

    def __repr__(self) -> str:
        return f"PostLocalSGDOptimizer({self.optim!r}, {self.averager!r})"

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step the optimizer, then average the parameters if this step is due; returns the result of `closure`.

        Raises:
            PeerLost, DesyncError, CollectiveTimeout: as `average_parameters` of the averager.
        """
        loss = step_as(self, self.optim, *(() if closure is None else (closure,)))
        self.averager.average_parameters(params=self.param_groups)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optim.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optim.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """The state of the optimizer, with the averager's step under "step"."""
        return {**self.optim.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """Load a state made by `state_dict`, or by that of torch's class.

        Raises:
            ValueError: as `load_state_dict` of the optimizer; "step" is no whole number from 0.

        Warns:
            UserWarning: there is no "step"; the averager starts at step 0 again.
        """
        given = dict(state_dict)
        step = given.pop("step", None)
        if step is not None:
            checks.whole_number("the averager's step in the state", step, 0)
        self.optim.load_state_dict(given)
        if step is None:
            warnings.warn(
                "the loaded state has no averager's step, under 'step', so the averager starts at step 0, with its warm-up; load a "
                "state_dict() of a PostLocalSGDOptimizer",
                UserWarning,
                stacklevel=2,
            )
        self.averager.step = step or 0
