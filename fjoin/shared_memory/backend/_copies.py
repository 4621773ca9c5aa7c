"""Collectives of the backend "fjoin" that copy."""

# mypy: disable-error-code="override,assignment"

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._channel import copy_all
from .._flat import cat_flat, check_dtypes, fill, flat_of, give_back, row_sizes
from ._calls import Calls, Values, nested, nothing, several
from ._work import SharedWork, Started


class Copies(Calls):
    """broadcast, all_gather, gather, scatter, all_to_all and barrier, in their several forms."""

    def broadcast(
        self, tensors: Values | Tensor, opts: Any = None, timeout: Any = None, *, root: int | None = None
    ) -> SharedWork:
        tensors, source = several(tensors), self._root(opts if root is None else root)
        return self._all([self._broadcast_one(x, source) for x in tensors], tensors)

    def _broadcast_one(self, x: Tensor, root: int) -> Started:
        flat = flat_of(x)
        n = len(flat)
        ranges = [(0, n if self._me == root else 0)] * self._ranks

        def take(parts: Values) -> None:
            if self._me != root:
                flat.copy_(parts[root])

        work = self._channels[0].exchange(f"broadcast {root}", flat, ranges, take, settles=True, same=n)
        return work, lambda: give_back(flat, x) if self._me != root else None

    def allgather(
        self, outputs: Sequence[Any], inputs: Values | Tensor, opts: Any = None, timeout: Any = None
    ) -> SharedWork:
        lists = nested(outputs)
        started = [self._gather_one(outs, x) for outs, x in zip(lists, several(inputs), strict=True)]
        return self._all(started, list(itertools.chain(*lists)))

    def allgather_coalesced(self, outputs: list[Values], inputs: Values, opts: Any = None) -> SharedWork:
        turned = list(zip(*outputs, strict=True))  # rank by rank here
        started = [self._gather_one(list(o), x) for o, x in zip(turned, inputs, strict=True)]
        return self._all(started, list(itertools.chain(*outputs)))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> SharedWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Values, inputs: Values, opts: Any = None) -> SharedWork:
        started = []
        for out, x in zip(outputs, inputs, strict=True):
            flat = flat_of(out)
            work, _ = self._gather_one(list(flat.chunk(self._ranks)) or [flat] * self._ranks, x)
            started.append((work, functools.partial(give_back, flat, out)))
        return self._all(started, outputs)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _gather_one(self, outs: Values, x: Tensor, root: int | None = None) -> Started:
        """Give all ranks' `x` to all ranks, or to one."""
        flat, receives = flat_of(x), root in (None, self._me)
        n = len(flat)
        check_dtypes("a gather", outs if receives else [], x.dtype)
        if receives and [out.numel() for out in outs] != [n] * self._ranks:
            raise ValueError(
                f"a gather among {self._ranks} ranks of {n} elements got outputs of {[out.numel() for out in outs]}"
            )

        def take(parts: Values) -> None:
            for out, part in zip(outs, parts, strict=True) if receives else ():
                fill(out, part)

        ranges = [(0, n if root in (None, rank) else 0) for rank in range(self._ranks)]
        return self._channels[0].exchange(f"gather {root}", flat, ranges, take, settles=True, same=n), nothing

    def gather(
        self,
        outputs: Sequence[Any],
        inputs: Values | Tensor,
        opts: Any = None,
        timeout: Any = None,
        *,
        root: int | None = None,
    ) -> SharedWork:
        to, (x,) = self._root(opts if root is None else root), several(inputs)
        outs = nested(outputs)[0] if outputs else []
        return self._all([self._gather_one(outs, x, to)], outs)

    def scatter(
        self,
        outputs: Values | Tensor,
        inputs: Sequence[Any],
        opts: Any = None,
        timeout: Any = None,
        *,
        root: int | None = None,
    ) -> SharedWork:
        (out,), source = several(outputs), self._root(opts if root is None else root)
        n = out.numel()
        check_dtypes("a scatter", nested(inputs)[0] if self._me == source else [], out.dtype)
        flat = cat_flat(nested(inputs)[0]) if self._me == source else flat_of(out)[:0]
        if self._me == source and len(flat) != n * self._ranks:
            raise ValueError(f"a scatter to {self._ranks} ranks of {n} elements each got {len(flat)}")
        ranges = [(i * n, (i + 1) * n) if self._me == source else (0, 0) for i in range(self._ranks)]
        work = self._channels[0].exchange(
            f"scatter {source}", flat, ranges, lambda parts: fill(out, parts[source]), settles=True, same=n
        )
        return self._all([(work, nothing)], [out])

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
        timeout: Any = None,
    ) -> SharedWork:
        check_dtypes("all_to_all", [output], input.dtype)
        source, flat = flat_of(input), flat_of(output)
        give, take = row_sizes(input, input_sizes, self._ranks), row_sizes(output, output_sizes, self._ranks)
        return self._all([self._exchange_parts(source, give, flat, take, lambda: give_back(flat, output))], [output])

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Values, inputs: Values, opts: Any = None) -> SharedWork:
        give, take = [x.numel() for x in inputs], [x.numel() for x in outputs]
        if len(give) != self._ranks or len(take) != self._ranks:
            raise ValueError(f"all_to_all among {self._ranks} ranks got {len(give)} inputs and {len(take)} outputs")
        check_dtypes("all_to_all", [*inputs, *outputs], inputs[0].dtype)
        flat = outputs[0].new_empty(sum(take))

        def done() -> None:
            for out, part in zip(outputs, flat.split(take), strict=True):
                fill(out, part)

        return self._all([self._exchange_parts(cat_flat(inputs), give, flat, take, done)], outputs)

    def _exchange_parts(
        self, source: Tensor, give: list[int], flat: Tensor, take: list[int], done: Callable[[], object]
    ) -> Started:
        got = list[int]()

        def taken(parts: Values) -> None:
            got.extend(len(part) for part in parts)
            if got == take:
                copy_all(flat, parts)

        def ended() -> None:
            if got != take:
                raise ValueError(f"all_to_all: the ranks gave {got} elements where {take} were expected")
            done()

        ends = [0, *itertools.accumulate(give)]
        work = self._channels[0].exchange("all_to_all", source, list(itertools.pairwise(ends)), taken, settles=True)
        return work, ended

    def barrier(self, opts: Any = None, timeout: Any = None) -> SharedWork:
        empty = torch.empty(0)
        work = self._channels[0].exchange("barrier", empty, [(0, 0)] * self._ranks, lambda parts: None)
        return self._all([(work, nothing)], [])
