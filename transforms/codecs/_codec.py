"""`Codec`, its rows, and its random bits."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base import Spec, Specified, checks, factory, trees

Key = tuple[int, int]  # seed, step

_GOLDEN = -1640531527  # 2**32 / the golden ratio, as an int32


class Noise(NamedTuple):
    """The source of random bits for `Codec.encode` of a stochastic codec.

    positions: (rows, n) int32, a number for each float, computed from its path and its offset in the leaf.
    own: 0-d int32, a key that differs between seeds, steps, ranks and messages.
    common: 0-d int32, a key that differs between seeds and steps only.

    >>> noise = Noise(torch.arange(4, dtype=torch.int32).view(1, 4), torch.tensor(7), torch.tensor(1))
    >>> noise.uniform()
    tensor([[0.5803, 0.9153, 0.2603, 0.7209]])
    """

    positions: Tensor
    own: Tensor
    common: Tensor

    def uniform(self) -> Tensor:
        """(rows, n) float32 in [0, 1), independent for each position and each `own`."""
        bits = hash32_(self.positions + self.own.to(torch.int32))
        return bits.bitwise_right_shift_(8).bitwise_and_(0xFFFFFF).to(torch.float32).mul_(2.0**-24)


def hash32_(h: Tensor) -> Tensor:
    """Hashes int32 to int32 in place, one to one: each bit depends on all bits.

    Source: C. Wellons, lowbias32, of his hash-prospector.
    """
    for shift, factor in ((16, 0x7FEB352D), (15, -2073254261)):
        h.bitwise_xor_((h >> shift).bitwise_and_((1 << (32 - shift)) - 1)).mul_(factor)
    return h.bitwise_xor_((h >> 16).bitwise_and_(0xFFFF))


def places_of(leaves: Mapping[str, Tensor], device: torch.device | None = None) -> Tensor:
    """(n,) int32: a number for each element of each leaf, computed from its path and its offset in the leaf."""
    each = [
        torch.arange(leaf.numel(), dtype=torch.int32, device=device) * _GOLDEN + _signed(zlib.crc32(path.encode()))
        for path, leaf in leaves.items()
    ]
    return torch.cat(each) if each else torch.zeros(0, dtype=torch.int32, device=device)


def key_of(key: Key, *folded: int | Tensor, device: torch.device | None = None) -> Tensor:
    """A 0-d int32 key: a hash of the seed, the step, and the `folded` numbers."""
    seed, step = key
    out = torch.full((), _signed(seed ^ (seed >> 32)), dtype=torch.int32, device=device)
    for part in (step, *folded):
        part = trees.to_device(device, part, torch.int32) if isinstance(part, Tensor) else _signed(part)
        out = hash32_(out * _GOLDEN + part + 1)
    return out


def _signed(n: int) -> int:
    """The last 32 bits, as an int32."""
    return (n & 0xFFFFFFFF) - ((n & 0x80000000) << 1)


@dataclass(frozen=True, eq=False, repr=False)
class Codec(Specified):
    """Encodes rows of floats as rows of bytes, and decodes them.

    A row is the message of one rank to another. Its bytes contain everything that is needed to decode it, scales
    included.

    Args:
        encode: (rows, n) float32 -> (rows, width(n)) uint8; where `stochastic`, a function of that and a `Noise`.
        decode: (rows, width(n)) uint8, n -> (rows, n) float32. If an input row has a non-finite value, so has the
            decoded row.
        width: n -> bytes in a row of n floats.
        elementwise: Whether each float's bytes depend on that float alone, and not on the other floats of its row.
        stochastic: Whether `encode` uses random bits; the hook that encodes then counts its steps.
        key: Where `stochastic`, the seed and the step of the random bits; see `keyed`. `compress` fills it in.
        spec: The codec as data; `factory` fills it in.

    >>> from fjoin import transforms as tx
    >>> codec = tx.int8(block=2)
    >>> x = torch.tensor([[1.0, -0.5, 100.0]])
    >>> codec.decode(codec.encode(x), 3)
    tensor([[  1.0000,  -0.5039, 100.0000]])
    >>> codec.width(3)
    11
    """

    encode: Callable[..., Tensor]
    decode: Callable[[Tensor, int], Tensor]
    width: Callable[[int], int]
    elementwise: bool = False
    stochastic: bool = False
    key: Key | None = None
    spec: Spec = Spec("")

    def __post_init__(self) -> None:
        functions = {"encode": self.encode, "decode": self.decode, "width": self.width}
        self.identify(**functions, elementwise=self.elementwise, stochastic=self.stochastic, key=self.key)

    def keyed(self, seed: int, step: int) -> Codec:
        """The same codec with the key of its random bits: `seed` and `step`, both equal on all ranks."""
        return keyed(self, seed, step)


@factory
def keyed(codec: Codec, seed: int, step: int) -> Codec:
    """`codec.keyed(seed, step)`, for your own collectives.

    `compress` keys its codec itself, by its seed and its count of steps.

    Raises:
        ValueError: `seed` or `step` is no whole number.

    >>> from fjoin import transforms as tx
    >>> tx.qsgd().keyed(7, 0)
    keyed(qsgd(), 7, 0)
    """
    return replace(codec, key=(checks.whole_number("seed", seed), checks.whole_number("step", step)), spec=Spec(""))


def check_codec(name: str, value: Any) -> Codec:
    """Return `value` if it is a codec without a key.

    Raises:
        TypeError: it is no codec.
        ValueError: it has a key.
    """
    if not isinstance(value, Codec):
        raise TypeError(f"{name} must be a Codec, got {value!r}; for example int8()")
    if value.key is not None:
        raise ValueError(f"{name} has a key already: {value!r}; pass it without, and the seed to the hook")
    return value


def refuse_derivative(leaves: Iterable[Tensor], remedy: str) -> None:
    """Raise RuntimeError, with a remedy, if a derivative is taken through values to be encoded."""
    if any(_is_differentiated(leaf) for leaf in leaves):
        raise RuntimeError(f"codes have no derivative; {remedy}")


def _is_differentiated(leaf: Tensor) -> bool:
    inside = leaf
    while torch._C._functorch.is_functorch_wrapped_tensor(inside):
        if torch._C._functorch.is_gradtrackingtensor(inside):
            return True
        inside = torch._C._functorch.get_unwrapped(inside)
    return torch.is_grad_enabled() and leaf.requires_grad


def as_bytes(x: Tensor) -> Tensor:
    """(rows, n) of any dtype as (rows, bytes)."""
    return read(x, torch.uint8)


def read(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes of (rows, n) read as another dtype; a view where torch can make one."""
    if not x.numel():
        return x.new_empty(x.shape[0], x.shape[1] * x.dtype.itemsize // dtype.itemsize, dtype=dtype)
    # torch refuses to view rows at odd offsets, and rows that are part of a wider batch.
    odd = any(place * x.dtype.itemsize % dtype.itemsize for place in (x.storage_offset(), x.stride(0)))
    if odd or x.stride(1) != 1 or torch._C._are_functorch_transforms_active():
        x = x.clone(memory_format=torch.contiguous_format)
    return x.view(dtype)


def stochastic_round(x: Tensor, uniform: Tensor, fraction: int, smallest: float) -> Tensor:
    """Stochastic rounding to `fraction` bits of fraction; the result is unbiased.

    Args:
        uniform: Random numbers like `x`, in [0, 1).
        smallest: The smallest power of two with all these bits.
    """
    power = (x.contiguous().view(torch.int32) & 0x7F800000).view(torch.float32)  # 2 ** exponent; infinity stays so
    step = power.clamp(min=smallest) * 2.0**-fraction
    return torch.floor(x / step + uniform) * step


@factory
def bfloat16(stochastic: bool = False) -> Codec:
    """Two bytes: float32 without its last 16 bits, rounded; the same range.

    Args:
        stochastic: Use stochastic rounding, so that decoded values are unbiased.

    Returns:
        A `Codec`.

    Same as: torch's bf16_compress_hook.

    >>> bfloat16().decode(bfloat16().encode(torch.tensor([[1.0, 1.001]])), 2)
    tensor([[1., 1.]])
    """
    if not stochastic:
        return _plain(torch.bfloat16)

    def encode(x: Tensor, noise: Noise) -> Tensor:
        # Up where 16 random bits plus the 16 dropped bits carry. In integers, which have no underflow for small steps.
        bits = (noise.uniform() * 2.0**16).to(torch.int32)
        up = (x.contiguous().view(torch.int32) + bits).bitwise_and_(-(2**16)).view(torch.float32)
        return as_bytes(torch.where(torch.isfinite(x), up, x).to(torch.bfloat16))

    return replace(_plain(torch.bfloat16), encode=encode, stochastic=True)


@factory
def bfp16() -> Codec:
    """`bfloat16` under its name in torch's quantized collectives.

    Returns:
        A `Codec`.

    Same as: BFP16 of torch's quantized collectives, for tensors of any shape.

    >>> bfp16().decode(bfp16().encode(torch.tensor([[1.0, 1.001]])), 2)
    tensor([[1., 1.]])
    """
    return _plain(torch.bfloat16)


def _plain(dtype: torch.dtype) -> Codec:
    def decode(data: Tensor, n: int) -> Tensor:
        return read(data, dtype).to(torch.float32)

    return Codec(lambda x: as_bytes(x.to(dtype)), decode, lambda n: n * dtype.itemsize, elementwise=True)


@factory
def float32() -> Codec:
    """Four bytes: the whole float32, as without a codec; float64 gradients lose half of their bits.

    Returns:
        A `Codec`.

    >>> float32().decode(float32().encode(torch.tensor([[0.1]])), 1)
    tensor([[0.1000]])
    """
    return _plain(torch.float32)


@factory
def float16() -> Codec:
    """Two bytes with ten bits of fraction, and for each row a power of two that scales it into range.

    Values within the range of float32 do not overflow. The largest value of a row is scaled to between 32752 and 65504.
    So values have ten bits of fraction down to 2**-29 of the largest one, fewer bits down to 2**-40, and are 0 below
    that.

    Returns:
        A `Codec`.

    Same as: torch's fp16_compress_hook, which makes infinity of 1e5.

    >>> float16().decode(float16().encode(torch.tensor([[100032.0, 1.0]])), 2)
    tensor([[1.0003e+05, 1.0000e+00]])
    """

    def encode(x: Tensor) -> Tensor:
        largest = _largest(x)
        exponent = torch.ceil(torch.log2(largest / 65504.0)).clamp(min=-100.0)
        unit = torch.where(torch.isfinite(largest), torch.exp2(exponent), torch.ones_like(largest))
        return torch.cat([as_bytes((x / unit).to(torch.float16)), as_bytes(unit)], dim=1)

    def decode(data: Tensor, n: int) -> Tensor:
        return read(data[:, : 2 * n], torch.float16).to(torch.float32).mul_(read(data[:, 2 * n :], torch.float32))

    return Codec(encode, decode, lambda n: 2 * n + 4)


def _largest(x: Tensor) -> Tensor:
    """The largest absolute value of each row, (rows, 1); NaN for rows with a NaN, 0 for empty rows."""
    return x.abs().amax(dim=1, keepdim=True) if x.shape[1] else x.new_zeros(x.shape[0], 1)


def encode_rows(
    codec: Codec,
    rows: Tensor,
    sender: Tensor | int,
    message: int = 0,
    positions: Tensor | None = None,
    answer: bool = False,
) -> Tensor:
    """Encode (rows, n) as (rows, width).

    Args:
        sender: The index of this rank. For an answer the index of the group of ranks that receives it, so that its
            random bits do not depend on the rank that sums an element, which depends on the bucket layout.
        message: A number for each message of one call.
        positions: (rows, n) int32, the position of each float; None: as if all were one leaf.
        answer: Whether this is the answer to a message.

    Raises:
        ValueError: the codec is stochastic and has no key.
    """
    if not codec.stochastic:
        return codec.encode(rows)
    if codec.key is None:
        raise ValueError(f"{codec!r} is stochastic: use it in compress, or pass codec.keyed(seed, step)")
    if positions is None:
        positions = places_of({"": rows}, rows.device).view(rows.shape)
    own = key_of(codec.key, sender, 2 * message + answer, device=rows.device)
    return codec.encode(rows, Noise(positions, own, key_of(codec.key, device=rows.device)))


def encode_pieces(codec: Codec, pieces: Iterable[Tensor], sender: Tensor | int) -> Tensor:
    """The bytes of pieces of any lengths, each a message of its own, one after the other."""
    return torch.cat([encode_rows(codec, piece.reshape(1, -1), sender, i)[0] for i, piece in enumerate(pieces)])


def decode_pieces(codec: Codec, data: Tensor, sizes: Sequence[int]) -> Tensor:
    """The floats of rows of bytes that lie one after the other, `sizes[i]` of row i; flat."""
    widths = [codec.width(n) for n in sizes]
    if len(set(sizes)) == 1:
        return codec.decode(data.view(len(sizes), widths[0]), sizes[0]).flatten()
    rows = zip(data.split(widths), sizes, strict=True)
    return torch.cat([codec.decode(row.unsqueeze(0), n)[0] for row, n in rows])
