"""A broadcast from a rank that only that rank itself knows."""

from __future__ import annotations

import optree
import torch
from torch import Tensor

from .._check import AxisName
from ..tree._tree import Tree
from ._collectives import psum


def from_one(tree: Tree, is_source: Tensor, axis: AxisName) -> Tree:
    """The tree of the one rank whose `is_source`, 0-d bool, is set; zeros if there is none. It sends one message."""
    # The bytes of all other ranks are 0, so the sum of the bytes is exact, for -0.0 and NaN too.
    sent = optree.tree_map(lambda leaf: torch.where(is_source, _bytes(leaf), torch.zeros_like(_bytes(leaf))), tree)
    return optree.tree_map(lambda raw, leaf: raw.clone().view(leaf.dtype).reshape(leaf.shape), psum(sent, axis), tree)


def _bytes(leaf: Tensor) -> Tensor:
    return leaf.detach().contiguous().reshape(-1).view(torch.uint8)
