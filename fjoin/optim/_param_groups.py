"""torch's param_groups on functional optimizers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..transforms import optimizers
from ..transforms.base import checks, state_dicts, trees
from ..transforms.optimizers import Ages, Optimizer, StepItem, apart, check_grad, check_rates, compared, leaf_arguments


def own_by_group(part: Optimizer) -> dict[str, Any]:
    """The hyperparameters that may differ by group, with those of an inner optimizer: numbers, and betas."""
    found: dict[str, Any] = {}
    for own, name, value in leaf_arguments(part):
        known = own.spec.parameters.get(name)
        if name == "betas" or isinstance(value, Tensor):
            found[name] = value
        elif checks.is_number(value) and known is not None and isinstance(known.default, float):
            found[name] = float(value)
    return found


class Hyperparameters:
    """An optimizer with the hyperparameters of parameter groups; the same object for equal values.

    Attributes:
        defaults: The optimizer's own hyperparameters by name; none where it differs by path.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.defaults: dict[str, Any] = {} if optimizer.select else own_by_group(optimizer)
        self._made: dict[Any, Any] = {}

    def at(self, group: Mapping[str, Any]) -> Callable[[str], Any]:
        """Path -> the optimizer with the present values of a group.

        Raises:
            ValueError: a value is no number.
        """
        if not self.defaults:
            return self.optimizer.at  # type: ignore[no-any-return]
        values = _numbers(group, self.defaults)
        if values not in self._made:
            if len(self._made) > 64:  # a schedule has produced many values
                self._made.clear()
            self._made[values] = optimizers.remade(self.optimizer, dict(values))
        made = self._made[values]
        return lambda path: made

    def check(self, group: Mapping[str, Any]) -> None:
        """Raise where a group has another value of a hyperparameter that is the same for all groups.

        Raises:
            ValueError: naming it, and its value in the optimizer.
        """
        fixed = _arguments(self.optimizer)
        for name in sorted(fixed.keys() & group.keys() - self.defaults.keys()):
            if any(_plain(group[name]) != _plain(own) for own in fixed[name]):
                raise ValueError(
                    f"{name!r} cannot differ by group: a group has {group[name]!r}, but the optimizer has "
                    f"{', '.join(map(repr, fixed[name]))}; it is no number, or the optimizer follows a schedule or differs by path; "
                    f"groups may have {sorted(self.defaults)}; for the rest use partition"
                )


def _numbers(group: Mapping[str, Any], names: Iterable[str]) -> tuple[tuple[str, Any], ...]:
    """The values of a group as numbers, or pairs of numbers for betas."""
    try:
        values = ((name, group[name]) for name in names)
        return tuple((name, tuple(map(float, value)) if name == "betas" else float(value)) for name, value in values)
    except (TypeError, ValueError):
        given = {name: group.get(name) for name in names}
        raise ValueError(f"the hyperparameters of a group must be numbers, betas two of them; got {given!r}") from None


def _arguments(optimizer: Optimizer) -> dict[str, list[Any]]:
    """The values of the arguments of an optimizer, and of its inner optimizers, by name."""
    found: dict[str, list[Any]] = {name: [value] for name, value in optimizer.spec.args}
    if optimizer.spec.name in ("adam", "adamw"):  # torch's groups distinguish them by this entry
        found["decoupled_weight_decay"] = [optimizer.spec.name == "adamw"]
    for child in optimizer.spec.children:
        if isinstance(child, Optimizer):
            for name, values in _arguments(child).items():
                found.setdefault(name, []).extend(values)
    return found


def _plain(value: Any) -> Any:
    """A value of a group, in which a list is as good as a tuple."""
    return tuple(value) if isinstance(value, list) else value


def without_params(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


class ForeachStepper:
    """The states of parameters by key. Parameters of one age (number of steps) share the 0-d tensors of their states.

    Attributes:
        states: Key -> state.
        shown: Where each state also is by name, for `torch.optim.Optimizer.state`; None: nowhere.
    """

    def __init__(self) -> None:
        self.states: dict[Any, Any] = {}
        self.shown: dict[Any, Any] | None = None
        self._seen: dict[Any, Any] = {}  # key -> the parameter's shape, strides, dtype and device when it was checked

    def begin(self, items: Iterable[StepItem]) -> None:
        """Initialise the states of the parameters that have none; all these states are of one age."""
        ages = Ages()
        for key, part, param, _ in items:
            if key not in self.states:
                self._put(key, ages(part, param, part.init_param(param.detach())))

    def check(self, items: Sequence[StepItem]) -> None:
        """Raise where these parameters cannot be stepped; nothing has changed then.

        Raises:
            ValueError: a gradient of another shape or device; a parameter that no longer fits its state; a
                hyperparameter that is not finite.
            TypeError: a gradient of another dtype or layout.
        """
        for key, part, param, grad in items:
            form = param.shape, param.stride(), param.dtype, param.device
            fine = grad.shape == form[0] and grad.dtype is form[2] and grad.device == form[3]
            if fine and grad.layout is torch.strided and self._seen.get(key) == form:
                continue
            check_grad(param, grad, lambda key=key: f"the gradient of {whose(key)}")  # type: ignore[misc]
            if (state := self.states.get(key)) is None:
                continue
            try:
                part.forms.check_state(param, state, lambda: "its state")
            except (ValueError, TypeError) as error:
                raise ValueError(
                    f"{whose(key)} has become another since the optimizer was made; change the parameters first, then make the "
                    f"optimizer: {error}"
                ) from None
            self._seen[key] = form
        self.check_rates(items)

    def check_rates(self, items: Iterable[StepItem]) -> list[tuple[str, float]]:
        """Only the check of hyperparameters in `check`, for parameters that cannot have changed their form; returns
        them.
        """
        steps = {
            (id(part), id(state.step)): (hypers, state.step)
            for key, part, *_ in items
            if (state := self.states.get(key)) is not None and (hypers := compared(part, state))
        }
        return [rate for hypers, step in steps.values() for rate in check_rates(hypers, step)]

    def step(self, items: Sequence[StepItem], **guards: Tensor | None) -> None:
        """Step these parameters, which have been checked; the step counts of the others stay."""
        of_one_age = Counter([id(state.step) for state in self.states.values()])
        self.begin(items)
        ages = [id(self.states[key].step) for key, *_ in items]
        for some in optimizers.stepped_together(items, ages):
            key, part, *_ = some[0]
            if len(some) < of_one_age[id(self.states[key].step)]:  # the others keep their age, and the shared tensors
                own = apart(part, self.states[key])
                for key, *_ in some:
                    self._put(key, optimizers.sharing(part, self.states[key], own))
            keys, _, params, grads = zip(*some, strict=True)
            optimizers.step_lists_(part, list(params), list(grads), [self.states[key] for key in keys], **guards)

    def _put(self, key: Any, state: Any) -> None:
        self.states[key] = state
        if self.shown is not None:
            self.shown[key] = state_dicts.to_state_dict(state)

    def prepared(self, given: Iterable[tuple[Any, Optimizer, Tensor, dict[str, Any]]]) -> dict[Any, Any]:
        """States from tensors by name, given as (key, optimizer, parameter, state); equal ages share 0-d tensors again.

        Raises:
            ValueError: a state of another optimizer, or of a parameter of another shape; a step that is no step count.
        """
        new: dict[Any, Any] = {}
        ages = Ages()
        for key, part, param, named in given:
            state = loaded(whose(key), part, param, named)
            common = (f.item() for f, c in zip(trees.fields(state), part.common, strict=True) if c)
            new[key] = ages(part, param, state, *common)
        return new

    def adopt(self, states: dict[Any, Any]) -> None:
        """Take the states that `prepared` made."""
        self.states.clear()
        self._seen.clear()
        for key, state in states.items():
            self._put(key, state)


def loaded(whose: str, part: Optimizer, param: Tensor, named: Mapping[str, Any]) -> Any:
    """The state of a parameter from tensors by name; a count may be a number.

    Args:
        param: On the meta device, where the state is only to be checked.

    Raises:
        ValueError, TypeError: as `ForeachStepper.prepared`.
    """
    named = {name: torch.as_tensor(value) if checks.is_number(value) else value for name, value in named.items()}
    state = state_dicts.restored(f"the state of {whose}", part.init_param(param.detach()), named)
    count = next(named[name] for name, field in state_dicts.to_state_dict(state).items() if field is state.step)
    if not 0 <= (number := float(count.to(state.step.dtype))) < float("inf"):
        raise ValueError(f"in the state of {whose}, step is {number}, expected the number of steps taken")
    return state


def divides(part: Optimizer, dtype: torch.dtype) -> bool:
    """Whether the optimizer's kernel leaves the gradients divided by `grad_scale`, and not as undivided sums."""
    if dtype.itemsize < 4:  # these buckets may have units of their own
        return False
    param, grad = torch.ones(2, 2, dtype=dtype), torch.full((2, 2), 2.0, dtype=dtype)
    scale = torch.tensor(2.0, dtype=torch.float64)
    optimizers.step_in_place(part, [param], [grad], [part.init_param(param)], grad_scale=scale)
    return bool((grad == 1.0).all())


def whose(key: Any) -> str:
    return f"a parameter of shape {tuple(key.shape)}" if isinstance(key, Tensor) else repr(key)
