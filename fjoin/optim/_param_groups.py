"""The hyperparameters of an optimizer in the form of torch's param_groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..transforms._check import is_number
from ..transforms._tree import fields
from ..transforms.optimizers._inject import remade
from ..transforms.step_param._optimizer import Optimizer


def own_by_group(part: Optimizer) -> dict[str, Any]:
    """The hyperparameters that may differ by group, with those of an inner optimizer: numbers, and betas."""
    found: dict[str, Any] = {}
    known = part.spec.parameters
    for name, value in part.spec.args:
        if isinstance(value, Optimizer):
            found.update(own_by_group(value))
        elif name == "betas" or isinstance(value, Tensor):
            found[name] = value
        elif is_number(value) and name in known and isinstance(known[name].default, float):
            found[name] = float(value)
    return found


def resizing(part: Optimizer, names: Iterable[str]) -> tuple[str, ...]:
    """The names whose value, 0 or not, determines the fields of a state."""
    probe = torch.empty(0, device="meta")

    def kinds(name: str, value: float) -> list[bool]:
        try:
            return [f is None for f in fields(remade(part, {name: value}).init_param(probe))]
        except ValueError:  # this value is not allowed
            return []

    both = {name: (kinds(name, 0.0), kinds(name, 0.5)) for name in names if name != "betas"}
    return tuple(name for name, (without, with_it) in both.items() if without and with_it and without != with_it)


def values_of(group: Mapping[str, Any], names: Iterable[str]) -> tuple[tuple[str, Any], ...]:
    """The values of a group as numbers, or pairs of numbers for betas.

    Raises:
        ValueError: a value is no number.
    """
    try:
        return tuple(
            (name, tuple(map(float, group[name])) if name == "betas" else float(group[name])) for name in names
        )
    except (TypeError, ValueError):
        given = {name: group.get(name) for name in names}
        raise ValueError(f"the hyperparameters of a group must be numbers, betas two of them; got {given!r}") from None


class WithValues:
    """Optimizers with other hyperparameters; the same object for equal values."""

    def __init__(self) -> None:
        self._made: dict[Any, Optimizer] = {}

    def __call__(self, part: Optimizer, values: tuple[tuple[str, Any], ...]) -> Optimizer:
        if not values:
            return part
        key = (id(part), values)
        if key not in self._made:
            if len(self._made) > 64:  # a schedule has produced many values
                self._made.clear()
            self._made[key] = remade(part, dict(values))
        return self._made[key]


def part_of_state(
    part: Optimizer, made: WithValues, hyperparameters: Mapping[str, Any], sized: Iterable[str], param: Tensor,
    saved: Mapping[str, Any],
) -> Optimizer:  # fmt: skip
    """The optimizer with the saved hyperparameters, where these determine the fields of a saved state.

    Args:
        hyperparameters: By name, of the saved group.
        sized: See `resizing`.
        saved: The state by name.
    """
    if not sized:
        return part
    other = made(part, values_of(hyperparameters, own_by_group(part)))
    return other if set(other.forms.of(param).filled()) == saved.keys() else part


def check_group(optimizer: Optimizer, names: Iterable[str], group: Mapping[str, Any]) -> None:
    """Raise where a group has another value of a hyperparameter that is the same for all groups.

    Raises:
        ValueError: naming it, and its value in the optimizer.
    """
    fixed = _arguments(optimizer)
    for name in sorted(fixed.keys() & group.keys() - set(names)):
        if not all(_same(group[name], own) for own in fixed[name]):
            raise ValueError(
                f"{name!r} cannot differ by group: a group has {group[name]!r}, but the optimizer has "
                f"{', '.join(map(repr, fixed[name]))}; it is no number, or the optimizer follows a schedule or differs by path; "
                f"groups may have {sorted(names)}; for the rest use partition"
            )


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
