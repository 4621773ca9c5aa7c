"""Where values wait for the backward pass, other than in the memory of their device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from ...codecs._codec import Codec
from ...codecs._rows import encode_rows
from ._pinned import HOST
from ._store import Abstract, Handle, Store, is_abstract

Offload: TypeAlias = "str | Codec"  # "cpu": pinned memory of the host; a codec: bytes in its form


def store_for(offload: Offload) -> Store:
    """The store for an argument of `remat`.

    Raises:
        TypeError: neither "cpu" nor a codec.
        ValueError: a stochastic codec.
    """
    if isinstance(offload, Codec):
        if offload.stochastic:
            raise ValueError(
                f"remat: offload must be a codec that rounds to the nearest, such as tx.int8(), got {offload!r}"
            )
        return Coded(offload)
    if isinstance(offload, str) and offload == "cpu":
        return HOST
    raise TypeError(f"remat: offload must be 'cpu' or a codec such as tx.int8(), got {offload!r}")


class _Codes(Handle):
    def __init__(self, x: Tensor, codec: Codec, codes: Tensor) -> None:
        self._like, self._device, self._codec, self._codes = torch.empty_like(x, device="meta"), x.device, codec, codes
        self.where, self.held = codec.spec.name, codes.nbytes

    def get(self) -> Tensor:
        like = self._like
        found = self._codec.decode(self._codes, like.numel()).to(like.dtype).view(like.shape)
        return torch.empty_like(like, device=self._device).copy_(found)


class Coded:
    """The codes of a codec, in the memory of the device."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def put(self, values: Sequence[Tensor]) -> list[Tensor | Handle]:
        with torch._C.DisableTorchFunction():  # a region around this one does not take it for a part of its function
            return [self._put(x) if x.is_floating_point() and x.numel() else x for x in values]

    def _put(self, x: Tensor) -> Handle:
        codec, n = self._codec, x.numel()
        if is_abstract(x):
            return Abstract(x, codec.spec.name, codec.width(n))
        rows = x.detach().to(torch.float32).reshape(1, n)
        return _Codes(x, codec, encode_rows(codec, rows, 0))
