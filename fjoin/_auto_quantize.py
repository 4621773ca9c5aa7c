"""torch's collectives, encoded."""

from __future__ import annotations

import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .transforms.base import devices
from .transforms.codecs import Codec, bfloat16, decode_pieces, encode_pieces, encode_rows, float16
from .transforms.reductions import cut

# The arguments of all_to_all_single, as torch's auto_quantize calls them.
_SPLITS = {"out_splits": "output_split_sizes", "in_splits": "input_split_sizes"}


def auto_quantize(
    func: Callable[..., Any], qtype: Codec | Enum | str, quant_loss: float | None = None
) -> Callable[..., None]:
    """One of torch's collectives with its floats encoded in messages.

    - A rank's message to another rank is one row of bytes, which the receiver can decode without other rows.
    - Every value is encoded once, by its sender. A reduction is taken in float32.
    - On three ranks and more all_reduce encodes its result again, and takes two messages as `tx.compress` does;
      all ranks get the same result to the bit.
    - A single rank encodes nothing.

    Args:
        func: dist.all_gather, all_to_all, all_to_all_single, or all_reduce with the operations SUM and AVG.
        qtype: A codec, for example `tx.int8()`; or torch's DQuantType.FP16 or BFP16, or "fp16" or "bfp16", which are
            `tx.float16()`, so that 1e5 does not become 65504, and `tx.bfloat16()`. Random bits are keyed by the number
            of calls, and by the seed of a codec such as `tx.qsgd().keyed(seed, 0)`.
        quant_loss: The divisor of the results. None: no division.

    Returns:
        A function with the arguments and the meaning of `func`, including `group` and split sizes, by position or by
        name; all_to_all_single also takes them as `out_splits` and `in_splits`, as torch's auto_quantize does. It waits
        for its messages, fills the given tensors, of any shape, strides and floating-point dtypes, and returns None.
        Shapes may differ between ranks in all_to_all and all_gather, on gloo too.

    Raises:
        TypeError: another function, or no codec; when called: an argument that `func` does not have, or a tensor that
            is not floating-point.
        ValueError: when called: `async_op=True`; lists that do not have a tensor for each rank, or a tensor that does
            not fit what the rank sends to itself, before anything is sent.

    Same as: torch.distributed.algorithms._quantization.quantization.auto_quantize.

    >>> import torch.distributed as dist
    >>> from fjoin import transforms as tx
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> all_gather, out = auto_quantize(dist.all_gather, tx.int8()), [torch.zeros(2)]
    >>> all_gather(out, torch.tensor([1.0, 2.0]))
    >>> out
    [tensor([1., 2.])]
    >>> dist.destroy_process_group()
    """
    run = next((mine for name, mine in _SERVED.items() if getattr(dist, name) is func), None)
    if run is None:
        names = ", ".join(_SERVED)
        raise TypeError(f"auto_quantize serves torch.distributed's {names}, got {func!r}")
    codec, signature = _codec_of(qtype), inspect.signature(func)
    seed, calls = codec.key[0] if codec.key else 0, itertools.count()

    @functools.wraps(func)
    def encoded(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **{_SPLITS.get(name, name): value for name, value in kwargs.items()})
        given.apply_defaults()
        named = dict(given.arguments)
        group = named.pop("group")
        if named.pop("async_op"):
            raise ValueError(f"{func.__name__}: async_op=True: an encoded call waits for its messages; leave it out")
        me = dist.get_rank(group)
        if me < 0:
            where = f"global rank {dist.get_rank()} which does not belong to the given group."
            return warnings.warn(f"Running {func.__name__} on {where}", stacklevel=2)
        keyed = codec.keyed(seed, next(calls)) if codec.stochastic else codec
        with torch.no_grad():
            floats, outputs = run(_Call(func.__name__, keyed, group, dist.get_world_size(group), me), **named)
            for out, values in zip(outputs, floats, strict=True):
                out.copy_((values if quant_loss is None else values / quant_loss).view(out.shape))

    return encoded


def _codec_of(qtype: Any) -> Codec:
    if isinstance(qtype, Codec):
        return qtype
    name = str(qtype.name if isinstance(qtype, Enum) else qtype).lower()
    if name not in ("fp16", "bfp16"):
        raise TypeError(f"qtype is {qtype!r}; expected a codec such as int8(), 'fp16', 'bfp16' or torch's DQuantType")
    return float16() if name == "fp16" else bfloat16()


class _Call(NamedTuple):
    """A call on one of the ranks that exchange encoded rows of floats."""

    name: str
    codec: Codec
    group: Any
    ranks: int
    me: int

    def exchange(self, pieces: Sequence[Tensor], sizes: list[int]) -> Sequence[Tensor]:
        """Send piece r to rank r, and receive `sizes[r]` floats from each rank."""
        if self.ranks == 1:
            return [piece.reshape(-1) for piece in pieces]
        rows = [piece.reshape(-1).float() for piece in pieces]
        if len(set(map(len, rows))) == 1:
            codes = encode_rows(self.codec, torch.stack(rows), self.me).flatten()
        else:
            codes = encode_pieces(self.codec, rows, self.me)
        given, taken = ([self.codec.width(n) for n in counts] for counts in (map(len, rows), sizes))
        received = codes.new_empty(sum(taken))
        dist.all_to_all_single(received, codes, taken, given, group=self.group)
        return decode_pieces(self.codec, received, sizes).split(sizes)

    def gather(self, x: Tensor, sizes: list[int]) -> Sequence[Tensor]:
        """Send a tensor to all ranks, and receive `sizes[r]` floats from each; all ranks know all sizes."""
        if self.ranks == 1:
            return [x.reshape(-1)]
        widths = [self.codec.width(n) for n in sizes]
        codes = encode_rows(self.codec, x.reshape(1, -1).float(), self.me, self.ranks)[0]
        codes = torch.nn.functional.pad(codes, (0, max(widths) - len(codes)))  # rows of one width
        received = list(codes.new_empty(self.ranks, len(codes)).unbind())
        dist.all_gather(received, codes, group=self.group)
        rows = [row[:width] for row, width in zip(received, widths, strict=True)]
        return decode_pieces(self.codec, torch.cat(rows), sizes).split(sizes)

    def check(self, outs: Sequence[Tensor], xs: Sequence[Tensor]) -> list[int]:
        """The sizes of the outputs. A rank knows only what it sends itself, not the other ranks' tensors."""
        if not len(outs) == len(xs) == self.ranks:
            raise ValueError(f"{self.name}: {len(xs)} tensors go out, {len(outs)} come in, on {self.ranks} ranks")
        for x in (*outs, *xs):
            if not isinstance(x, Tensor) or not x.is_floating_point() or x.layout is not torch.strided:
                raise TypeError(f"{self.name} encodes dense floating-point tensors only, got {getattr(x, 'dtype', x)}")
        if outs[self.me].numel() != xs[self.me].numel():
            mine, to = tuple(xs[self.me].shape), tuple(outs[self.me].shape)
            raise ValueError(f"{self.name}: this rank sends itself {mine}, and has {to} to receive it")
        return [out.numel() for out in outs]


# Each function returns the floats that come in, flat, and the tensors to fill with them.
_Result = tuple[Sequence[Tensor], Sequence[Tensor]]


def _all_gather(call: _Call, tensor_list: Any, tensor: Any) -> _Result:
    return call.gather(tensor, call.check(tensor_list, [tensor] * call.ranks)), tensor_list


def _all_to_all(call: _Call, output_tensor_list: Any, input_tensor_list: Any) -> _Result:
    sizes = call.check(output_tensor_list, input_tensor_list)
    return call.exchange(input_tensor_list, sizes), output_tensor_list


def _all_to_all_single(
    call: _Call, output: Any, input: Any, output_split_sizes: Any, input_split_sizes: Any
) -> _Result:
    both = ((output, output_split_sizes), (input, input_split_sizes))
    outs, xs = (x.split(list(sizes or [len(x) // call.ranks] * call.ranks)) for x, sizes in both)
    return _all_to_all(call, outs, xs)


def _all_reduce(call: _Call, tensor: Any, op: Any) -> _Result:
    if not (op == dist.ReduceOp.SUM or op == dist.ReduceOp.AVG):  # in this order: op may be a ReduceOp or its kind
        raise ValueError(f"all_reduce: op must be ReduceOp.SUM or AVG, got {op!r}")

    def reduced(parts: Sequence[Tensor]) -> Tensor:
        total = devices.sum_in_order(parts)
        return total / call.ranks if op == dist.ReduceOp.AVG else total

    sizes = call.check([tensor] * call.ranks, [tensor] * call.ranks)
    if call.ranks <= 2:  # send all codes to the other rank: as many bytes as in two messages, but encoded once
        return [reduced(call.gather(tensor, sizes))], [tensor]
    n = tensor.numel()
    sizes = [-(-n // call.ranks)] * call.ranks
    chunks = cut(tensor.reshape(-1).float(), call.ranks)
    return [torch.cat([*call.gather(reduced(call.exchange(chunks.unbind(), sizes)), sizes)])[:n]], [tensor]


_SERVED: dict[str, Callable[..., _Result]] = {
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "all_reduce": _all_reduce,
}
