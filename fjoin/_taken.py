"""Losses that read a module's own parameters, which no step trains, beside those of its pure function."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

# Parameter -> path, of the modules that `functional` has taken.
TAKEN: Any = WeakIdKeyDictionary()


def warn_of_module_params(loss: Tensor, stacklevel: int) -> None:
    """Warn if a loss depends on the parameters of a module itself, and not only on those given to its `Apply`."""
    seen, waiting = set[Any](), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting.extend(before for before, _ in node.next_functions)
        leaf = getattr(node, "variable", None)
        if leaf is not None and (path := TAKEN.get(leaf)) is not None:
            warnings.warn(
                f"the loss reads the parameter {path!r} of the module itself, which keeps its value: functional has made a function of "
                f"it, whose parameters are those given to apply. Read params[{path!r}] instead",
                stacklevel=stacklevel,
            )
            return
