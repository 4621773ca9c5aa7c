"""Hooks and pipelines inside torch's DistributedDataParallel: any context and option, errors that backward raises, refused arguments.

tests/test_places.py compares the pipelines themselves.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from tests.ddp.register_problem import EVEN, HOOKS, SIZES, SMALL, Branches, check, samples
from tests.helpers import max_diff, raises_text, same_bits
from tests.oracle import whole_batch
from tests.oracle.whole_batch import make_batches, make_model, mean_loss


def train(sizes: list[list[int]], hook: str, fused: bool, join: str, options: dict[str, Any]) -> Any:
    """Every sample counts once, whatever the ranks' batches."""
    ddp = DistributedDataParallel(make_model(), **options)
    handle = fjoin.ddp.register(ddp, tx.fuse(HOOKS[hook](), tx.adamw(0.05)) if fused else HOOKS[hook]())
    optimizers = [] if fused else [torch.optim.AdamW(ddp.parameters(), 0.05)]
    contexts: dict[str, Any] = {
        "ours": lambda: fjoin.Join([ddp, *optimizers]), "torch": lambda: TorchJoin([ddp]), "none": contextlib.nullcontext,
    }  # fmt: skip
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


def reference(sizes: list[list[int]], hook: str) -> dict[str, Tensor]:
    """One process on the batches of all."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    for _ in range(2):
        whole_batch.train(model, optimizer, make_batches(1, sizes), clip=0.1 if hook == "mean, clip" else None)
    return whole_batch.parameters(model)


TWO = [[3, 2, 4, 1], [5, 1]]
VIEWS, STATIC = {"gradient_as_bucket_view": True}, {"static_graph": True}
# Batches, hook, whether it has an optimizer, context, options. In a torch Join a rank without input takes the same steps.
ROWS: list[tuple[Any, ...]] = [
    (SIZES, "mean, clip", False, "ours", SMALL), *((TWO, hook, True, "torch", SMALL) for hook in ("mean", "by hand")),
    (EVEN, "mean, clip", True, "none", {**SMALL, **VIEWS}), (EVEN, "by hand", True, "none", {**SMALL, **STATIC}),
]  # fmt: skip


@pytest.mark.parametrize("row", range(len(ROWS)), ids=lambda i: "-".join(map(str, ROWS[i][1:])))
def test_it_equals_one_process(pool: Any, row: int) -> None:
    sizes, hook, *_ = ROWS[row]
    results = pool.run(len(sizes), train, *ROWS[row])
    check(results, reference(sizes, hook))
    if sizes is EVEN and hook != "by hand":  # whose last sum is not of the weights
        assert results[0][1] == [float(a + b) for a, b in zip(*EVEN, strict=True)] * 2, "the totals of the weights"


# -- errors --------------------------------------------------------------------------------------------


def failing() -> str:
    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        raise KeyError("no such thing")

    ddp = DistributedDataParallel(make_model(), **SMALL)
    fjoin.ddp.register(ddp, tx.Transform(lambda params: (), update, needs=tx.Needs.LEAVES))
    return raises_text(Exception, mean_loss(ddp, make_batches(1, [[3], [3]])[0][0]).backward, "no such thing")


def goes_on(skips: bool) -> Any:
    """After a NonFinite from backward, or a pass that is left out, and after gradients taken outside the module."""
    ddp = DistributedDataParallel(Branches(), find_unused_parameters=True, **SMALL)
    pipeline = tx.fuse(tx.mean("data"), tx.adamw(0.05, weight_decay=0.5))
    handle = fjoin.ddp.register(ddp, tx.skip_if_nonfinite(pipeline) if skips else pipeline)
    kinds = []
    for x, which in ((1.0, [0]), (float("nan") if dist.get_rank() == 1 else 1.0, [0, 1]), (2.0, [0]), (3.0, [0])):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of gradients without a step
            torch.autograd.grad(ddp.module(torch.ones(1, 3).double(), [2]), list(ddp.module.branches[2].parameters()))
        try:
            ddp.zero_grad(set_to_none=True)
            ddp(torch.full((1, 3), x).double(), which).backward()
            kinds.append("fine")
        except fjoin.NonFinite as error:
            assert "unchanged" in str(error)
            kinds.append(f"{error.step}")
    moved = [
        not same_bits(p.detach(), q.detach())
        for p, q in zip(ddp.module.parameters(), Branches().parameters(), strict=True)
    ]
    return kinds, moved, handle.step, handle.skipped


def test_errors_come_out_of_backward_and_a_module_goes_on(pool: Any) -> None:
    """All ranks leave the pass out, or all raise. What was used in no step is left alone."""
    pool.run(2, failing)
    for skips in (True, False):
        want = ["fine", "fine" if skips else "1", "fine", "fine"], [True, True, *[False] * 6], 4, int(skips)
        assert pool.run(2, goes_on, skips) == [want] * 2


def refused() -> None:
    ddp, register = DistributedDataParallel(make_model()), fjoin.ddp.register
    mean = tx.mean("data")
    for what, kind, *texts in (
        ((tx.sgd(0.1),), TypeError, "transform or a pipeline", "sgd(lr=0.1)"),
        ((tx.chain(tx.mean("a"), tx.mean("b")),), ValueError, "['a', 'b']", "mesh="),
        ((tx.fuse(mean, tx.muon()),), ValueError, "matrices only"),
        ((tx.accumulate(2, mean),), ValueError, "no_sync()"),
        ((tx.chain(mean, tx.clip_by_value(1.0 + dist.get_rank())),), fjoin.DesyncError,
         "rank 1 differs from rank 0 in its hook", "clip_by_value(2.0)", "clip_by_value(1.0)"),
    ):  # fmt: skip
        raises_text(kind, lambda: register(ddp, *what), *texts)  # noqa: B023
    hook = tx.chain(mean, tx.every(2, tx.clip_by_value(1.0)))
    handle = register(ddp, tx.fuse(hook, tx.adamw(0.1)))
    raises_text(ValueError, lambda: register(ddp, mean), "already")
    for bad in (-1.0, float("nan"), 1e-46, 1e39, torch.tensor(-1.0), torch.ones(2)):
        raises_text(ValueError, lambda: handle.weight(bad), "weight must be")  # noqa: B023
    raises_text(TypeError, lambda: handle.weight("1"), "'1'")  # type: ignore[arg-type]
    raises_text(ValueError, lambda: handle.with_hyperparameters(rate=1.0), "['rate']")
    # -- states
    other = register(DistributedDataParallel(make_model()), tx.fuse(hook, tx.sgd(0.1)))
    raises_text(ValueError, lambda: other.load_state_dict(handle.state_dict()), "the state of '0.weight'", "exp_avg")
    mean_loss(ddp, make_batches(1, EVEN)[0][0]).backward()
    saved = handle.state_dict()
    first = next(iter(saved["optimizer"]))

    def changed(**fields: Any) -> Any:
        return {**saved, "optimizer": {**saved["optimizer"], first: {**saved["optimizer"][first], **fields}}}

    for state, *texts in (
        ({"hook": {}}, "got ['hook']", "'optimizer'"), (changed(exp_avg=torch.zeros(1)), "'exp_avg'", "shape (1,)"),
        (changed(step=torch.tensor(-1.0)), repr(first), "step is -1.0"),
    ):  # fmt: skip
        raises_text(ValueError, lambda: handle.load_state_dict(state), *texts)  # noqa: B023
    handle.load_state_dict({**saved, "hook": dict(reversed(saved["hook"].items()))})
    assert same_bits(handle.state_dict(), saved)
    # -- parameters
    table = DistributedDataParallel(nn.Embedding(3, 2, sparse=True))
    register(table, mean)
    raises_text(TypeError, lambda: table(torch.tensor([0])).sum().backward(), "sparse=False")
    spectrum = DistributedDataParallel(nn.ParameterDict({"w": torch.ones(2, dtype=torch.complex64)}))
    raises_text(TypeError, lambda: register(spectrum, tx.fuse(mean, tx.sgd(0.1))), "'w' has complex dtype")
    register(spectrum, mean)


def test_raises_on_bad_input(pool: Any) -> None:
    pool.run(2, refused)


# -- the allowed dtypes and memory formats of a registered module's parameters --


class TwoDtypes(nn.Module):
    """Whose gradients never lie in one bucket."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.narrow, self.wide = nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(self.narrow(x).double()).square().mean()


def two_dtypes(codec: str | None, static: bool) -> dict[str, Tensor]:
    ddp = DistributedDataParallel(TwoDtypes(), static_graph=static)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    if codec is not None:
        fjoin.ddp.register(ddp, tx.compress(tx.float32(), tx.mean("data")) if codec else tx.mean("data"))
    x = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    for batch in x:
        optimizer.zero_grad()
        ddp(batch).backward()
        optimizer.step()
    return {path: p.detach().clone() for path, p in ddp.module.named_parameters()}


@pytest.mark.parametrize("static", [False, True], ids=["", "static"])
def test_parameters_of_two_dtypes(pool: Any, static: bool) -> None:
    """In the first pass of a static graph both buckets have index 0, and none says that it is the last."""
    want = pool.run(2, two_dtypes, None, static)
    for codec in ("", "float32"):
        for got, expected in zip(pool.run(2, two_dtypes, codec, static), want, strict=True):
            assert max_diff(got, expected) < 1e-6


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
    if ours := how in ("fused", "views"):
        clipped = tx.chain(tx.mean("data"), tx.clip_by_global_norm(0.1))
        fjoin.ddp.register(ddp, tx.fuse(clipped, tx.adamw(0.05, weight_decay=0.1)))
    rank = dist.get_rank()
    with contextlib.nullcontext() if how == "plain" else fjoin.Join([ddp] if ours else [ddp, optimizer]):
        for step in range(3 - (rank if how == "join" else 0)):
            g = torch.Generator().manual_seed(10 * step + rank)
            ddp.zero_grad()
            ddp(torch.randn(2, 3, 5, 5, generator=g, dtype=torch.float64)).backward()
            if how == "plain":
                nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
            if not ours:
                optimizer.step()
    params = {path: p.detach().clone() for path, p in ddp.module.named_parameters()}
    moments = {
        f"{path}, moment": optimizer.state[p]["exp_avg"] for path, p in ddp.module.named_parameters() if how == "join"
    }
    return params | moments


@pytest.mark.parametrize("how", ["fused", "views"])
def test_parameters_with_other_memory_layouts(pool: Any, how: str) -> None:
    """torch's views in a bucket have other strides than the parameters."""
    ours, theirs = pool.run(2, layouts, how), pool.run(2, layouts, "plain")
    assert max_diff(ours[0], theirs[0]) < 1e-12 and same_bits(ours[0], ours[1])


def test_parameters_with_other_memory_layouts_in_a_join(pool: Any) -> None:
    """A rank without input steps with the gradients it receives: the optimizer's state stays equal too."""
    a, b = pool.run(2, layouts, "join")
    assert len(a) == 6 and same_bits(a, b)


def widely_weighted(hook: str, dtype: torch.dtype) -> Any:
    """The gradient of each pass, which is 0.5 for any weights, also without an optimizer, and the parameter after the first."""
    module = nn.Linear(3, 1, bias=False, dtype=dtype)
    nn.init.ones_(module.weight)
    mean = tx.mean("data")
    made = {"mean": mean, "mean, clip": tx.chain(mean, tx.clip_by_global_norm(100.0)), "alone": mean}[hook]
    ddp = DistributedDataParallel(module)
    handle = fjoin.ddp.register(ddp, made if hook == "alone" else tx.fuse(made, tx.sgd(1.0)))
    grads, params = [], []
    for weight in (512.0, 1e-6, 3.0, 50000.0):
        ddp.zero_grad()
        handle.weight(weight * (1 + dist.get_rank() * (dtype is torch.float16)))
        ddp(torch.full((1, 3), 0.5, dtype=dtype)).sum().backward()
        grads += module.weight.grad.flatten().tolist()
        params += module.weight.flatten().tolist()
    return grads, params[0]


@pytest.mark.parametrize(
    ("hook", "dtype"), [("mean", torch.bfloat16), *((hook, torch.float16) for hook in ("mean", "mean, clip", "alone"))]
)
def test_weights_of_any_size_in_low_precision(pool: Any, hook: str, dtype: torch.dtype) -> None:
    """The scale of gradients in messages is removed once; sums fit when weights suddenly grow."""
    for grads, param in pool.run(2, widely_weighted, hook, dtype):
        assert grads == pytest.approx([0.5] * 12, rel=1e-3) and param == (1.0 if hook == "alone" else 0.5)


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda: tx.adamw(0.05),
    "lion": lambda: tx.lion(0.05),
    "masters": lambda: tx.mixed_precision(tx.adamw(0.05)),
    "frozen": lambda: tx.partition({"*bias": tx.frozen(), "*": tx.adamw(0.05)}),  # its kernel divides nothing
    "skipped": lambda: tx.adamw(0.05),
}


def gradients_left(optimizer: str, dtype: torch.dtype) -> Any:
    """After the first pass: with a pipeline, and with its hook alone."""
    left = []
    for alone in (False, True):
        ddp = DistributedDataParallel(make_model().to(dtype))
        pipeline = tx.fuse(tx.mean("data"), OPTIMIZERS[optimizer]())
        handle = fjoin.ddp.register(ddp, tx.mean("data") if alone else tx.skip_if_nonfinite(pipeline))
        x, y = make_batches(1, EVEN)[dist.get_rank()][0]
        x = x * float("inf") if optimizer == "skipped" else x
        handle.weight(samples((x, y)))
        mean_loss(ddp, (x.to(dtype), y)).backward()
        left.append({path: p.grad.clone() for path, p in ddp.module.named_parameters() if p.grad is not None})
    return left


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_gradients_are_left_as_the_hook_made_them(pool: Any, optimizer: str, dtype: torch.dtype) -> None:
    """Means, where the optimizer's kernel has divided the sums too."""
    for with_pipeline, alone in pool.run(2, gradients_left, optimizer, dtype):
        assert len(alone) == 4
        for path, g in alone.items():
            assert torch.allclose(with_pipeline[path], g, rtol=1e-6, atol=0, equal_nan=True), path
