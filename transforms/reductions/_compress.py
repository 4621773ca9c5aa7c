"""Hooks whose messages are encoded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from .._check import AxisName, whole_number
from ..codecs._blocks import fp8
from ..codecs._codec import Codec, bfloat16, check_codec, float16, float32
from ..spec._spec import factory
from ..transform._call import Call
from ..transform._counter import counts_steps
from ..transform._inner import Inner
from ..transform._transform import Compression, Needs, Transform, check_transform
from ..transform._weights import Over
from ..tree._tree import State, Tree, named_leaves
from ._mean import mean

_CASTS: dict[torch.dtype, Callable[[], Codec]] = {
    torch.bfloat16: bfloat16,
    torch.float16: float16,
    torch.float32: float32,
    torch.float8_e4m3fn: fp8,
    torch.float8_e5m2: lambda: fp8(dtype=torch.float8_e5m2),
}


class CompressState(NamedTuple):
    inner: State
    step: int  # calls so far, on the host; with the seed it keys the random bits


@factory
def compress(codec: Codec, hook: Transform, seed: int = 0) -> Transform:
    """Encodes the gradients that a hook communicates.

    All leaves are sent in one message, or in one message to and one from the rank that sums them; see `quantized_mean`.
    Weights and lane are sent with the codes, in float64, and are exact. Results have the gradients' dtypes. On an axis
    of one rank nothing is sent, and nothing is encoded.

    Args:
        codec: For example `int8()`.
        hook: `mean`, `sum_over`, or a transform that contains them: `chain`, `partition`, `every` and so on.
        seed: For stochastic codecs, such as `int8(stochastic=True)`; the same on all ranks. The random bits depend on
            the seed, the step, the rank, and a float's path and position in its leaf.

    Returns:
        A `Transform` with the state of `hook`; for stochastic codecs, `CompressState(inner, step)`.

    Raises:
        TypeError: `codec` is no codec; `hook` sends nothing that can be encoded, or encodes already; at `update`: a
            complex gradient.
        ValueError: `seed` is no whole number.
        RuntimeError: at `update`: something differentiates through the gradients.

    Same as: torch's fp16_compress_wrapper, bf16_compress_wrapper, for any codec.

    >>> from fjoin import transforms as tx
    >>> hook = compress(tx.int8(block=2), tx.mean("data"))
    >>> def one_rank(g):
    ...     return hook.update(g, hook.init(g))[0]
    >>> tx.simulate(one_rank, {"data": 2}, [torch.tensor([127.0, 3.2]), torch.tensor([1.0, 0.0])])[0]
    tensor([64.0000,  1.5000])
    """
    whole_number("seed", seed)
    return _encoded(check_codec("compress: codec", codec), check_transform(hook, "compress: hook"), seed)


@factory
def cast(dtype: torch.dtype, hook: Transform) -> Transform:
    """Communicates gradients in a lower-precision dtype.

    Sums are taken in float32. Values within the range of float32 do not overflow: float16 and the 8-bit floats are sent
    with a scale, and the largest bfloat16 number is 3.39e38, a little less than that of float32.

    Args:
        dtype: torch.bfloat16, float16, float8_e4m3fn or float8_e5m2; float32 for float64 gradients.
        hook: As for `compress`.

    Returns:
        A `Transform` with the state of `hook`.

    Raises:
        ValueError: another dtype.
        TypeError, RuntimeError: as `compress`.

    Same as: torch's fp16_compress_wrapper and bf16_compress_wrapper.

    >>> from fjoin import transforms as tx
    >>> hook = cast(torch.float16, tx.mean("data"))
    >>> def one_rank(g):
    ...     return hook.update(g, hook.init(g))[0]
    >>> tx.simulate(one_rank, {"data": 2}, [torch.tensor([1e5]), torch.tensor([0.0])])[0]
    tensor([49984.])
    """
    if dtype not in _CASTS:
        raise ValueError(f"cast: dtype must be one of {sorted(map(str, _CASTS))}, got {dtype!r}")
    return _encoded(_CASTS[dtype](), check_transform(hook, "cast: hook"))


@factory
def quantized_mean(axis: AxisName, codec: Codec, over: Over = "weight", seed: int = 0) -> Transform:
    """The mean of all ranks' gradients, weighted, with every message encoded.

    Each rank reduces one chunk of the gradients: it receives all ranks' codes of that chunk, takes the mean in float32,
    and sends the mean to all ranks, encoded again. So a rank sends twice the codes of its gradients, less 1 / ranks of
    it, however many ranks there are. Two ranks send all their codes to each other, which are as many bytes, and encode
    once.

    Args:
        axis: The axis, or several axes; the last one is reduced first.
        codec: The codec of the messages.
        over: The divisor; see `mean`.
        seed: For stochastic codecs; see `compress`.

    Returns:
        A `Transform` whose `update` returns a tree like `grads`, equal on all ranks to the bit.
        State: `MeanState(total, lane)`; for stochastic codecs, `CompressState(inner, step)` around it.

    Raises:
        TypeError, ValueError, RuntimeError: as `compress` and `mean`.

    Same as: torch's quantization_pertensor_hook and quantization_perchannel_hook, which send ranks / 8 times the bytes
        of float32.

    >>> from fjoin import transforms as tx
    >>> hook = quantized_mean("data", tx.int8())
    >>> def one_rank(g, n):
    ...     return hook.update(g, hook.init(g), weight=n)[0]
    >>> mean = tx.simulate(one_rank, {"data": 3}, [torch.tensor(v) for v in (127.0, 1.0, 9.0)], [1, 2, 0])[0]
    >>> round(mean.item(), 3)
    43.0
    """
    return compress(codec, mean(axis, over), seed)


def _encoded(codec: Codec, hook: Transform, seed: int = 0) -> Transform:
    if not hook.accepts("wire"):
        raise TypeError(
            f"{hook!r} sends nothing that can be encoded; wrap a mean or a sum_over, or make a Transform whose update has the "
            f"keyword wire"
        )
    if hook.compression and hook.compression.encoded:
        raise TypeError(f"{hook!r} is to be encoded by {codec!r}, but encodes already; leave one of them out")
    needs = Needs.NOTHING if codec.elementwise else Needs.LAYOUT
    inner, lossy = Inner(hook), Compression(named_leaves)
    if not codec.stochastic:

        def update(grads: Tree, state: State, params: Tree, call: Call) -> tuple[Tree, State]:
            return hook.run(grads, state, params, call.inside(wire=codec))

        reduces = hook.reduces and hook.reduces._replace(fusable=False, scatters=False)
        return Transform(hook.init, update, needs, reduces, lossy, takes=("donated",), wraps="whole")

    def init(params: Tree) -> CompressState:
        return CompressState(hook.init(params), 0)

    @counts_steps
    def stochastic(grads: Tree, state: CompressState, params: Tree, call: Call) -> tuple[Tree, CompressState]:
        wire = replace(codec, key=(seed, state.step))
        out, new = inner.run(grads, state, params, call.inside(wire=wire))
        return out, CompressState(new, state.step + 1)

    # Random bits are keyed by path.
    return Transform(
        init, stochastic, needs | Needs.PATHS, inner.reduction(same=True), lossy, takes=("donated",), wraps="whole"
    )
