"""Hyperparameters as part of the state."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from ...spec._spec import factory
from ...step_param._formula import like, rate_at
from ...step_param._hyper import no_schedule
from ...step_param._lists import step_in_place
from ...step_param._optimizer import Optimizer
from ...step_param._wrap import around, each_part
from ...tree._tree import State, fields, readable_without_sync


class InjectState(NamedTuple):
    inner: Any  # the other optimizer's state
    hyperparameters: dict[str, Tensor]  # name -> value, 0-d float64; `with_hyperparameters` changes it
    scheduled: dict[str, Tensor]  # name -> value in the next step, 0-d float64, for hyperparameters with a schedule

    @property
    def step(self) -> Tensor:
        return self.inner.step


@factory
def inject_hyperparameters(optimizer: Optimizer) -> Optimizer:
    """Keeps an optimizer's hyperparameters in its state, where `with_hyperparameters` can change them at run time.

    - Included are arguments that are floats, such as lr, momentum, eps and weight_decay, and arguments that are
      schedules, whose present value can be read from the state.
    - Not included are pairs such as betas, switches, and an argument of 0 that would need another state if it were not
      0, such as momentum.

    Args:
        optimizer: An optimizer from one of this package's factories, or a `partition` of such optimizers.

    Returns:
        An `Optimizer`. State: `InjectState(inner, hyperparameters, scheduled)`.

    Raises:
        TypeError: an optimizer that no factory has made.
        ValueError: at a step: a value that the factory refuses.

    Same as: optax.inject_hyperparams; param_groups of torch.optim.

    >>> from fjoin import transforms as tx
    >>> opt, params = inject_hyperparameters(tx.sgd(0.5)), {"w": torch.tensor(1.0)}
    >>> state = opt.init(params)
    >>> state = with_hyperparameters(state, lr=0.25)
    >>> opt.step(params, {"w": torch.tensor(1.0)}, state)[0]
    {'w': tensor(0.7500)}
    """
    return each_part(optimizer, _injected, "inject_hyperparameters")


def with_hyperparameters(state: State, **values: float | Tensor) -> State:
    """The same optimizer states with other hyperparameters.

    Args:
        state: A tree of states, or of pipelines' states, with `InjectState`s in it.
        values: Name -> value, a number or a tensor of one element, for all states with this name.

    Raises:
        ValueError: a name that none of them has, or that follows a schedule; the message lists what there is. A value
            that is not finite, or a tensor of several elements.
        TypeError: a value that is neither a number nor a tensor.

    >>> from fjoin import transforms as tx
    >>> opt = inject_hyperparameters(tx.sgd(0.5, momentum=0.9))
    >>> state = with_hyperparameters(opt.init({"w": torch.tensor(1.0)}), momentum=0.8)
    >>> state["w"].hyperparameters["momentum"].item()
    0.8
    """
    no_schedule(**values)
    known: set[str] = set()
    new: dict[int, Tensor] = {}

    def change(node: Any) -> Any:
        if not isinstance(node, InjectState):
            return node
        known.update(node.hyperparameters)
        changed = dict(node.hyperparameters)
        for name in values.keys() & changed.keys():  # states that shared a tensor share the new one
            changed[name] = new.setdefault(id(changed[name]), _as_like(changed[name], values[name]))
        return node._replace(hyperparameters=changed)

    out = optree.tree_map(change, state, is_leaf=lambda node: isinstance(node, InjectState))
    unknown = sorted(values.keys() - known)
    if unknown:
        raise ValueError(
            f"no state has the hyperparameters {unknown}; there are {sorted(known)}. Those that are to be changed in a state are put "
            f"there by inject_hyperparameters(optimizer)"
        )
    return out


def injected(state: State) -> list[tuple[str, Tensor]]:
    """The hyperparameters in optimizer states by name: 0-d tensors that `with_hyperparameters` changes."""
    nodes = optree.tree_leaves(state, is_leaf=lambda node: isinstance(node, InjectState))
    return [pair for node in nodes if isinstance(node, InjectState) for pair in node.hyperparameters.items()]


def compared(part: Optimizer, state: State) -> tuple[tuple[str, Any], ...]:
    """The hyperparameters by name that ranks compare, and that may become non-finite: schedules, and those in the state."""
    holds = isinstance(state, InjectState) or hasattr(state, "inner")
    return (*part.watched, *(injected(state) if holds else ()))


def _as_like(old: Tensor, value: float | Tensor) -> Tensor:
    """A value in the dtype and on the device of another one."""
    if isinstance(value, Tensor):
        return value.reshape(()).to(old, copy=True)
    return torch.full_like(old, value)


def remade(part: Optimizer, values: Mapping[str, Any]) -> Optimizer:
    """The same optimizer with other arguments, also those of one inside it.

    Raises:
        TypeError: it was made by no factory.
    """
    make = part.spec.factory
    if make is None:
        raise TypeError(f"{part!r} was made by no factory, so its arguments are not known")
    args = {
        name: remade(value, values) if isinstance(value, Optimizer) else values.get(name, value)
        for name, value in part.spec.args
    }
    return make(**args)  # type: ignore[no-any-return]


def leaf_arguments(part: Optimizer) -> Iterator[tuple[Optimizer, str, Any]]:
    """(optimizer, name, value) of each argument, where an optimizer inside stands for its own arguments."""
    for name, value in part.spec.args:
        if isinstance(value, Optimizer):
            yield from leaf_arguments(value)
        else:
            yield part, name, value


def number_arguments(part: Optimizer) -> dict[str, float | Tensor]:
    """The hyperparameters that may change from step to step, also those of an optimizer inside: name -> value."""
    found: dict[str, float | Tensor] = {}
    for own, name, value in leaf_arguments(part):
        whole = type(value) is int and isinstance(own.spec.parameters[name].default, float)
        if whole or isinstance(value, (float, Tensor)):
            # A value of 0 is left out if it must be 0, or if another one would change the form of the state.
            if isinstance(value, Tensor) or value != 0 or empty_fields(own, name, 1.0) == empty_fields(own, name, 0.0):
                found[name] = value if isinstance(value, Tensor) else float(value)
    return found


def empty_fields(part: Optimizer, name: str, value: float) -> list[bool] | None:
    """Which fields of a state are None where an argument has this value; None for a value that is refused."""
    try:
        state = remade(part, {name: value}).init_param(torch.empty(0, device="meta"))
    except ValueError:
        return None
    return [field is None for field in fields(state)]


def _injected(part: Optimizer) -> Optimizer:
    remade(part, {})  # or raise
    numbers = number_arguments(part)
    schedules = {name: value for _, name, value in leaf_arguments(part) if callable(value)}

    @functools.lru_cache(maxsize=2)  # of the last steps: making an optimizer takes longer than a small step
    def fixed(*values: tuple[str, float]) -> Optimizer:
        return remade(part, dict(values))

    def scheduled(step: Tensor) -> dict[str, Tensor]:
        return {name: rate_at(schedule, step) for name, schedule in schedules.items()}

    def init_param(param: Tensor) -> InjectState:
        inner = part.init_param(param)
        values = {name: torch.as_tensor(value, dtype=torch.float64).clone() for name, value in numbers.items()}
        return InjectState(inner, values, scheduled(inner.step))

    def step_param(param: Tensor, grad: Tensor, state: InjectState) -> tuple[Tensor, InjectState]:
        now = remade(part, {**state.hyperparameters, **scheduled(state.step)})
        param, inner = like(param, state.inner, *now.step_param(param, grad, state.inner))
        return param, InjectState(inner, state.hyperparameters, scheduled(inner.step))

    def step_params_(
        params: list[Tensor], grads: list[Tensor], states: list[InjectState], **guards: Tensor | None
    ) -> None:
        first = states[0]
        # The host would have to wait for the value of a schedule on a device.
        values = {
            name: value.item() if readable_without_sync(value) else value
            for name, value in {**first.hyperparameters, **scheduled(first.step)}.items()
        }
        known = not any(isinstance(value, Tensor) for value in values.values())
        now = fixed(*values.items()) if known else remade(part, values)
        step_in_place(now, params, grads, [state.inner for state in states], **guards)
        for name, value in scheduled(first.step).items():
            first.scheduled[name].copy_(value)

    return around(part, init_param, step_param, step_params_)
