"""Our hooks and pipelines inside torch's DistributedDataParallel."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import max_diff, raises_text, same_bits
from oracle import whole_batch
from oracle.whole_batch import make_batches, make_model, mean_loss
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx

SIZES = [[3, 2, 4, 1], [5, 1], []]
EVEN = [[3, 2, 4], [5, 1, 2]]
SMALL = {"bucket_cap_mb": 1e-4}  # two buckets, from the second pass on


def by_hand() -> tx.Transform:
    """A hook without a spec, which sends two messages, one after the other."""

    def update(grads: Any, state: Any, params: Any = None, *, weight: Any = None, **extra: Any) -> Any:
        w = torch.as_tensor(1.0 if weight is None else weight, dtype=torch.float64)
        total = tx.psum(w, "data")
        sums = tx.psum({k: g * w for k, g in grads.items()}, "data")
        return {k: s / total for k, s in sums.items()}, state

    return tx.Transform(lambda params: (), update, scope="leaf")


HOOKS: dict[str, Any] = {
    "mean": lambda: tx.mean("data"),
    "mean, clip": lambda: tx.chain(tx.mean("data"), tx.clip_by_global_norm(0.1)),
    "mean, two stages": lambda: tx.chain(tx.mean("data"), tx.clip_by_value(0.05), tx.clip_by_global_norm(0.1)),
    "clip, mean": lambda: tx.chain(tx.clip_by_value(0.5), tx.mean("data"), tx.clip_by_global_norm(0.1)),
    "by path": lambda: tx.partition(
        {"*.weight": tx.mean("data"), "*": tx.chain(tx.mean("data"), tx.clip_by_value(0.01))}
    ),
    "by hand": by_hand,
    "mean of mean": lambda: tx.chain(tx.mean("data"), tx.mean("data", over="live")),
}


def clipping(hook: str) -> Any:
    """What a hook does besides the mean, to a model's gradients."""
    params = {"mean, clip": (None, 0.1), "mean, two stages": (0.05, 0.1)}.get(hook)

    def clip(model: nn.Module) -> None:
        if params and params[0]:
            nn.utils.clip_grad_value_(model.parameters(), params[0])
        if params:
            nn.utils.clip_grad_norm_(model.parameters(), params[1])

    return clip


def samples(batch: Any) -> int:
    return len(batch[1])


def train(
    sizes: list[list[int]],
    hook: str = "mean",
    fused: bool = True,
    join: str = "ours",
    options: dict[str, Any] | None = None,
) -> Any:
    """Every sample counts once, whatever the ranks' batches."""
    ddp = DistributedDataParallel(make_model(), **(options or {}))
    if fused:
        handle = fjoin.ddp.register(ddp, tx.fuse(HOOKS[hook](), tx.adamw(0.05)))
        optimizers: list[Any] = []
    else:
        handle = fjoin.ddp.register(ddp, HOOKS[hook]())
        optimizers = [torch.optim.AdamW(ddp.parameters(), 0.05)]
    joinables = [ddp, *optimizers]
    contexts: dict[str, Any] = {
        "ours": lambda: fjoin.Join(joinables),
        "by live": lambda: fjoin.Join(joinables, divide_by_initial_world_size=False),
        "torch": lambda: TorchJoin([ddp]),
        "none": contextlib.nullcontext,
    }
    totals = []
    for _ in range(2):
        with contexts[join]():
            for batch in make_batches(1, sizes)[dist.get_rank()]:
                ddp.zero_grad()
                handle.weight(samples(batch))
                mean_loss(ddp, batch).backward()
                totals.append(handle.total)
                for optimizer in optimizers:
                    optimizer.step()
    return {path: p.detach().clone() for path, p in ddp.module.named_parameters()}, totals


def reference(sizes: list[list[int]], hook: str, epochs: int = 2) -> dict[str, Tensor]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    batches = make_batches(1, sizes)
    clip = clipping(hook)
    for _ in range(epochs):
        for i in range(max(map(len, batches))):
            live = [own[i] for own in batches if i < len(own)]
            total = sum(map(samples, live))
            optimizer.zero_grad()
            sum(mean_loss(model, b) * (samples(b) / total) for b in live).backward()
            clip(model)
            optimizer.step()
    return whole_batch.parameters(model)


def check(results: list[Any], want: dict[str, Tensor]) -> None:
    start = whole_batch.parameters(make_model())
    assert max_diff(want, start) > 1e-2
    for params, _ in results:
        assert max_diff(params, want) < 1e-12 and same_bits(params, results[0][0])


ORACLES = ["mean", "mean, clip", "mean, two stages", "by hand"]


@pytest.mark.parametrize("options", [{}, SMALL], ids=["one bucket", "many"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "hook"])
@pytest.mark.parametrize("hook", ORACLES)
def test_uneven_inputs_equal_one_process(pool: Any, hook: str, fused: bool, options: Any) -> None:
    """On three ranks, one of which has no batch at all, in our Join."""
    check(pool.run(3, train, SIZES, hook, fused, "ours", options), reference(SIZES, hook))


def test_the_divisor_of_a_join_has_no_effect(pool: Any) -> None:
    check(pool.run(3, train, SIZES, "mean", True, "by live", SMALL), reference(SIZES, "mean"))


@pytest.mark.parametrize("hook", ["mean", "by hand"])
def test_in_torchs_join(pool: Any, hook: str) -> None:
    """A fused pipeline keeps all ranks equal there too: a rank without input takes the same steps."""
    check(
        pool.run(2, train, [[3, 2, 4, 1], [5, 1]], hook, True, "torch", SMALL),
        reference([[3, 2, 4, 1], [5, 1]], hook),
    )


@pytest.mark.parametrize("options", [SMALL, {**SMALL, "static_graph": True}, {**SMALL, "find_unused_parameters": True},
                                     {**SMALL, "gradient_as_bucket_view": False}], ids=str)  # fmt: skip
@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_what_it_is_in_a_train_step(pool: Any, hook: str, options: Any) -> None:
    """Clipping before the mean included, which one process cannot do: so against the simulation."""

    def one_rank(batches: list[Any]) -> Any:
        apply, params, _ = fjoin.functional(make_model())

        def loss_fn(params: Any, batch: Any) -> Tensor:
            return torch.nn.functional.cross_entropy(apply(params, {}, batch[0]), batch[1])

        step = fjoin.train_step(loss_fn, tx.fuse(HOOKS[hook](), tx.adamw(0.05)), weight=samples)
        state = step.init(params)
        for _ in range(2):
            for batch in step.join(batches):
                state, _ = step(state, batch)
        return {path: p.clone() for path, p in state.params.items()}

    want = tx.simulate(one_rank, {"data": 2}, make_batches(1, EVEN))[0]
    results = pool.run(2, train, EVEN, hook, True, "none", options)
    check(results, want)
    if hook not in ("by hand", "mean of mean"):  # whose last sum is not of the weights
        assert results[0][1] == [float(a + b) for a, b in zip(*EVEN, strict=True)] * 2, "the totals of the weights"


# -- accumulation, unused parameters, resuming ---------------------------------------------------------


def accumulate() -> Any:
    """Two micro-batches a step; the weights are those of both."""
    ddp = DistributedDataParallel(make_model(), **SMALL)
    handle = fjoin.ddp.register(ddp, tx.fuse(tx.mean("data"), tx.adamw(0.05)))
    own = make_batches(1, [[3, 2, 4, 2], [5, 1, 2, 6]])[dist.get_rank()]
    for i in range(0, 4, 2):
        first, second = own[i], own[i + 1]
        total = samples(first) + samples(second)
        ddp.zero_grad()
        with ddp.no_sync():
            (mean_loss(ddp, first) * samples(first) / total).backward()
        handle.weight(total)
        (mean_loss(ddp, second) * samples(second) / total).backward()
    assert handle.step == 2
    return {path: p.detach().clone() for path, p in ddp.module.named_parameters()}, handle.total


def test_accumulation_under_no_sync(pool: Any) -> None:
    batches = make_batches(1, [[3, 2, 4, 2], [5, 1, 2, 6]])
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    for i in range(0, 4, 2):
        live = [own[j] for own in batches for j in (i, i + 1)]
        optimizer.zero_grad()
        sum(mean_loss(model, b) * (samples(b) / sum(map(samples, live))) for b in live).backward()
        optimizer.step()
    results = pool.run(2, accumulate)
    check(results, whole_batch.parameters(model))
    assert results[0][1] == 14.0


class Branches(nn.Module):
    """Rank r uses branch r in its first step; the last branch is used by no rank in the first two."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(3, 3).double() for _ in range(4))

    def forward(self, x: Tensor, which: list[int]) -> Tensor:
        for i in which:
            x = torch.tanh(self.branches[i](x))
        return x.square().mean()


def unused(ours: bool) -> Any:
    ddp = DistributedDataParallel(Branches(), find_unused_parameters=True, **SMALL)
    if ours:
        fjoin.ddp.register(ddp, tx.fuse(tx.mean("data"), tx.adamw(0.05, weight_decay=0.1)))
    optimizer = torch.optim.AdamW(ddp.parameters(), 0.05, weight_decay=0.1, fused=True)
    for step in range(4):
        g = torch.Generator().manual_seed(10 * step + dist.get_rank())
        ddp.zero_grad()
        ddp(
            torch.randn(5, 3, generator=g, dtype=torch.float64), [0, 3] if step == 2 else [0, 1 + dist.get_rank()]
        ).backward()
        if not ours:
            optimizer.step()
    return {path: p.detach().clone() for path, p in ddp.module.named_parameters()}


def test_what_no_rank_uses_is_left_alone(pool: Any) -> None:
    """As by torch.optim, which skips parameters without gradient: no decay, no ageing."""
    ours, theirs = pool.run(2, unused, True), pool.run(2, unused, False)
    assert max_diff(ours[0], theirs[0]) < 1e-14 and same_bits(ours[0], ours[1])


def resume(hook: str) -> Any:
    """The second epoch, with a new module that loads what was saved: DDP starts with other buckets."""

    def fresh() -> Any:
        ddp = DistributedDataParallel(make_model(), **SMALL)
        return ddp, fjoin.ddp.register(
            ddp, tx.fuse(tx.chain(HOOKS[hook](), tx.every(2, tx.clip_by_value(0.01))), tx.adamw(0.05))
        )

    def epoch(ddp: Any, handle: Any) -> None:
        for batch in make_batches(1, EVEN)[dist.get_rank()]:
            ddp.zero_grad()
            handle.weight(samples(batch))
            mean_loss(ddp, batch).backward()

    ddp, handle = fresh()
    epoch(ddp, handle)
    file = io.BytesIO()
    torch.save((ddp.module.state_dict(), handle.state_dict()), file)
    file.seek(0)
    weights, saved = torch.load(file, weights_only=True)
    other, resumed = fresh()
    other.module.load_state_dict(weights)
    resumed.load_state_dict(saved)
    epoch(ddp, handle)
    epoch(other, resumed)
    assert resumed.step == handle.step == 6
    return [{p: v.detach().clone() for p, v in m.module.named_parameters()} for m in (ddp, other)]


@pytest.mark.parametrize("hook", ["mean", "clip, mean", "by path"])
def test_a_saved_state_goes_on(pool: Any, hook: str) -> None:
    for going_on, resumed in pool.run(2, resume, hook):
        assert same_bits(going_on, resumed)


# -- steps that are left out, errors ---------------------------------------------------------------------


def nonfinite(skips: bool) -> Any:
    ddp = DistributedDataParallel(make_model(), **SMALL)
    pipeline = tx.fuse(tx.mean("data"), tx.adamw(0.05))
    handle = fjoin.ddp.register(ddp, tx.skip_if_nonfinite(pipeline) if skips else pipeline)
    told = ""
    for i, (x, y) in enumerate(make_batches(1, EVEN)[dist.get_rank()]):
        before = {path: p.detach().clone() for path, p in ddp.module.named_parameters()}
        ddp.zero_grad()
        bad = x * float("nan") if i == 1 and dist.get_rank() == 1 else x
        try:
            mean_loss(ddp, (bad, y)).backward()
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
        if i == 1:
            assert same_bits(before, dict(ddp.module.named_parameters()))
            if not skips:
                break
    return told, handle.step, handle.skipped


def test_a_step_that_is_not_finite(pool: Any) -> None:
    """Left out on all ranks, or raised on all, out of backward."""
    assert pool.run(2, nonfinite, True) == [("", 3, 1)] * 2
    for told, step, _ in pool.run(2, nonfinite, False):
        assert "NonFinite" in told and "step 1" in told and "unchanged" in told and step == 2


def failing() -> Any:
    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        raise KeyError("no such thing")

    ddp = DistributedDataParallel(make_model(), **SMALL)
    fjoin.ddp.register(ddp, tx.Transform(lambda params: (), update, scope="leaf"))
    try:
        mean_loss(ddp, make_batches(1, [[3], [3]])[0][0]).backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_an_exception_in_a_hook_comes_out_of_backward(pool: Any) -> None:
    """In torch's fused hook it is lost (H2)."""
    assert all("no such thing" in told for told in pool.run(2, failing))


def refused() -> Any:
    ddp = DistributedDataParallel(make_model())
    for make, kind, texts in [
        (lambda: fjoin.ddp.register(ddp.module, tx.mean("data")), TypeError, ["DistributedDataParallel", "Sequential"]),
        (lambda: fjoin.ddp.register(ddp, tx.sgd(0.1)), TypeError, ["transform or a pipeline", "sgd(lr=0.1)"]),
        (lambda: fjoin.ddp.register(ddp, tx.chain(tx.mean("a"), tx.mean("b"))), ValueError, ["['a', 'b']", "mesh="]),
        (lambda: fjoin.ddp.register(ddp, tx.mean("data"), fjoin.mesh({"data": 1})), ValueError, ["1"]),
        (lambda: fjoin.ddp.register(ddp, tx.fuse(tx.mean("data"), tx.muon())), ValueError, ["matrices only"]),
    ]:  # fmt: skip
        raises_text(kind, make, *texts)
    raises_text(
        fjoin.DesyncError,
        lambda: fjoin.ddp.register(ddp, tx.chain(tx.mean("data"), tx.clip_by_value(1.0 + dist.get_rank()))),
        "rank 1 registers", "clip_by_value(2.0)", "clip_by_value(1.0)",
    )  # fmt: skip
    handle = fjoin.ddp.register(ddp, tx.fuse(tx.mean("data"), tx.adamw(0.1)))
    raises_text(ValueError, lambda: fjoin.ddp.register(ddp, tx.mean("data")), "already")
    raises_text(ValueError, lambda: handle.weight(-1.0), "-1.0")
    raises_text(ValueError, lambda: handle.weight(float("nan")), "nan")
    other = fjoin.ddp.register(DistributedDataParallel(make_model()), tx.fuse(tx.noop(), tx.sgd(0.1)))
    raises_text(ValueError, lambda: other.load_state_dict(handle.state_dict()), "the state of the hook")
    return True


def test_what_is_refused(pool: Any) -> None:
    assert all(pool.run(2, refused))


def messages(options: dict[str, Any]) -> list[list[int]]:
    """The sizes of what is given to torch.distributed in each pass."""
    ddp = DistributedDataParallel(make_model(), **options)
    handle = fjoin.ddp.register(ddp, tx.fuse(tx.mean("data"), tx.adamw(0.05)))
    sent: list[list[int]] = []
    kept = {name: getattr(dist, name) for name in ("all_reduce", "all_to_all_single")}

    def counted(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            sent[-1].append(args[1 if name == "all_to_all_single" else 0].numel())
            return kept[name](*args, **kwargs)

        return call

    for name in kept:
        setattr(dist, name, counted(name))
    try:
        for batch in make_batches(1, EVEN)[dist.get_rank()]:
            sent.append([])
            ddp.zero_grad()
            handle.weight(samples(batch))
            mean_loss(ddp, batch).backward()
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)
    return sent


def test_one_message_besides_the_buckets(pool: Any) -> None:
    """Of one number, with the first bucket; the module's first pass has one bucket, and the others two."""
    for sent in pool.run(2, messages, SMALL):
        assert sent == [[1, 66], [1, 24, 42], [1, 24, 42]]


class Images(nn.Module):
    """A convolution whose weights lie in channels-last order, and a transposed matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3).double().to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(4, 2, dtype=torch.float64).t())

    def forward(self, x: Tensor) -> Tensor:
        return (self.turned @ self.conv(x).amax((2, 3)).t()).square().mean()


def layouts(how: str) -> Any:
    ddp = DistributedDataParallel(Images(), gradient_as_bucket_view=how == "views")
    optimizer = torch.optim.AdamW(ddp.parameters(), 0.05, weight_decay=0.1)
    if how in ("fused", "views"):
        fjoin.ddp.register(
            ddp, tx.fuse(tx.chain(tx.mean("data"), tx.clip_by_global_norm(0.1)), tx.adamw(0.05, weight_decay=0.1))
        )
    rank = dist.get_rank()
    with (
        fjoin.Join([ddp] if how in ("fused", "views") else [ddp, optimizer])
        if how != "plain"
        else contextlib.nullcontext()
    ):
        for step in range(3 - (rank if how == "join" else 0)):
            g = torch.Generator().manual_seed(10 * step + rank)
            ddp.zero_grad()
            ddp(torch.randn(2, 3, 5, 5, generator=g, dtype=torch.float64)).backward()
            if how == "plain":
                nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
            if how in ("plain", "join"):
                optimizer.step()
    moments = {
        f"{path}, moment": optimizer.state[p]["exp_avg"] for path, p in ddp.module.named_parameters() if optimizer.state
    }
    return {path: p.detach().clone() for path, p in ddp.module.named_parameters()} | (moments if how == "join" else {})


@pytest.mark.parametrize("how", ["fused", "views"])
def test_parameters_that_lie_otherwise_in_memory(pool: Any, how: str) -> None:
    """torch's views in a bucket have other strides than the parameters."""
    ours, theirs = pool.run(2, layouts, how), pool.run(2, layouts, "plain")
    assert max_diff(ours[0], theirs[0]) < 1e-12 and same_bits(ours[0], ours[1])


def test_they_do_so_in_our_join_too(pool: Any) -> None:
    """A rank without input steps with what it receives: the optimizer's state stays equal too."""
    a, b = pool.run(2, layouts, "join")
    assert len(a) == 6 and same_bits(a, b)


def weighted_halves(weight: float) -> Any:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    ddp = DistributedDataParallel(model.half())
    handle = fjoin.ddp.register(ddp, tx.mean("data"))
    seen = []
    for step in range(2):
        ddp.zero_grad()
        handle.weight(weight * (1 + dist.get_rank()))
        ddp(torch.full((1, 1), 30.0 * (step + 1)).half()).sum().backward()
        seen.append(model.weight.grad.item())
    return seen


@pytest.mark.parametrize("weight", [4096.0, 1e-6])
def test_weights_do_not_overflow_16_bits(pool: Any, weight: float) -> None:
    assert pool.run(2, weighted_halves, weight) == [[30.0, 60.0]] * 2


def goes_on() -> Any:
    """After a NonFinite out of backward, and gradients taken beside the module."""
    ddp = DistributedDataParallel(Branches(), find_unused_parameters=True, **SMALL)
    handle = fjoin.ddp.register(ddp, tx.fuse(tx.mean("data"), tx.adamw(0.05, weight_decay=0.5)))
    kinds = []
    for x, which in ((1.0, [0]), (float("nan"), [0, 1]), (2.0, [0]), (3.0, [0])):
        torch.autograd.grad(ddp.module(torch.ones(1, 3).double(), [2]), list(ddp.module.branches[2].parameters()))
        try:
            ddp.zero_grad(set_to_none=True)
            ddp(torch.full((1, 3), x).double(), which).backward()
            kinds.append("fine")
        except fjoin.NonFinite as error:
            kinds.append(f"{error.step}")
    moved = [
        not same_bits(p.detach(), q.detach())
        for p, q in zip(ddp.module.parameters(), Branches().parameters(), strict=True)
    ]
    return kinds, moved, handle.step


def test_a_module_goes_on_after_an_error(pool: Any) -> None:
    for kinds, moved, step in pool.run(2, goes_on):
        assert kinds == ["fine", "1", "fine", "fine"] and step == 4
        assert moved == [True, True, False, False, False, False, False, False], "what was used in no step is left alone"


def refused_later() -> bool:
    table = DistributedDataParallel(nn.Embedding(3, 2, sparse=True))
    fjoin.ddp.register(table, tx.mean("data"))
    raises_text(TypeError, lambda: table(torch.tensor([0])).sum().backward(), "sparse=False")
    ddp = DistributedDataParallel(make_model())
    raises_text(ValueError, lambda: fjoin.ddp.register(ddp, tx.accumulate(2, tx.mean("data"))), "no_sync()")
    handle = fjoin.ddp.register(
        ddp, tx.fuse(tx.chain(tx.mean("data"), tx.every(2, tx.clip_by_value(1.0))), tx.adamw(0.1))
    )
    mean_loss(ddp, make_batches(1, EVEN)[0][0]).backward()
    saved = handle.state_dict()
    raises_text(ValueError, lambda: handle.load_state_dict({"hook": {}}), "has no", "'optimizer'")
    first = next(iter(saved["optimizer"]))
    bad = {
        **saved,
        "optimizer": {**saved["optimizer"], first: {**saved["optimizer"][first], "exp_avg": torch.zeros(1)}},
    }
    raises_text(ValueError, lambda: handle.load_state_dict(bad), "'exp_avg'", "shape (1,)")
    turned = {**saved, "hook": dict(reversed(saved["hook"].items()))}
    handle.load_state_dict(turned)
    assert same_bits(handle.state_dict()["hook"], saved["hook"]) and same_bits(handle.state_dict(), saved)
    return True


def test_what_is_refused_later(pool: Any) -> None:
    assert all(pool.run(2, refused_later))
