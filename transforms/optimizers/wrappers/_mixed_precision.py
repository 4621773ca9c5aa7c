"""Mixed precision: low-precision parameters with a high-precision master copy."""

from __future__ import annotations

from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from ...spec._spec import factory
from ...step_param._lists import step_in_place
from ...step_param._optimizer import Optimizer
from ...step_param._wrap import around, each_part
from ...tree._tree import State, Tree


class MixedState(NamedTuple):
    inner: Any  # the other optimizer's state, in the master's dtype
    master: Tensor | None  # like the parameter, in higher precision; None where the parameter has that precision

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

    def step_params_(
        params: list[Tensor], grads: list[Tensor], states: list[MixedState], **guards: Tensor | None
    ) -> None:
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

    leaves, structure = optree.tree_flatten(params)
    new: list[tuple[Tensor, Any]] = []
    given: list[Any] = structure.flatten_up_to(masters)
    for master, param, s in zip(given, leaves, structure.flatten_up_to(state), strict=True):
        new.append((master, s) if master_of(s) is None else (master.to(param.dtype), with_master(s, master)))
    return structure.unflatten([param for param, _ in new]), structure.unflatten([s for _, s in new])
