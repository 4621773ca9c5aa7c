"""torch's collectives, encoded."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import numbers
import operator
import warnings
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .transforms.base import sum_in_order
from .transforms.codecs import Codec, bfloat16, decode_pieces, encode_pieces, encode_rows, float16
from .transforms.reductions import cut


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


_NAMED: dict[str, Callable[[], Codec]] = {"fp16": float16, "bfp16": bfloat16}


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
        name; all_to_all_single also takes them as `out_splits` and `in_splits`, as torch's auto_quantize does. It waits for its
        messages, fills the given tensors, of any shape, strides and floating-point dtypes, and returns None. Shapes may
        differ between ranks in all_to_all and all_gather, on gloo too.

    Raises:
        TypeError: another function, or no codec; when called: an argument that `func` does not have, or a tensor that
            is not floating-point.
        ValueError: an unknown name, or a `quant_loss` to divide by that is 0 or not finite; when called: `async_op=True`;
            lists, shapes or split sizes that do not fit, before anything is sent.

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
    codec, loss, signature = _codec_of(qtype), _checked_loss(quant_loss), inspect.signature(func)
    seed, calls = codec.key[0] if codec.key else 0, itertools.count()

    @functools.wraps(func)
    def encoded(*args: Any, **kwargs: Any) -> None:
        try:
            given = signature.bind(*args, **_by_torchs_names(func, kwargs))
        except TypeError as error:
            raise TypeError(f"{func.__name__}: {error}; it takes {signature}") from None
        given.apply_defaults()
        named = dict(given.arguments)
        group = named.pop("group")
        if named.pop("async_op"):
            raise ValueError(f"{func.__name__}: async_op=True: an encoded call waits for its messages; leave it out")
        me = dist.get_rank(group)
        if me < 0:
            warnings.warn(
                f"Running {func.__name__} on global rank {dist.get_rank()} which does not belong to the given group.",
                stacklevel=2,
            )
            return
        with torch.no_grad():
            keyed = codec.keyed(seed, next(calls)) if codec.stochastic else codec
            floats, outputs = run(Peers(func.__name__, keyed, group, dist.get_world_size(group), me), **named)
            floats, sizes = floats if loss is None else floats / loss, [out.numel() for out in outputs]
            for out, values in zip(outputs, floats[: sum(sizes)].split(sizes), strict=True):
                out.detach().copy_(values.view(out.shape))

    return encoded


# torch's auto_quantize's names for arguments of all_to_all_single.
_SPLITS = {"out_splits": "output_split_sizes", "in_splits": "input_split_sizes"}


def _by_torchs_names(func: Callable[..., Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    if func is not dist.all_to_all_single:
        return kwargs
    for old, new in _SPLITS.items():
        if old in kwargs and new in kwargs:
            raise TypeError(f"{old} and {new} are the same argument; give one of them")
    return {_SPLITS.get(name, name): value for name, value in kwargs.items()}


def _codec_of(qtype: Any) -> Codec:
    if isinstance(qtype, Codec):
        return qtype
    name = qtype.name if isinstance(qtype, Enum) else qtype
    expected = "expected a codec such as int8(), torch's DQuantType.FP16 or BFP16, 'fp16' or 'bfp16'"
    if not isinstance(name, str):
        raise TypeError(f"qtype is {getattr(qtype, '__name__', None) or repr(qtype)}; {expected}")
    if name.lower() not in _NAMED:
        raise ValueError(f"qtype is {name!r}; {expected}")
    return _NAMED[name.lower()]()


def _checked_loss(loss: Any) -> float | None:
    if loss is None:
        return None
    if isinstance(loss, bool) or not isinstance(loss, numbers.Real):
        raise TypeError(f"quant_loss must be a number or None, got {loss!r}")
    if not math.isfinite(loss) or loss == 0:
        raise ValueError(f"quant_loss must be finite and not 0, for results are divided by it, got {loss!r}")
    return float(loss)


# A call of each function, after its checks: the floats of all ranks, one after the other, and the tensors to fill.
_Result = tuple[Tensor, list[Tensor]]


def _all_gather(peers: Peers, tensor_list: Any, tensor: Any) -> _Result:
    x, outs = peers.check("tensor", tensor), peers.check_list("tensor_list", tensor_list, True)
    peers.check_own(f"tensor_list[{peers.me}]", outs[peers.me], "tensor", x)
    return peers.gather(x, [out.numel() for out in outs]), outs


def _all_to_all(peers: Peers, output_tensor_list: Any, input_tensor_list: Any) -> _Result:
    outs = peers.check_list("output_tensor_list", output_tensor_list, True)
    xs, me = peers.check_list("input_tensor_list", input_tensor_list), peers.me
    peers.check_own(f"output_tensor_list[{me}]", outs[me], f"input_tensor_list[{me}]", xs[me])
    return peers.exchange(xs, [out.numel() for out in outs]), outs


def _all_to_all_single(
    peers: Peers, output: Any, input: Any, output_split_sizes: Any, input_split_sizes: Any
) -> _Result:
    out, x = peers.check("output", output, True), peers.check("input", input)
    taken = peers.check_splits("output_split_sizes", output_split_sizes, "output", out)
    given = peers.check_splits("input_split_sizes", input_split_sizes, "input", x)
    if taken[peers.me] != given[peers.me]:
        raise ValueError(
            f"{peers.name}: this rank sends itself {given[peers.me]} floats of input, but output has place for {taken[peers.me]}; "
            f"input has shape {tuple(x.shape)}, output {tuple(out.shape)}"
        )
    return peers.exchange(x.reshape(-1).split(given), taken), [out]


def _all_reduce(peers: Peers, tensor: Any, op: Any) -> _Result:
    x, ranks = peers.check("tensor", tensor, True), peers.ranks
    peers.check_op(op)
    if ranks <= 2:  # send all codes to the other rank: as many bytes as in two messages, but encoded once
        return peers.reduced(op, peers.gather(x, [x.numel()] * ranks)), [x]
    sizes = [-(-x.numel() // ranks)] * ranks
    chunks = cut(x.detach().reshape(-1).to(torch.float32), ranks, sizes[0])
    return peers.gather(peers.reduced(op, peers.exchange(chunks.unbind(0), sizes)), sizes), [x]


_SERVED: dict[str, Callable[..., _Result]] = {
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "all_reduce": _all_reduce,
}
