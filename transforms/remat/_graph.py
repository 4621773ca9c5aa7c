"""What is known of a graph of autograd."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def is_known(results: Iterable[Tensor]) -> bool:
    """Whether all that the graph of these results keeps is told to saved-tensor hooks.

    A torch.autograd.Function may keep more, as attributes of its context; those of this package do not.
    """
    seen: set[Any] = set()
    todo: list[Any] = [x.grad_fn for x in results]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        function = getattr(type(node), "_forward_cls", None)
        own = function is not None and function.__module__.startswith(__name__.rpartition(".")[0])
        if not own and (function is not None or "CppNode" in type(node).__name__):
            return False
        todo += [next_node for next_node, _ in node.next_functions]
    return True
