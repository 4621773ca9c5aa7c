"""Encoded means, error feedback, and torch's encoded collectives by axis name."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import optree
import torch
from torch import Tensor

from .. import axes, base, codecs
from ..axes import all_gather, all_to_all, all_to_all_single, as_tensor, axis_index, axis_size, packed, pmean, psum
from ..base import AxisName, Call, Compression, Facts, Needs, State, Transform, Tree, checks, factory, own_state, trees
from ..codecs import Codec, bfloat16, check_codec, decode_pieces, encode_pieces, encode_rows, float16, float32, fp8
from ._mean import ResidualMemory, coded_sum

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
def compress(codec: Codec | torch.dtype, hook: Transform, seed: int = 0) -> Transform:
    """Encodes the gradients that a hook communicates.

    All leaves travel in one message. On three and more ranks each rank reduces one chunk of the gradients: it receives
    all ranks' codes of that chunk, takes the mean in float32, and sends it to all ranks, encoded again. So a rank sends
    twice the codes of its gradients, less 1 / ranks of it, however many ranks there are. Two ranks send all their codes
    to each other, which are as many bytes, and encode once.

    Each rank encodes its share of the mean; the ranks sum their weights before. Results have the
    gradients' dtypes, and are equal on all ranks to the bit. On an axis of one rank nothing is sent, and nothing is
    encoded.

    Args:
        codec: For example `int8()`; or a dtype: torch.bfloat16, float16, float8_e4m3fn or float8_e5m2, and float32 for
            float64 gradients. Sums are taken in float32; float16 and the 8-bit floats are sent with a scale, so that
            values within the range of float32 do not overflow.
        hook: `mean`, `sum_over`, or a transform that contains them: `chain`, `partition`, `every` and so on.
        seed: For stochastic codecs, such as `int8(stochastic=True)`; the same on all ranks. The random bits depend on
            the seed, the step, the rank, and a float's path and position in its leaf.

    Returns:
        A `Transform` with the state of `hook`; for stochastic codecs, `CompressState(inner, step)`.

    Raises:
        TypeError: `codec` is no codec; `hook` sends nothing that can be encoded, or encodes already; at `update`: a
            complex gradient.
        ValueError: another dtype; `seed` is no whole number.
        RuntimeError: at `update`: something differentiates through the gradients.

    Same as: torch's fp16_compress_wrapper and bf16_compress_wrapper, for any codec; `compress(uint8(), mean(axis))` is
        torch's quantization_pertensor_hook, which sends ranks / 8 times the bytes of float32.

    >>> from fjoin import transforms as tx
    >>> hook = compress(tx.int8(block=2), tx.mean("data"))
    >>> def one_rank(g):
    ...     return hook.update(g, hook.init(g))[0]
    >>> tx.simulate(one_rank, {"data": 2}, [torch.tensor([127.0, 3.2]), torch.tensor([1.0, 0.0])])[0]
    tensor([64.0000,  1.5000])
    """
    checks.whole_number("seed", seed)
    if isinstance(codec, torch.dtype):
        if codec not in _CASTS:
            raise ValueError(f"compress: a dtype must be one of {sorted(map(str, _CASTS))}, got {codec!r}")
        codec = _CASTS[codec]()
    form = check_codec("compress: codec", codec)
    if not hook.accepts("wire"):
        raise TypeError(
            f"{hook!r} sends nothing that can be encoded; wrap a mean, a sum_over, or a Transform whose update has the keyword wire"
        )
    if hook.facts.compression and hook.facts.compression.encoded:
        raise TypeError(f"{hook!r} is to be encoded by {form!r}, but encodes already; leave one of them out")

    def init(params: Tree) -> CompressState:
        return CompressState(hook.init(params), 0)

    def stochastic(grads: Tree, state: CompressState, params: Tree, call: Call) -> tuple[Tree, CompressState]:
        state = own_state(state, CompressState, call)
        out, new = hook.run(grads, state.inner, params, call.inside(wire=replace(form, key=(seed, state.step))))
        return out, CompressState(new, state.step + 1)

    def update(grads: Tree, state: State, params: Tree, call: Call) -> tuple[Tree, State]:
        return hook.run(grads, state, params, call.inside(wire=form))

    needs = Needs.NOTHING if form.elementwise else Needs.LAYOUT
    needs |= Needs.PATHS if form.stochastic else Needs.NOTHING  # random bits are keyed by path
    facts = Facts(compression=Compression(trees.named_leaves), takes=("donated",), wraps="whole")
    if form.stochastic:
        return Transform(init, stochastic, needs, facts=facts)
    return Transform(hook.init, update, needs, facts=facts)


class ErrorState(NamedTuple):
    inner: State
    error: base.Summed[dict[str, Tensor]]  # path -> residual, not sent yet, in units of the mean, at least float32


@factory
def error_feedback(hook: Transform) -> Transform:
    """Adds to each message the residual of this rank's earlier messages.

        u <- w g / W + e,  u' = u as the others decode it,  e <- u - u'

    with w the rank's weight and W that of all ranks. On three and more ranks the mean is encoded again for its way
    back; the rank that summed it keeps that error. So nothing is lost forever: over all steps, the sum of the hook's
    results, plus the sum of the ranks' residuals, equals the sum of all means, rounded to float32 where something is
    encoded. A rank without input sends its residual.

    A step in which no rank has input, or whose result is not finite, uses up no residual (`power_sgd` decides this for
    each matrix, `hierarchical_mean` for each rank's part). Residuals stay bounded only if the error of a codec is
    smaller than its input, as for casts, `int8`, `sign`, `top_k` and `power_sgd`. `qsgd` with few levels is unbiased,
    but its error may be larger.

    Args:
        hook: A hook that encodes or projects over one axis: `compress`, `power_sgd`, alone or
            in `partition`, or in a `chain` with stages that send nothing.

    Returns:
        A `Transform` with state `ErrorState(inner, error)`; `error` differs between ranks.

    Raises:
        TypeError: nothing is encoded in `hook`.
        ValueError: at `update`: encoded over several axes at once, or twice.

    Source: Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014; Karimireddy et al., Error Feedback Fixes
        SignSGD, arXiv:1901.09847; the second error: Tang et al., DoubleSqueeze, arXiv:1905.05957.

    >>> from fjoin import transforms as tx
    >>> hook = error_feedback(tx.compress(tx.int8(), tx.mean("data")))
    >>> def one_rank(g):
    ...     state, sums = hook.init(g), 0.0
    ...     for _ in range(100):
    ...         mean, state = hook.update(g, state)
    ...         sums = sums + mean
    ...     return sums
    >>> tx.simulate(one_rank, {"data": 2}, [torch.tensor([127.0, 0.3]), torch.tensor([127.0, 0.1])])[0]
    tensor([12700.,    20.])
    """
    lossy = hook.facts.compression
    if lossy is None or lossy.paths is None:
        raise TypeError(
            f"nothing in {hook!r} is {'lost' if lossy else 'encoded'}, so there is no error to feed back; write "
            f"error_feedback(compress(codec, mean(axis)))"
        )
    paths = lossy.paths

    def init(params: Tree) -> ErrorState:
        lost = set(paths(params))
        errors = {path: zero for path, zero in trees.zeros_at_least_f32(params).items() if path in lost}
        return ErrorState(hook.init(params), errors)

    def update(grads: Tree, state: ErrorState, params: Tree, call: Call) -> tuple[Tree, ErrorState]:
        memory = ResidualMemory(own_state(state, ErrorState).error)
        out, new = hook.run(grads, state.inner, params, call.inside(memory=memory))
        return out, ErrorState(new, {**state.error, **memory.new})

    # Chunk ownership, and so the second residual, depends on the bucket layout.
    needs = Needs.LAYOUT if lossy.encoded else Needs.NOTHING
    compression = Compression(None, lossy.encoded)
    return Transform(init, update, needs, facts=Facts(compression=compression, takes=("donated",), wraps="whole"))


C = TypeVar("C", bound=Callable[..., Any])


def quantized(collective: C, codec: Codec) -> C:
    """The same collective with floats encoded in its messages.

    All floating-point leaves of a call are sent in one message, as float32 (`psum` and `pmean` over three and more
    ranks: one message to the ranks that sum, and one back). Leaves of other dtypes are sent unencoded, in a message for
    each dtype.

        all_gather, all_to_all, all_to_all_single      each value is encoded once; a rank receives its own value
                                                       as the other ranks decode it
        psum, pmean                                    as `compress`: bytes do not grow with the ranks, and all
                                                       ranks receive equal results to the bit

    On an axis of one rank nothing is sent, and nothing is encoded.

    Args:
        collective: One of the collectives above.
        codec: For example `int8()`; a stochastic codec with its key, `qsgd().keyed(seed, step)`.

    Returns:
        A function with the collective's arguments that returns new tensors of the same shapes and dtypes.

    Raises:
        TypeError: another collective, for example `pmax`, or no codec.
        RuntimeError: when called: something differentiates through it.

    Same as: torch's auto_quantize, which knows float16 and bfloat16.

    >>> from fjoin import transforms as tx
    >>> psum = quantized(tx.psum, tx.int8())
    >>> xs = [{"a": torch.tensor([127.0, 3.2]), "n": torch.tensor(1)}, {"a": torch.tensor([127.0, 1.0]), "n": torch.tensor(2)}]
    >>> tx.simulate(lambda x: psum(x, "data"), {"data": 2}, xs)[1]
    {'a': tensor([254.,   4.]), 'n': tensor(3)}
    """
    if not any(collective is served for served in _FORMS):
        served = ", ".join(each.__name__ for each in _FORMS)
        got = getattr(collective, "__name__", None) or repr(collective)
        raise TypeError(f"quantized serves {served}, got {got}; for a hook write compress(codec, hook)")
    if not isinstance(codec, Codec):
        raise TypeError(f"quantized takes a Codec, got {codec!r}; for example quantized(psum, int8())")
    # A partial: its fingerprint depends on the codec.
    return functools.update_wrapper(functools.partial(_quantized, collective, codec), collective)  # type: ignore[return-value]


def _quantized(
    collective: Callable[..., Any], codec: Codec, x: Tree, axis: AxisName, *args: Any, **kwargs: Any
) -> Tree:
    """The encoded form for the floating-point leaves, in float32, and the collective itself for the others."""
    inspect.signature(collective).bind(x, axis, *args, **kwargs)  # before a look at the axis
    x = optree.tree_map(as_tensor, x)
    if axis_size(axis) == 1:
        return collective(x, axis, *args, **kwargs)
    floating = [leaf for leaf in optree.tree_leaves(x) if leaf.is_floating_point()]
    codecs.refuse_derivative(floating, "differentiate through the collective itself, or detach its input")
    # None is no leaf: omitted leaves take no space in a message, and the paths do not change.
    others = optree.tree_map(lambda leaf: None if leaf.is_floating_point() else leaf, x)
    others = collective(others, axis, *args, **kwargs)
    floats = optree.tree_map(lambda leaf: leaf.to(torch.float32) if leaf.is_floating_point() else None, x)
    floats = _FORMS[collective](codec, floats, axis, *args, **kwargs)

    def chosen(leaf: Tensor, coded: Tensor | None, other: Tensor | None) -> Tensor | None:
        return other if coded is None else coded.to(leaf.dtype)

    return optree.tree_map(chosen, x, floats, others, none_is_leaf=True)


def _in_bytes(codec: Codec, axis: AxisName, move: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`move`, which moves rows of bytes over an axis, for rows of floats."""

    def run(rows: Tensor) -> Tensor:
        *lead, n = rows.shape
        codes = encode_rows(codec, rows.reshape(math.prod(lead), n), axis_index(axis))
        moved = move(codes.reshape(*lead, codes.shape[1]))
        return codec.decode(torch.atleast_2d(moved), n).reshape(*moved.shape[:-1], n)

    return run


def _psum(codec: Codec, x: Tree, axis: AxisName) -> Tree:
    def run(flat: Tensor) -> Tensor:
        return coded_sum(axis, codec, flat, codecs.places_of({"": flat}, flat.device) if codec.stochastic else None)[0]

    return packed(x, 0, run)


def _pmean(codec: Codec, x: Tree, axis: AxisName) -> Tree:
    return optree.tree_map(lambda total: total / axis_size(axis), _psum(codec, x, axis))


def _all_gather(codec: Codec, x: Tree, axis: AxisName, *, dim: int = 0, tiled: bool = False) -> Tree:
    run = _in_bytes(codec, axis, lambda codes: all_gather(codes, axis))
    return axes.place_gathered(packed(x, 0, run), dim, tiled)


def _all_to_all(
    codec: Codec, x: Tree, axis: str, split_dim: int = 0, concat_dim: int = 0, *, tiled: bool = False
) -> Tree:
    run = _in_bytes(codec, axis, lambda codes: all_to_all(codes, axis))
    rows = axes.split_ranks("all_to_all", x, axis, split_dim, tiled)
    return axes.place_received(packed(rows, 1, run), split_dim, concat_dim, tiled)


def _all_to_all_single(
    codec: Codec, x: Tree, axis: str, *, input_split_sizes: Any = None, output_split_sizes: Any = None
) -> Tree:
    if input_split_sizes is None and output_split_sizes is None:
        return _all_to_all(codec, x, axis, tiled=True)
    give, take = axes.check_splits(x, axis, input_split_sizes, output_split_sizes)

    def run(rows: Tensor) -> Tensor:
        n = rows.shape[1]
        axes.lookup(axis).check_rows(n, give, take)
        # One row of bytes for each receiver, of the length of its part.
        given, taken = ([codec.width(size * n) for size in sizes] for sizes in (give, take))
        codes = encode_pieces(codec, rows.split(give), axis_index(axis))
        moved = all_to_all_single(codes, axis, input_split_sizes=given, output_split_sizes=taken)
        return decode_pieces(codec, moved, [size * n for size in take]).view(sum(take), n)

    return packed(x, 1, run)


# The forms of the collectives for leaves in float32, on an axis of several ranks.
_FORMS: dict[Callable[..., Any], Callable[..., Tree]] = {
    psum: _psum,
    pmean: _pmean,
    all_gather: _all_gather,
    all_to_all: _all_to_all,
    all_to_all_single: _all_to_all_single,
}
