"""Copies of a module and its submodules for one call, and what the call has assigned to them."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

TENSORS = ("_parameters", "_buffers", "_modules")


class PartCopies:
    """Copies of all parts of a module, to be used by one call at a time.

    Attributes:
        modules: The copies; a module without tensors stands for itself.
        copied: The indices of those that are copies.
        slots: For each tensor its dict in a copy, its name there, and its path.
        originals: For each copy the attributes of its module: the present ones, and those that were copied.
        own: For each copy its attributes: the present ones, and those before a call.
        special: Index and name of an attribute that refers to the module's tensors or submodules -> the pair in `own`.
        counts: The number of references to each copy while no call uses it.
        objects: Copies of other objects that this call uses.
    """

    def __init__(self, modules: list[Any], copied: list[int]) -> None:
        self.modules, self.copied = modules, copied
        self.slots: list[tuple[dict[str, Any], str, str]] = []
        self.originals: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.own: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.special: dict[tuple[int, str], tuple[dict[str, Any], dict[str, Any]]] = {}
        self.counts: list[int] = []
        self.objects: list[Any] = []
        self.places: Any = None  # the attributes that were found when it was made

    def count(self) -> list[int]:
        """The number of references to each copy."""
        return [sys.getrefcount(self.modules[i]) for i in self.copied]

    def write_back(self) -> None:
        """Write the plain attributes that a call has assigned, such as kept losses, to the modules."""
        if not same(self.own):
            for i, (now, before), (original, copied) in zip(self.copied, self.own, self.originals, strict=True):
                for name, value in now.items():
                    kept = name in TENSORS or name == "training" or (i, name) in self.special
                    if kept or before.get(name, self) is value:
                        continue
                    before[name] = value
                    if not _is_wrapped(value):
                        original[name] = copied[name] = value
        for original, now, before, _ in self.objects:
            changed = {name: value for name, value in now.items() if before.get(name, self) is not value}
            original.update({name: value for name, value in changed.items() if not _is_wrapped(value)})

    def empty(self) -> None:
        """Let go of the tensors and of other objects."""
        self.objects = []
        for held, name, _ in self.slots:  # they would live until the next call
            held[name] = None
        for (_, name), (now, before) in self.special.items():
            now[name] = before[name] = None


def _is_wrapped(value: Any) -> bool:
    """Whether a value is of a transform of torch.func, at whose end it has no meaning."""
    return isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value)


def same(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> bool:
    """Whether the dicts of each pair have the same values; values that cannot be compared, such as tensors, are others."""
    try:
        return all([now == before for now, before in pairs])
    except Exception:
        return False
