"""torch's own functional optimizers in our pipelines."""

from __future__ import annotations

from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from ..transforms.spec._spec import Spec
from ..transforms.step_param._optimizer import Optimizer


class TorchState(NamedTuple):
    step: Tensor  # the number of steps taken, 0-d float32
    slots: dict[str, Tensor]  # torch's state for the parameter, by torch's names; zeros before the first step


def as_step_param(functional: Any) -> Optimizer:
    """One of torch's private functional optimizers, such as _FunctionalAdam, as an `Optimizer`.

    torch keys the memory of these optimizers by the identity of a parameter; here it is in the state. They step in
    place under no_grad, so `step_param` works on copies and cannot be differentiated, nor mapped over.

    Args:
        functional: An object with `step_param(param, grad)`, or with `step(grads)` and a `param_group`, and with a
            `state` that is a dict of dicts.

    Returns:
        An `Optimizer`. State: `TorchState(step, slots)`.

    Raises:
        TypeError: `functional` has none of these.
        RuntimeError: at `step_param`: under torch.func transforms, where torch would silently give a derivative of 0.

    Same as: torch's _hook_then_optimizer with this optimizer.

    >>> import warnings
    >>> with warnings.catch_warnings(record=True):  # torch warns at the import, and at each construction
    ...     warnings.simplefilter("always")
    ...     from torch.distributed.optim.functional_sgd import _FunctionalSGD
    ...     opt = fjoin.as_step_param(_FunctionalSGD([], lr=0.5, _allow_empty_param_list=True))
    >>> opt.step({"w": torch.tensor(1.0)}, {"w": torch.tensor(1.0)}, opt.init({"w": torch.tensor(1.0)}))[0]
    {'w': tensor(0.5000)}
    """
    one = callable(getattr(functional, "step_param", None))
    several = callable(getattr(functional, "step", None)) and hasattr(functional, "param_group")
    if not (one or several) or not isinstance(getattr(functional, "state", None), dict):
        raise TypeError(f"as_step_param takes one of torch's functional optimizers, got {functional!r}")

    defaults = getattr(functional, "defaults", {})

    def run(param: Tensor, grad: Tensor, slots: dict[str, Any] | None) -> dict[str, Any]:
        """Take one step of torch's optimizer in place; returns its new memory of the parameter."""
        functional.state.clear()
        if slots is not None:
            functional.state[param] = slots
        if one:
            functional.step_param(param, grad)
        else:
            functional.param_group = {"params": [param]}
            functional.step([grad])
        return functional.state.pop(param, {})  # type: ignore[no-any-return]

    def start(param: Tensor) -> dict[str, Any] | None:
        """The memory that some optimizers make in their constructor, Adagrad's sum; otherwise None."""
        value = defaults.get("initial_accumulator_value")
        return None if value is None else {"sum": torch.full_like(param, value), "step": torch.tensor(0.0)}

    def init_param(param: Tensor) -> TorchState:
        probe = torch.zeros((2,), dtype=param.dtype)  # a first step on it shows the names and kinds of the slots
        kept = run(probe, torch.zeros_like(probe), start(probe))
        slots = {
            name: torch.zeros_like(param) if value.dim() else torch.zeros((), dtype=value.dtype)
            for name, value in kept.items()
            if isinstance(value, Tensor)
        }
        return TorchState(torch.zeros((), dtype=torch.float32), slots)

    def step_param_(param: Tensor, grad: Tensor, state: TorchState) -> None:
        # torch makes the slots in its first step, from the gradient where a slot starts as the gradient.
        param = param.detach()
        after = run(param, grad, dict(state.slots) if state.step > 0 else start(param))
        state.step.add_(1)
        for name, slot in state.slots.items():
            slot.copy_(after[name])

    def step_param(param: Tensor, grad: Tensor, state: TorchState) -> tuple[Tensor, TorchState]:
        if torch._C._are_functorch_transforms_active():
            raise RuntimeError(
                f"{type(functional).__name__} steps under no_grad, so that its derivative would be 0; use the function of "
                f"fjoin.transforms, such as adam"
            )
        own: Any = param.detach(), state
        own = optree.tree_map(torch.clone, own)
        step_param_(own[0], grad, own[1])
        return own  # type: ignore[no-any-return]

    kind = f"{type(functional).__module__}.{type(functional).__qualname__}"
    settings = {name: value for name, value in vars(functional).items() if isinstance(value, (bool, int, float, tuple))}
    spec = Spec("as_step_param", (("functional", kind), ("defaults", dict(defaults)), ("settings", settings)))
    return Optimizer(init_param, step_param, step_param_, spec=spec)
