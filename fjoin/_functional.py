"""A module as a pure function of its parameters and buffers."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn


class Apply:
    """The forward pass of a module as a pure function; made by `functional`.

    - `apply(params, buffers, *args, **kwargs)` returns the module's output and leaves `buffers` unchanged. The first
      call that discards an update of buffers warns.
    - `apply.with_buffers(...)` returns `(out, buffers)` with the buffers that the module updated, such as running
      statistics.
    - Entries missing in `buffers` have their values from the call of `functional`. `params` must be complete, since no
      second copy of them is kept.
    """

    def __init__(self, module: nn.Module, trained: frozenset[str]) -> None:
        self._module, self._trained = module, trained
        # Path -> the dicts that hold this tensor, several for a shared one. torch.func.functional_call also
        # writes into these dicts, but looks them up again in each call.
        self._places: dict[str, list[tuple[dict[str, Any], str]]] = {}
        self._own: list[tuple[dict[str, Any], str, Any]] = []
        self._updated: dict[str, Tensor] = {}
        self._warned = False
        first: dict[int, str] = {}
        for prefix, part in module.named_modules():
            for kind in (part._parameters, part._buffers):
                for name, tensor in kind.items():
                    if tensor is not None:
                        path = first.setdefault(id(tensor), f"{prefix}.{name}" if prefix else name)
                        self._places.setdefault(path, []).append((kind, name))
                        if path in trained:
                            kind[name] = tensor = nn.Parameter(torch.empty_like(tensor, device="meta"))
                        self._own.append((kind, name, tensor))
                        if kind is part._buffers:
                            self._updated[path] = tensor

    def __call__(self, params: dict[str, Tensor], buffers: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        """The forward pass.

        Warns:
            UserWarning: once, where the module updates buffers: the update is discarded.

        Raises:
            ValueError: a path that the module does not have.
        """
        return self._call(params, buffers, args, kwargs, keeps=False)[0]

    def with_buffers(
        self, params: dict[str, Tensor], buffers: dict[str, Tensor], *args: Any, **kwargs: Any
    ) -> tuple[Any, dict[str, Tensor]]:
        """The forward pass and the buffers after it, as `(out, buffers)`."""
        return self._call(params, buffers, args, kwargs, keeps=True)

    def _call(
        self,
        params: dict[str, Tensor],
        buffers: dict[str, Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        keeps: bool,
    ) -> tuple[Any, dict[str, Tensor]]:
        # The module writes into its buffers in place, so give it copies.
        new = {path: buffers.get(path, b).clone() for path, b in self._updated.items()} if self._updated else {}
        given = {**params, **buffers, **new}
        if torch.compiler.is_compiling():
            return torch.func.functional_call(self._module, given, args, kwargs), {p: given[p] for p in buffers}
        if not self._trained <= params.keys():
            raise ValueError(f"params lacks {sorted(self._trained - params.keys())}; pass all that functional returned")
        if not given.keys() <= self._places.keys():
            unknown = sorted(given.keys() - self._places.keys())
            raise ValueError(f"the module has no parameter or buffer {unknown}; it has {list(self._places)}")
        try:
            for path, tensor in given.items():
                for holder, name in self._places[path]:
                    holder[name] = tensor
            out = self._module(*args, **kwargs)
            if not keeps and not self._warned:
                self._warn_of_updates(new)
            return out, self._after(buffers)
        finally:
            for holder, name, tensor in self._own:
                holder[name] = tensor

    def _warn_of_updates(self, new: dict[str, Tensor]) -> None:
        """Warn if the module has updated one of the buffers `new` that it was given, in place or by assignment."""
        updated = []
        for path, tensor in new.items():
            holder, name = self._places[path][0]
            if holder[name] is not tensor or (not tensor.is_inference() and tensor._version):
                updated.append(path)
        if not updated:
            return
        self._warned = True
        warnings.warn(
            f"this forward pass has updated buffers of the module, {updated[0]!r} among them, which apply(params, buffers, ...) throws "
            f"away, so that the module in eval mode will use the old ones; keep them by out, buffers = "
            f"apply.with_buffers(params, buffers, ...), which train_step takes as step.init(params, buffers) and "
            f"loss_fn(params, buffers, batch) -> (loss, aux, buffers); where they are not wanted put the module into eval mode",
            stacklevel=4,
        )

    def _after(self, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
        """The buffers after the call, with the module's updates in place or by assignment."""
        out = {}
        for path in buffers:
            holder, name = self._places[path][0]
            out[path] = holder[name]
        return out


def functional(module: nn.Module) -> tuple[Apply, dict[str, Tensor], dict[str, Tensor]]:
    """A module as `(apply, params, buffers)`.

    Args:
        module: Any module; it is copied, so that training does not change it.

    Returns:
        apply: An `Apply`, called as `apply(params, buffers, *args, **kwargs)`.
        params: Path -> tensor, the trained values: the parameters that require a gradient, detached, in
            the order of registration. A shared parameter appears once, under its first path.
        buffers: Path -> tensor, the untrained values: the module's buffers and its frozen parameters.

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
    params = {path: p.detach() for path, p in module.named_parameters() if p.requires_grad}
    frozen = {path: p.detach() for path, p in module.named_parameters() if not p.requires_grad}
    buffers = {path: b.detach() for path, b in module.named_buffers()}
    return Apply(module, frozenset(params)), params, {**frozen, **buffers}
