"""Collectives with encoded floats: the meaning of the plain ones, within a codec's error; their messages."""

from __future__ import annotations

import inspect
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fjoin import transforms as tx
from fjoin.transforms.axes._simulate import SimulatedAxis
from fjoin.transforms.base.specs import fingerprint
from tests.collective_table import OPS, SIZES, inputs
from tests.helpers import assert_untouched, raises_text, same_bits, snapshot

# Each codec, and its largest error relative to the largest value encoded with it.
CODECS: dict[str, tuple[Any, float]] = {
    "float32": (tx.float32(), 1e-7), "bfloat16": (tx.bfloat16(), 2.0**-8), "float16": (tx.float16(), 2.0**-11),
    "fp8": (tx.fp8(block=8), 1 / 15), "fp8 e5m2": (tx.fp8(dtype=torch.float8_e5m2), 1 / 7),
    "int8": (tx.int8(), 1 / 253), "int4": (tx.int4(block=4), 1 / 13),
    "int8 by chance": (tx.int8(stochastic=True).keyed(1, 2), 1 / 126),
}  # fmt: skip
SERVED = ["psum", "pmean", "all_gather", "all_to_all", "all_to_all_single"]
CALLS: dict[str, Any] = {
    "psum": lambda f, x, n: f(x, "data"),
    "pmean": lambda f, x, n: f({k: v for k, v in x.items() if k != "torch.bool"}, "data"),
    "all_gather": lambda f, x, n: f(x, "data", dim=1), "all_to_all": lambda f, x, n: f(x, "data", tiled=True),
    "all_to_all_single": lambda f, x, n: f(x, "data"),
}  # fmt: skip


def on_ranks(name: str, f: Any, xs: list[Any]) -> list[Any]:
    return tx.simulate(lambda x: CALLS[name](f, x, len(xs)), {"data": len(xs)}, xs)


AXES = {"node": 2, "local": 3}
BOTH = ("node", "local")


SERVED_OPS = [case for case in OPS if not case.startswith(("pmax", "pmin", "ppermute", "pbroadcast"))]


def all_quantized(monkeypatch: pytest.MonkeyPatch, codec: tx.Codec) -> None:
    for name in SERVED:
        monkeypatch.setattr(tx, name, tx.quantized(getattr(tx, name), codec))


@pytest.mark.sample(12)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("op", SERVED_OPS)
def test_meaning(monkeypatch: pytest.MonkeyPatch, op: str, codec: str) -> None:
    made, room = CODECS[codec]
    all_quantized(monkeypatch, made)
    call, shape, expected = OPS[op]
    for n in SIZES:
        xs = [x - 4 for x in inputs(n, shape(n))]
        before = snapshot(xs)
        out = tx.simulate(lambda x: call(x, n), {"data": n}, xs)  # noqa: B023
        assert_untouched(xs, before)
        for r in range(n):
            want = expected(xs, r)
            assert out[r].dtype is want.dtype and out[r].shape == want.shape
            # A sum adds up the errors of n values; psum encodes it again.
            most = 4.0 * (2.2 * n if op == "psum" else n if "psum" in op else 1) * room * (n > 1)
            assert (out[r] - want).abs().max() <= most, (n, r, out[r], want)
            if op == "psum":
                assert same_bits(out[r], out[0])


@pytest.mark.sample(2)
@pytest.mark.parametrize("codec", CODECS)
def test_over_two_axes(codec: str) -> None:
    """Moved bytes are encoded once over both, sums once for each axis."""
    made, room = CODECS[codec]
    calls: dict[str, Any] = {
        "psum": lambda f, x: f(x, BOTH),
        "pmean": lambda f, x: f(x, BOTH),
        "all_gather": lambda f, x: f(x, BOTH, dim=1, tiled=True),
    }
    xs = [torch.randn(4, 12, generator=torch.Generator().manual_seed(r)).clamp(-2, 2) for r in range(6)]
    for name, call in calls.items():
        f = getattr(tx, name)
        got, want = (
            tx.simulate(lambda x: call(g, x), AXES, xs)  # noqa: B023
            for g in (tx.quantized(f, made), f)
        )
        for r in range(6):
            most = 2.0 * {"psum": 18, "pmean": 3, "all_gather": 1}[name] * room
            assert (got[r] - want[r]).abs().max() <= most * 1.3 + 1e-6, name
            assert same_bits(got[r], got[0])


@pytest.mark.sample(8)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", SERVED)
def test_what_is_not_finite_stays_so(name: str, bad: float, codec: str) -> None:
    coded = tx.quantized(getattr(tx, name), CODECS[codec][0])
    for n in (2, 3, 5):
        xs = [{"x": torch.ones(n, 4)} for _ in range(n)]
        xs[n - 1]["x"][0, 2] = bad  # its own piece for rank 0
        out = on_ranks(name, coded, xs)
        hit = [0] if name in ("all_to_all", "all_to_all_single") else list(range(n))
        assert [bool(torch.isfinite(o["x"]).all()) for o in out] == [r not in hit for r in range(n)], n


@pytest.mark.sample(3)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", ["psum", "all_gather", "all_to_all"])
def test_quantized_collectives_inside_torch_vmap(name: str, codec: str) -> None:
    """Each rank calls torch.func.vmap over an ensemble of 4, whose members are encoded separately."""
    f = tx.quantized(getattr(tx, name), CODECS[codec][0])
    xs = [torch.randn(4, 3, 5) for _ in range(3)]
    mapped = tx.simulate(lambda x: torch.func.vmap(lambda v: f(v, "data"))(x), {"data": 3}, xs)
    for k in range(4):
        alone = tx.simulate(lambda x: f(x[k], "data"), {"data": 3}, xs)  # noqa: B023
        assert all(torch.allclose(m[k], a, rtol=1e-6) for m, a in zip(mapped, alone, strict=True))


@pytest.mark.parametrize("name", SERVED)
def test_a_code_has_no_derivative(name: str) -> None:
    f = tx.quantized(getattr(tx, name), tx.bfloat16())

    def inside(x: Tensor) -> Tensor:
        return torch.func.grad(lambda y: CALLS[name](f, {"x": y}, 2)["x"].sum())(x)

    def plain(x: Tensor) -> Any:
        return CALLS[name](f, {"x": x.clone().requires_grad_()}, 2)

    xs, reported = [torch.ones(2, 3)] * 2, ("no derivative", "the collective itself")
    raises_text(RuntimeError, lambda: tx.simulate(inside, {"data": 2}, xs), *reported)
    raises_text(RuntimeError, lambda: tx.simulate(plain, {"data": 2}, xs), *reported)
    tx.simulate(torch.no_grad()(plain), {"data": 2}, xs)


def test_signature_matches_the_collective() -> None:
    for name in SERVED:
        f = tx.quantized(getattr(tx, name), tx.int8())
        assert inspect.signature(f) == inspect.signature(getattr(tx, name)) and f.__name__ == name
    raises_text(TypeError, lambda: tx.quantized(tx.psum, tx.int8())(1.0, "data", dims=2), "dims")
    one, other = (tx.stateless(tx.quantized(tx.psum, tx.int8(b))) for b in (8, 16))
    assert fingerprint(one) != fingerprint(other) and one == tx.stateless(tx.quantized(tx.psum, tx.int8(8)))


def test_random_bits_need_a_key() -> None:
    def coded(codec: tx.Codec, x: Tensor) -> Any:
        return tx.simulate(lambda: tx.quantized(tx.psum, codec)(x, "data"), {"data": 3})

    x = torch.full((300,), 0.3)
    raises_text(ValueError, lambda: coded(tx.qsgd(), x), "qsgd()", "keyed(seed, step)")
    first, second, other = (coded(tx.qsgd(1).keyed(*key), x)[0] for key in ((0, 0), (0, 1), (1, 0)))
    assert not torch.equal(first, second) and not torch.equal(first, other)
    sizes = {"input_split_sizes": (150, 150), "output_split_sizes": (150, 150)}
    received = tx.simulate(
        lambda: tx.quantized(tx.all_to_all_single, tx.qsgd(1).keyed(0, 0))(x, "data", **sizes), {"data": 2}
    )
    parts = [part for out in received for part in out.split(150)]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(parts, 2)), (
        "each piece has random_bits of its own"
    )
    raises_text(ValueError, lambda: tx.qsgd().keyed(0.5, 0), "seed", "0.5")


def sent(monkeypatch: pytest.MonkeyPatch, axes: dict[str, int], function: Any, xs: list[Any]) -> list[Any]:
    """The values that rank 0 gives to the axis: (op, dtype, bytes)."""
    notes: list[Any] = []
    plain = SimulatedAxis.run

    def run(self: SimulatedAxis, op: str, x: Tensor, arg: Any) -> Tensor:
        if self.world_rank == 0:
            notes.append((op, x.dtype, x.numel() * x.element_size()))
        return plain(self, op, x, arg)

    monkeypatch.setattr(SimulatedAxis, "run", run)
    tx.simulate(function, axes, xs)
    monkeypatch.undo()
    return notes


@pytest.mark.parametrize("codec", CODECS)
def test_messages(monkeypatch: pytest.MonkeyPatch, codec: str) -> None:
    """One message of bytes for all floats of a call, and one for each other dtype; nothing else."""
    made, n = CODECS[codec][0], 3
    xs = [
        {"a": torch.ones(n, 40), "b": torch.ones(n, 7, dtype=torch.bfloat16), "c": torch.ones(n, 2).long()}
        for _ in range(n)
    ]
    whole, row, ints = made.width(47 * n), made.width(47), (torch.int64, 2 * n * 8)
    once = {
        "all_gather": [("all_gather", *ints), ("all_gather", torch.uint8, whole)],
        "all_to_all": [("all_to_all", *ints), ("all_to_all", torch.uint8, row * n)],
        "all_to_all_single": [("all_to_all", *ints), ("all_to_all", torch.uint8, row * n)],
    }
    for name, want in once.items():
        f = tx.quantized(getattr(tx, name), made)
        assert sent(monkeypatch, {"data": n}, lambda x: CALLS[name](f, x, n), xs) == want, name  # noqa: B023
    for name in ("psum", "pmean"):  # a part to each rank, and back; a word with each row
        f = tx.quantized(getattr(tx, name), made)
        (_, *other), to, back = sent(monkeypatch, {"data": n}, lambda x: CALLS[name](f, x, n), xs)  # noqa: B023
        assert (
            tuple(other) == ints and to[:2] == ("all_to_all", torch.uint8) and back[:2] == ("all_gather", torch.uint8)
        )
        assert row * n <= to[2] <= (row + 16) * n and row <= back[2] <= row + 8
    for name in SERVED:  # nothing is encoded for one rank
        f = tx.quantized(getattr(tx, name), made)
        x = {"a": torch.rand(1, 40), "b": torch.rand(1, 3, dtype=torch.float64)}
        notes = sent(monkeypatch, {"data": 1}, lambda x: CALLS[name](f, x, 1), [x])  # noqa: B023
        assert {dtype for _, dtype, _ in notes} == {torch.float32, torch.float64}


def test_bytes_of_a_sum_do_not_grow_with_the_ranks() -> None:
    f = tx.quantized(tx.psum, tx.int8())
    hook = tx.Transform(lambda params: (), lambda g, s, params=None, **extra: (f(g, "data"), s))
    params = {"w": torch.zeros(10**6, device="meta"), "v": torch.zeros(1000, dtype=torch.bfloat16)}
    for ranks in (2, 8, 64):
        what = tx.explain(hook, params, {"data": ranks})
        assert what.messages == (1 if ranks == 2 else 2) and what.sent_bytes < 2.1e6
