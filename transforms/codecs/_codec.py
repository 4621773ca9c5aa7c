"""Codecs: what floats are while they travel."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .._check import flag, whole_number
from .._spec import Spec, Specified, factory
from ._random_bits import Key, Noise


@dataclass(frozen=True, eq=False, repr=False)
class Codec(Specified):
    """Rows of floats to rows of bytes, and back.

    A row is what one rank sends to another: its bytes hold all that is needed to read it, scales included.

    Args:
        encode: (rows, n) float32 -> (rows, width(n)) uint8; where `stochastic`, of that and of a `Noise`.
        decode: (rows, width(n)) uint8, n -> (rows, n) float32. A row in which something was not finite when it was encoded has
            something that is not finite.
        width: n -> bytes in a row of n floats.
        elementwise: Whether each float's bytes depend on that float alone, so that it does not matter which floats
            stand in a row.
        stochastic: Whether `encode` throws dice; the hook that encodes then keeps the count of its steps.
        key: Where `stochastic`, the seed and the step that noise is made of; see `keyed`. `compress` fills it in.
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
        rest = {"elementwise": self.elementwise, "stochastic": self.stochastic, "key": self.key}
        return Spec("custom", tuple({**functions, **rest}.items()))

    def keyed(self, seed: int, step: int) -> Codec:
        """The same codec with what its dice are keyed by: both the same on all ranks."""
        return keyed(self, seed, step)


@factory
def keyed(codec: Codec, seed: int, step: int) -> Codec:
    """`codec.keyed(seed, step)`: for a collective of one's own; `compress` keys its codec itself, by its seed and its count of steps.

    Raises:
        ValueError: `seed` or `step` is no whole number.

    >>> from fjoin import transforms as tx
    >>> tx.qsgd().keyed(7, 0)
    keyed(qsgd(), 7, 0)
    """
    return replace(codec, key=(whole_number("seed", seed), whole_number("step", step)), spec=Spec(""))


def check_codec(name: str, value: Any, dice: bool = True) -> Codec:
    """The value, if it is a codec, without a key of its own; not `dice`: and throws none.

    Raises:
        TypeError: it is no codec.
        ValueError: it has a key, or throws dice.
    """
    if not isinstance(value, Codec):
        raise TypeError(f"{name} must be a Codec, got {value!r}; for example int8()")
    if value.key is not None:
        raise ValueError(
            f"{name} has a key already: {value!r}; pass it without, and the seed as an argument of the hook"
        )
    if value.stochastic and not dice:
        raise ValueError(f"{name} must be a codec without dice, got {value!r}")
    return value


def refuse_derivative(leaves: Iterable[Tensor], remedy: str) -> None:
    """Raise RuntimeError, with a remedy, where something differentiates through what is to be encoded."""
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
    """(rows, n) of anything as (rows, bytes)."""
    return read(x, torch.uint8)


def read(x: Tensor, dtype: torch.dtype) -> Tensor:
    """(rows, n) as what their bytes are, read as another dtype; a view where torch can make one."""
    if not x.numel():
        return x.new_empty(x.shape[0], x.shape[1] * x.dtype.itemsize // dtype.itemsize, dtype=dtype)
    # Rows at odd places, or of a batch of which only a part is meant: torch refuses to view them.
    odd = any(place * x.dtype.itemsize % dtype.itemsize for place in (x.storage_offset(), x.stride(0)))
    if odd or x.stride(1) != 1 or torch._C._are_functorch_transforms_active():
        x = x.clone(memory_format=torch.contiguous_format)
    return x.view(dtype)


def poison(x: Tensor) -> Tensor:
    """(rows, n) floats: NaN for each row in which something is not finite, else 0; (rows, 1)."""
    return (x * 0).sum(dim=1, keepdim=True)


def by_chance(x: Tensor, dice: Tensor, fraction: int, smallest: float) -> Tensor:
    """Round to so many bits of fraction, up or down by chance, so that the result is right on average.

    Args:
        dice: Like `x`, uniform in [0, 1).
        smallest: The smallest power of two that still has all these bits.
    """
    power = (x.contiguous().view(torch.int32) & 0x7F800000).view(torch.float32)  # 2 ** exponent; infinity stays so
    step = power.clamp(min=smallest) * 2.0**-fraction
    return torch.floor(x / step + dice) * step


@factory
def bfloat16(stochastic: bool = False) -> Codec:
    """Two bytes: float32 without its last 16 bits, rounded; the same range.

    Args:
        stochastic: Round up or down by chance, so that what is decoded is right on average.

    Returns:
        A `Codec`.

    Same as: torch's bf16_compress_hook.

    >>> bfloat16().decode(bfloat16().encode(torch.tensor([[1.0, 1.001]])), 2)
    tensor([[1., 1.]])
    """
    if not flag("stochastic", stochastic):
        return _plain(torch.bfloat16)

    def encode(x: Tensor, noise: Noise) -> Tensor:
        # Up where 16 random bits and the 16 that go make a carry: in integers, since no step is too small for them.
        dice = (noise.uniform() * 2.0**16).to(torch.int32)
        up = (x.contiguous().view(torch.int32) + dice).bitwise_and_(-(2**16)).view(torch.float32)
        return as_bytes(torch.where(torch.isfinite(x), up, x).to(torch.bfloat16))

    return replace(_plain(torch.bfloat16), encode=encode, stochastic=True)


@factory
def bfp16() -> Codec:
    """`bfloat16` under the name that torch's quantized collectives have for it.

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
    """Four bytes, all of a float32: what travels without a codec, and what float64 gradients lose half of.

    Returns:
        A `Codec`.

    >>> float32().decode(float32().encode(torch.tensor([[0.1]])), 1)
    tensor([[0.1000]])
    """
    return _plain(torch.float32)


@factory
def float16() -> Codec:
    """Two bytes, ten bits of them for the fraction, and a power of two for each row that makes it fit.

    Nothing overflows that a float32 holds. The largest of a row is brought to between 32752 and 65504; so values have ten bits down to
    2**-29 of it, fewer down to 2**-40, and are 0 below.

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
    """The largest absolute value of each row, (rows, 1); a NaN where there is one, 0 for rows of nothing."""
    return x.abs().amax(dim=1, keepdim=True) if x.shape[1] else x.new_zeros(x.shape[0], 1)
