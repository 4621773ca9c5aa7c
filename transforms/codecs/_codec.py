"""Codecs: the form of floats in messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .._check import flag, whole_number
from ..spec._spec import Spec, factory
from ..spec._specified import Specified
from ._random_bits import Key, Noise


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

    def with_spec(self, spec: Spec) -> Codec:
        return replace(self, spec=spec)

    @property
    def _spec(self) -> Spec:
        if self.spec.name:
            return self.spec
        functions = {"encode": self.encode, "decode": self.decode, "width": self.width}
        options = {"elementwise": self.elementwise, "stochastic": self.stochastic, "key": self.key}
        return Spec("custom", tuple({**functions, **options}.items()))

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
    return replace(codec, key=(whole_number("seed", seed), whole_number("step", step)), spec=Spec(""))


def check_codec(name: str, value: Any, allow_stochastic: bool = True) -> Codec:
    """Return `value` if it is a codec without a key.

    Raises:
        TypeError: it is no codec.
        ValueError: it has a key, or is stochastic and `allow_stochastic` is False.
    """
    if not isinstance(value, Codec):
        raise TypeError(f"{name} must be a Codec, got {value!r}; for example int8()")
    if value.key is not None:
        raise ValueError(
            f"{name} has a key already: {value!r}; pass it without, and the seed as an argument of the hook"
        )
    if value.stochastic and not allow_stochastic:
        raise ValueError(f"{name} must be a codec that is not stochastic, got {value!r}")
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
    if not flag("stochastic", stochastic):
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
