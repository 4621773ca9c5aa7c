"""Calling the user's functions, and checking what they return."""

from __future__ import annotations

import inspect
import numbers
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from optree import tree_leaves
from torch import Tensor

from ..records import host_number
from ..transforms.base import checks, shares

LossParts: TypeAlias = tuple[Tensor, Any, dict[str, Tensor] | None]  # the loss, aux, and the buffers after the pass


class Loss:
    """`loss_fn` and `weight` of a train_step."""

    def __init__(self, loss_fn: Callable[..., Any], weight: Callable[[Any], float] | None) -> None:
        self._loss_fn, self.weight = loss_fn, weight

    def check(self, buffers: bool) -> None:
        """Raise TypeError unless `loss_fn` takes the arguments that it is called with, `buffers` among them or not."""
        names = ("params", "buffers", "batch") if buffers else ("params", "batch")
        try:
            signature = inspect.signature(self._loss_fn)
        except (TypeError, ValueError):  # a function that is not written in Python
            return
        try:
            signature.bind(*names)
        except TypeError:
            needs = f"init {'with' if buffers else 'without'} buffers needs a loss_fn({', '.join(names)})"
            raise TypeError(f"{needs}, got one that takes {signature}") from None

    def __call__(self, params: Any, buffers: dict[str, Tensor] | None, batch: Any) -> LossParts:
        """The forward pass: `(loss, aux, buffers)`.

        Raises:
            TypeError, ValueError: `loss_fn` returned something other than a loss, aux and buffers of the expected form.
        """
        out = self._loss_fn(params, batch) if buffers is None else self._loss_fn(params, buffers, batch)
        parts = out if isinstance(out, tuple) else (out,)
        want = "loss or (loss, aux)" if buffers is None else "(loss, aux, buffers)"
        if (len(parts) not in (1, 2)) if buffers is None else (len(parts) != 3):
            raise TypeError(f"loss_fn must return {want}, got {len(parts)} values")
        loss, aux = parts[0], parts[1] if len(parts) > 1 else None
        if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
            got = f"a tensor of shape {tuple(loss.shape)}, {loss.dtype}" if isinstance(loss, Tensor) else repr(loss)
            raise ValueError(f"loss_fn must return a 0-d floating-point loss, the mean over the local batch, got {got}")
        if not loss.requires_grad:
            refuse_inference("a step")
            why = "was it detached, or computed from other tensors?"
            if not tree_leaves(params):
                why = "params holds no parameter: does any of the model's require gradients?"
            raise ValueError(f"the loss does not depend on params; {why}")
        if buffers is None:
            return loss, aux, None
        if not isinstance(parts[2], Mapping) or not all(isinstance(b, Tensor) for b in parts[2].values()):
            raise TypeError(f"loss_fn must return its buffers as a dict from paths to tensors, got {parts[2]!r}")
        if parts[2].keys() != buffers.keys():
            raise ValueError(f"loss_fn returned the buffers {sorted(parts[2])}, expected {sorted(buffers)}")
        for path, b in parts[2].items():
            if (b.shape, b.dtype) != (buffers[path].shape, buffers[path].dtype):
                raise ValueError(
                    f"loss_fn returned the buffer {path!r} as {b.dtype}{list(b.shape)}, expected "
                    f"{buffers[path].dtype}{list(buffers[path].shape)}; buffers keep their shape and dtype"
                )
        return loss, aux, {path: b.detach() for path, b in parts[2].items()}


def refuse_inference(name: str) -> None:
    """Raise ValueError under torch.inference_mode, whose tensors have no gradients."""
    if torch.is_inference_mode_enabled():
        raise ValueError(f"{name} cannot run under torch.inference_mode, which has no gradients; call it outside")


def weigh(weight: Callable[[Any], float] | None, batch: Any) -> float:
    """The weight of a batch; 1 if there is no weight function.

    Raises:
        ValueError: the weight is neither 0 nor from 1e-30 to 1e30.
        TypeError: the weight is no number.
    """
    if weight is len and isinstance(batch, (tuple, Mapping)):
        _warn_of_parts(batch)
    return 1.0 if weight is None else shares.host_weight("weight(batch)", weight(batch))


def _warn_of_parts(batch: Any) -> None:
    """Warn where `len` counts the parts of a batch, such as inputs and targets, in the place of its samples."""
    parts = list(batch.values() if isinstance(batch, Mapping) else batch)
    sizes = {len(part) if isinstance(part, Tensor) and part.dim() else None for part in parts}
    if len(sizes) == 1 and None not in sizes and sizes != {len(parts)}:
        warnings.warn(
            f"weight=len gives {len(parts)}, the number of parts of a {type(batch).__name__}, and not its {sizes.pop()} samples; write "
            f"weight=lambda batch: len(batch[...])",
            stacklevel=5,
        )


def user_sums(aux: Any) -> dict[str, Any]:
    """The numbers in aux["sum"], to be summed over all ranks: host numbers, or tensors on a device.

    Raises:
        TypeError, ValueError: one of them is no scalar.
    """
    if not isinstance(aux, dict) or "sum" not in aux:
        return {}
    sums: dict[str, Any] = {}
    if not isinstance(aux["sum"], Mapping):
        raise TypeError(f"aux['sum'] must be a mapping from names to numbers, got {aux['sum']!r}")
    for name, value in aux["sum"].items():
        if not isinstance(name, str):
            raise TypeError(f"aux['sum'] is keyed by names, got {name!r}")
        if isinstance(value, Tensor):
            if value.dim() or value.is_complex():
                raise ValueError(
                    f"aux['sum'][{name!r}] must be a real scalar, got a tensor of shape {tuple(value.shape)}, {value.dtype}"
                )
            sums[name] = host_number(value)
        elif isinstance(value, numbers.Real):
            sums[name] = checks.as_float(f"aux['sum'][{name!r}]", value)
        else:
            raise TypeError(f"aux['sum'][{name!r}] must be a number or a 0-d tensor, got {value!r}")
    return sums
