"""A step's own promises: any tree and dtype of parameters, exact weights and sums, ranks without input, equal first parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from fjoin.transforms.sync import BatchNormState
from tests.helpers import or_text, raises_text, same_bits, seen_by, stepped, warned
from tests.oracle.whole_batch import make_batches, make_model
from tests.training.small import MEAN_SGD, X, one, start, step_of


def test_the_users_sums_travel_with_the_gradients() -> None:
    def one_rank(batches: list[Any]) -> list[Any]:
        apply, params, _ = fjoin.functional(make_model())

        def loss_fn(params: Any, batch: Any) -> Any:
            out = apply(params, {}, batch[0])
            sums = {"right": (out.argmax(1) == batch[1]).sum(), "n": len(batch[1])}
            return torch.nn.functional.cross_entropy(out, batch[1]), {"sum": sums, "own": 7}

        def look(state: Any, metrics: Any) -> Any:
            return metrics.sums["n"], metrics.sums["right"], metrics.aux and metrics.aux["own"]

        step, state = step_of(loss_fn, params=params)
        return seen_by(look, step, state, step.join(batches))

    a, b, c = tx.simulate(one_rank, {"data": 3}, make_batches(1, [[3, 2, 4], [5], []]))
    assert [n for n, _, _ in a] == [8, 2, 4] and [s[:2] for s in a] == [s[:2] for s in b] == [s[:2] for s in c]
    assert [own for _, _, own in b] == [7, None, None] and [own for _, _, own in c] == [None] * 3


def test_a_batch_of_weight_zero_is_ignored() -> None:
    """A batch of padding alone: its loss is 0 / 0, and is not looked at; if all have no weight, nothing changes."""

    def one_rank(batch: Tensor, weight: float) -> Any:
        step, state = one(tx.fuse(tx.mean("data"), tx.adamw(0.1)), weight=lambda _: weight)
        state, metrics = step(state, batch)
        return state.params["w"].clone(), metrics.loss, metrics.weight, int(state.pipeline.optimizer["w"].step)

    nan = torch.full((2,), float("nan"), dtype=torch.float64)
    (a, *seen), (b, *others) = tx.simulate(one_rank, {"data": 2}, [X, nan], [2.0, 0.0])
    ((alone, *wanted),) = tx.simulate(one_rank, {"data": 1}, [X], [2.0])
    assert torch.equal(a, b) and torch.equal(a, alone) and seen == others == wanted
    w, loss, weight, steps = one_rank(X, 0.0)
    assert torch.equal(w, start()["w"]) and loss != loss and weight == steps == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_counts_are_exact_where_float32_is_not(dtype: torch.dtype) -> None:
    """2^24 + 1 tokens on one rank and 1 on another: their sum is not a float32. Counts never ride in 16 bits either."""

    def one_rank(weight: float) -> Any:
        ones = torch.ones(4, dtype=dtype)
        step, state = step_of(lambda p, b: (p["h"] * b).float().sum(), params={"h": ones}, weight=lambda _: weight)
        state, metrics = step(state, ones)
        return metrics.weight, state.params["h"].clone()

    for weight, h in tx.simulate(one_rank, {"data": 3}, [2.0**24 + 1, 1.0, 2.0**40]):
        assert weight == 2.0**24 + 2 + 2.0**40
        assert torch.allclose(h, torch.full((4,), 0.9, dtype=dtype), rtol=0, atol=2**-8)


# -- parameters ----------------------------------------------------------------------------------------


def test_any_tree_of_parameters() -> None:
    tree = {"b": [torch.ones(2), (torch.ones(1), {"z": torch.tensor(1.0), "a": torch.ones(0, 3)})], "a": torch.ones(1)}

    def loss_fn(params: Any, batch: Any) -> Tensor:
        assert isinstance(params["b"][1], tuple)
        return (params["b"][0] * batch).sum() + params["b"][1][1]["z"] ** 2 + params["a"].sum()

    step, state = step_of(loss_fn, tx.fuse(tx.mean("data"), tx.adamw(0.1)), tree)
    state, _ = step(state, torch.ones(2))
    assert state.params["b"][1][1]["a"].shape == (0, 3)
    assert torch.equal(state.params["b"][1][0], torch.ones(1) * (1 - 0.1 * 0.01)), "an unused parameter is decayed"
    assert state.pipeline.optimizer["a"].step == 1


def test_no_parameters_at_all() -> None:
    step, state = step_of(lambda p, b: b.sum(), params={})
    raises_text(ValueError, lambda: step(state, torch.ones(1)), "does not depend on params")
    state, metrics = step(state, torch.ones(1, requires_grad=True))
    assert metrics.loss == 1 and state.params == {}


def test_initial_parameters_are_made_equal_or_checked() -> None:
    def one_rank(value: float, sync: Any) -> Any:
        step = fjoin.train_step(lambda p, b: p["w"].sum() * b, MEAN_SGD)
        return step.init({"w": torch.full((3,), value)}, sync=sync).params["w"][0].item()

    for sync, values, want in (
        ("broadcast", [1.0, 2.0], [1.0, 1.0]), (None, [1.0, 2.0], [1.0, 2.0]), ("check", [2.0, 2.0], [2.0, 2.0]),
    ):  # fmt: skip
        assert tx.simulate(one_rank, {"data": 2}, values, [sync] * 2) == want
    raises_text(
        fjoin.DesyncError, lambda: tx.simulate(one_rank, {"data": 2}, [1.0, 2.0], ["check"] * 2),
        "'w' has other values on rank 1 than on rank 0", "broadcast",
    )  # fmt: skip


def reduce_along_one_axis() -> Any:
    """Two groups; one of them has no batch at all and never takes a step."""
    mesh = fjoin.mesh({"node": 2, "local": 2}, timeout_s=20)
    pipeline = tx.fuse(tx.mean("local"), tx.sgd(1.0))
    step, state = step_of(lambda p, b: (p["w"] * b, {"sum": {"n": 1}}), pipeline, {"w": torch.tensor(0.0)}, mesh=mesh)
    batches = step.join([1.0] * [3, 1, 0, 0][mesh.rank])
    return seen_by(lambda state, metrics: (metrics.sums["n"], float(state.params["w"])), step, state, batches)


def test_groups_along_one_axis_do_not_wait_for_each_other(pool: Any) -> None:
    want = [[(2, -1), (1, -2), (1, -3)]] * 2 + [[], []]
    assert pool.run(4, reduce_along_one_axis) == want
    assert tx.simulate(reduce_along_one_axis, {"node": 2, "local": 2}) == want


class First(torch.autograd.Function):
    """Returns its first argument, and None as the gradient of the second one."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


@pytest.mark.parametrize("bucket_bytes", [8, 1 << 20])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_gradient_that_a_function_leaves_out_is_zero(accumulate: int, bucket_bytes: int) -> None:
    def one_rank(rank: int) -> Any:
        step, state = step_of(
            lambda p, x: (First.apply(p["w"], p["v"]) * x).sum(), bucket_bytes=bucket_bytes, accumulate=accumulate
        )
        return stepped(step, state, [torch.full((2,), 1.0 + rank)] * accumulate).params

    for params in tx.simulate(one_rank, {"data": 2}, [0, 1]):
        torch.testing.assert_close(params, {"w": torch.full((2,), 1 - 0.15), "v": torch.ones(2)})


ROWS, Y = torch.ones(4, 3), torch.zeros(4, dtype=torch.long)
SGD = tx.sgd(0.1)


# -- a loss that depends on other tensors than the given parameters trains nothing ---------------------


def calling(calls_module: bool = True, hook: Any = None, **settings: Any) -> Any:
    """A step whose loss calls the module, in place of the function made of it; and the state."""
    module = torch.nn.Linear(3, 2)
    apply, params, _ = fjoin.functional(copy.deepcopy(module))

    def loss(params: Any, batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(module(batch) if calls_module else apply(params, {}, batch), Y)

    return step_of(loss, tx.fuse(hook or tx.mean("data"), SGD), params, **settings)


REDUCTIONS = [
    tx.mean("data"), tx.compress(tx.int8(), tx.mean("data")), tx.chain(tx.mean("data"), tx.clip_by_global_norm(1.0)),
]  # fmt: skip


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("hook", REDUCTIONS, ids=["mean", "int8", "clip"])
def test_a_loss_that_calls_another_module_is_refused(hook: Any, accumulate: int) -> None:
    step, state = calling(hook=hook, bucket_bytes=1, accumulate=accumulate)
    before = state.clone().params
    raises_text(ValueError, lambda: step(state, ROWS), "no parameter has got a gradient", "apply(params, buffers, ...)")
    assert same_bits(state.params, before)


def refused_on_a_process(kind: str) -> Any:
    """The first ranks have fewer batches, or none."""
    mesh = fjoin.mesh({"data": -1}, timeout_s=30)
    step, state = calling(mesh=mesh) if not kind else (None, None)
    return or_text(
        lambda: train(kind, 1 + mesh.rank, mesh) if kind else stepped(step, state, step.join([ROWS] * mesh.rank))
    )  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("kind", "ranks", "words"),
    [("", 3, "no parameter has got a gradient"), *((kind, 2, "when_exhausted='replay'") for kind in ("psum", "pmean"))],
)
def test_it_is_refused_on_all_ranks(pool: Any, kind: str, ranks: int, words: str) -> None:
    texts = pool.run(ranks, refused_on_a_process, kind)
    assert all(words in text for text in texts) and (kind or texts[0].startswith("PeerLost")), texts


def test_ranks_and_steps_without_weight_and_later_steps_may_reach_none() -> None:
    """All terms of a loss may be switched off, for example."""

    def one_rank(n: int) -> int:
        step, state = calling(False, weight=lambda batch: float(batch.sum() > 0))
        return stepped(step, state, step.join([torch.zeros(4, 3), ROWS, ROWS][: n and n + 1])).step

    assert tx.simulate(one_rank, {"data": 3}, [2, 0, 1]) == [3, 3, 3]

    def loss(params: Any, batch: float) -> Any:
        return params["w"].sum() * batch if batch else torch.zeros((), requires_grad=True)

    state = stepped(*step_of(loss), (1.0, 0.0, 1.0))
    assert state.params["w"].tolist() == pytest.approx([0.8, 0.8])


# -- parameters without a gradient on any rank are named once ------------------------------------------

FOUR = {"w": torch.ones(3), "used by one": torch.ones(2), "never": torch.ones(2), "frozen": torch.ones(1)}
PLAIN, USES, ALL = (torch.ones(3), ["w"]), (torch.ones(3), ["w", "used by one"]), (torch.ones(3), [*FOUR])
# By name: the batches of each rank, options, and words of the warning.
WARNED: dict[str, tuple[list[list[Any]], dict[str, int], list[str]]] = {
    "two": ([[PLAIN] * 3, [PLAIN, USES, PLAIN]], {}, ["2 parameters have got no gradient on any rank", "'frozen', 'never'"]),
    "three": ([[PLAIN] * 3, [PLAIN] * 3], {}, ["3 parameters", "'used by one'"]),
    "ranks without a batch": ([[PLAIN] * 3, [], []], {}, ["3 parameters"]),
    "used early in a window": ([[USES, PLAIN, PLAIN, PLAIN], [PLAIN] * 4], {"accumulate": 2}, ["2 parameters"]),
    "no batch at all": ([[], []], {}, []), "all are used": ([[ALL] * 2, [ALL], []], {}, []),
}  # fmt: skip


@pytest.mark.parametrize("name", WARNED)
def test_parameters_without_a_gradient_on_any_rank_are_named_once(name: str) -> None:
    ranks, options, words = WARNED[name]

    def run(batches: list[Any]) -> None:
        step, state = step_of(lambda p, b: sum((p[path] * b[0].sum()).sum() for path in b[1]), params=FOUR, **options)
        for _ in range(2):  # epochs
            state = stepped(step, state, step.join(batches))

    found = warned(lambda: tx.simulate(run, {"data": len(ranks)}, ranks))
    assert len(found) == bool(words) and all(word in found[0] for word in words)


# -- a loss that communicates, in a loop in which ranks without input do not call it -------------------

KINDS: dict[str, Any] = {
    "psum": lambda y: tx.psum(torch.ones(()), "data"),
    "several": lambda y: tx.psum((torch.ones(3), torch.ones(2)), "data")[0].mean(),
    "pmean": lambda y: 1 + tx.pmean(y.mean(0), "data").sum().square(),
    "pmax": lambda y: 1 + tx.pmax(y.detach().sum(), "data").square(),
    "all_gather": lambda y: 1 + tx.all_gather(y.sum(), "data").sum().square(),
    "psum_scatter": lambda y: 1 + tx.psum_scatter(y.sum().expand(2), "data").square(),
    "all_to_all": lambda y: 1 + tx.all_to_all(y.sum().expand(2), "data").sum().square(),
    "ppermute": lambda y: 1 + tx.ppermute(y.sum(), "data", [(0, 1)]).square(),
    "all_to_all_single": lambda y: 1 + tx.all_to_all_single(y, "data").sum().square(),
    "encoded": lambda y: 1 + tx.quantized(tx.all_gather, tx.int8())(y.detach().sum(1), "data").sum().square(),
    "batch norm": lambda y: (1 + tx.sync_batch_norm(y, BatchNormState(torch.zeros(4), torch.ones(4)), axis="data")[0].square().mean()),
}  # fmt: skip


def train(kind: Any, batches: int, mesh: Any = None, joined: bool = True, **join: Any) -> Any:
    """A loss over batches of four rows."""

    def loss(params: Any, x: Any) -> Any:
        y = x @ params["w"]
        assert 0 <= int(tx.axis_index("data")) < tx.axis_size("data") == 2
        return y.square().mean() / KINDS[kind](y) if kind else y.square().mean()

    step, state = step_of(loss, tx.fuse(tx.mean("data"), tx.sgd(0.01)), {"w": torch.ones(8, 4)}, mesh=mesh)
    rows = [torch.randn(4, 8) for _ in range(batches)]
    state = stepped(step, state, step.join(rows, **join) if joined else rows)
    return state.params["w"], state.step


@pytest.mark.parametrize("kind", KINDS)
def test_collectives_in_the_loss(kind: str) -> None:
    """They raise in a loop, on equal inputs too, and run with replay and outside a loop."""
    for batches in ([2, 1], [2, 2]):
        run = lambda: tx.simulate(lambda n: train(kind, n), {"data": 2}, batches)  # noqa: B023, E731
        raises_text(fjoin.JoinError, run, "'data'", "when_exhausted='replay'")
    replayed = tx.simulate(lambda n: train(kind, n, when_exhausted="replay"), {"data": 2}, [2, 1])
    outside = tx.simulate(lambda n: train(kind, n, joined=False), {"data": 2}, [2, 2])
    for out in (replayed, outside, tx.simulate(lambda n: train(None, n), {"data": 2}, [2, 1])):
        assert [n for _, n in out] == [2, 2] and torch.equal(out[0][0], out[1][0])


@pytest.mark.parametrize("axis", ["model", "data", ("data", "model"), ("model", "data")])
def test_collectives_over_other_axes_run(axis: Any) -> None:
    """Ranks along "model" have the same batches; those along "data" may run out alone."""

    def one_rank(batches: int) -> Any:
        mesh = fjoin.mesh({"data": 2, "model": 2})
        step = fjoin.train_step(lambda p, x: tx.psum(p["w"] * x, axis), tx.fuse(tx.mean("data"), SGD), mesh=mesh)
        return stepped(step, step.init({"w": torch.tensor(0.0)}, sync=None), step.join([1.0] * batches)).step

    def run() -> Any:
        return tx.simulate(one_rank, {"data": 2, "model": 2}, [2, 2, 1, 1])

    if axis == "model":
        assert run() == [2] * 4
    else:
        raises_text(fjoin.JoinError, run, "'data'", "replay")


# -- what a new user runs into first: a progress bar, a second epoch, a weight, a pipeline that reduces nothing --


def test_a_loop_has_the_length_of_this_ranks_loader_and_a_text() -> None:
    step, _ = step_of()
    loader = torch.utils.data.DataLoader(list(range(10)), batch_size=4)  # type: ignore[arg-type]
    assert len(step.join(loader)) == 3 and len(fjoin.join(loader)) == 3 and len(step.join([])) == 0
    assert step.join([]) and fjoin.join([]), "a loop is true whatever its length"
    raises_text(TypeError, lambda: len(step.join(iter([]))), "len()")


def test_a_second_epoch_of_an_iterator_warns() -> None:
    loop = fjoin.join(iter([1, 2]))
    assert list(loop) == [1, 2]
    with pytest.warns(UserWarning, match="list_iterator, that an epoch before this one has used up"):
        assert list(loop) == []


PARTS = torch.ones(3, 2), torch.ones(3)
OF_PARTS: dict[str, tuple[Any, bool]] = {
    "tuple": (PARTS, True), "dict": (dict(zip("xy", PARTS, strict=True)), True),
    "as many parts as samples": ((torch.ones(2, 2), torch.ones(2)), False),
    "samples of different lengths": ((torch.ones(4), torch.ones(3), torch.ones(5)), False), "tensor": (PARTS[0], False),
    "a list of samples": ([torch.ones(3), torch.ones(3)], False),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_PARTS)
def test_len_as_the_weight_of_a_batch_of_parts_warns(name: str) -> None:
    batch, warns = OF_PARTS[name]
    loop, seen = fjoin.join([batch], weight=len), list[Any]()
    texts = warned(lambda: seen.extend(loop.weight for _ in loop))
    assert (
        seen == [len(batch)]
        and ["not its 3 samples; write weight=lambda batch" in text for text in texts] == [True] * warns
    )


# -- ranks that drift apart, where `identity` does not say that it is meant ----------------------------

CLIP = tx.clip_by_value(1.0)
SILENT = {
    "clip": tx.fuse(tx.chain(CLIP, tx.clip_by_global_norm(1.0)), SGD),
    "by path": tx.fuse(tx.partition({"*": CLIP}), SGD),
    "clip alone": tx.fuse(tx.chain(CLIP, tx.identity()), SGD),  # a chain leaves identity out
    "identity in some steps": tx.fuse(tx.every(2, tx.identity()), SGD),
    "identity for some leaves": tx.fuse(tx.partition({"w": tx.identity(), "v": CLIP}), SGD),
    "identity at the end": tx.fuse(CLIP, SGD, after=tx.switch_after(10, tx.identity(), tx.ema(0.9))),
    "some steps": tx.skip_if_nonfinite(tx.fuse(tx.every(2, CLIP), SGD)),
}
TALKS = {
    "mean": MEAN_SGD,
    "some": tx.fuse(tx.masked(tx.mean("data"), "*"), SGD),
    "identity": tx.fuse(tx.identity(), SGD),
    "after": tx.fuse(tx.identity(), SGD, after=tx.every(2, tx.mean("data"))),
    "by hand": tx.fuse(tx.Transform(lambda p: (), lambda p, s, params=None, **extra: (tx.pmean(p, "data"), s)), SGD),
    "a function": tx.fuse(tx.stateless(lambda g: -g), SGD),  # which may communicate
}


def of_init(pipeline: tx.Pipeline, ranks: int) -> list[str]:
    def one_rank() -> None:
        step = fjoin.train_step(lambda p, b: (p["w"] * b).sum(), pipeline)
        step.init({"w": torch.zeros(2), "v": torch.zeros(1)})

    return warned(lambda: tx.simulate(one_rank, {"data": ranks}), __file__)


@pytest.mark.parametrize("name", [*SILENT, *TALKS])
def test_one_rank_warns_of_a_pipeline_that_reduces_nothing(name: str) -> None:
    if name in TALKS:
        assert of_init(TALKS[name], 2) == []
        return
    (text,) = of_init(SILENT[name], 3)
    assert all(part in text for part in ("reduces", "3 ranks", "tx.mean('data')", "tx.identity()"))
    assert of_init(SILENT[name], 1) == []


def of_register() -> list[list[str]]:
    def register(hook: tx.Transform) -> None:
        fjoin.ddp.register(torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1)), hook)

    return [warned(lambda hook=hook: register(hook), __file__) for hook in (CLIP, tx.identity(), tx.mean("data"))]  # type: ignore[misc]


def test_a_registered_hook_warns_too(pool: Any) -> None:
    ((text,), *others), second = pool.run(2, of_register)
    assert "2 ranks" in text and "tx.mean('data')" in text and others == [[], []] and second == [[]] * 3
