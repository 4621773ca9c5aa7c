"""Errors of functions that cannot run again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import optree
import torch


class Saved(NamedTuple):
    """The form of a tensor that a graph saves."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


def refuse_iterators(args: Any, kwargs: Any) -> None:
    """Raise TypeError where an argument is an iterator."""
    given: Any = (args, kwargs)
    leaves, form = optree.tree_flatten(given, none_is_leaf=True)
    for leaf, path in zip(leaves, optree.treespec_paths(form), strict=True):
        if isinstance(leaf, Iterator):
            raise TypeError(
                f"remat: argument {path_words(path)} is an iterator, of which nothing is left when the function runs again; pass a list"
            )


def written_into(path: str) -> ValueError:
    """The error of a write into an argument."""
    return ValueError(
        f"a function in remat has written into its argument {path}, and would do so again in the backward pass; write into a "
        f"copy, and return it"
    )


def path_words(path: tuple[Any, ...]) -> str:
    """A path in (args, kwargs)."""
    _, first, *rest = path
    return repr(first) + "".join(f"[{part!r}]" for part in rest)


def differs(got: str, expected: list[Saved]) -> RuntimeError:
    """The error of a later run whose graph saves something else."""
    want = f"a tensor of shape {tuple(expected[0].shape)} and {expected[0].dtype}" if expected else "nothing more"
    return RuntimeError(
        f"a function in remat did not do the same in the backward pass: its graph saves {got}, before {want}; it must depend on its "
        f"arguments only"
    )
