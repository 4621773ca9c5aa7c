"""torch's collectives with encoded floats mean what the plain ones mean, on real processes; their messages."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms._quantization.quantization import DQuantType

import fjoin
from fjoin import transforms as tx
from tests.helpers import max_diff, raises_text, same_bits
from tests.traffic import watched

# Each codec, and its largest error relative to the largest value encoded with it.
CODECS: dict[str, tuple[Any, float]] = {
    "fp16": ("fp16", 2.0**-11), "torch's fp16": (DQuantType.FP16, 2.0**-11), "bfp16": ("BFP16", 2.0**-8),
    "torch's bfp16": (DQuantType.BFP16, 2.0**-8), "fp8": (tx.fp8(block=8), 1 / 15), "int8": (tx.int8(), 1 / 253),
    "int4": (tx.int4(block=4), 1 / 13), "float32": (tx.float32(), 1e-7),
}  # fmt: skip
SUM = dist.ReduceOp.SUM
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SHAPES: list[tuple[int, ...]] = [(), (7,), (3, 5), (2, 1, 4), (0, 3)]


def value(shape: tuple[int, ...], *seed: int) -> Tensor:
    """The values that a rank sends, which every rank can compute."""
    g = torch.Generator().manual_seed(sum((s + 1) * 10**i for i, s in enumerate(seed)))
    return torch.randn(shape, generator=g, dtype=torch.float64).clamp(-2, 2)


def place(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor to be filled, every second element of another one."""
    return torch.full((*shape, 2), 9.0, dtype=dtype)[..., 0]


def near(got: Tensor, want: Tensor, room: float) -> None:
    rounding = torch.finfo(got.dtype).eps + 1e-6
    assert got.shape == want.shape
    assert got.numel() == 0 or (got.double() - want).abs().max() <= 2 * room + want.abs().max() * rounding, (got, want)


def calls(
    codec: Any, n: int, me: int, loss: float | None = None
) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...], list[Tensor]]]:
    """One call of each collective: the function, its arguments, the tensors that it fills."""

    def quantized(name: str) -> Callable[..., Any]:
        return fjoin.auto_quantize(getattr(dist, name), codec, quant_loss=loss)

    x, all_of, uneven = value((50,), me).float(), value((n * 50,), me).float(), [50 * me + r for r in range(n)]
    fresh = [[place((50,)) for _ in range(n)] for _ in range(2)]
    b, c, split = (place((size,)) for size in (50 * n, 50 * n, sum(50 * r + me for r in range(n))))
    c.copy_(all_of)
    return {
        "all_gather": (quantized("all_gather"), (fresh[0], x), fresh[0]),
        "all_to_all": (quantized("all_to_all"), (fresh[1], list(all_of.split(50))), fresh[1]),
        "all_to_all_single": (quantized("all_to_all_single"), (b, all_of), [b]),
        "all_reduce": (quantized("all_reduce"), (c,), [c]),
        "splits": (quantized("all_to_all_single"), (split, torch.ones(sum(uneven)), [50 * r + me for r in range(n)], uneven), [split]),
    }  # fmt: skip


def meaning(codec: str) -> Any:
    qtype, room = CODECS[codec]
    me, n = dist.get_rank(), dist.get_world_size()
    room *= n > 1
    kinds = [(shape, DTYPES[i % 4], DTYPES[(i + i // 4) % 4]) for i, shape in enumerate(SHAPES)]
    for shape, given, taken in kinds:
        outs = [place(shape, taken) for _ in range(n)]
        fjoin.auto_quantize(dist.all_gather, qtype)(outs, value(shape, me).to(given))
        for r in range(n):
            near(outs[r], value(shape, r).to(given).double(), room)
    for shape, _, dtype in kinds:
        for op, divisor in ((SUM, 1), (dist.ReduceOp.AVG, n)):
            x = place(shape, dtype)
            x.copy_(value(shape, me))
            fjoin.auto_quantize(dist.all_reduce, qtype)(x, op=op)
            total = torch.stack([value(shape, r).to(dtype).double() for r in range(n)]).sum(0)
            near(x, total / divisor, n / divisor * room * (2.2 if n > 2 else 1))
            sums = [torch.zeros_like(x) for _ in range(n)]
            dist.all_gather(sums, x.contiguous())
            assert all(same_bits(s, sums[0]) for s in sums), "ranks differ"


@pytest.mark.sample(5)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("codec", CODECS)
def test_meaning(pool: Any, codec: str, ranks: int) -> None:
    pool.run(ranks, meaning, codec)


def pieces(codec: str) -> Any:
    """Different shapes for each pair of ranks, which gloo's own all_to_all refuses; split sizes, some of them 0."""
    qtype, room = CODECS[codec]
    me, n = dist.get_rank(), dist.get_world_size()
    room *= n > 1

    def shape(sender: int, receiver: int) -> tuple[int, ...]:
        return [(sender + 1, receiver), (), (2, 2, receiver + 1)][(sender + receiver) % 3]

    outs = [place(shape(r, me), DTYPES[r]) for r in range(n)]
    kept = list(outs)
    given = [value(shape(me, r), me, r).to(DTYPES[r]) for r in range(n)]
    assert fjoin.auto_quantize(dist.all_to_all, qtype)(outs, given) is None
    for r in range(n):
        assert outs[r] is kept[r]
        near(outs[r], value(shape(r, me), r, me).to(DTYPES[me]).double(), room)
    if n > 1:
        plain: Any = [torch.zeros(r) for r in range(n)], [torch.zeros(me)] * n
        raises_text(RuntimeError, lambda: dist.all_to_all(*plain), "invalid tensor size")  # else gloo takes them now
        dist.barrier()
    outs = [place((r, 2)) for r in range(n)]
    fjoin.auto_quantize(dist.all_gather, qtype)(outs, value((me, 2), me))
    for r in range(n):
        near(outs[r], value((r, 2), r), room)

    counts = [[(s + 2 * t) % 3 for t in range(n)] for s in range(n)]  # rows that s sends to t
    ins, taken = counts[me], [counts[r][me] for r in range(n)]
    for rest in ((), (3,), (2, 2)):
        x, want = value((sum(ins), *rest), me), torch.zeros((sum(taken), *rest), dtype=torch.float64)
        dist.all_to_all_single(want, x, taken, ins)
        named: Any = {"output_split_sizes": taken, "input_split_sizes": ins}
        for args, kwargs in (((taken, ins), {}), ((), named), ((tuple(taken),), {"input_split_sizes": ins})):
            out = place((sum(taken), *rest))
            assert fjoin.auto_quantize(dist.all_to_all_single, qtype)(out, x, *args, **kwargs) is None
            near(out, want, room)
    for rest in ((), (4,)):
        x, want = value((2 * n, *rest), me), torch.zeros((2 * n, *rest), dtype=torch.float64)
        dist.all_to_all_single(want, x)
        out = place((2 * n, *rest), torch.bfloat16)
        fjoin.auto_quantize(dist.all_to_all_single, qtype)(out, x.t().contiguous().t() if rest else x, [], None)
        near(out, want, room)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("codec", ["fp16", "int8", "int4"])
def test_pieces_of_any_size(pool: Any, codec: str, ranks: int) -> None:
    pool.run(ranks, pieces, codec)


def in_a_part() -> Any:
    group, me = dist.new_group([0, 2]), dist.get_rank()
    results = []
    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        for name, (f, args, outs) in calls(tx.int8(), 2, min(me, 1)).items():
            before = [o.clone() for o in outs]
            between = {"all_to_all_single": (None, None)}.get(name, (SUM,) if "reduce" in name else ())
            assert f(*args, *between, group) is None
            results.append([o.clone() for o in outs])
            assert same_bits(results[-1], before) == (me == 1)
            assert f(*args, group=group) is None
    texts = [str(w.message) for w in reported if "does not belong" in str(w.message)]
    assert len(texts) == (2 * len(results) if me == 1 else 0)
    assert all("global rank 1" in text for text in texts)
    return results


def test_groups_of_some_of_the_ranks(pool: Any) -> None:
    """The group is given by position or by name; a rank outside it gets a warning and keeps its tensors."""
    first, _, last = pool.run(3, in_a_part)
    for gathered in (0, 3):  # both ranks have the same results
        assert same_bits(first[gathered], last[gathered])
    x, y = first[0]
    near(x, value((50,), 0), 2.0**-7)
    near(y, value((50,), 1), 2.0**-7)


def divided(codec: str) -> Any:
    n, me = dist.get_world_size(), dist.get_rank()
    whole, halved = calls(CODECS[codec][0], n, me), calls(CODECS[codec][0], n, me, 2.0)
    for name, (function, args, outs) in whole.items():
        half, given, halves = halved[name]
        function(*args)
        half(*given)
        assert all(torch.equal(out / 2, other) for out, other in zip(outs, halves, strict=True)), name


@pytest.mark.parametrize("codec", ["fp16", "bfp16", "int8"])
def test_results_are_divided_by_quant_loss(pool: Any, codec: str) -> None:
    """This holds for every collective, including lists, and every codec."""
    for ranks in (1, 2, 3):
        pool.run(ranks, divided, codec)


def with_random_bits() -> Any:
    reduce, x = fjoin.auto_quantize(dist.all_reduce, tx.int8(stochastic=True)), torch.linspace(0.1, 1.0, 30)
    out = []
    for _ in range(2):
        out.append(x.clone())
        reduce(out[-1])
    return out


def test_random_bits_are_equal_on_all_ranks_and_new_in_each_call(pool: Any) -> None:
    for ranks in (2, 3):
        results = pool.run(ranks, with_random_bits)
        for first, second in results:
            assert max_diff(first, ranks * torch.linspace(0.1, 1.0, 30)) < 0.05
            assert torch.equal(first, results[0][0]) and not torch.equal(first, second)


def leaves_and_views() -> None:
    """Tensors that require a gradient, an input that is also the output, views of one buffer."""
    me, n = dist.get_rank(), dist.get_world_size()
    x = torch.full((2,), me + 1.0, requires_grad=True)
    outs = [torch.zeros(2, requires_grad=True) for _ in range(n)]
    fjoin.auto_quantize(dist.all_gather, "fp16")(outs, x)
    assert [o[0].item() for o in outs] == [r + 1.0 for r in range(n)] and all(
        o.is_leaf and o.requires_grad for o in outs
    )
    buffer = torch.arange(float(n)) + 10 * me
    views = list(buffer.split(1))
    fjoin.auto_quantize(dist.all_to_all, tx.float32())(views, views)
    assert buffer.tolist() == [10.0 * r + me for r in range(n)]
    fjoin.auto_quantize(dist.all_to_all_single, tx.float32())(buffer, buffer)
    assert buffer.tolist() == [me * 10.0 + r for r in range(n)]
    table = torch.zeros(4, n)
    fjoin.auto_quantize(dist.all_gather, "fp16")(list(table.unbind(1)), torch.full((4,), me + 1.0))
    assert table[3].tolist() == [r + 1.0 for r in range(n)]


def test_leaves_and_views(pool: Any) -> None:
    for ranks in (1, 2, 3):
        pool.run(ranks, leaves_and_views)


# -- errors ------------------------------------------------------------------------------------------------------------

X, ONES, INTS = torch.ones(4), torch.ones(3), torch.ones(4, dtype=torch.int64)
REFUSED: dict[str, list[tuple[Any, ...]]] = {
    "all_gather": [
        (lambda f: f([], X), ValueError, "all_gather", "0 come in", "2 ranks"),
        (lambda f: f([X] * 3, X), ValueError, "3 come in", "2 ranks"),
        (lambda f: f([ONES, ONES], X), ValueError, "(4,)", "(3,)"), (lambda f: f([X, INTS], X), TypeError, "floating-point"),
        (lambda f: f([X, X], X, async_op=True), ValueError, "all_gather", "async_op=True", "leave it out"),
        (lambda f: f([X, X], X.to_sparse()), TypeError, "dense"), (lambda f: f([X, None], X), TypeError, "None"),
        (lambda f: f([X, X], X.to(torch.complex64)), TypeError, "floating-point"),
        (lambda f: f([X, X], X, nonsense=3), TypeError, "'nonsense'"), (lambda f: f([X, X]), TypeError, "'tensor'"),
    ],
    "all_to_all": [
        (lambda f: f([X, X], [X]), ValueError, "1 tensors go out"), (lambda f: f([X[:2], X[:2]], [X, X]), ValueError, "(4,)", "(2,)"),
    ],
    "all_to_all_single": [
        (lambda f: f(X, ONES), RuntimeError, "split_sizes"), (lambda f: f(torch.ones(6), X), ValueError, "(2,)", "(3,)"),
        (lambda f: f(X, X, [1, 2], [2, 2]), RuntimeError, "split_sizes"),
        (lambda f: f(X, X, [2, 2], [4]), ValueError, "1 tensors go out", "2 ranks"),
        (lambda f: f(X, X, [1, 3] if dist.get_rank() == 0 else [3, 1], [2, 2]), ValueError, "(2,)", "(1,)"),
        (lambda f: f(INTS, INTS), TypeError, "floating-point", "all_to_all_single"),
    ],
    "all_reduce": [
        (lambda f: f(X, SUM, None, True), ValueError, "all_reduce", "async_op=True"), (lambda f: f(1.0), TypeError, "1.0"),
        (lambda f: f(X, dist.ReduceOp.PRODUCT), ValueError, "SUM or AVG", "PRODUCT"),
        (lambda f: f(X, None), ValueError, "SUM or AVG", "None"),
    ],
}  # fmt: skip


def mistakes() -> None:
    encoded = {name: fjoin.auto_quantize(getattr(dist, name), "fp16") for name in REFUSED}
    with watched() as sent:
        for name, rows in REFUSED.items():
            for call, kind, *words in rows:
                raises_text(kind, lambda: call(encoded[name]), *words)  # noqa: B023
    assert not sent


def test_mistakes_raise_before_the_first_message(pool: Any) -> None:
    pool.run(2, mistakes)


def test_raises_on_what_is_no_codec_or_is_not_served() -> None:
    for func in (dist.broadcast, dist.reduce_scatter_tensor):
        raises_text(TypeError, lambda: fjoin.auto_quantize(func, "fp16"), func.__name__, "all_to_all_single")  # noqa: B023
    for codec, text in (("int8", "'int8'"), (tx.int8, "int8()"), (torch.float16, "torch.float16")):
        raises_text(TypeError, lambda: fjoin.auto_quantize(dist.all_gather, codec), text)  # noqa: B023


def test_signature_matches_the_wrapped_collective() -> None:
    for name in ("all_gather", "all_to_all", "all_to_all_single", "all_reduce"):
        f = fjoin.auto_quantize(getattr(dist, name), "fp16")
        assert inspect.signature(f) == inspect.signature(getattr(dist, name)) and f.__name__ == name


WIDTHS = {"fp16": tx.float16().width, "int8": tx.int8().width}


def payload(codec: str) -> Any:
    sent = {}
    for name, (function, args, _) in calls(CODECS[codec][0], dist.get_world_size(), dist.get_rank()).items():
        with watched() as notes:
            assert function(*args) is None
        sent[name] = [(one.name, one.dtype, one.bytes) for one in notes]
    return sent


@pytest.mark.parametrize("codec", WIDTHS)
def test_bytes_travel(pool: Any, codec: str) -> None:
    """A message has one row for each receiver, of the codec's width, and nothing else."""
    width = WIDTHS[codec]
    for n in (1, 2, 3):
        for me, sent in enumerate(pool.run(n, payload, codec)):
            gather, each = ("all_gather", "torch.uint8", width(50)), ("all_to_all_single", "torch.uint8", n * width(50))
            want = {
                "all_gather": [gather], "all_to_all": [each], "all_to_all_single": [each],
                "all_reduce": [("all_gather", "torch.uint8", width(100))] if n == 2 else [each, gather],
                "splits": [("all_to_all_single", "torch.uint8", sum(width(50 * me + r) for r in range(n)))],
            }  # fmt: skip
            assert sent == (want if n > 1 else dict.fromkeys(want, []))
