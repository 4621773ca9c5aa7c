"""A call as a function of the tensors in its arguments, into which it may not write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optree
from torch import Tensor

from ._reached import reached
from ._rerun import Rerun, version_of


class FlatCall:
    """A call of a function.

    Args:
        fn: The function.
        args, kwargs: Its arguments.

    Attributes:
        tensors: Those in the arguments, until the first run has ended.
        found: What the function reaches.
    """

    def __init__(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
        given: Any = (args, kwargs)
        leaves, self._form = optree.tree_flatten(given, none_is_leaf=True)
        self.fn, self._places = fn, [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.tensors: list[Tensor] = [leaves[i] for i in self._places]
        self._others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.found = reached(fn, *self._others)

    def run(self, tensors: Sequence[Tensor]) -> Any:
        """Call the function with these tensors in its arguments; more are left out."""
        leaves = list(self._others)
        for i, x in zip(self._places, tensors, strict=False):
            leaves[i] = x
        given: Any = optree.tree_unflatten(self._form, leaves)
        return self.fn(*given[0], **given[1])

    def refuse_writes(self, tensors: Sequence[Tensor], versions: Sequence[int], rerun: Rerun) -> None:
        """Raise ValueError if the first run has written into tensors, of which the first are those in the arguments."""
        for i, (x, before) in enumerate(zip(tensors, versions, strict=True)):
            if version_of(x) != before and (i < len(self._places) or not rerun.holds(x)):
                what = f"a tensor of shape {tuple(x.shape)} that no module holds"
                if i < len(self._places):
                    what = f"its argument {path_words(self.paths()[i])}"
                again = "and would do so again in the backward pass"
                remedy = "write into a copy and return it, or into a buffer of a module"
                raise ValueError(f"a function in remat has written into {what}, {again}; {remedy}")

    def paths(self) -> list[tuple[Any, ...]]:
        """Of the tensors in the arguments: their paths in (args, kwargs)."""
        paths = optree.treespec_paths(self._form)
        return [paths[i] for i in self._places]


def path_words(path: tuple[Any, ...]) -> str:
    """A path in (args, kwargs)."""
    _, first, *rest = path
    return repr(first) + "".join(f"[{part!r}]" for part in rest)
