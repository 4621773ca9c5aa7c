"""Optimizers around others, and optimizers by torch's names."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, optim

from ..base import State, Tree, factory, trees
from ._adagrad import adadelta, adafactor, adagrad, rmsprop
from ._adam import adam, adamax, adamw, nadam, radam
from ._kernels import around, each_part, one_param, zeros
from ._optimizer import Optimizer, Tensors, like, rate_at, step_in_place
from ._schedules import no_schedule
from ._sgd import asgd, muon, rprop, sgd


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

    def step_param(param: Tensor, grad: Tensor, state: FrozenState) -> tuple[Tensor, FrozenState]:
        return param, FrozenState(state.step + 1)

    def step_params_(params: Any, grads: Any, states: list[FrozenState], **guards: Tensor | None) -> None:
        found_inf = guards.get("found_inf")
        states[0].step.add_(1 if found_inf is None else 1 - found_inf)

    return Optimizer(zeros(FrozenState), step_param, one_param(step_params_), step_params_, elementwise=True)


class InjectState(NamedTuple):
    inner: Any  # the other optimizer's state
    hyperparameters: dict[str, Tensor]  # name -> value, 0-d float64; `with_hyperparameters` changes it
    scheduled: dict[str, Tensor]  # name -> value in the last step, 0-d float64, for hyperparameters with a schedule

    @property
    def step(self) -> Tensor:
        return self.inner.step


@factory
def inject_hyperparameters(optimizer: Optimizer) -> Optimizer:
    """Keeps an optimizer's hyperparameters in its state, where `with_hyperparameters` can change them at run time.

    - Included are arguments that are floats, such as lr, momentum, eps and weight_decay, and arguments that are
      schedules, whose value in the last step can be read from the state.
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
        for name in values.keys() & changed.keys():
            old, value = changed[name], values[name]
            made = value.reshape(()).to(old, copy=True) if isinstance(value, Tensor) else torch.full_like(old, value)
            changed[name] = new.setdefault(id(old), made)  # states that shared a tensor share the new one
        return node._replace(hyperparameters=changed)

    out = optree.tree_map(change, state, is_leaf=lambda node: isinstance(node, InjectState))
    unknown = sorted(values.keys() - known)
    if unknown:
        remedy = "Those that are to be changed in a state are put there by inject_hyperparameters(optimizer)"
        raise ValueError(f"no state has the hyperparameters {unknown}; there are {sorted(known)}. {remedy}")
    return out


def compared(part: Optimizer, state: State) -> tuple[tuple[str, Any], ...]:
    """The hyperparameters by name that ranks compare, and that may become non-finite: schedules, and those in the
    state.
    """
    if not hasattr(state, "inner"):
        return part.watched
    own = (node.hyperparameters.items() for node in trees.nodes(state, InjectState))
    return (*part.watched, *itertools.chain.from_iterable(own))


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
    return [field is None for field in trees.fields(state)]


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
        rates = scheduled(state.step)  # not those of the next step, which a table may not have
        now = remade(part, {**state.hyperparameters, **rates})
        param, inner = like(param, state.inner, *now.step_param(param, grad, state.inner))
        return param, InjectState(inner, state.hyperparameters, rates)

    def step_params_(params: Tensors, grads: Tensors, states: list[InjectState], **guards: Tensor | None) -> None:
        first, rates = states[0], scheduled(states[0].step)
        # The host would have to wait for the value of a schedule on a device.
        values = {
            name: value.item() if trees.readable_without_sync(value) else value
            for name, value in {**first.hyperparameters, **rates}.items()
        }
        known = not any(isinstance(value, Tensor) for value in values.values())
        now = fixed(*values.items()) if known else remade(part, values)
        step_in_place(now, params, grads, [state.inner for state in states], **guards)
        found_inf = guards.get("found_inf")
        for name, value in rates.items():
            kept = first.scheduled[name]
            if found_inf is not None and found_inf.device == kept.device:  # else the host would wait for the flag
                value = torch.where(found_inf > 0, kept, value)
            kept.copy_(value)

    return around(part, init_param, step_param, step_params_)


class MixedState(NamedTuple):
    inner: Any  # the other optimizer's state, in the master's dtype
    master: Tensor | None  # like the parameter, in higher precision; None if the parameter has that precision

    @property
    def step(self) -> Tensor:
        return self.inner.step


@factory
def mixed_precision(optimizer: Optimizer, dtype: torch.dtype = torch.float32) -> Optimizer:
    """Keeps a master copy of low-precision parameters, which another optimizer steps.

        master, state <- step(master, g in dtype, state)
        p <- master in the parameter's own dtype

    Steps that are too small for bfloat16 add up in the master copy. Other changes of the parameter are undone by the
    next step, which starts from the master. Parameters of `dtype`, and wider ones, are stepped directly.

    Args:
        optimizer: The optimizer of the master, or a `partition`.
        dtype: The dtype of the master.

    Returns:
        An `Optimizer`. State: `MixedState(inner, master)`.

    Raises:
        TypeError: `optimizer` is no optimizer; a dtype that is not floating-point.

    Same as: the float32 master weights of apex and DeepSpeed; torch has none.
    Source: Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, section 3.1.

    >>> from fjoin import transforms as tx
    >>> p = torch.tensor([256.0], dtype=torch.bfloat16)
    >>> for opt in tx.sgd(0.25), mixed_precision(tx.sgd(0.25)):
    ...     params, state = {"p": p}, opt.init({"p": p})
    ...     for _ in range(8):
    ...         params, state = opt.step(params, {"p": torch.ones_like(p)}, state)
    ...     params["p"].item()
    256.0
    254.0
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"mixed_precision: dtype must be a floating-point dtype, got {dtype!r}")
    return each_part(optimizer, lambda part: _with_master(part, dtype), "mixed_precision", dtype=dtype)


def _with_master(part: Optimizer, dtype: torch.dtype) -> Optimizer:
    def init_param(param: Tensor) -> MixedState:
        master = param.to(dtype) if param.dtype.itemsize < dtype.itemsize else None
        return MixedState(part.init_param(param if master is None else master), master)

    def step_param(param: Tensor, grad: Tensor, state: MixedState) -> tuple[Tensor, MixedState]:
        if state.master is None:
            param, inner = part.step_param(param, grad, state.inner)
            return param, MixedState(inner, None)
        master, inner = part.step_param(state.master, grad.to(dtype), state.inner)
        return master.to(param.dtype), MixedState(inner, master)

    def step_params_(params: Tensors, grads: Tensors, states: list[MixedState], **guards: Tensor | None) -> None:
        inner, masters = [s.inner for s in states], [s.master for s in states if s.master is not None]
        if not masters:
            step_in_place(part, params, grads, inner, **guards)
            return
        step_in_place(part, masters, [grad.to(dtype) for grad in grads], inner, **guards)
        torch._foreach_copy_(params, masters)

    return around(part, init_param, step_param, step_params_)


def master_of(state: Any) -> Tensor | None:
    """The master copy in a parameter's state, if there is one."""
    if isinstance(state, MixedState):
        return state.master
    return master_of(state.inner) if hasattr(state, "inner") else None


def with_master(state: Any, master: Tensor) -> Any:
    """A state with a master copy, with another one in its place."""
    if isinstance(state, MixedState):
        return state._replace(master=master)
    return state._replace(inner=with_master(state.inner, master))


def masters_of(params: Tree, state: State) -> Tree:
    """The parameters, or their master copies where their optimizers keep one."""
    return optree.tree_map(lambda param, s: param if (master := master_of(s)) is None else master, params, state)


def with_masters(masters: Tree, params: Tree, state: State) -> tuple[Tree, State]:
    """Parameters and state with new values for the result of `masters_of`."""
    new = optree.tree_map(lambda param, master: master.to(param.dtype), params, masters)
    kept = optree.tree_map(lambda master, s: s if master_of(s) is None else with_master(s, master), masters, state)
    return new, kept


_FACTORIES = (sgd, adam, adamw, nadam, radam, adamax, adagrad, adadelta, adafactor, rmsprop, rprop, asgd, muon)
_BY_NAME: dict[str, Callable[..., Optimizer]] = {make.__name__: make for make in _FACTORIES}
# torch's classes have the same names, but for capital letters.
OF_TORCH: Mapping[type, Callable[..., Optimizer]] = {
    cls: _BY_NAME[name.lower()]
    for name, cls in vars(optim).items()
    if name.lower() in _BY_NAME and isinstance(cls, type)
}
_KNOWN: dict[Any, Callable[..., Optimizer]] = dict(OF_TORCH)  # and those registered
# Arguments that select torch's implementation of a step and do not change its result.
_HOW = {"foreach", "fused", "capturable", "differentiable"}


def as_functional_optim(optim_cls: Any, *args: Any, **kwargs: Any) -> Optimizer:
    """The functional counterpart of an optimizer class.

    Args:
        optim_cls: A class of torch.optim, or a key given to `register_functional_optim`.
        args, kwargs: The arguments of the class after its parameters. foreach, fused, capturable and differentiable are
            ignored.

    Returns:
        An `Optimizer`.

    Raises:
        ValueError: no counterpart of `optim_cls` is known; the message says how to add one.
        TypeError, ValueError: arguments that the counterpart does not take.

    Same as: torch's function of this name.

    >>> as_functional_optim(torch.optim.SGD, 0.1, momentum=0.9, foreach=True)
    sgd(lr=0.1, momentum=0.9)
    """
    make = _KNOWN.get(optim_cls)
    if make is None:
        known = ", ".join(getattr(key, "__name__", repr(key)) for key in _KNOWN)
        remedy = "add one with register_functional_optim(key, factory)"
        raise ValueError(f"{optim_cls!r} has no functional counterpart; there are those of {known}; {remedy}")
    if inspect.isclass(optim_cls):
        bound = inspect.signature(optim_cls).bind(None, *args, **kwargs).arguments
        given = {name: value for name, value in list(bound.items())[1:] if name not in _HOW}
        if make is adam and given.pop("decoupled_weight_decay", False):
            make = adamw
        return make(**given)
    return make(*args, **kwargs)


def register_functional_optim(key: Any, factory: Callable[..., Optimizer]) -> None:
    """Registers the counterpart of a class, or of any other key, for `as_functional_optim`.

    Args:
        key: The class, or a name. `factory` takes the arguments of the class after its parameters by name.
        factory: Makes the `Optimizer`.

    Raises:
        ValueError: `key` has a counterpart already, which torch's function of this name keeps silently.

    Same as: torch's function of this name.

    >>> from fjoin import transforms as tx
    >>> tx.register_functional_optim("slow sgd", lambda: tx.sgd(1e-6))
    >>> tx.as_functional_optim("slow sgd")
    sgd(lr=1e-06)
    """
    if key in _KNOWN:
        raise ValueError(f"{key!r} has a functional counterpart already, {_KNOWN[key]!r}; choose another key")
    if not callable(factory):
        raise TypeError(f"factory must be a function that makes an Optimizer, got {factory!r}")
    _KNOWN[key] = factory
