"""torch's param_groups on functional optimizers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..transforms.base import fields, is_number, restored, to_state_dict, with_fields
from ..transforms.optimizers import (
    Ages,
    Item,
    Optimizer,
    apart,
    check_grad,
    check_rates,
    compared,
    empty_fields,
    leaf_arguments,
    refuse_count,
    remade,
    sharing,
    step_in_place,
    step_lists_,
    stepped_together,
)


def own_by_group(part: Optimizer) -> dict[str, Any]:
    """The hyperparameters that may differ by group, with those of an inner optimizer: numbers, and betas."""
    found: dict[str, Any] = {}
    for own, name, value in leaf_arguments(part):
        known = own.spec.parameters.get(name)
        if name == "betas" or isinstance(value, Tensor):
            found[name] = value
        elif is_number(value) and known is not None and isinstance(known.default, float):
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
        self._resizing = [name for name in self.defaults if name != "betas" and self._resizes(name)]
        self._made: dict[Any, Any] = {}

    def _resizes(self, name: str) -> bool:
        """Whether a value, 0 or not, determines which fields a state has."""
        without, with_it = (empty_fields(self.optimizer, name, value) for value in (0.0, 0.5))
        return without is not None and with_it is not None and without != with_it

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
            self._made[values] = remade(self.optimizer, dict(values))
        made = self._made[values]
        return lambda path: made

    def sizes(self, groups: Iterable[Mapping[str, Any]]) -> list[bool]:
        """What determines the fields of the states under these groups."""
        return [group[name] != 0 for group in groups for name in self._resizing]

    def of_saved(self, group: Mapping[str, Any], path: str, param: Tensor, saved: Mapping[str, Any]) -> Any:
        """The optimizer of a saved state, by name: that of the saved group, where this determines the state's fields."""
        if self._resizing:
            other = self.at(group)(path)
            if set(other.forms.of(param).filled()) == saved.keys():
                return other
        return self.optimizer.at(path)

    def check(self, group: Mapping[str, Any]) -> None:
        """Raise where a group has another value of a hyperparameter that is the same for all groups.

        Raises:
            ValueError: naming it, and its value in the optimizer.
        """
        fixed = _arguments(self.optimizer)
        for name in sorted(fixed.keys() & group.keys() - self.defaults.keys()):
            if not all(_same(group[name], own) for own in fixed[name]):
                raise ValueError(
                    f"{name!r} cannot differ by group: a group has {group[name]!r}, but the optimizer has "
                    f"{', '.join(map(repr, fixed[name]))}; it is no number, or the optimizer follows a schedule or differs by path; "
                    f"groups may have {sorted(self.defaults)}; for the rest use partition"
                )


def _numbers(group: Mapping[str, Any], names: Iterable[str]) -> tuple[tuple[str, Any], ...]:
    """The values of a group as numbers, or pairs of numbers for betas."""
    try:
        return tuple(
            (name, tuple(map(float, group[name])) if name == "betas" else float(group[name])) for name in names
        )
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


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(_same, a, b))
    if callable(a) or callable(b):
        return a is b
    try:
        return bool(a == b)
    except RuntimeError:  # tensors of several elements
        return False


def without_params(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


Changed = Callable[[Any, Any], None]


def ignore(key: Any, state: Any) -> None:
    del key, state


class ForeachStepper:
    """The states of parameters by key. Parameters of one age (number of steps) share the 0-d tensors of their states.

    Methods call their argument `changed` with a key and its new state wherever a state is replaced by another object.
    """

    def __init__(self) -> None:
        self.states: dict[Any, Any] = {}
        self._sizes: list[bool] | None = None  # for which all states have their fields
        self._seen: dict[Any, Any] = {}  # key -> the parameter's shape, strides, dtype and device when it was checked

    def begin(self, items: Iterable[Item], changed: Changed = ignore) -> None:
        """Initialise the states of the parameters that have none; all these states are of one age."""
        ages = Ages()
        for key, part, param, _ in items:
            if key not in self.states:
                self._put(key, ages(part, param, part.init_param(param.detach())), changed)

    def fit(self, items: Iterable[Item], sizes: list[bool], changed: Changed = ignore) -> None:
        """Initialise the state fields that an optimizer now needs for the first time, such as a momentum that was 0.

        Args:
            sizes: See `Hyperparameters.sizes`; where these are as in the last call, nothing is done.

        Raises:
            ValueError: a momentum with dampening that begins after the first step.
        """
        if sizes == self._sizes:
            return
        for key, part, param, _ in items:
            if (state := self.states.get(key)) is None:
                continue
            new = part.init_param(param.detach())
            pairs = list(zip(fields(state), fields(new), strict=True))
            if any(old is None and fresh is not None for old, fresh in pairs):
                if own_by_group(part).get("dampening") and state.step.item() > 0:
                    raise ValueError(
                        f"{part!r}: momentum with dampening cannot begin in step {int(state.step)}, since the first step has no "
                        f"dampening; give the optimizer a small momentum from the start"
                    )
                self._put(key, with_fields(new, [fresh if old is None else old for old, fresh in pairs]), changed)
        self._sizes = sizes

    def check(self, items: Sequence[Item]) -> None:
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
            expected = part.forms.of(param)
            for field, kind, name in zip(fields(state), expected.fields, expected.names, strict=True):
                if field is None or kind is None:
                    continue
                shape, dtype, on_device = kind
                if field.shape != shape or field.dtype is not dtype or (on_device and field.device != param.device):
                    raise ValueError(
                        f"{whose(key)} has become another since the optimizer was made: the state's {name!r} is "
                        f"{field.dtype}{list(field.shape)} on {field.device}; change the parameters first, then make the optimizer"
                    )
            self._seen[key] = form
        self.check_rates(items)

    def check_rates(self, items: Iterable[Item]) -> list[tuple[str, float]]:
        """Only the check of hyperparameters in `check`, for parameters that cannot have changed their form; returns them."""
        steps = {
            (id(part), id(state.step)): (hypers, state.step)
            for key, part, *_ in items
            if (state := self.states.get(key)) is not None and (hypers := compared(part, state))
        }
        return [rate for hypers, step in steps.values() for rate in check_rates(hypers, step)]

    def step(self, items: Iterable[Item], changed: Changed = ignore, **guards: Tensor | None) -> None:
        """Step these parameters, which have been checked; the step counts of the others stay."""
        of_one_age = Counter(id(state.step) for state in self.states.values())
        items = list(items)
        self.begin(items, changed)
        ages = [id(self.states[key].step) for key, *_ in items]
        for some in stepped_together(items, ages):
            key, part, *_ = some[0]
            if (
                len(some) < of_one_age[id(self.states[key].step)]
            ):  # the others keep their age, and so the shared tensors
                own = apart(part, self.states[key])
                for key, *_ in some:
                    self._put(key, sharing(part, self.states[key], own), changed)
            keys, _, params, grads = zip(*some, strict=True)
            step_lists_(part, list(params), list(grads), [self.states[key] for key in keys], **guards)

    def _put(self, key: Any, state: Any, changed: Changed) -> None:
        self.states[key] = state
        changed(key, state)

    def prepared(self, given: Iterable[tuple[Any, Optimizer, Tensor, dict[str, Any]]]) -> dict[Any, Any]:
        """States from tensors by name, given as (key, optimizer, parameter, state); equal ages share 0-d tensors again.

        Raises:
            ValueError: a state of another optimizer, or of a parameter of another shape; a step that is no step count.
        """
        new: dict[Any, Any] = {}
        ages = Ages()
        for key, part, param, named in given:
            state = loaded(whose(key), part, param, named)
            new[key] = ages(
                part, param, state, *(f.item() for f, c in zip(fields(state), part.common, strict=True) if c)
            )
        return new

    def adopt(self, states: dict[Any, Any], changed: Changed = ignore) -> None:
        """Take the states that `prepared` made."""
        self.states, self._sizes = states, None
        self._seen.clear()
        for key, state in states.items():
            changed(key, state)


def loaded(whose: str, part: Optimizer, param: Tensor, named: Mapping[str, Any]) -> Any:
    """The state of a parameter from tensors by name; a count may be a number.

    Args:
        param: On the meta device, where the state is only to be checked.

    Raises:
        ValueError, TypeError: as `ForeachStepper.prepared`.
    """
    named = {name: torch.as_tensor(value) if is_number(value) else value for name, value in named.items()}
    state = restored(f"the state of {whose}", part.init_param(param.detach()), named)
    count = next(named[name] for name, field in to_state_dict(state).items() if field is state.step)
    refuse_count(float(count.to(state.step.dtype)), lambda: f"in the state of {whose}, step")
    return state


def divides(part: Optimizer, dtype: torch.dtype) -> bool:
    """Whether the optimizer's kernel leaves the gradients divided by `grad_scale`, and not as undivided sums."""
    if dtype.itemsize < 4:  # these buckets may have units of their own
        return False
    param, grad = torch.ones(2, 2, dtype=dtype), torch.full((2, 2), 2.0, dtype=dtype)
    step_in_place(part, [param], [grad], [part.init_param(param)], grad_scale=torch.tensor(2.0, dtype=torch.float64))
    return bool((grad == 1.0).all())


def whose(key: Any) -> str:
    return f"a parameter of shape {tuple(key.shape)}" if isinstance(key, Tensor) else repr(key)
