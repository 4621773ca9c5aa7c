"""Between the passes and behind them: order, memory, changes and writes, and calls; what is predicted to be kept."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from fjoin import transforms as tx
from fjoin.transforms import checkpoint_policies as policies
from tests.helpers import raises_text

from .functions import POLICIES, Block, Case, again
from .operations import WRITES, last
from .transformer import Counted, Transformer, tokens

pytestmark = pytest.mark.usefixtures("host")
of_policies = pytest.mark.parametrize("policy", ["nothing", "dots", "host", "own"])


@of_policies
def test_later_code_may_write_into_the_result(policy: str) -> None:
    layer, grads = nn.Linear(4, 4), []
    for wrap in (lambda f: f, lambda f: again(f, policy)):
        leaf = torch.linspace(-1, 1, 24).view(2, 3, 4).requires_grad_()
        F.relu_(wrap(layer)(leaf)).sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=0)


@of_policies
def test_a_change_between_the_passes_is_an_error(policy: str) -> None:
    mask, x = torch.ones(3), torch.ones(3, requires_grad=True)
    y = again(lambda x: (x * mask).sin(), policy)(x)
    mask.zero_()
    raises_text(RuntimeError, lambda: y.sum().backward(), "modified by an inplace operation")


def test_unused_tensors_may_change_between_the_passes() -> None:
    first, second = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 1), nn.BatchNorm1d(1))
    both = nn.ModuleList([first, second])
    out = tx.remat(lambda x: both[0](x).tanh())(torch.ones(2, 4))
    with torch.no_grad():
        second[0].weight.mul_(2)
    second(out).sum().backward()
    assert first.weight.grad is not None


def test_parameters_may_be_stepped_in_the_backward_pass() -> None:
    """Each is stepped when it has its gradient, before the recomputation, which does not need the last bias."""

    def run(wrap: Any) -> list[Tensor]:
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
        x = torch.ones(2, 5, 3, requires_grad=True)
        y = wrap(lambda x: block(x).transpose(0, 1) + block[2].bias)(x)

        def step(p: Tensor) -> None:
            with torch.no_grad():
                p.add_(p.grad, alpha=-0.1)

        for p in block.parameters():
            p.register_post_accumulate_grad_hook(step)
        y.sum().backward()
        return [*(p.detach() for p in block.parameters()), x.grad]

    assert all(map(torch.equal, run(tx.remat), run(lambda f: f)))


def test_gradients_arrive_in_the_order_of_the_plain_function() -> None:
    """Buckets are sent in this order while the backward pass runs."""
    blocks, seen, orders = nn.ModuleList(nn.Linear(4, 4) for _ in range(5)), [], []
    for name, p in blocks.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: seen.append(name))
    for wrap in (lambda f: f, tx.remat):
        x = torch.ones(2, 4)
        for i in range(4):  # the last one is unused
            x = wrap(lambda x, i=i: blocks[i](x).tanh())(x)  # a closure over all of them
        seen.clear()
        x.sum().backward()
        orders.append(list(seen))
    assert orders[0] == orders[1] and len(orders[0]) == 8


@pytest.mark.parametrize("away", [False, True])
def test_arguments_are_freed(away: bool) -> None:
    """Those that wait elsewhere at once, others by the backward pass, although the loss is alive."""
    h = torch.randn(8, 8, requires_grad=True) * 2
    kept = StorageWeakRef(h.untyped_storage())
    options: Any = {"policy": policies.everything_saveable, "offload": "cpu"} if away else {}
    loss = tx.remat(lambda x: x.sin().tanh().sum(), **options)(h)
    del h
    assert kept.expired() == away
    loss.backward()
    assert kept.expired()


# -- what is reached ----------------------------------------------------------------------------------------------------


class Hidden:
    """Out of reach of a search."""

    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value


@dataclasses.dataclass
class State:
    """No module."""

    mean: Tensor


HELD: dict[str, Any] = {}


@of_policies
def test_values_that_globals_hold(policy: str) -> None:
    """A dataclass and a deque that are new in each step, with and without torch.func."""

    def loss(w: Tensor, wrap: Callable[[Any], Any]) -> Tensor:
        HELD.update(state=State(w.sin() * 2), more=collections.deque([w.cos()]))
        x = torch.linspace(-1, 1, 12).view(3, 4)
        return wrap(lambda x: (x * HELD["state"].mean + HELD["more"][0]).sin())(x).sum()

    w = torch.linspace(0, 1, 4)
    want = torch.func.grad(loss)(w, lambda f: f)
    torch.testing.assert_close(torch.func.grad(loss)(w, lambda f: again(f, policy)), want)
    leaf = w.clone().requires_grad_()
    loss(leaf, lambda f: again(f, policy)).backward()
    torch.testing.assert_close(leaf.grad, want)


def test_tensors_that_are_not_reached() -> None:
    """They get gradients from autograd, as those from outside, and are an error under torch.func, which would lose them."""
    hidden, x = Hidden(torch.ones(3, requires_grad=True)), torch.ones(2, 3, requires_grad=True)
    middle = x * 2
    tx.remat(lambda y: (y * hidden.value).sum() + middle.sum())(x).backward()
    assert x.grad is not None and hidden.value.grad is not None
    assert x.grad.tolist() == [[3.0] * 3] * 2 and hidden.value.grad.tolist() == [2.0] * 3
    f = tx.remat(lambda y: (y * hidden.value).sum())
    raises_text(RuntimeError, lambda: torch.func.grad(f)(torch.ones(3)), "(3,)", "pass it as an argument")
    given = torch.func.grad(lambda y: tx.remat(torch.mul)(y, hidden.value).sum())
    assert given(torch.ones(3)).tolist() == [1.0] * 3


# -- writes -------------------------------------------------------------------------------------------------------------


HOLDERS: dict[str, Callable[[Tensor, Any], Callable[[Tensor], Tensor]]] = {
    "closure": lambda mean, write: lambda x: last(write(mean), (x * mean.clone()).sin()),
    "object": lambda mean, write: (lambda state: lambda x: last(write(state.mean), (x * state.mean.clone()).sin()))(State(mean)),
    "argument": lambda mean, write: lambda x, mean=mean: last(write(mean), (x * mean.clone()).sin()),
}  # fmt: skip


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("write", WRITES)
def test_a_write_into_a_tensor_that_no_module_holds_is_an_error(write: str, holder: str) -> None:
    """Plans write into no tensor."""
    mean, x = torch.ones(4), torch.ones(3, 4, requires_grad=True)
    f = HOLDERS[holder](mean, WRITES[write])
    for run in (f, tx.remat(f)):
        with contextlib.suppress(ValueError):
            tx.saved_residuals(run, x)
        assert type(mean) is Tensor and mean.tolist() == [1.0] * 4 and mean._version == 0
    raises_text(ValueError, lambda: tx.remat(f)(x), "written into a tensor of shape (4,) that no module holds")
    if write == "add_" and holder != "argument":
        raises_text(ValueError, lambda: tx.saved_residuals(f, x), "no module holds")


def test_writes_into_arguments_and_by_another_name_are_errors() -> None:
    module, x = nn.BatchNorm1d(4), torch.ones(3, 4, requires_grad=True)
    mean: Any = module.running_mean

    def f(x: Tensor) -> Tensor:
        mean.add_(1)
        return module(x) * mean.clone()

    raises_text(ValueError, lambda: tx.remat(f)(x).sum().backward(), "by another name")
    raises_text(ValueError, lambda: tx.remat(lambda tree: tree["a"].add_(1))({"a": x * 1}), "['a']")


def test_a_second_run_that_does_something_else_is_an_error() -> None:
    """An iterator is empty in it; or a product has another shape."""
    x, sizes = torch.ones(2, requires_grad=True), iter(range(2, 9))
    of_iterator = tx.remat(lambda xs: sum((y.sin() for y in xs), x).sum())
    raises_text(RuntimeError, lambda: of_iterator(y for y in [x * 1, x]).backward(), "did not do the same")
    unsteady = tx.remat(lambda x: (x @ torch.ones(2, next(sizes))).sum(), policies.dots_saveable)
    raises_text(RuntimeError, lambda: unsteady(x * 1).backward(), "did not do the same")


def gradient(f: Any, at: float = 1.0) -> float:
    x = torch.tensor([at], requires_grad=True)
    f(x).sum().backward()
    assert x.grad is not None
    return round(x.grad.item(), 4)


def draws_last(wrap: Any) -> float:
    """The operation saves its noise before it draws it. torch fills new memory with NaN here."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return gradient(wrap(lambda x: F.rrelu(-x, 0.1, 0.9, training=True)))
    finally:
        torch.use_deterministic_algorithms(before)


def test_an_operation_that_draws_last() -> None:
    want = draws_last(lambda f: f)
    assert [draws_last(lambda f, policy=policy: again(f, policy)) for policy in ("nothing", "dots")] == [want] * 2  # type: ignore[misc]


# -- torch.compile ------------------------------------------------------------------------------------------------------


def compiled(wrap: Callable[[nn.Module], Any] | None) -> tuple[Tensor, Tensor]:
    """The gradient and the buffer after a compiled call; of the module itself, and not compiled, without `wrap`."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    module, x = Block(Case(("linear", "mean", "sin"))), torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
    (torch.compile(wrap(module), backend="aot_eager") if wrap else module)(x).sum().backward()
    assert x.grad is not None
    return x.grad, module.world.mean


@pytest.mark.parametrize("policy", ["nothing", pytest.param("dots", marks=pytest.mark.long)])
def test_compiled_functions_that_write_into_buffers(policy: str) -> None:
    given = again(lambda module, x: module(x), policy)
    for wrap in (
        lambda m: again(m, policy), lambda m: again(lambda x: m(x), policy), lambda m: again(m.forward, policy),
        lambda m: lambda x: given(m, x),
    ):  # fmt: skip
        torch.testing.assert_close(compiled(wrap), compiled(None), rtol=1e-5, atol=1e-5)


def test_functions_without_buffers_are_compiled() -> None:
    torch._dynamo.reset()
    linear = nn.Linear(3, 3)
    torch.compile(tx.remat(lambda x: linear(x).sin()), backend="aot_eager", fullgraph=True)(
        torch.ones(4, 3)
    ).sum().backward()


# -- beside a large table of numbers or texts, a region makes the calls that it makes without ---------------------------


NUMBERS: dict[int, Any] = {i: float(i) for i in range(10_000)}


class Lookup(nn.Module):
    def __init__(self, entries: int) -> None:
        super().__init__()
        self.layer, self.vocabulary = nn.Linear(3, 3), {i: str(i) for i in range(entries)}

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum() * NUMBERS[1]


def calls_of(model: Lookup) -> int:
    count, x, region = 0, torch.ones(2, 3, requires_grad=True), tx.remat(model)
    region(x).backward()

    def called(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(called)
    try:
        region(x).backward()
    finally:
        sys.setprofile(None)
    return count


def test_a_table_costs_nothing() -> None:
    assert calls_of(Lookup(10_000)) <= calls_of(Lookup(0)) + 10


# -- what is predicted to be kept is what saved-tensor hooks count --

WRAPS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda f: f,
    **{name: lambda f, policy=name: again(f, policy) for name in POLICIES},
    "nested": lambda f: again(again(f, "dots"), "names"),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("how", WRAPS)
def test_predicted_is_counted(how: str) -> None:
    model, x = Transformer(3), tokens()
    predicted = tx.saved_residuals(model, x, WRAPS[how])
    for outside, want in (([], predicted.bytes), ([*model.parameters(), x], predicted.activation_bytes)):
        counted = Counted(outside)
        with counted.context():
            out = model(x, WRAPS[how])
        assert counted.now == want
        out.backward()
        del out
        assert counted.now == 0


def test_policies_are_told_apart() -> None:
    model, x = Transformer(2), tokens()
    of = {how: tx.saved_residuals(model, x, wrap).activation_bytes for how, wrap in WRAPS.items()}
    assert of["plain"] == of["everything"] > of["dots"] > of["names"] > of["nothing"] > of["arguments to the host"]
    assert of["dots"] > of["names, some to the host"] > of["dots to the host"] == of["host"]
    assert of["dots"] > of["no batch"] > of["nothing"] and of["but names"] > of["nothing"]


def test_parameters_on_meta_and_as_arguments() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1000, 4000), nn.GELU(), nn.Linear(4000, 1000))
    params = dict(model.named_parameters())

    def loss(params: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(model, params, (x,)).sum()

    found = tx.saved_residuals(
        loss, {name: p.detach() for name, p in params.items()}, torch.empty(50000, 1000, device="meta")
    )
    assert found.activation_bytes == 2 * 50000 * 4000 * 4
    assert {one.name for one in found if one.given} == {"argument 1", "argument 0['2.weight']"}
    assert [one.shape for one in found if not one.given] == [(50000, 4000)] * 2
    assert "1,600,000,000 without arguments" in str(found)


def test_names() -> None:
    def f(w: Tensor, x: Tensor, scale: Any) -> Tensor:
        h = tx.checkpoint_name(torch.tanh(x @ w), "h")
        return torch.exp(h).sum() * scale["by"]

    found = tx.saved_residuals(
        f, torch.ones(3, 3).requires_grad_(), torch.ones(2, 3), scale={"by": torch.ones((), requires_grad=True)}
    )
    names = {one.name for one in found}
    assert "h" in names and "argument 'scale'['by']" in names
    assert any(name.startswith("exp at test_passes.py:") for name in names)


def test_dropout_masks_are_kept_or_drawn_again() -> None:
    x = torch.ones(100, requires_grad=True)
    assert tx.saved_residuals(lambda x: F.dropout(x * 2, 0.5), x).activation_bytes == 400
    assert tx.saved_residuals(tx.remat(lambda x: F.dropout(x * 2, 0.5)), x).activation_bytes == 0


def test_empty_and_no_gradient() -> None:
    assert tx.saved_residuals(lambda: torch.ones(3)).bytes == 0
    assert tx.saved_residuals(lambda tree: tree["a"].sum(), {"a": torch.zeros(0, 3), "n": 3}).bytes == 0
