"""Reductions of the backend "fjoin"."""

# mypy: disable-error-code="override,assignment"

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._channel import Fold, combine
from .._flat import cat_flat, check_dtypes, fill, flat_of, give_back
from ._calls import Calls, Values, nested, several
from ._work import SharedWork, Started

_FOLDS: dict[Any, Fold] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}

_BITWISE = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)


class Reductions(Calls):
    """all_reduce, reduce and reduce_scatter, in their several forms."""

    def allreduce(
        self, tensors: Values | Tensor, opts: Any = None, timeout: Any = None, *, op: Any = None
    ) -> SharedWork:
        tensors, op = several(tensors), _op(op or opts)
        return self._all([self._reduce_one(x, op) for x in tensors], tensors)

    def allreduce_coalesced(self, tensors: Values, opts: Any = None) -> SharedWork:
        op = _op(opts)
        if len(tensors) < 2 or len({x.dtype for x in tensors}) > 1:
            return self.allreduce(tensors, opts)
        flat = cat_flat(tensors)  # so that a tensor may stand in the list twice
        work, done = self._reduce_one(flat, op)

        def spread() -> None:
            done()
            for x, part in zip(tensors, flat.split([x.numel() for x in tensors]), strict=True):
                fill(x, part)

        return self._all([(work, spread)], tensors)

    def _reduce_one(self, x: Tensor, op: Any) -> Started:
        flat, fold = flat_of(x), _fold(op, x.dtype)

        def done() -> None:
            if op == dist.ReduceOp.AVG:
                flat.div_(self._ranks)
            give_back(flat, x)

        return self._channels[0].reduce_(f"all_reduce {op}", flat, fold), done

    def reduce(
        self,
        tensors: Values | Tensor,
        opts: Any = None,
        op: Any = None,
        timeout: Any = None,
        *,
        root: int | None = None,
    ) -> SharedWork:
        tensors, to = several(tensors), self._root(opts if root is None else root)
        fold = _op(op if op is not None else opts)
        return self._all([self._reduce_to(x, x, to, fold) for x in tensors], tensors)

    def _reduce_to(self, x: Tensor, out: Tensor, root: int, op: Any) -> Started:
        """Combine all ranks' `x` on one rank."""
        flat, fold = flat_of(x), _fold(op, x.dtype)
        n, total = len(flat), torch.empty_like(flat) if self._me == root else flat

        def take(parts: Values) -> None:
            if self._me == root:
                combine(parts, [total], fold)

        ranges = [(0, n if rank == root else 0) for rank in range(self._ranks)]
        work = self._channels[0].exchange(f"reduce {op} {root}", flat, ranges, take, settles=True, same=n)
        average = op == dist.ReduceOp.AVG
        return work, lambda: fill(out, total / self._ranks if average else total) if self._me == root else None

    def reduce_scatter(
        self, outputs: Values | Tensor, inputs: Sequence[Any], opts: Any = None, timeout: Any = None, *, op: Any = None
    ) -> SharedWork:
        outputs, op = several(outputs), _op(op or opts)
        pairs = zip(outputs, nested(inputs), strict=True)
        started = [self._scatter_sum(o, cat_flat(parts), [x.numel() for x in parts], op) for o, parts in pairs]
        return self._all(started, outputs)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> SharedWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Values, inputs: Values, opts: Any = None) -> SharedWork:
        pairs, op, n = zip(outputs, inputs, strict=True), _op(opts), self._ranks
        return self._all([self._scatter_sum(o, flat_of(x), [x.numel() // n] * n, op) for o, x in pairs], outputs)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _scatter_sum(self, out: Tensor, flat: Tensor, sizes: list[int], op: Any) -> Started:
        """Combine all ranks' pieces for this rank."""
        ends = [0, *itertools.accumulate(sizes)]
        if len(sizes) != self._ranks or ends[-1] != len(flat) or sizes[self._me] != out.numel():
            raise ValueError(
                f"reduce_scatter among {self._ranks} ranks got {len(flat)} elements for an output of {out.numel()}"
            )
        check_dtypes("reduce_scatter", [out], flat.dtype)
        room = torch.empty(out.numel(), dtype=flat.dtype)  # the output may be a part of the input
        fold, average = _fold(op, flat.dtype), op == dist.ReduceOp.AVG
        work = self._channels[0].exchange(
            f"reduce_scatter {op}",
            flat,
            list(itertools.pairwise(ends)),
            lambda parts: combine(parts, [room], fold),
            settles=True,
            same=sizes,
        )
        return work, lambda: fill(out, room / self._ranks if average else room)


def _fold(op: Any, dtype: torch.dtype) -> Fold:
    """How two values become one; raises RuntimeError, as gloo does, for a dtype that has no such reduction."""
    floats = dtype.is_floating_point or dtype.is_complex
    if floats if op in _BITWISE else op == dist.ReduceOp.AVG and not floats:
        raise RuntimeError(f"there is no reduction {getattr(op, 'name', op)} of {dtype}")
    return _FOLDS[op]


def _op(opts: Any) -> Any:
    op = dist.ReduceOp.SUM if opts is None or isinstance(opts, int) else getattr(opts, "reduceOp", opts)
    for known in _FOLDS:
        if op == known:
            return known
    name = getattr(op, "name", None) or str(getattr(op, "op", op)).removeprefix("RedOpType.")
    raise ValueError(f"the backend 'fjoin' has no reduction {name}; it has {', '.join(str(k) for k in _FOLDS)}")
