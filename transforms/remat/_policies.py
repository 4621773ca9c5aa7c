"""Which values a rematerialised function keeps, by JAX's names."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from .._check import text


class Keep(enum.Enum):
    """What happens to a value between the forward and the backward pass."""

    RECOMPUTE = "recompute"
    SAVE = "save"


# From an operation of ATen and its arguments to whether to keep its result: a `Keep`, or a bool for SAVE and RECOMPUTE.
Policy: TypeAlias = Callable[..., "Keep | bool"]

_aten = torch.ops.aten
_NO_BATCH = {_aten.mm, _aten.addmm, _aten.mv, _aten.addmv, _aten.dot, _aten.vdot, _aten._int_mm, _aten._scaled_mm}
_DOTS = _NO_BATCH | {
    _aten.bmm,
    _aten.baddbmm,
    _aten.convolution,
    _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_efficient_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu,
    _aten._scaled_dot_product_cudnn_attention,
}


class Named:
    """A policy by the names that `checkpoint_name` gives, and one for operations."""

    def __init__(
        self, words: str, of_name: Callable[[str], Keep], of_op: Policy = lambda op, *args, **kwargs: False
    ) -> None:
        self._words, self.of_name, self._of_op = words, of_name, of_op

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> Keep | bool:
        return self._of_op(op, *args, **kwargs)

    def __repr__(self) -> str:
        return self._words


def everything_saveable(op: Any, *args: Any, **kwargs: Any) -> bool:
    """Keep all values, as without `remat`.

    >>> from fjoin import transforms as tx
    >>> w = torch.ones(2, 2)
    >>> torch.func.grad(lambda w: tx.remat(torch.tanh, tx.everything_saveable)(w @ w).sum())(w)
    tensor([[0.2826, 0.2826],
            [0.2826, 0.2826]])
    """
    return True


def nothing_saveable(op: Any, *args: Any, **kwargs: Any) -> bool:
    """Keep nothing but the arguments.

    >>> from fjoin import transforms as tx
    >>> w = torch.ones(2, 2)
    >>> torch.func.grad(lambda w: tx.remat(torch.tanh, tx.nothing_saveable)(w @ w).sum())(w)
    tensor([[0.2826, 0.2826],
            [0.2826, 0.2826]])
    """
    return False


def dots_saveable(op: Any, *args: Any, **kwargs: Any) -> bool:
    """Keep the results of products of matrices, convolutions and attention.

    >>> from fjoin import transforms as tx
    >>> w = torch.ones(2, 2)
    >>> torch.func.grad(lambda w: tx.remat(torch.tanh, tx.dots_saveable)(w @ w).sum())(w)
    tensor([[0.2826, 0.2826],
            [0.2826, 0.2826]])
    """
    return op.overloadpacket in _DOTS


def dots_with_no_batch_dims_saveable(op: Any, *args: Any, **kwargs: Any) -> bool:
    """Keep the results of products of matrices without batch dimensions, such as those of linear layers.

    >>> from fjoin import transforms as tx
    >>> w = torch.ones(2, 2)
    >>> torch.func.grad(lambda w: tx.remat(torch.tanh, tx.dots_with_no_batch_dims_saveable)(w @ w).sum())(w)
    tensor([[0.2826, 0.2826],
            [0.2826, 0.2826]])
    """
    return op.overloadpacket in _NO_BATCH


def save_only_these_names(*names: str) -> Named:
    """Keep the values that `checkpoint_name` has given one of these names.

    >>> from fjoin import transforms as tx
    >>> tx.save_only_these_names("a", "b")
    save_only_these_names('a', 'b')
    """
    chosen = _names("save_only_these_names", names)
    return Named(_call("save_only_these_names", names), lambda name: Keep.SAVE if name in chosen else Keep.RECOMPUTE)


def save_any_names_but_these(*names: str) -> Named:
    """Keep the values that `checkpoint_name` has given another name.

    >>> from fjoin import transforms as tx
    >>> tx.save_any_names_but_these("a")
    save_any_names_but_these('a')
    """
    left = _names("save_any_names_but_these", names)
    return Named(_call("save_any_names_but_these", names), lambda name: Keep.RECOMPUTE if name in left else Keep.SAVE)


def save_from_both_policies(a: Policy, b: Policy) -> Named:
    """Keep the values that one of two policies keeps.

    >>> from fjoin import transforms as tx
    >>> tx.save_from_both_policies(tx.save_only_these_names("a"), tx.save_only_these_names("b"))
    save_from_both_policies(save_only_these_names('a'), save_only_these_names('b'))
    """

    def of_name(name: str) -> Keep:
        found = [keep_of_name(policy, name) for policy in (a, b)]
        return next((keep for keep in found if keep is not Keep.RECOMPUTE), Keep.RECOMPUTE)

    def of_op(op: Any, *args: Any, **kwargs: Any) -> Keep:
        found = [keep_of(policy, op, *args, **kwargs) for policy in (a, b)]
        return next((keep for keep in found if keep is not Keep.RECOMPUTE), Keep.RECOMPUTE)

    return Named(f"save_from_both_policies({a!r}, {b!r})", of_name, of_op)


def keep_of(policy: Policy, op: Any, *args: Any, **kwargs: Any) -> Keep:
    """The policy's choice for an operation.

    Raises:
        TypeError: it is neither a bool nor a `Keep`.
    """
    found = policy(op, *args, **kwargs)
    if isinstance(found, Keep):
        return found
    if isinstance(found, bool):
        return Keep.SAVE if found else Keep.RECOMPUTE
    raise TypeError(f"a policy must return a bool or a Keep, got {found!r} for {op}")


def keep_of_name(policy: Policy, name: str) -> Keep:
    """The policy's choice for a name."""
    return policy.of_name(name) if isinstance(policy, Named) else Keep.RECOMPUTE


def _call(name: str, names: tuple[str, ...]) -> str:
    return f"{name}({', '.join(map(repr, names))})"


def _names(where: str, names: tuple[str, ...]) -> set[str]:
    for name in names:
        text(where, name)
    return set(names)
