"""The states of parameters by key, and steps of these parameters in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..transforms._check import is_number
from ..transforms.optimizers.wrappers._inject import compared
from ..transforms.schedules._rates import check_rates
from ..transforms.step_param._checked import check_grad, check_written, refuse_count
from ..transforms.step_param._lists import Ages, Item, apart, sharing, step_in_place, step_lists_, stepped_together
from ..transforms.step_param._optimizer import Optimizer
from ..transforms.tree._state_dict import restored, to_state_dict
from ..transforms.tree._tree import fields, with_fields
from ._param_groups import own_by_group

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
            ValueError: a gradient of another shape or device; a parameter that no longer fits its state, or that cannot
                be written, since its elements overlap in memory or it is an inference tensor; a hyperparameter that is
                not finite.
            TypeError: a gradient of another dtype or layout.
        """
        for key, part, param, grad in items:
            form = param.shape, param.stride(), param.dtype, param.device
            fine = grad.shape == form[0] and grad.dtype is form[2] and grad.device == form[3]
            if fine and grad.layout is torch.strided and self._seen.get(key) == form:
                continue
            check_grad(param, grad, lambda key=key: f"the gradient of {whose(key)}")  # type: ignore[misc]
            check_written(param, lambda key=key: whose(key))  # type: ignore[misc]
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
                check_written(field, lambda key=key, name=name: f"the state's {name!r} of {whose(key)}")  # type: ignore[misc]
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
