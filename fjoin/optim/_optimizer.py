"""`Optimizer`, in the shape of torch.optim's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..transforms.base import trees
from ..transforms.optimizers import Optimizer as StepParamOptimizer, StepItem
from ._param_groups import ForeachStepper, Hyperparameters


def guards_of(optimizer: Any) -> dict[str, Tensor | None]:
    """The divisor of the gradients, and whether they are to be skipped, where a GradScaler has set them."""
    return {name: getattr(optimizer, name, None) for name in ("grad_scale", "found_inf")}


def step_as(front: Any, local: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
    """Step an optimizer with what a GradScaler has set on the one in front of it; None if it is not to step."""
    given = {name: value for name, value in guards_of(front).items() if value is not None}
    if getattr(local, "_step_supports_amp_scaling", False):
        vars(local).update(given)
        try:
            return local.step(*args, **kwargs)
        finally:
            for name in given:
                delattr(local, name)
    if "found_inf" in given and given["found_inf"].item():
        return None
    if "grad_scale" in given:
        for grad in [p.grad for group in local.param_groups for p in group["params"] if p.grad is not None]:
            grad.div_(given["grad_scale"].to(grad.device))
    return local.step(*args, **kwargs)


class Optimizer(torch.optim.Optimizer):
    """A torch.optim.Optimizer that steps with one of ours, in place, by one kernel for all parameters of a kind.

    - `param_groups` holds the hyperparameters that are numbers, and betas. Groups may have their own values, and
      torch's schedulers change them there. A group may repeat other hyperparameters, and torch's own such as foreach,
      without effect.
    - `state`, `state_dict` and `load_state_dict` hold the state, by names such as "exp_avg".
    - A parameter without gradient is left unchanged, as by torch.
    - It works with torch.amp.GradScaler.

    Args:
        params: As in torch.optim: tensors, groups of them, or `model.named_parameters()`, whose names are the paths of
            a `partition`.
        optimizer: An `Optimizer` of fjoin.transforms.

    Raises:
        TypeError: `optimizer` is not an Optimizer; a complex parameter; at a step: a sparse gradient, or one of another
            dtype.
        ValueError: a `partition` without names; parameters that the optimizer cannot serve; a group with another value
            of a hyperparameter that is the same for all; at a step, which then changes nothing: hyperparameters out of
            their range or not finite, parameters that have changed their shape.

    Same as: the classes of torch.optim.

    >>> from fjoin import transforms as tx
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = fjoin.Optimizer(model.parameters(), tx.adamw(1e-3))
    >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    >>> model(torch.ones(3, 2)).sum().backward()
    >>> optimizer.step()
    >>> scheduler.step()
    >>> optimizer.param_groups[0]["lr"]
    0.0005
    """

    _step_supports_amp_scaling = True

    def __init__(self, params: Any, optimizer: StepParamOptimizer) -> None:
        if not isinstance(optimizer, StepParamOptimizer):
            raise TypeError(f"fjoin.Optimizer takes an Optimizer of fjoin.transforms, as adamw(), got {optimizer!r}")
        if optimizer.spec.name == "inject_hyperparameters":
            raise TypeError(
                f"{optimizer!r} keeps its hyperparameters in its state; here they are in param_groups: omit it"
            )
        self._optimizer = optimizer
        self._hyper = Hyperparameters(optimizer)
        super().__init__(params, dict(self._hyper.defaults))
        self._stepper = ForeachStepper()  # it must not refer to this object: a cycle would delay freeing the states
        self._check()

    def _check(self) -> None:
        """Check that the optimizer can serve all groups, and initialise its states."""
        by_path = self._by_path()
        for path, param in by_path.items():
            if param.requires_grad:
                trees.check_dense(f"the parameter {path!r}", param)
        if self._optimizer.check:
            self._optimizer.check(by_path)
        for group in self.param_groups:
            self._hyper.check(group)
        # Initialise at once, since torch.distributed.checkpoint takes a step where there is no state.
        self._stepper.shown = self.state
        self._stepper.begin(item for item in self._items() if item[2].requires_grad)

    def _items(self) -> list[StepItem]:
        """(key of the state, optimizer with the group's hyperparameters, parameter, gradient) of all parameters."""
        items: list[StepItem] = []
        for group in self.param_groups:
            at = self._hyper.at(group)
            items += [(p, at(name), p, p.grad) for name, p in zip(_names(group), group["params"], strict=True)]
        return items

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as torch's method; a group that the optimizer cannot serve is not added."""
        super().add_param_group(param_group)
        if hasattr(self, "_stepper"):  # not while the constructor adds the first groups
            try:
                self._check()
            except (ValueError, TypeError):
                self.param_groups.pop()
                raise

    def __getstate__(self) -> dict[str, Any]:
        own = ("_optimizer", "_hyper", "_stepper")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}  # type: ignore[no-untyped-call]

    def _by_path(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for group in self.param_groups:
            if self._optimizer.select and "param_names" not in group:
                raise ValueError(
                    f"{self._optimizer!r} differs by path, so it needs names: pass model.named_parameters()"
                )
            names = group.get("param_names") or [str(len(found) + i) for i in range(len(group["params"]))]
            found.update(zip(names, group["params"], strict=True))
        return found

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step all parameters that have a gradient; returns the result of `closure`, which is called first.

        Raises:
            ValueError, TypeError: see the class; no parameter and no state has been changed then.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        items = [item for item in self._items() if item[3] is not None]
        self._stepper.shown = self.state  # which others may have replaced, or cleared
        if len(self.state) != len(self._stepper.states):
            for param in self._stepper.states.keys() - self.state.keys():  # cleared: their states start anew
                del self._stepper.states[param]
        self._stepper.check(items)
        self._stepper.step(items, **guards_of(self))
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state made by `state_dict`, for the same parameters in the same order.

        Raises:
            ValueError: other groups, or states of another optimizer.
        """
        saved = state_dict["state"]  # in the saved dtypes; torch would convert them to the parameters' dtypes
        given = []
        for its, mine in zip(state_dict["param_groups"], self.param_groups, strict=False):
            self._hyper.check(its)
            at = self._hyper.at({**mine, **its})
            for key, name, param in zip(its["params"], _names(mine), mine["params"], strict=False):  # keys may be names
                if one := saved.get(key):
                    given.append((param, at(name), param, one))
        states = self._stepper.prepared(given)
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for name in self._hyper.defaults:
                group.setdefault(name, self.defaults[name])
        self._stepper.shown = self.state
        self._stepper.adopt(states)


def _names(group: dict[str, Any]) -> list[str]:
    return group.get("param_names") or [""] * len(group["params"])
