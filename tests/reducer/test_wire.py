"""Encoded messages in a step and in a module: the same on all ranks, as small as announced, loud where not finite."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from tests.ddp.register_problem import EVEN, SMALL, samples
from tests.helpers import max_diff, raises_text, same_bits
from tests.oracle.whole_batch import make_batches, make_model, mean_loss, parameters
from tests.traffic import announced, watched
from tests.training.small import net_loss, net_params, net_trained

CODECS: dict[str, Any] = {
    "bfloat16": tx.bfloat16, "float16": tx.float16, "fp8": lambda: tx.fp8(block=8), "int8": lambda: tx.int8(block=8),
    "int4": lambda: tx.int4(block=8), "bfloat16 by chance": lambda: tx.bfloat16(stochastic=True),
    "qsgd": lambda: tx.qsgd(levels=127, block=8), "uint8": lambda: tx.uint8(block=8), "top_k": lambda: tx.top_k(0.5),
}  # fmt: skip
# The allowed deviation of steps, relative to the distance moved by a run in float32; a step the wrong way would be off by 2.
ROOM = {
    "bfloat16": 0.02, "float16": 0.02, "fp8": 0.15, "int8": 0.05, "int4": 0.5, "bfloat16 by chance": 0.04, "qsgd": 0.1,
    "uint8": 0.05, "top_k": 0.95,
}  # fmt: skip
HOOKS: dict[str, Any] = {
    "mean": lambda codec: tx.compress(codec, tx.mean("data")),
    "clip, mean, clip": lambda codec: tx.compress(
        codec, tx.chain(tx.clip_by_value(10.0), tx.mean("data", over="live"), tx.clip_by_global_norm(10.0))
    ),
    "by path": lambda codec: tx.partition({"*.bias": tx.mean("data"), "*": tx.compress(codec, tx.mean("data"))}),
    "fed back": lambda codec: tx.error_feedback(tx.compress(codec, tx.mean("data"))),
    "fed back by path": lambda codec: tx.partition(
        {"*.bias": tx.mean("data"), "*": tx.error_feedback(tx.compress(codec, tx.mean("data")), "flush")}
    ),
    "from the third step on": lambda codec: tx.switch_after(2, tx.mean("data"), tx.compress(codec, tx.mean("data"))),
}
# Hooks that take another path than the mean, so they need not come near it.
METHODS: dict[str, Any] = {
    "power_sgd": lambda codec: tx.error_feedback(tx.compress(codec, tx.power_sgd("data", 1, min_compression_rate=1.0))),
    "two in a chain": lambda codec: tx.chain(tx.tap(len), tx.error_feedback(tx.compress(codec, tx.mean("data"))), tx.clip_by_value(1.0)),
}  # fmt: skip
ALL = {**HOOKS, **METHODS}
FLOATS = {"by path"}  # in which some gradients travel as they are
SIZES = [5, 3, 0]  # batches of each rank


def table(first: Sequence[Any], *others: Sequence[Any]) -> list[Any]:
    """All combinations; without --long, of the codecs one each, and of int8 every hook, the first ones in every size."""
    usual = [values[0] for values in others]

    def is_short(codec: str, hook: str, *size: Any) -> bool:
        return [hook, *size] == usual or codec == "int8" and (hook in HOOKS or [*size] == usual[1:])

    return [
        pytest.param(*case, marks=() if is_short(*case) else pytest.mark.long, id="-".join(map(str, case)))
        for case in itertools.product(first, *others)
    ]


NEAR = 1e-5


def trained(hook: str, codec: str, bucket_bytes: int) -> Any:
    made = ALL[hook](CODECS[codec]()) if codec else tx.mean("data", over="live" if "clip" in hook else "weight")
    return net_trained(made, SIZES, bucket_bytes)


@pytest.mark.sample(10)
@pytest.mark.parametrize(("codec", "hook", "bucket_bytes"), table([*CODECS], [*ALL], [1, 10**6]))
def test_on_processes_as_simulated_and_near_the_uncoded(pool: Any, codec: str, hook: str, bucket_bytes: int) -> None:
    """To the bit, without an ordered reduction; weights and losses are exact, even where gradients are lossy."""
    start, room = net_params(), ROOM[codec]
    for ranks in (2, 3):
        real = pool.run(ranks, trained, hook, codec, bucket_bytes)
        simulated = tx.simulate(lambda: trained(hook, codec, bucket_bytes), {"data": ranks})
        (want, losses), *_ = tx.simulate(lambda: trained(hook, "", bucket_bytes), {"data": ranks})
        for (params, seen), (sim_params, sim_seen) in zip(real, simulated, strict=True):
            assert same_bits(params, real[0][0]) and seen == sim_seen
            if "by path" in hook:  # where a mean is plain gloo adds in another order
                assert max_diff(params, sim_params) < NEAR, f"by {max_diff(params, sim_params)}"
            else:
                assert same_bits(params, sim_params)
            assert [w for _, w in seen] == [w for _, w in losses] and seen[0] == losses[0]
            assert all(torch.isfinite(p).all() for p in params.values()) and not same_bits(params, start)
            for path in ("a.weight", "b.weight") if hook in HOOKS else ():
                way = want[path] - start[path]
                assert (params[path] - want[path]).norm() < room * way.norm() + 1e-9, path


def counted(codec: str, hook: str, bucket_bytes: int) -> Any:
    sent = []
    mesh = fjoin.mesh({"data": -1})
    step = fjoin.train_step(
        lambda p, b: sum((v * b).sum() for v in p.values()), tx.fuse(ALL[hook](CODECS[codec]()), tx.sgd(0.1)),
        mesh=mesh, bucket_bytes=bucket_bytes,
    )  # fmt: skip
    state = step.init({f"{n}.bias": torch.ones(100 + n) for n in range(12)} | {"w": torch.ones(30, 20)})
    for _ in range(4):
        with watched() as seen:
            state, _ = step(state, torch.ones(()))
        sent.append([(one.bytes, one.dtype) for one in seen])
    step.close()
    return sent


@pytest.mark.gloo
@pytest.mark.sample(40)
@pytest.mark.parametrize(
    ("codec", "hook", "bucket_bytes"),
    table([*CODECS], ["mean", "clip, mean, clip", "by path", "fed back", *METHODS], [1000, 1, 10**6]),
)
def test_what_is_announced_is_sent(pool: Any, codec: str, hook: str, bucket_bytes: int) -> None:
    """Bytes and dtypes of all messages, by watching torch.distributed; gradients travel as bytes."""
    params = {f"{n}.bias": torch.ones(100 + n) for n in range(12)} | {"w": torch.ones(30, 20)}
    for ranks in (2, 3):
        made = tx.fuse(ALL[hook](CODECS[codec]()), tx.sgd(0.1))
        explained = functools.partial(tx.explain, made, params, {"data": ranks}, bucket_bytes=bucket_bytes)
        for sent in pool.run(ranks, counted, codec, hook, bucket_bytes):
            for step, messages in enumerate(sent):
                said = announced(explained(at_step=step))
                assert sorted(messages) == sorted((m.payload_bytes, str(m.dtype)) for m in said)
                record = {
                    str(m.dtype) for row in explained(at_step=step).rows if row.stage[0] == "(" for m in row.messages
                }
                assert hook in FLOATS or {dtype for _, dtype in messages} <= {"torch.uint8"} | record


@pytest.mark.parametrize("ranks", [2, 8, 64, 512])
def test_bytes_do_not_grow_with_the_ranks(ranks: int) -> None:
    """At most two messages of codes are sent for any number of ranks; torch gathers ranks - 1 times the codes."""
    params = {"w": torch.ones(1_000_000)}
    whole = tx.explain(tx.mean("data"), params, {"data": ranks}).sent_bytes
    for codec, most in ((tx.bfloat16(), 0.51), (tx.int8(), 0.26), (tx.int4(), 0.15), (tx.fp8(), 0.26)):
        coded = tx.explain(tx.compress(codec, tx.mean("data")), params, {"data": ranks}).sent_bytes
        assert coded / whole < most, (codec, coded, whole)


def nonfinite(codec: str, bad: float) -> str:
    mesh = fjoin.mesh({"data": -1}, timeout_s=60)
    step = fjoin.train_step(
        lambda p, b: (p["w"] * b).sum() + p["v"].sum(), tx.fuse(tx.compress(CODECS[codec](), tx.mean("data")), tx.sgd(0.1)), mesh=mesh
    )  # fmt: skip
    state = step.init({"w": torch.ones(40), "v": torch.ones(40)})
    batch = torch.ones(40)
    if mesh.rank == 1:
        batch[17] = bad
    text = raises_text(fjoin.NonFinite, lambda: step(state, batch))
    assert torch.equal(state.params["w"], torch.ones(40))
    step.close()
    return text


@pytest.mark.sample(3)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("codec", CODECS)
def test_nonfinite_gradients_raise_on_every_rank(codec: str, bad: float) -> None:
    for ranks in (2, 3, 5):
        for text in tx.simulate(lambda: nonfinite(codec, bad), {"data": ranks}):
            assert "rank 1" in text and "'w'" in text


def registered(hook: str, codec: str) -> Any:
    ddp = DistributedDataParallel(make_model(dtype=torch.float32), **SMALL)
    made = ALL[hook](CODECS[codec]()) if hook else tx.mean("data")
    handle = fjoin.ddp.register(ddp, tx.fuse(made, tx.sgd(0.1)))
    for x, y in make_batches(1, EVEN, torch.float32)[dist.get_rank()]:
        ddp.zero_grad()
        handle.weight(samples((x, y)))
        mean_loss(ddp, (x, y)).backward()
    return {path: p.detach().clone() for path, p in ddp.module.named_parameters()}, handle.total


@pytest.mark.sample(3)
@pytest.mark.parametrize(("codec", "hook"), table([*CODECS], ["mean", "fed back", "fed back by path", *METHODS]))
def test_in_distributed_data_parallel(pool: Any, codec: str, hook: str) -> None:
    """DDP changes the buckets from the second pass on."""
    start = {path: p.float() for path, p in parameters(make_model()).items()}
    (want, total), _ = pool.run(2, registered, "", "")
    for params, coded_total in (results := pool.run(2, registered, hook, codec)):
        assert same_bits(params, results[0][0]) and coded_total == total
        for path, p in want.items() if hook in HOOKS else ():
            assert (params[path] - p).norm() < ROOM[codec] * (p - start[path]).norm(), path


def test_raises_on_bad_input() -> None:
    raises_text(TypeError, lambda: tx.compress(tx.int8, tx.mean("data")), "compress: codec must be a Codec", "int8()")  # type: ignore[arg-type]
    raises_text(TypeError, lambda: tx.compress(tx.int8(), tx.clip_by_value(1.0)), "clip_by_value(1.0)", "keyword wire")
    raises_text(TypeError, lambda: tx.compress(torch.bfloat16, tx.sgd(0.1)), "compress: hook")  # type: ignore[arg-type]
    raises_text(ValueError, lambda: tx.compress(torch.int8, tx.mean("data")), "torch.int8", "torch.bfloat16")
    for block in (0, 1.5, True):
        raises_text(ValueError, lambda: tx.int8(block), "block", repr(block))  # type: ignore[arg-type]  # noqa: B023
    raises_text(ValueError, lambda: tx.fp8(dtype=torch.float16), "torch.float16", "float8_e4m3fn")


@pytest.mark.parametrize(
    "hook",
    [tx.compress(torch.bfloat16, tx.mean("data")), tx.compress(tx.bfloat16(), tx.hierarchical_mean("local", "data"))],
    ids=repr,
)
def test_a_code_has_no_derivative(hook: tx.Transform) -> None:

    def outer(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda y: hook.update(y, hook.init(y))[0].sum())(x)

    def plain(x: torch.Tensor) -> torch.Tensor:
        return hook.update(x.requires_grad_(), hook.init(x))[0]

    for run in (outer, plain):
        two = [torch.ones(2), torch.ones(2)]
        raises_text(RuntimeError, lambda: tx.simulate(run, {"data": 2, "local": 1}, two), "no derivative")  # noqa: B023


def test_overflowing_weights_give_nan() -> None:
    hook = tx.compress(torch.bfloat16, tx.mean("data"))
    for ranks in (2, 3):
        out = tx.simulate(
            lambda w: hook.update(torch.ones(2), hook.init(torch.ones(2)), weight=w)[0],
            {"data": ranks},
            [torch.tensor(1e308, dtype=torch.float64, requires_grad=True)] * ranks,  # Python does not read it
        )
        assert all(o.isnan().all() for o in out)


def other_codec() -> str:
    mesh = fjoin.mesh({"data": -1}, timeout_s=60)
    block = 8 + 8 * mesh.rank
    step = fjoin.train_step(net_loss, tx.fuse(tx.compress(tx.int8(block), tx.mean("data")), tx.sgd(0.1)), mesh=mesh)
    return raises_text(fjoin.DesyncError, lambda: step.init(net_params()), "block=16", "rank 1")


def test_ranks_with_other_codecs_raise_before_the_first_message(pool: Any) -> None:
    pool.run(2, other_codec)
