"""The bytes that really cross the network: counted at torch.distributed, and by torch's profiler, and equal to what `explain` announces."""

from __future__ import annotations

import datetime
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg as fake_pg  # which registers the backend

import fjoin
from fjoin import transforms as tx
from fjoin.groups import mesh_over
from tests import problem
from tests.helpers import stepped
from tests.rows import ADAM, MEAN, ROWS, SGD
from tests.traffic import announced, watched
from tests.training.small import step_of

CODECS: dict[str, Callable[[], Any]] = {
    "bfloat16": tx.bfloat16, "float16": tx.float16, "fp8": lambda: tx.fp8(block=8), "int8": lambda: tx.int8(block=8),
    "int4": lambda: tx.int4(block=8), "by chance": lambda: tx.bfloat16(stochastic=True), "qsgd": lambda: tx.qsgd(levels=127, block=8),
    "uint8": lambda: tx.uint8(block=8), "top_k": lambda: tx.top_k(0.5),
}  # fmt: skip
AVERAGE = tx.average_parameters("data")
AFTER = {
    "masked": tx.every(3, tx.masked(AVERAGE, "bias")), "parts": tx.partition({"bias": tx.every(2, AVERAGE), "*": tx.every(3, AVERAGE)}),
    "nested periods": tx.every(2, tx.every(2, AVERAGE)),
    "switch": tx.switch_after(
        5, tx.every(2, tx.every(2, AVERAGE)), tx.switch_after(3, tx.outer_step(MEAN, tx.sgd(1.0), 2), tx.every(4, AVERAGE, first=0))
    ),
}  # fmt: skip
OF_MEANS = {
    **{name: tx.compress(make(), MEAN) for name, make in CODECS.items()},
    **{f"{name}, fed back": tx.error_feedback(tx.compress(make(), MEAN)) for name, make in CODECS.items()},
    "by path": tx.partition({"bias": MEAN, "*": tx.compress(tx.int8(), MEAN)}),
    "clipped": tx.compress(tx.int8(), tx.chain(tx.clip_by_value(10.0), tx.mean("data", over="live"), tx.clip_by_global_norm(10.0))),
    "PowerSGD, int8": tx.error_feedback(tx.compress(tx.int8(), tx.power_sgd("data", 1, min_compression_rate=0.5))),
    "batched PowerSGD": tx.error_feedback(tx.batched_power_sgd("data", 1, min_compression_rate=0.5)),
    "two in a chain": tx.chain(tx.tap(len), tx.error_feedback(tx.compress(tx.int8(), MEAN)), tx.clip_by_value(1.0)),
}  # fmt: skip
PIPELINES: dict[str, tx.Pipeline] = {
    # Pieces are counted in tests/training/test_zero_step.py.
    **{name: row.make() for name, row in ROWS.items() if "roots" not in name and "zero" not in name},
    **{name: tx.fuse(hook, SGD) for name, hook in OF_MEANS.items()},
    **{f"after: {name}": tx.fuse(tx.identity(), ADAM, after=after) for name, after in AFTER.items()},
    "DiLoCo, top-k": tx.diloco(ADAM, tx.error_feedback(tx.compress(tx.top_k(0.1), MEAN)), 3),
    "DiLoCo, PowerSGD": tx.diloco(ADAM, tx.power_sgd("data", min_compression_rate=0.5), 3),
}  # fmt: skip


def settings(name: str) -> tuple[dict[str, int], dict[str, torch.Tensor]]:
    """Axes and parameters; those of four dtypes where an average is of some of them."""
    row = ROWS.get(name)
    params = problem.start(row.dtype if row else torch.float32)
    dtypes = (torch.bfloat16, torch.float32, torch.float64, torch.float16, torch.float32)
    mixed = {path: p.to(dtype) for (path, p), dtype in zip(params.items(), dtypes, strict=True)}
    return row.axes if row else {"data": 2}, mixed if name in ("after: masked", "after: parts") else params


def squares(params: Any, batch: float) -> Any:
    return sum((leaf.double() * batch).square().sum() for leaf in params.values())


def messages(name: str, bucket_bytes: int) -> list[list[tuple[int, str]]]:
    """(bytes, dtype) of the messages of each of 9 steps."""
    axes, params = settings(name)
    mesh, seen = fjoin.mesh(axes), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of pipelines that do not reduce
        step, state = step_of(squares, PIPELINES[name], params, mesh=mesh, bucket_bytes=bucket_bytes)
    for i in range(9):
        with watched() as sent:
            state, _ = step(state, 0.1 + 0.1 * i + 0.1 * step.rank)
        seen.append(sorted((one.bytes, one.dtype) for one in sent))
    return seen


CASES = [(name, n) for name in PIPELINES for n in ((64,) if name in ROWS else (1, 64, 10**6))]


@pytest.mark.gloo
@pytest.mark.sample(12)
@pytest.mark.parametrize(("name", "bucket_bytes"), CASES)
def test_each_step_sends_what_is_announced(pool: Any, name: str, bucket_bytes: int) -> None:
    """In its first step the ranks compare their records too."""
    axes, params = settings(name)
    for seen in pool.run(math.prod(axes.values()), messages, name, bucket_bytes):
        for i in range(1, 9):
            what = tx.explain(PIPELINES[name], params, axes, bucket_bytes=bucket_bytes, at_step=i)
            assert seen[i] == sorted((m.payload_bytes, str(m.dtype)) for m in announced(what)), i
            if name in CODECS:  # gradients travel as bytes, beside the step's record
                records = {str(m.dtype) for row in what.rows if row.stage[0] == "(" for m in row.messages}
                assert {dtype for _, dtype in seen[i]} <= {"torch.uint8"} | records


def over_one_rank(axes: dict[str, int]) -> tuple[list[str], int]:
    """What is sent over an axis of one rank, by steps too where there is no other; and the messages of a sum over all axes."""
    mean, mesh = tx.mean("one"), fjoin.mesh(axes, transport="gloo")
    with watched() as joint, fjoin.bind(mesh):
        summed = tx.psum(torch.tensor(1.0), tuple(axes))
        assert summed == mesh.size
    with watched() as sent, fjoin.bind(mesh):
        for collective in (tx.psum, tx.pmax, tx.all_gather, tx.psum_scatter):
            collective(torch.ones(1, 3), "one")
        for hook in (mean, tx.compress(tx.int8(), mean), tx.scatter_mean("one")) if mesh.size == 1 else ():
            params, pipeline = problem.start(torch.float32), tx.fuse(hook, ADAM)
            step, state = step_of(squares, pipeline, params, mesh=mesh)
            stepped(step, state, step.join([1.0, 2.0]))
            pipeline.step(params, params, pipeline.init(params))
    return [one.name for one in sent], len(joint)


@pytest.mark.gloo
@pytest.mark.parametrize(
    "axes", [{"one": 1}, {"one": 1, "other": 1}, {"data": 2, "one": 1}, {"one": 1, "a": 2, "b": 2}]
)
def test_nothing_is_sent_over_an_axis_of_one_rank(pool: Any, axes: dict[str, int]) -> None:
    ranks = math.prod(axes.values())
    for sent, joint in pool.run(ranks, over_one_rank, axes):
        assert not sent and joint == (ranks > 1)


@pytest.mark.parametrize("ranks", [2, 8, 64, 512])
def test_bytes_do_not_grow_with_the_ranks(ranks: int) -> None:
    """At most two messages of codes are sent for any number of ranks; torch gathers ranks - 1 times the codes."""
    params = {"w": torch.ones(1_000_000)}
    whole = tx.explain(MEAN, params, {"data": ranks}).sent_bytes
    for codec, most in ((tx.bfloat16(), 0.51), (tx.int8(), 0.26), (tx.int4(), 0.15), (tx.fp8(), 0.26)):
        coded = tx.explain(tx.compress(codec, MEAN), params, {"data": ranks}).sent_bytes
        assert coded / whole < most, (codec, coded, whole)


# -- a loop, in all buckets --------------------------------------------------------------------------


MODELS = {
    "with a large one": lambda: {"a": torch.ones(10), "big": torch.ones(1_000_001), "c": torch.ones(7)},
    "several buckets": lambda: {f"p{i}": torch.ones(1000 + 70 * i) for i in range(12)},
    "mixed": lambda: {"a": torch.ones(10, dtype=torch.bfloat16), "b": torch.ones(5), "c": torch.ones(4, dtype=torch.float64)},
    "with an empty leaf": lambda: {"a": torch.ones(10), "none": torch.ones(0, 3)},
}  # fmt: skip
HOOKS = {"mean": MEAN, "clip, mean": tx.chain(tx.clip_by_value(1.0), MEAN), "noop": tx.identity()}


def counted(batches: int, model: str, hook: str) -> tuple[list[tuple[str, int, str]], int]:
    """(collective, payload bytes, dtype) of all that a loop over `join` sends, and the profiler's own count."""
    mesh = fjoin.mesh({"data": -1})
    step, state = step_of(squares, tx.fuse(HOOKS[hook], ADAM), MODELS[model](), mesh=mesh, bucket_bytes=20_000)
    with (
        watched() as seen,
        torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            acc_events=True,  # else some versions of torch warn
            experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True),
        ) as profile,
    ):
        state = stepped(step, state, step.join([1.0] * batches))
    step.close()
    sent = [(one.name, one.bytes, one.dtype) for one in seen]
    return sent, sum(event.name.startswith("c10d::") for event in profile.events())


@pytest.mark.gloo
@pytest.mark.sample(6)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("hook", HOOKS)
def test_a_loop_sends_what_is_announced(pool: Any, model: str, hook: str) -> None:
    """Each of 3 steps sends the announced messages, the loop two numbers before them, and a rank without input the same."""
    results = pool.each(counted, [3, 1], model, hook)
    what = tx.explain(tx.fuse(HOOKS[hook], ADAM), MODELS[model](), {"data": 2}, bucket_bytes=20_000)
    said = sorted((m.payload_bytes, str(m.dtype)) for m in announced(what))
    assert said, "something is always sent: at least the step's own counts"
    for sent, seen_by_profiler in results:
        at_end = hook == "noop"  # a rank may have left the last step out that the other took
        assert seen_by_profiler == len(sent) == 1 + 3 * what.messages + at_end
        assert {name for name, _, _ in sent} <= {"all_reduce", "all_to_all_single"}
        assert sent[0][1:] == (8, "torch.float32")
        for i in range(3):
            of_step = sent[1 + i * what.messages : 1 + (i + 1) * what.messages]
            assert sorted((size, dtype) for _, size, dtype in of_step) == said
    assert results[0][0] == results[1][0], "both ranks send the same in the same order"


# -- the bytes announced for many ranks, counted on torch's fake group --

OF_MANY_RANKS: dict[str, Any] = {
    "bfloat16": lambda: tx.compress(torch.bfloat16, tx.mean("data")),
    "int8": lambda: tx.compress(tx.int8(), tx.mean("data")),
    "int4 fed back": lambda: tx.error_feedback(tx.compress(tx.int4(), tx.mean("data"))),
    "qsgd": lambda: tx.compress(tx.qsgd(1), tx.mean("data")),
    "top_k": lambda: tx.error_feedback(tx.compress(tx.top_k(0.01), tx.mean("data"))),
    "skipped": lambda: tx.skip_if_nonfinite(tx.partition({"b": tx.mean("data"), "*": tx.compress(tx.int8(), tx.mean("data"))})),
    "by path": lambda: tx.partition({"b": tx.mean("data"), "*": tx.compress(tx.int8(), tx.mean("data"))}),
}  # fmt: skip
# The bytes that one rank sends of a payload in a ring.
IN_A_RING = {
    "all_reduce": lambda n: 2 * (n - 1) / n, "all_gather": lambda n: n - 1, "all_to_all_single": lambda n: (n - 1) / n,
}  # fmt: skip


@pytest.fixture
def fake_group(request: pytest.FixtureRequest) -> Iterator[int]:
    dist.init_process_group(
        "fake", rank=0, world_size=request.param, store=dist.HashStore(), timeout=datetime.timedelta(seconds=20)
    )
    yield request.param
    dist.destroy_process_group()


@pytest.mark.sample(8)
@pytest.mark.parametrize("hook", OF_MANY_RANKS)
@pytest.mark.parametrize("fake_group", [2, 8, 64, 512], indirect=True)
def test_counted_and_announced(fake_group: int, hook: str) -> None:
    # Sizes that fill cache lines: the step pads others.
    params, made = {"w": torch.ones(300, 100), "b": torch.ones(16)}, OF_MANY_RANKS[hook]()
    state = made.init(params)
    for step in range(3):
        with fjoin.bind(mesh_over(dist.group.WORLD)), watched() as sent:
            _, state = made.update(params, state, params)
        rows = tx.explain(made, params, {"data": fake_group}, bucket_bytes=10**9, at_step=step).rows
        # A step sends its record in the place of the weights.
        assert sent.pop(0).bytes == 16 and rows[-1].stage == "(the step's own counts)"
        messages = [message for row in rows[:-1] for message in row.messages]
        assert sorted(one.bytes for one in sent) == sorted(m.payload_bytes for m in messages)
        counted = sum(round(one.bytes * IN_A_RING[one.name](fake_group)) for one in sent)
        assert counted == sum(m.sent_bytes for m in messages)
        floats = hook in {"by path", "skipped"}
        assert floats or {one.dtype for one in sent} == {"torch.uint8"}, "a payload travels as floats"
