"""What a new user runs into first: an unused part of the model, a progress bar, a break, a schedule by epochs."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, StepLR

import fjoin
from fjoin import transforms as tx
from tests.helpers import raises_text, stepped

START = {"w": torch.ones(3), "used by one": torch.ones(2), "never": torch.ones(2), "frozen": torch.ones(1)}


def loss_fn(params: Any, batch: Any) -> Any:
    x, uses = batch
    loss = (params["w"] * x).sum()
    return loss + (params["used by one"].sum() if uses else 0.0)


def run(batches: list[Any], epochs: int = 2, accumulate: int = 1) -> None:
    step = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.sgd(0.1)), accumulate=accumulate)
    state = step.init(START)
    for _ in range(epochs):
        state = stepped(step, state, step.join(batches))


def warned(*ranks: list[Any], **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        tx.simulate(lambda batches: run(batches, **options), {"data": len(ranks)}, list(ranks))
    return [str(one.message) for one in found]


def test_parameters_without_a_gradient_on_any_rank_are_named_once() -> None:
    plain, uses = (torch.ones(3), False), (torch.ones(3), True)
    (text,) = warned([plain] * 3, [plain, uses, plain])
    assert "2 parameters have got no gradient on any rank" in text and "'frozen', 'never'" in text
    (text,) = warned([plain] * 3, [plain] * 3)
    assert "3 parameters" in text and "'used by one'" in text
    (text,) = warned([plain] * 3, [], [])  # ranks without a batch
    assert "3 parameters" in text
    (text,) = warned([uses, plain, plain, plain], [plain] * 4, accumulate=2)  # used early in a window
    assert "2 parameters" in text and "used by one" not in text
    assert warned([], []) == []


def test_a_run_in_which_all_are_used_warns_of_nothing() -> None:
    def one_rank(count: int) -> None:
        step = fjoin.train_step(lambda p, x: (p["w"] * x).sum(), tx.fuse(tx.mean("data"), tx.sgd(0.1)))
        stepped(step, step.init({"w": torch.zeros(3)}), step.join(torch.ones(count, 3)))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tx.simulate(one_rank, {"data": 3}, [2, 1, 0])


def test_a_loop_has_the_length_of_this_ranks_loader() -> None:
    step = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.sgd(0.1)))
    loader = torch.utils.data.DataLoader(list(range(10)), batch_size=4)  # type: ignore[arg-type]
    assert len(step.join(loader)) == 3 and len(fjoin.join(loader)) == 3 and len(step.join([])) == 0
    assert step.join([]) and fjoin.join([]), "a loop is true whatever its length"
    raises_text(TypeError, lambda: len(step.join(iter([]))), "len()")


def test_a_second_epoch_of_an_iterator_warns() -> None:
    loop = fjoin.join(iter([1, 2]))
    assert list(loop) == [1, 2]
    with pytest.warns(UserWarning, match="list_iterator, that an epoch before this one has used up"):
        assert list(loop) == []
    raises_text(TypeError, lambda: run_params(torch.nn.Linear(2, 2).parameters()), "fjoin.functional(module)")


def run_params(params: Any) -> None:
    fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.sgd(0.1))).init(params)


def test_reprs() -> None:
    step = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.sgd(0.1)))
    assert repr(step) == "train_step(fuse(mean('data'), sgd(lr=0.1)), rank=0, ranks=1)"
    apply, _, _ = fjoin.functional(torch.nn.Linear(2, 2))
    assert repr(apply) == "Apply(Linear, training=None)" and repr(apply.eval()) == "Apply(Linear, training=False)"
    assert repr(step.join([1])) == "JoinedLoader(list, epoch=0)" and repr(fjoin.join([1])) == "Loop(list, epoch=0)"


def torchs_rates(make: Any, steps: int, per_epoch: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(())], 0.1)
    scheduler, found = make(optimizer), []
    for step in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if (step + 1) % per_epoch == 0:
            scheduler.step()
    return found


def test_schedules_of_epochs_and_factors_are_functions_of_the_step() -> None:
    """As docs/recipes.md writes them: StepLR by epochs, LambdaLR."""
    halved = tx.from_torch_scheduler(lambda optimizer: StepLR(optimizer, 2, 0.5), 0.1, 7)
    want = torchs_rates(lambda optimizer: StepLR(optimizer, 2, 0.5), 20, 3)
    assert [halved(i // 3).item() for i in range(20)] == pytest.approx(want)
    want = torchs_rates(lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)), 9, 1)
    assert [0.1 / (1 + i) for i in range(9)] == pytest.approx(want)
    params = {"w": torch.zeros(2, dtype=torch.float64)}
    for rate, of_step in (
        (lambda step: halved(step // 3), lambda i: 0.1 * 0.5 ** (i // 6)),
        (lambda step: 0.1 / (1 + step), lambda i: 0.1 / (1 + i)),
    ):
        opt, new = tx.sgd(rate), params
        state = opt.init(params)
        for i in range(9):
            old = new
            new, state = opt.step(new, {"w": torch.ones(2, dtype=torch.float64)}, state)
            assert (old["w"] - new["w"]).tolist() == pytest.approx([of_step(i)] * 2)


def test_errors_say_what_to_write() -> None:
    raises_text(TypeError, lambda: tx.adamw("1e-3"), "lr", "write float('1e-3')")  # type: ignore[arg-type]
    module, pipeline = torch.nn.Linear(2, 2), tx.fuse(tx.mean("data"), tx.sgd(0.1))
    text = raises_text(
        TypeError, lambda: tx.explain(pipeline, module, {"data": 2}), "a Linear", "fjoin.functional(module)"
    )
    assert "in_features" not in text
    optimizer = torch.optim.SGD(module.parameters())
    text = raises_text(TypeError, lambda: tx.fuse(tx.mean("data"), optimizer), "torch's SGD", "tx.sgd(lr)")  # type: ignore[arg-type]
    assert "momentum" not in text
    state = fjoin.train_step(loss_fn, pipeline).init(START)
    raises_text(ValueError, lambda: state.with_hyperparameters(lr=1.0), "'lr'", "inject_hyperparameters(optimizer)")


@pytest.mark.parametrize(
    ("batch", "warns"),
    [
        ((torch.ones(3, 2), torch.ones(3)), True),
        ({"x": torch.ones(3, 2), "y": torch.ones(3)}, True),
        ((torch.ones(2, 2), torch.ones(2)), False),  # as many parts as samples
        ((torch.ones(4), torch.ones(3), torch.ones(5)), False),  # samples of different lengths
        (torch.ones(3, 2), False),
        ([torch.ones(3), torch.ones(3)], False),  # a list is one of samples
    ],
    ids=["tuple", "dict", "equal", "samples", "tensor", "list"],
)
def test_len_as_the_weight_of_a_batch_of_parts_warns(batch: Any, warns: bool) -> None:
    def one_step() -> None:
        loop = fjoin.join([batch], weight=len)
        assert [loop.weight for _ in loop] == [len(batch)]

    if warns:
        with pytest.warns(UserWarning, match="not its 3 samples; write weight=lambda batch"):
            one_step()
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            one_step()
