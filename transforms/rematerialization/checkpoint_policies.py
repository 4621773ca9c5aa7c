"""Policies of `remat`: which results to keep; they bear the names of jax.checkpoint_policies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch.utils.checkpoint import CheckpointPolicy

from ..base import checks

__all__ = [
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "everything_saveable",
    "nothing_saveable",
    "offload_dot_with_no_batch_dims",
    "save_and_offload_only_these_names",
    "save_any_names_but_these",
    "save_from_both_policies",
    "save_only_these_names",
]


# What becomes of a result, and other words of torch for it.
RECOMPUTE, SAVE = CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_SAVE
OFFLOAD = CheckpointPolicy.MUST_CPU_OFFLOAD
_SAME = {
    CheckpointPolicy.MUST_RECOMPUTE: RECOMPUTE,
    CheckpointPolicy.PREFER_SAVE: SAVE,
    CheckpointPolicy.PREFER_CPU_OFFLOAD: OFFLOAD,
}
# From an operation of ATen and its arguments to whether to keep its result: one of torch's words, or a bool. True is
# SAVE, or OFFLOAD where `remat` says where to.
Policy: TypeAlias = Callable[..., "CheckpointPolicy | bool"]


@dataclasses.dataclass(frozen=True)
class Named:
    """A policy by the names that `checkpoint_name` gives, and one for operations."""

    of_name: Callable[[str], CheckpointPolicy | bool]
    of_op: Policy = lambda op, *args, **kwargs: False
    offloads: bool = False

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy | bool:
        return self.of_op(op, *args, **kwargs)


def keep_of(policy: Policy, kept: CheckpointPolicy, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy's choice for an operation; `kept` is what True means.

    Raises:
        TypeError: it is neither a bool nor a `CheckpointPolicy`.
    """
    found = policy(op, *args, **kwargs)
    if isinstance(found, (CheckpointPolicy, bool)):
        return _meant(found, kept)
    raise TypeError(f"a policy must return a bool or a CheckpointPolicy, got {found!r} for {op}")


def keep_of_name(policy: Policy, kept: CheckpointPolicy, name: str) -> CheckpointPolicy:
    """The policy's choice for a name; `kept` is what True means."""
    return _meant(policy.of_name(name), kept) if isinstance(policy, Named) else RECOMPUTE


def _meant(found: CheckpointPolicy | bool, kept: CheckpointPolicy) -> CheckpointPolicy:
    if isinstance(found, bool):
        return kept if found else RECOMPUTE
    return _SAME.get(found, found)


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


def everything_saveable(op: Any, *args: Any, **kwargs: Any) -> bool:
    """Keep all values, as without `remat`.

    >>> from fjoin import transforms as tx
    >>> w = torch.ones(2, 2)
    >>> torch.func.grad(lambda w: tx.remat(torch.tanh, tx.checkpoint_policies.everything_saveable)(w @ w).sum())(w)
    tensor([[0.2826, 0.2826],
            [0.2826, 0.2826]])
    """
    return True


def nothing_saveable(op: Any, *args: Any, **kwargs: Any) -> bool:
    """Keep nothing but the arguments.

    >>> from fjoin import transforms as tx
    >>> w = torch.ones(2, 2)
    >>> torch.func.grad(lambda w: tx.remat(torch.tanh, tx.checkpoint_policies.nothing_saveable)(w @ w).sum())(w)
    tensor([[0.2826, 0.2826],
            [0.2826, 0.2826]])
    """
    return False


def dots_saveable(op: Any, *args: Any, **kwargs: Any) -> bool:
    """Keep the results of products of matrices, convolutions and attention.

    >>> from fjoin import transforms as tx
    >>> w = torch.ones(2, 2)
    >>> torch.func.grad(lambda w: tx.remat(torch.tanh, tx.checkpoint_policies.dots_saveable)(w @ w).sum())(w)
    tensor([[0.2826, 0.2826],
            [0.2826, 0.2826]])
    """
    return op.overloadpacket in _DOTS


def dots_with_no_batch_dims_saveable(op: Any, *args: Any, **kwargs: Any) -> bool:
    """Keep the results of products of matrices without batch dimensions, such as those of linear layers.

    >>> from fjoin import transforms as tx
    >>> w = torch.ones(2, 2)
    >>> torch.func.grad(lambda w: tx.remat(torch.tanh, tx.checkpoint_policies.dots_with_no_batch_dims_saveable)(w @ w).sum())(w)
    tensor([[0.2826, 0.2826],
            [0.2826, 0.2826]])
    """
    return op.overloadpacket in _NO_BATCH


def save_only_these_names(*names: str) -> Named:
    """Keep the values that `checkpoint_name` has given one of these names.

    >>> from fjoin import transforms as tx
    >>> remat = tx.remat(lambda x: tx.checkpoint_name(x.exp(), "e").sin(), tx.checkpoint_policies.save_only_these_names("e"))
    >>> torch.func.grad(remat)(torch.zeros(()))
    tensor(0.5403)
    """
    chosen = _names("save_only_these_names", names)
    return Named(lambda name: name in chosen)


def save_any_names_but_these(*names: str) -> Named:
    """Keep the values that `checkpoint_name` has given another name.

    >>> from fjoin import transforms as tx
    >>> remat = tx.remat(lambda x: tx.checkpoint_name(x.exp(), "e").sin(), tx.checkpoint_policies.save_any_names_but_these("a"))
    >>> torch.func.grad(remat)(torch.zeros(()))
    tensor(0.5403)
    """
    left = _names("save_any_names_but_these", names)
    return Named(lambda name: name not in left)


def save_from_both_policies(a: Policy, b: Policy) -> Named:
    """Keep the values that one of two policies keeps.

    >>> from fjoin import transforms as tx
    >>> policies = tx.checkpoint_policies
    >>> both = policies.save_from_both_policies(policies.save_only_these_names("a"), policies.dots_saveable)
    >>> torch.func.grad(tx.remat(torch.sin, both))(torch.zeros(()))
    tensor(1.)
    """

    def of_name(name: str) -> CheckpointPolicy | bool:
        return _first(policy.of_name(name) for policy in (a, b) if isinstance(policy, Named))

    def of_op(op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy | bool:
        return _first(policy(op, *args, **kwargs) for policy in (a, b))

    offloads = any(isinstance(policy, Named) and policy.offloads for policy in (a, b))
    return Named(of_name, of_op, offloads)


def save_and_offload_only_these_names(
    *,
    names_which_can_be_saved: Sequence[str],
    names_which_can_be_offloaded: Sequence[str],
    offload_src: str = "device",
    offload_dst: str = "pinned_host",
) -> Named:
    """Keep the values that `checkpoint_name` has given one of these names, some of them elsewhere.

    Args:
        names_which_can_be_saved: Names of values to keep on their device.
        names_which_can_be_offloaded: Names of values to keep where `remat(..., offload=)` says, by default in pinned
            memory.
        offload_src: "device".
        offload_dst: "pinned_host"; `remat(..., offload=)` overrides it.

    Raises:
        ValueError: a name that is in both; another source or destination.

    >>> from fjoin import transforms as tx
    >>> names = {"names_which_can_be_saved": ["a"], "names_which_can_be_offloaded": ["b"]}
    >>> torch.func.grad(tx.remat(torch.sin, tx.checkpoint_policies.save_and_offload_only_these_names(**names)))(torch.zeros(()))
    tensor(1.)
    """
    here = "save_and_offload_only_these_names"
    saved, away = _names(here, tuple(names_which_can_be_saved)), _names(here, tuple(names_which_can_be_offloaded))
    if saved & away:
        raise ValueError(f"{here}: {', '.join(sorted(saved & away))} cannot be both saved and offloaded")
    _check_ends(here, offload_src, offload_dst)
    return Named(lambda name: SAVE if name in saved else OFFLOAD if name in away else RECOMPUTE, offloads=True)


def offload_dot_with_no_batch_dims(offload_src: str = "device", offload_dst: str = "pinned_host") -> Named:
    """Keep the results of products of matrices without batch dimensions, elsewhere.

    Args:
        offload_src: "device".
        offload_dst: "pinned_host"; `remat(..., offload=)` overrides it.

    Raises:
        ValueError: another source or destination.

    >>> from fjoin import transforms as tx
    >>> torch.func.grad(tx.remat(torch.sin, tx.checkpoint_policies.offload_dot_with_no_batch_dims()))(torch.zeros(()))
    tensor(1.)
    """
    _check_ends("offload_dot_with_no_batch_dims", offload_src, offload_dst)

    def of_op(op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return OFFLOAD if op.overloadpacket in _NO_BATCH else RECOMPUTE

    return Named(lambda name: False, of_op, offloads=True)


def _first(found: Iterable[CheckpointPolicy | bool]) -> CheckpointPolicy | bool:
    return next((keep for keep in found if _meant(keep, SAVE) is not RECOMPUTE), False)


def _check_ends(where: str, src: str, dst: str) -> None:
    if (src, dst) != ("device", "pinned_host"):
        raise ValueError(f"{where} offloads from 'device' to 'pinned_host', got {src!r} and {dst!r}")


def _names(where: str, names: tuple[str, ...]) -> set[str]:
    for name in names:
        checks.text(where, name)
    return set(names)
