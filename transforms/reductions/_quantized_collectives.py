"""Collectives by axis name with encoded floats.

The leaves are packed as the plain collectives pack them. Each row of floats for a rank becomes a row of bytes: the
sender encodes it once, and the receiver decodes it.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import optree
import torch
from torch import Tensor

from .._axis_env import lookup
from .._check import AxisName
from ..axes._collectives import axis_index, axis_size, pbroadcast, pmean, ppermute, psum
from ..axes._gather_scatter import all_gather, all_to_all, place_gathered, place_received, psum_scatter, split_ranks
from ..axes._packing import as_tensor, packed
from ..axes._primitive import names, note
from ..axes._ragged import all_to_all_single, check_splits
from ..codecs._codec import Codec, refuse_derivative
from ..codecs._random_bits import places_of
from ..codecs._rows import decode_pieces, encode_pieces, encode_rows
from ..tree._tree import Tree, to_device
from ._coded_mean import Term, coded_mean

C = TypeVar("C", bound=Callable[..., Any])


def quantized(collective: C, codec: Codec) -> C:
    """The same collective with floats encoded in its messages.

    All floating-point leaves of a call are sent in one message, as float32 (`psum` and `pmean` over three and more
    ranks: one message to the ranks that sum, and one back). Leaves of other dtypes are sent unencoded, in a message for
    each dtype.

        all_gather, all_to_all, all_to_all_single,     each value is encoded once; a rank receives its own value
        ppermute, pbroadcast                           as the other ranks decode it
        psum_scatter                                   exchanged like these, then summed in float32
        psum, pmean                                    as `quantized_mean`: bytes do not grow with the ranks, and all
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
        raise TypeError(f"quantized serves {served}, got {_called(collective)}; for a hook write compress(codec, hook)")
    if not isinstance(codec, Codec):
        raise TypeError(
            f"quantized takes a collective and a Codec, got {_called(codec)}; for example quantized(psum, int8())"
        )
    # A partial: its fingerprint depends on the codec.
    return functools.update_wrapper(functools.partial(_quantized, collective, codec), collective)  # type: ignore[return-value]


def _called(value: Any) -> str:
    return getattr(value, "__name__", None) or repr(value)


def _quantized(
    collective: Callable[..., Any], codec: Codec, x: Tree, axis: AxisName, *args: Any, **kwargs: Any
) -> Tree:
    """The encoded form for the floating-point leaves, in float32, and the collective itself for the others."""
    inspect.signature(collective).bind(x, axis, *args, **kwargs)  # before a look at the axis
    x = optree.tree_map(as_tensor, x)
    if axis_size(axis) == 1:
        return collective(x, axis, *args, **kwargs)
    floating = [leaf for leaf in optree.tree_leaves(x) if leaf.is_floating_point()]
    refuse_derivative(floating, "differentiate through the collective itself, or detach its input")
    # None is no leaf: omitted leaves take no space in a message, and the paths do not change.
    others = optree.tree_map(lambda leaf: None if leaf.is_floating_point() else leaf, x)
    others = collective(others, axis, *args, **kwargs)
    if floating:
        note(axis, ", ".join(f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}" for leaf in floating))
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
    return packed(x, 0, lambda flat: _mean(codec, flat, axis) * axis_size(axis))


def _pmean(codec: Codec, x: Tree, axis: AxisName) -> Tree:
    return packed(x, 0, lambda flat: _mean(codec, flat, axis))


def _mean(codec: Codec, flat: Tensor, axis: AxisName) -> Tensor:
    one, words = (torch.ones(shape, dtype=torch.float64, device=flat.device) for shape in ((), (0,)))
    positions = places_of({"": flat}, flat.device) if codec.stochastic else None
    return coded_mean(Term(codec, flat, one, words, positions=positions), axis).mean


def _psum_scatter(codec: Codec, x: Tree, axis: AxisName, *, dim: int = 0, tiled: bool = False) -> Tree:
    def exchange(codes: Tensor) -> Tensor:
        """Row s goes to rank s; the result has a row from each rank. They move over one axis after another."""
        moved = codes.reshape((*[axis_size(name) for name in names(axis)], codes.shape[1]))
        for i, name in enumerate(names(axis)):
            moved = all_to_all(moved, name, i, i)
        return moved.reshape(codes.shape)

    received = _in_bytes(codec, axis, exchange)
    out = packed(split_ranks("psum_scatter", x, axis, dim, tiled), 1, lambda rows: received(rows).sum(0))
    return optree.tree_map(lambda leaf: leaf.movedim(0, dim), out) if tiled else out


def _all_gather(codec: Codec, x: Tree, axis: AxisName, *, dim: int = 0, tiled: bool = False) -> Tree:
    run = _in_bytes(codec, axis, lambda codes: all_gather(codes, axis))
    return place_gathered(packed(x, 0, run), dim, tiled)


def _all_to_all(
    codec: Codec, x: Tree, axis: str, split_dim: int = 0, concat_dim: int = 0, *, tiled: bool = False
) -> Tree:
    run = _in_bytes(codec, axis, lambda codes: all_to_all(codes, axis))
    rows = split_ranks("all_to_all", x, axis, split_dim, tiled)
    return place_received(packed(rows, 1, run), split_dim, concat_dim, tiled)


def _all_to_all_single(
    codec: Codec, x: Tree, axis: str, *, input_split_sizes: Any = None, output_split_sizes: Any = None
) -> Tree:
    if input_split_sizes is None and output_split_sizes is None:
        return _all_to_all(codec, x, axis, tiled=True)
    give, take = check_splits(x, axis, input_split_sizes, output_split_sizes)

    def run(rows: Tensor) -> Tensor:
        n = rows.shape[1]
        lookup(axis).check_rows(n, give, take)
        # One row of bytes for each receiver, of the length of its part.
        given, taken = ([codec.width(size * n) for size in sizes] for sizes in (give, take))
        codes = encode_pieces(codec, rows.split(give), axis_index(axis))
        moved = all_to_all_single(codes, axis, input_split_sizes=given, output_split_sizes=taken)
        return decode_pieces(codec, moved, [size * n for size in take]).view(sum(take), n)

    return packed(x, 1, run)


def _ppermute(codec: Codec, x: Tree, axis: str, perm: Sequence[tuple[int, int]]) -> Tree:
    run = _in_bytes(codec, axis, lambda codes: ppermute(codes, axis, perm))
    # A rank without a message gets zeros; bytes of zeros need not decode to zeros.
    is_target = (axis_index(axis) == torch.tensor([int(target) for _, target in perm], dtype=torch.int64)).any()
    return optree.tree_map(
        lambda leaf: torch.where(to_device(leaf.device, is_target), leaf, torch.zeros_like(leaf)), packed(x, 0, run)
    )


def _pbroadcast(codec: Codec, x: Tree, axis: str, source: int) -> Tree:
    return packed(x, 0, _in_bytes(codec, axis, lambda codes: pbroadcast(codes, axis, source)))


# The forms of the collectives for leaves in float32, on an axis of several ranks.
_FORMS: dict[Callable[..., Any], Callable[..., Tree]] = {
    psum: _psum,
    pmean: _pmean,
    psum_scatter: _psum_scatter,
    all_gather: _all_gather,
    all_to_all: _all_to_all,
    all_to_all_single: _all_to_all_single,
    ppermute: _ppermute,
    pbroadcast: _pbroadcast,
}
