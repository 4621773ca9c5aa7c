"""Checks of trees and of their leaves."""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch import Tensor, nn

from ._tree import Tree, named_leaves

# What to write where a module was given in the place of its parameters.
OF_MODULE = "; write apply, params, buffers = fjoin.functional(module), call apply(params, buffers, x) in loss_fn, and pass params"


def check_same(name: str, tree: Tree, like_name: str, like: Tree) -> None:
    """Raise unless `tree` has the structure, shapes and dtypes of `like`.

    Raises:
        ValueError: another structure, shape or device, with the path.
        TypeError: another dtype, or a leaf that is no dense real floating-point tensor.
    """
    if _alike(tree, like):
        return
    have, want = named_leaves(tree), named_leaves(like)
    if have.keys() != want.keys():
        missing, extra = sorted(want.keys() - have.keys()), sorted(have.keys() - want.keys())
        raise ValueError(
            f"{name} and {like_name} differ in structure: {name} lacks {missing} and has the additional {extra}; "
            f"pass {name} with the structure of {like_name}"
        )
    for path, leaf in have.items():
        check_dense(f"{name}[{path!r}]", leaf)
        other = want[path]
        check_dense(f"{like_name}[{path!r}]", other)
        if leaf.shape != other.shape:
            raise ValueError(
                f"{name}[{path!r}] has shape {tuple(leaf.shape)}, but {like_name}[{path!r}] has shape {tuple(other.shape)}"
            )
        if leaf.dtype != other.dtype:
            raise TypeError(
                f"{name}[{path!r}] has dtype {leaf.dtype}, but {like_name}[{path!r}] has dtype {other.dtype}; "
                f"convert one of them with .to(dtype)"
            )
        if leaf.device != other.device:
            raise ValueError(
                f"{name}[{path!r}] lies on {leaf.device}, but {like_name}[{path!r}] on {other.device}; move one with .to(device)"
            )


def _alike(a: Tree, b: Tree) -> bool:
    """Whether the trees surely pass `check_same`, found without their paths."""
    (leaves, structure), (others, other) = optree.tree_flatten(a), optree.tree_flatten(b)
    return structure == other and all(
        [
            isinstance(x, Tensor)
            and isinstance(y, Tensor)
            and x.dtype is y.dtype
            and x.is_floating_point()
            and x.shape == y.shape
            and x.device == y.device
            and x.layout is torch.strided
            for x, y in zip(leaves, others, strict=True)
        ]
    )


def check_dense(name: str, leaf: Any) -> None:
    """Raise TypeError unless `leaf` is a strided, real, floating-point tensor."""
    if not isinstance(leaf, Tensor):
        shown = f"a {type(leaf).__name__}" if isinstance(leaf, nn.Module) else f"{leaf!r}, a {type(leaf).__name__}"
        hint = "; torch.from_dlpack(array) makes one of it" if hasattr(leaf, "__dlpack__") else ""
        hint = OF_MODULE if isinstance(leaf, nn.Module) else hint
        raise TypeError(f"{name} is {shown}; expected a tensor{hint}")
    if leaf.layout is not torch.strided:
        raise TypeError(
            f"{name} has layout {leaf.layout}; sparse gradients are not supported, use a dense one "
            f"(for nn.Embedding: sparse=False, or grad.to_dense())"
        )
    if leaf.is_complex():
        raise TypeError(f"{name} has complex dtype {leaf.dtype}; pass torch.view_as_real(tensor) instead")
    if not leaf.is_floating_point():
        raise TypeError(f"{name} has dtype {leaf.dtype}; only floating-point tensors can be trained")
