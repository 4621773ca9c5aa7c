"""The hyperparameters of an optimizer in torch's param_groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from ..transforms._check import is_number
from ..transforms.optimizers.wrappers._inject import empty_fields, leaf_arguments, remade
from ..transforms.step_param._optimizer import Optimizer


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
