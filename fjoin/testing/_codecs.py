"""The laws of codecs.

Each law is a function whose argument makes a codec. It raises AssertionError where the law is broken.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import transforms as tx
from ._compare import repeated, same_bits

SIZES = (0, 1, 2, 3, 7, 8, 63, 64, 65, 256, 300, 1000)


def _rows(n: int, rows: int = 3) -> Tensor:
    """Rows of very different sizes."""
    g = torch.Generator().manual_seed(n)
    return torch.randn(rows, n, generator=g) * 10.0 ** torch.arange(-2, rows - 2).unsqueeze(1)


def _encode(codec: tx.Codec, x: Tensor, first: int = 0) -> Tensor:
    """Encode with random bits that depend only on the position in a row."""
    if not codec.stochastic:
        return codec.encode(x)
    places = ((torch.arange(x.shape[1], dtype=torch.int32) + first) * 7919).expand(x.shape)
    return codec.encode(x, tx.Noise(places, torch.tensor(1, dtype=torch.int32), torch.tensor(2, dtype=torch.int32)))


def encodes_purely(make: Callable[[], tx.Codec]) -> None:
    """A repeated call gives the same result, and its argument stays unchanged."""
    codec = make()
    for n in SIZES:
        data = repeated(lambda x: _encode(codec, x), _rows(n))
        repeated(lambda data, n=n: codec.decode(data, n), data)  # type: ignore[misc]


def says_its_width(make: Callable[[], tx.Codec]) -> None:
    """Rows of n floats encode to rows of width(n) bytes, and decode to n floats."""
    codec = make()
    for n in SIZES:
        for rows in (0, 1, 3):
            data = _encode(codec, _rows(n, rows))
            assert data.dtype is torch.uint8 and data.shape == (rows, codec.width(n)), (n, rows, data.shape)
            back = codec.decode(data, n)
            assert back.dtype is torch.float32 and back.shape == (rows, n), (n, rows, back.shape)


def stays_near(make: Callable[[], tx.Codec]) -> None:
    """No value changes its sign, zeros stay zeros, not all become 0, and no error exceeds the row's largest magnitude."""
    codec, kept = make(), False
    for n in SIZES[1:]:
        x = torch.cat([_rows(n), torch.zeros(1, n)])
        back = codec.decode(_encode(codec, x), n)
        kept = kept or bool(back.any())
        assert (back * x >= 0).all(), "a sign has changed"
        assert ((back - x).abs() <= x.abs().amax(1, keepdim=True)).all()
    assert kept, "everything has become 0"


def serves_large_and_small(make: Callable[[], tx.Codec]) -> None:
    """Float32 values do not overflow, and very small values become 0 or stay near."""
    codec = make()
    for size in (1e-45, 1e-38, 1e-20, 1e5, 1e20, 3e38):
        x = torch.tensor([[size, -size, 0.0, size / 2]])
        back = codec.decode(_encode(codec, x), 4)
        assert torch.isfinite(back).all() or size > 1e38, size
        assert ((back - x).abs() <= size).all() or size > 1e38, size


def tells_nonfinite(make: Callable[[], tx.Codec]) -> None:
    """A NaN or an infinity never decodes to a finite number, at any position."""
    codec = make()
    for n in SIZES[1:]:
        for bad in (float("nan"), float("inf"), -float("inf")):
            for at in {0, n // 2, n - 1}:
                x = _rows(n)
                x[1, at] = bad
                back = codec.decode(_encode(codec, x), n)
                assert not torch.isfinite(back[1, at]), (n, bad, at)
                assert torch.isfinite(back[[0, 2]]).all(), "another row was changed"


def reads_rows_alone(make: Callable[[], tx.Codec]) -> None:
    """A row's bytes depend only on that row, and suffice to decode it."""
    codec = make()
    for n in SIZES:
        x = _rows(n)
        together = _encode(codec, x)
        for row in range(3):
            alone = _encode(codec, x[row : row + 1])
            assert same_bits(alone, together[row : row + 1])
            assert same_bits(codec.decode(alone, n), codec.decode(together, n)[row : row + 1])


def keeps_to_elements(make: Callable[[], tx.Codec]) -> None:
    """elementwise: a decoded float does not depend on the other floats of its row."""
    codec = make()
    if not codec.elementwise:
        return
    x = _rows(65, 1) * torch.logspace(-6, 6, 65)
    back = codec.decode(_encode(codec, x), 65)
    for i in range(65):
        assert same_bits(codec.decode(_encode(codec, x[:, i : i + 1], first=i), 1), back[:, i : i + 1])
