"""The encoded messages of one collective call to the ranks of a group, and the checks before they are sent."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..transforms._sums import sum_in_order
from ..transforms.codecs._codec import Codec
from ..transforms.codecs._rows import decode_pieces, encode_pieces, encode_rows


class Peers:
    """The ranks of one call, which exchange encoded rows of floats."""

    def __init__(self, name: str, codec: Codec, group: Any, ranks: int, me: int) -> None:
        self.name, self.codec, self.group, self.ranks, self.me = name, codec, group, ranks, me

    def exchange(self, pieces: Iterable[Tensor], sizes: list[int]) -> Tensor:
        """Send piece r to rank r, and receive `sizes[r]` floats from each rank; returns them one after the other."""
        rows = [self._flat(piece) for piece in pieces]
        if self.ranks == 1:
            return rows[0]
        if len({len(row) for row in rows}) == 1:
            codes = encode_rows(self.codec, torch.stack(rows), self.me).flatten()
        else:
            codes = encode_pieces(self.codec, rows, self.me)
        given, taken = ([self.codec.width(n) for n in counts] for counts in (map(len, rows), sizes))
        received = codes.new_empty(sum(taken))
        dist.all_to_all_single(received, codes, taken, given, group=self.group)
        return decode_pieces(self.codec, received, sizes)

    def gather(self, x: Tensor, sizes: list[int]) -> Tensor:
        """Send a tensor to all ranks, and receive `sizes[r]` floats from each; all ranks know all sizes."""
        row = self._flat(x)
        if self.ranks == 1:
            return row
        widths = [self.codec.width(n) for n in sizes]
        codes = encode_rows(self.codec, row.unsqueeze(0), self.me, self.ranks)[0]
        codes = torch.nn.functional.pad(codes, (0, max(widths) - len(codes)))  # rows of one width
        received = list(codes.new_empty(self.ranks, len(codes)).unbind(0))
        dist.all_gather(received, codes, group=self.group)
        rows = [row[:width] for row, width in zip(received, widths, strict=True)]
        return decode_pieces(self.codec, torch.cat(rows), sizes)

    def _flat(self, x: Tensor) -> Tensor:
        """`x` flat, as float32; on one rank, where nothing is encoded, float64 keeps its bits."""
        keeps = self.ranks == 1 and x.dtype is torch.float64
        return x.detach().reshape(-1).to(x.dtype if keeps else torch.float32)

    def reduced(self, op: Any, rows: Tensor) -> Tensor:
        """The sum or the mean of the ranks' rows, which are equally long."""
        total = sum_in_order(rows.view(self.ranks, -1).unbind(0))
        return total / self.ranks if op == dist.ReduceOp.AVG else total

    def check(self, what: str, x: Any, filled: bool = False) -> Tensor:
        if not isinstance(x, Tensor):
            raise TypeError(f"{self.name}: {what} is {x!r}, a {type(x).__name__}; expected a tensor")
        if not x.is_floating_point() or x.layout is not torch.strided:
            raise TypeError(
                f"{self.name}: {what} has dtype {x.dtype} and layout {x.layout}; only dense floating-point tensors are encoded, "
                f"send others with dist.{self.name} itself"
            )
        if filled and any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True)):
            raise ValueError(f"{self.name}: {what} is an expanded view, which cannot be filled; pass its .clone()")
        return x

    def check_list(self, what: str, xs: Any, filled: bool = False) -> list[Tensor]:
        if not isinstance(xs, (list, tuple)):
            raise TypeError(
                f"{self.name}: {what} is a {type(xs).__name__}; expected a list of tensors, one for each rank"
            )
        if len(xs) != self.ranks:
            raise ValueError(f"{self.name}: {what} has {len(xs)} tensors, but the group has {self.ranks} ranks")
        return [self.check(f"{what}[{i}]", x, filled) for i, x in enumerate(xs)]

    def check_own(self, out: str, to: Tensor, given: str, x: Tensor) -> None:
        """Check that the tensor a rank sends to itself fits; it does not know the other ranks' tensors."""
        if to.shape != x.shape:
            raise ValueError(
                f"{self.name}: {out} has shape {tuple(to.shape)}, but {given}, which goes there, has shape {tuple(x.shape)}"
            )

    def check_op(self, op: Any) -> None:
        if not (op == dist.ReduceOp.SUM or op == dist.ReduceOp.AVG):  # in this order: op may be a ReduceOp or its kind
            raise ValueError(f"{self.name}: op must be ReduceOp.SUM or AVG, got {op!r}")

    def check_splits(self, what: str, splits: Any, of: str, x: Tensor) -> list[int]:
        """The number of floats of each rank in a tensor that is divided along its first dimension."""
        shape = x.shape if x.dim() or self.ranks > 1 else (1,)
        if not shape:
            raise ValueError(f"{self.name}: {of} has no dimension to divide among {self.ranks} ranks; it is 0-d")
        if splits is None or (isinstance(splits, Sequence) and not splits):
            if shape[0] % self.ranks:
                raise ValueError(
                    f"{self.name}: {of} has shape {tuple(shape)}; its first dimension does not divide among {self.ranks} ranks, "
                    f"pass {what}"
                )
            splits = [shape[0] // self.ranks] * self.ranks
        try:
            rows = [operator.index(n) for n in splits]
        except TypeError:
            raise TypeError(f"{self.name}: {what} is {splits!r}; expected whole numbers, one for each rank") from None
        if len(rows) != self.ranks or min(rows) < 0 or sum(rows) != shape[0]:
            raise ValueError(
                f"{self.name}: {what} is {rows}; it must have a size for each of {self.ranks} ranks, with the sum {shape[0]}, "
                f"the first dimension of {of}, which has shape {tuple(shape)}"
            )
        return [n * math.prod(shape[1:]) for n in rows]
