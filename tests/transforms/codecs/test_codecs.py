"""Codecs: unbiased where documented, with the documented error bounds, and equal to the codes of torch's own hooks."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from fjoin import transforms as tx
from fjoin.transforms.base.specs import fingerprint
from fjoin.transforms.codecs import _blocks as _scaled, key_of, places_of
from fjoin.transforms.codecs._blocks import bits_of, pack, unpack, width
from tests.helpers import same_bits

ON_AVERAGE: dict[str, Any] = {
    "bfloat16": lambda: tx.bfloat16(stochastic=True), "fp8": lambda: tx.fp8(stochastic=True),
    "fp8_e5m2": lambda: tx.fp8(dtype=torch.float8_e5m2, stochastic=True),
    "int8": lambda: tx.int8(block=16, stochastic=True), "int4": lambda: tx.int4(block=16, stochastic=True),
    "qsgd": lambda: tx.qsgd(levels=3, block=16), "top_k of noise": lambda: tx.top_k(1.0, tx.qsgd()),
}  # fmt: skip


def thrown(codec: tx.Codec, x: Tensor, seed: int = 0, step: int = 0) -> Tensor:
    """The decoded codes of rows of the leaf "w"."""
    own, common = key_of((seed, step), 0), key_of((seed, step))
    places = places_of({"w": x[0]}).expand(x.shape)
    return codec.decode(codec.encode(x, tx.Noise(places, own, common)), x.shape[1])


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ON_AVERAGE)
def test_right_on_average(name: str) -> None:
    """The mean of 400 roundings of 50 numbers deviates by standard errors, as for random rounding."""
    x = torch.randn(1, 50, generator=torch.Generator().manual_seed(1))
    x = x + 0.1 * x.sign()  # very small values would hardly ever be drawn
    throws = torch.cat([thrown(ON_AVERAGE[name](), x, step=step) for step in range(400)]).double()
    off, spread = throws.mean(0) - x[0], throws.std(0) / 20
    thrown_at = spread > 0
    assert thrown_at.sum() >= 40 and (off[~thrown_at].abs() <= 1e-3).all()
    assert (off / spread)[thrown_at].square().mean() < 2.0


def test_largest_value_does_not_overflow_the_largest_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rounded scale may give 127.00001, which random bits near 1 would round to 128, a byte of -128."""
    x = torch.rand(3000, 8, generator=torch.Generator().manual_seed(0)) + 1.0
    monkeypatch.setattr(tx.Noise, "uniform", lambda self: torch.full(self.positions.shape, 1 - 2.0**-24))
    over = (x.amax(1) * (1 / (x.amax(1) / 127.0)) > 127).sum()
    assert over > 0
    for codec in (tx.int8(stochastic=True), tx.int4(stochastic=True), tx.qsgd(127), tx.fp8(stochastic=True)):
        noise = tx.Noise(torch.zeros(3000, 8, dtype=torch.int32), torch.tensor(0), torch.tensor(0))
        assert (codec.decode(codec.encode(x, noise), 8) > 0).all(), codec


@pytest.mark.parametrize("block", [7, 300])
def test_a_long_row_is_encoded_in_slices(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """The result does not depend on the slices, since random bits belong to positions."""
    codec, x = tx.qsgd(7, block), torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    places = torch.arange(3000, dtype=torch.int32).view(3, 1000)
    noise = tx.Noise(places, torch.tensor(1), torch.tensor(2))
    whole = codec.encode(x, noise)
    for size in (1, 64, 10**9):
        monkeypatch.setattr(_scaled, "_SLICE", size)
        assert torch.equal(codec.encode(x, noise), whole)


def test_random_bits_depend_on_seed_step_and_path_only() -> None:
    codec, x = tx.bfloat16(stochastic=True), torch.full((1, 1000), 1.001)
    assert same_bits(thrown(codec, x), thrown(codec, x))
    for other in (thrown(codec, x, seed=1), thrown(codec, x, step=1), thrown(codec, x, seed=2**40)):
        assert 0.2 < (other == thrown(codec, x)).float().mean() < 0.9

    def three(bucket: str) -> Any:
        hook = tx.compress(codec, tx.mean("data"), seed=5)
        params = {"a": torch.full((300,), 1.001), "b": torch.full((20, 20), 1.001)}
        state, outs = hook.init(params), []
        for _ in range(3):
            if bucket == "one":
                out, state = hook.update(params, state)
            else:
                parts = [hook.update({path: params[path]}, state) for path in reversed(params)]
                out, state = {**parts[0][0], **parts[1][0]}, parts[0][1]
            outs.append(out)
        return outs

    one = tx.simulate(lambda: three("one"), {"data": 2})[0]
    assert same_bits(one, tx.simulate(lambda: three("each"), {"data": 2})[0])
    assert not torch.equal(one[0]["a"], one[1]["a"]) and not torch.equal(one[0]["a"], one[0]["b"].flatten()[:300])
    # Two ranks use random bits of their own: with the same ones all means would be one of two neighbours.
    assert len(one[0]["a"].unique()) == 3


def test_as_torch_encodes() -> None:
    """The same codes as of quantize_per_tensor and quantize_per_channel with the parameters of torch's observers."""
    warnings.filterwarnings("ignore", ".*deprecated and will be removed", UserWarning)
    from torch.ao.quantization.observer import MinMaxObserver, PerChannelMinMaxObserver

    x = torch.randn(4096, generator=torch.Generator().manual_seed(0)) + 0.3
    whole = MinMaxObserver(dtype=torch.quint8)
    whole(x)
    scale, zero = whole.calculate_qparams()
    want = torch.quantize_per_tensor(x, float(scale), int(zero), torch.quint8)
    assert torch.equal(tx.uint8().encode(x.view(1, -1))[0, 5:], want.int_repr())
    each = PerChannelMinMaxObserver(dtype=torch.quint8)
    each(x.view(8, 512))
    scales, zeros = each.calculate_qparams()
    rows = torch.quantize_per_channel(x.view(8, 512), scales, zeros, 0, torch.quint8)
    assert torch.equal(tx.uint8(512).encode(x.view(1, -1))[0, 40:], rows.int_repr().flatten())
    torch.testing.assert_close(
        tx.uint8(512).decode(tx.uint8(512).encode(x.view(1, -1)), 4096)[0], rows.dequantize().flatten()
    )

    two_d = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    theirs = torch.ops.quantization._Bfloat16QuantizedToFloat(torch.ops.quantization._FloatToBfloat16Quantized(two_d))
    ours = tx.bfp16().decode(tx.bfp16().encode(two_d), 8)
    assert (ours - theirs).abs().max() <= theirs.abs().max() * 2**-7 and (ours - two_d).abs().max() <= (
        theirs - two_d
    ).abs().max()


def test_float16_holds_very_large_and_very_small_values() -> None:
    """A cast alone gives infinity or 0."""
    for x in (torch.tensor([[1e37, -3e38, 2e36]]), torch.tensor([[1e-9, -3e-10, 2e-14]])):
        assert not torch.allclose(x.half().float(), x, rtol=0.01, atol=0.0)
        assert torch.allclose(tx.float16().decode(tx.float16().encode(x), 3), x, rtol=1e-3, atol=0.0)


def test_signs() -> None:
    x = torch.tensor([[1.0, -2.0, 3.0, 0.0, -4.0, -6.0]])
    codec, large = tx.sign(block=4), torch.full((1, 6), 3e38)
    assert codec.decode(codec.encode(x), 6).tolist() == [[1.5, -1.5, 1.5, 1.5, -5.0, -5.0]]
    assert torch.equal(codec.decode(codec.encode(large), 6), large)


@pytest.mark.parametrize("n", [1, 7, 40000, 70000])
@pytest.mark.parametrize("k", [1, 0.01, 0.3, 1.0])
def test_top_k_matches_torch_topk(k: Any, n: int) -> None:
    x = torch.randn(2, n, generator=torch.Generator().manual_seed(n))
    codec, count = tx.top_k(k), k if isinstance(k, int) else -int(-k * n // 1)
    back = codec.decode(codec.encode(x), n)
    at = x.abs().topk(count, dim=1).indices
    assert torch.equal(back, torch.zeros_like(x).scatter(1, at, x.gather(1, at)))
    assert codec.width(n) == count * (6 if n <= 65536 else 8)


@pytest.mark.parametrize("base", [2, 3, 5, 7, 15, 16, 17, 255, 256])
def test_packed_digits_round_trip(base: int) -> None:
    for n in (0, 1, 4, 5, 8, 9, 100):
        digits = torch.randint(0, base, (3, n), generator=torch.Generator().manual_seed(n)).to(torch.uint8)
        packed = pack(digits, base)
        assert packed.shape == (3, width(n, base)) and torch.equal(unpack(packed, n, base), digits)
        assert width(n, base) == math.ceil(n * bits_of(base) / 8) and base <= 2 ** bits_of(base)


def test_stochastic_bfloat16_with_flushed_denormals() -> None:
    codec, key = tx.bfloat16(stochastic=True), torch.tensor(1, dtype=torch.int32)
    x = torch.tensor([[1.0, 0.0, -0.0, 1e-3, 1e-40, math.inf, -math.inf, math.nan]])
    noise = tx.Noise(torch.arange(8, dtype=torch.int32).view(1, 8), key, key)
    torch.set_flush_denormal(True)
    try:
        back = codec.decode(codec.encode(x, noise), 8)
    finally:
        torch.set_flush_denormal(False)
    assert back[0, :3].tolist() == [1.0, 0.0, 0.0] and abs(back[0, 3] - 1e-3) < 1e-5 and abs(back[0, 4]) < 1e-38
    assert back[0, 5:7].tolist() == [math.inf, -math.inf] and back[0, 7].isnan()


def test_a_key_is_part_of_a_codec() -> None:
    """Ranks with other keys can be distinguished; hooks key their codecs themselves."""
    one, same, other = (tx.qsgd().keyed(*key) for key in ((7, 0), (7, 0), (8, 0)))
    assert one == same != other and one != tx.qsgd()
    assert fingerprint(one) != fingerprint(other) and one.key == (7, 0) and repr(one) == "keyed(qsgd(), 7, 0)"
