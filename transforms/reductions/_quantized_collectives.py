"""Collectives by axis name with encoded floats.

The leaves are packed as the plain collectives pack them. Each row of floats for a rank becomes a row of bytes: the
sender encodes it once, and the receiver decodes it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import optree
import torch
from torch import Tensor

from .._axis_env import AxisName, lookup
from .._tree import Tree, to_device
from ..axes._collectives import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    pbroadcast,
    place_gathered,
    place_received,
    pmean,
    ppermute,
    psum,
    psum_scatter,
    split_ranks,
)
from ..axes._primitive import as_tensor, names, note, packed
from ..axes._ragged import all_to_all_single, check_splits
from ..codecs._codec import Codec, refuse_derivative
from ..codecs._random_bits import places_of
from ..codecs._rows import encode_rows
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
    coded = next((mine for plain, mine in _SERVED if plain is collective), None)
    if coded is None:
        served = ", ".join(plain.__name__ for plain, _ in _SERVED)
        raise TypeError(f"quantized serves {served}, got {_called(collective)}; for a hook write compress(codec, hook)")
    if not isinstance(codec, Codec):
        raise TypeError(
            f"quantized takes a collective and a Codec, got {_called(codec)}; for example quantized(psum, int8())"
        )
    # A partial: its fingerprint depends on the codec.
    return functools.update_wrapper(functools.partial(coded, codec), collective)  # type: ignore[return-value]


def _called(value: Any) -> str:
    return getattr(value, "__name__", None) or repr(value)


def _psum(codec: Codec, x: Tree, axis: AxisName) -> Tree:
    return _on_floats(
        x, axis, lambda floats: packed(floats, 0, lambda flat: _mean(codec, flat, axis) * axis_size(axis)),
        lambda rest: psum(rest, axis),
    )  # fmt: skip


def _pmean(codec: Codec, x: Tree, axis: AxisName) -> Tree:
    return _on_floats(
        x, axis, lambda floats: packed(floats, 0, lambda flat: _mean(codec, flat, axis)), lambda rest: pmean(rest, axis)
    )


def _pbroadcast(codec: Codec, x: Tree, axis: str, source: int) -> Tree:
    def run(flat: Tensor) -> Tensor:
        return _move(codec, flat, axis, lambda codes: pbroadcast(codes, axis, source))

    return _on_floats(x, axis, lambda floats: packed(floats, 0, run), lambda rest: pbroadcast(rest, axis, source))


def _ppermute(codec: Codec, x: Tree, axis: str, perm: Sequence[tuple[int, int]]) -> Tree:
    def run(flat: Tensor) -> Tensor:
        out = _move(codec, flat, axis, lambda codes: ppermute(codes, axis, perm))
        targets = torch.tensor([int(target) for _, target in perm], dtype=torch.int64)
        # A rank without a message gets zeros; bytes of zeros need not decode to zeros.
        return torch.where(to_device(out.device, (axis_index(axis) == targets).any()), out, torch.zeros_like(out))

    return _on_floats(x, axis, lambda floats: packed(floats, 0, run), lambda rest: ppermute(rest, axis, perm))


def _all_gather(codec: Codec, x: Tree, axis: AxisName, *, dim: int = 0, tiled: bool = False) -> Tree:
    def run(flat: Tensor) -> Tensor:
        return codec.decode(all_gather(_encode(codec, flat.unsqueeze(0), axis)[0], axis), flat.shape[0])

    return _on_floats(
        x, axis, lambda floats: place_gathered(packed(floats, 0, run), dim, tiled),
        lambda rest: all_gather(rest, axis, dim=dim, tiled=tiled),
    )  # fmt: skip


def _all_to_all(
    codec: Codec, x: Tree, axis: str, split_dim: int = 0, concat_dim: int = 0, *, tiled: bool = False
) -> Tree:
    def run(floats: Tree) -> Tree:
        rows = split_ranks("all_to_all", floats, axis, split_dim, tiled)
        received = packed(rows, 1, lambda flat: _exchange(codec, flat, axis))
        return place_received(received, split_dim, concat_dim, tiled)

    return _on_floats(x, axis, run, lambda rest: all_to_all(rest, axis, split_dim, concat_dim, tiled=tiled))


def _all_to_all_single(
    codec: Codec, x: Tree, axis: str, *, input_split_sizes: Any = None, output_split_sizes: Any = None
) -> Tree:
    if input_split_sizes is None and output_split_sizes is None:
        return _all_to_all(codec, x, axis, tiled=True)
    give, take = check_splits(x, axis, input_split_sizes, output_split_sizes)

    def run(rows: Tensor) -> Tensor:
        lookup(axis).check_rows(rows.shape[1], give, take)
        # One row of bytes for each receiver, of the length of its part.
        coded = [
            encode_rows(codec, piece.reshape(1, -1), axis_index(axis), i)[0] for i, piece in enumerate(rows.split(give))
        ]
        widths = [codec.width(n * rows.shape[1]) for n in take]
        moved = all_to_all_single(
            torch.cat(coded), axis, input_split_sizes=[len(row) for row in coded], output_split_sizes=widths
        )
        pieces = [
            codec.decode(row.unsqueeze(0), n * rows.shape[1]).view(n, rows.shape[1])
            for row, n in zip(moved.split(widths), take, strict=True)
        ]
        return torch.cat(pieces)

    return _on_floats(
        x, axis, lambda floats: packed(floats, 1, run),
        lambda rest: all_to_all_single(rest, axis, input_split_sizes=give, output_split_sizes=take),
    )  # fmt: skip


def _psum_scatter(codec: Codec, x: Tree, axis: AxisName, *, dim: int = 0, tiled: bool = False) -> Tree:
    def run(floats: Tree) -> Tree:
        rows = split_ranks("psum_scatter", floats, axis, dim, tiled)
        out = packed(rows, 1, lambda flat: _exchange(codec, flat, axis).sum(0))
        return optree.tree_map(lambda leaf: leaf.movedim(0, dim), out) if tiled else out

    return _on_floats(x, axis, run, lambda rest: psum_scatter(rest, axis, dim=dim, tiled=tiled))


_SERVED: tuple[tuple[Callable[..., Any], Callable[..., Any]], ...] = (
    (psum, _psum), (pmean, _pmean), (psum_scatter, _psum_scatter), (all_gather, _all_gather), (all_to_all, _all_to_all),
    (all_to_all_single, _all_to_all_single),
    (ppermute, _ppermute), (pbroadcast, _pbroadcast),
)  # fmt: skip


def _on_floats(
    x: Tree, axis: AxisName, coded: Callable[[Tree], Tree], plain: Callable[[Tree], Tree]
) -> Tree:  # fmt: skip
    """`coded` for the floating-point leaves, in float32, and `plain` for the others; on one rank `plain` for all."""
    x = optree.tree_map(as_tensor, x)
    if axis_size(axis) == 1:
        return plain(x)
    leaves, structure = optree.tree_flatten(x)
    floating = [leaf for leaf in leaves if leaf.is_floating_point()]
    refuse_derivative(floating, "differentiate through the collective itself, or detach its input")
    # None is no leaf: omitted leaves take no space in a message, and the paths do not change.
    others = plain(optree.tree_map(lambda leaf: None if leaf.is_floating_point() else leaf, x))
    if floating:
        note(axis, ", ".join(f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}" for leaf in floating))
    floats = coded(optree.tree_map(lambda leaf: leaf.to(torch.float32) if leaf.is_floating_point() else None, x))
    of_floats, of_others = iter(optree.tree_leaves(floats)), iter(optree.tree_leaves(others))
    out: list[Any] = [
        next(of_floats).to(leaf.dtype) if leaf.is_floating_point() else next(of_others) for leaf in leaves
    ]
    return optree.tree_unflatten(structure, out)


def _mean(codec: Codec, flat: Tensor, axis: AxisName) -> Tensor:
    one, words = (torch.ones(shape, dtype=torch.float64, device=flat.device) for shape in ((), (0,)))
    positions = places_of({"": flat}, flat.device) if codec.stochastic else None
    return coded_mean(Term(codec, flat, one, words, positions=positions), axis).mean


def _move(codec: Codec, flat: Tensor, axis: AxisName, move: Callable[[Tensor], Tensor]) -> Tensor:
    return codec.decode(move(_encode(codec, flat.unsqueeze(0), axis)[0]).unsqueeze(0), flat.shape[0])[0]


def _encode(codec: Codec, rows: Tensor, axis: AxisName) -> Tensor:
    return encode_rows(codec, rows, axis_index(axis))


def _exchange(codec: Codec, rows: Tensor, axis: AxisName) -> Tensor:
    """(ranks, n): row s goes to rank s; the result has a row from each rank. Bytes move over one axis after another."""
    sizes = [axis_size(name) for name in names(axis)]
    codes = _encode(codec, rows, axis)
    moved = codes.reshape((*sizes, codes.shape[1]))
    for i, name in enumerate(names(axis)):
        moved = all_to_all(moved, name, i, i)
    return codec.decode(moved.reshape(codes.shape), rows.shape[1])
