"""A module as a pure function of its parameters and buffers."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


class Apply:
    """The forward pass of a module as a pure function; made by `functional`.

    `apply(params, buffers, *args, **kwargs)` returns what the module returns and leaves `buffers` as
    they are; `apply.with_buffers(...)` returns `(out, buffers)` with those that the module updated,
    such as running statistics. What is missing in either dict has the value it had when `functional`
    was called.
    """

    def __init__(self, module: nn.Module, updated: frozenset[str]) -> None:
        self._module, self._updated = module, updated

    def __call__(self, params: dict[str, Tensor], buffers: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        return self.with_buffers(params, buffers, *args, **kwargs)[0]

    def with_buffers(
        self, params: dict[str, Tensor], buffers: dict[str, Tensor], *args: Any, **kwargs: Any
    ) -> tuple[Any, dict[str, Tensor]]:
        """The forward pass and the buffers after it, as `(out, buffers)`."""
        # The module writes into its buffers in place: let it write into copies.
        own = {path: b.clone() if path in self._updated else b for path, b in {**self._defaults(), **buffers}.items()}
        out = torch.func.functional_call(self._module, {**own, **params}, args, kwargs, strict=False)
        return out, {path: b for path, b in own.items() if path in buffers}

    def _defaults(self) -> dict[str, Tensor]:
        return {path: b for path, b in self._module.named_buffers() if path in self._updated}


def functional(module: nn.Module) -> tuple[Apply, dict[str, Tensor], dict[str, Tensor]]:
    """A module as `(apply, params, buffers)`.

    Args:
        module: Any module; it is copied, so that training does not change it.

    Returns:
        apply: An `Apply`, called as `apply(params, buffers, *args, **kwargs)`.
        params: Path -> tensor, what is trained: the parameters that require a gradient, detached, in
            the order of registration. A shared parameter stands once, under its first path.
        buffers: Path -> tensor, what is not trained: the module's buffers and its frozen parameters.

    Raises:
        TypeError: `module` is no nn.Module.

    Same as: torch.func.functional_call over the module's own tensors.

    >>> apply, params, buffers = fjoin.functional(torch.nn.Linear(2, 1))
    >>> list(params), buffers
    (['weight', 'bias'], {})
    >>> apply(params, buffers, torch.ones(3, 2)).shape
    torch.Size([3, 1])
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"functional takes an nn.Module, got {module!r}")
    module = copy.deepcopy(module)
    params = {path: p.detach().clone() for path, p in module.named_parameters() if p.requires_grad}
    frozen = {path: p.detach().clone() for path, p in module.named_parameters() if not p.requires_grad}
    updated = {path: b.detach().clone() for path, b in module.named_buffers()}
    return Apply(module, frozenset(updated)), params, {**frozen, **updated}
