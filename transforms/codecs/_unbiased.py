"""A codec that is always stochastic: its decoded values are unbiased."""

from __future__ import annotations

import torch
from torch import Tensor

from .._check import whole_number
from ..spec._spec import factory
from ..transform._weights import nonzero_or_one
from ._codec import Codec
from ._scaled import check_block, largest_of, whole


@factory
def qsgd(levels: int = 7, block: int = 64) -> Codec:
    """Whole multiples of a block's norm / levels, with stochastic rounding: unbiased.

    Bytes per element: 1 / 5, 1 / 3, 1/2 or 1 for up to 1, 2, 7 or 127 levels, and 4 / block.

    Args:
        levels: Steps from 0 to the norm, 1 to 127.
        block: Elements that share a norm, at least 1: the error grows with its square root.

    Returns:
        A `Codec`.

    Raises:
        ValueError: `block` or `levels` is no whole number, or out of range.

    Source: Alistarh et al., QSGD, arXiv:1610.02132, section 3.1, with codes of equal length.

    >>> codec = qsgd(levels=5, block=2)
    >>> codec.width(6)
    15
    >>> from fjoin import transforms as tx
    >>> hook = tx.quantized_mean("data", codec, seed=1)
    >>> tx.simulate(lambda g: hook.update(g, hook.init(g))[0], {"data": 2}, 2 * [torch.tensor([3.0, -4.0])])[0]
    tensor([ 3., -4.])
    """
    check_block(block)
    whole_number("levels", levels, 1, 127)

    # Squares could overflow and underflow where the values themselves do not.
    def norm(cut: Tensor) -> Tensor:
        most = largest_of(cut)
        return torch.linalg.vector_norm(cut / nonzero_or_one(most).unsqueeze(2), dim=2) * most

    return whole(block, levels, True, measure=norm)
