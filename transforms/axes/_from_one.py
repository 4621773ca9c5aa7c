"""One rank's tensors for all ranks, where only that rank knows which it is."""

from __future__ import annotations

import optree
import torch
from torch import Tensor

from .._axis_env import AxisName
from .._tree import Tree
from ._collectives import psum


def from_one(tree: Tree, is_source: Tensor, axis: AxisName) -> Tree:
    """The tree of the one rank whose `is_source`, 0-d bool, is set; zeros where it is on none. One message."""
    # Bytes, of which all but one rank's are 0: their sum is that rank's, -0.0 and NaN included.
    sent = optree.tree_map(lambda leaf: torch.where(is_source, _bytes(leaf), torch.zeros_like(_bytes(leaf))), tree)
    return optree.tree_map(lambda raw, leaf: raw.clone().view(leaf.dtype).reshape(leaf.shape), psum(sent, axis), tree)


def _bytes(leaf: Tensor) -> Tensor:
    return leaf.detach().contiguous().reshape(-1).view(torch.uint8)
