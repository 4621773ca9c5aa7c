"""What an operation of ATen reads, writes into and draws."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def tensors_in(args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The tensors in the arguments of an operation of ATen, which are flat but for lists."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (x for x in value if isinstance(x, Tensor))


def written_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operation writes into."""
    found: list[Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += tensors_in((value,), {})
    return found


def draws(op: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation draws random numbers: it always runs again, so that later ones draw theirs."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    for i, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":  # attention draws only with dropout
            return bool(args[i] if i < len(args) else kwargs.get("dropout_p", argument.default_value))
    return True
