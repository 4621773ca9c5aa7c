"""Names for values, by which a policy can keep them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._check import text
from ._kept import note_name


def checkpoint_name(x: Tensor, name: str) -> Tensor:
    """The same value, with a name by which a policy of `remat` can keep it.

    What is kept is the result of the operation that made the value, which then does not run again. In torch.compile names
    have no effect.

    Args:
        x: Any tensor.
        name: Its name; several values may have one name.

    Returns:
        The value, not to be written into.

    >>> from fjoin import transforms as tx
    >>> def f(x):
    ...     return torch.sin(tx.checkpoint_name(x * 2, "h"))
    >>> torch.func.grad(tx.remat(f, tx.save_only_these_names("h")))(torch.tensor(0.0))
    tensor(2.)
    """
    if torch.compiler.is_compiling():
        return x
    text("checkpoint_name", name)
    if not isinstance(x, Tensor):
        raise TypeError(f"checkpoint_name takes a tensor, got a {type(x).__name__}")
    return _Name.apply(x, name)  # type: ignore[no-untyped-call,no-any-return]


class _Name(torch.autograd.Function):
    """The identity; below all transforms it tells the record of the running region."""

    @staticmethod
    def forward(x: Tensor, name: str) -> Tensor:
        note_name(x, name)
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        del ctx, inputs, output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: Any) -> Tensor:
        return tangent.view_as(tangent)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, name: str) -> tuple[Tensor, Any]:
        return _Name.apply(x, name), in_dims[0]  # type: ignore[no-untyped-call]
