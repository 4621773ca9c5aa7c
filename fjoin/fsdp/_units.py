"""The parts of a module under fully_shard."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from .._functional import inner_names


def units_of(model: nn.Module) -> dict[str, Any]:
    """Path -> module for which fully_shard was called."""
    from torch.distributed.fsdp import FSDPModule  # it takes long to import

    return {path: part for path, part in model.named_modules() if isinstance(part, FSDPModule)}


def paths_in(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Name of a parameter or buffer -> its path without what wrappers, of checkpoints too, put into it."""
    return inner_names(model, names, "_checkpoint_wrapped_module")
