"""What a new user runs into first: a progress bar, a second epoch, a weight, a pipeline that reduces nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from tests.helpers import raises_text, warned
from tests.training.small import MEAN_SGD, step_of

SGD = tx.sgd(0.1)


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
BATCHES: dict[str, tuple[Any, bool]] = {
    "tuple": (PARTS, True), "dict": (dict(zip("xy", PARTS, strict=True)), True),
    "as many parts as samples": ((torch.ones(2, 2), torch.ones(2)), False),
    "samples of different lengths": ((torch.ones(4), torch.ones(3), torch.ones(5)), False), "tensor": (PARTS[0], False),
    "a list of samples": ([torch.ones(3), torch.ones(3)], False),
}  # fmt: skip


@pytest.mark.parametrize("name", BATCHES)
def test_len_as_the_weight_of_a_batch_of_parts_warns(name: str) -> None:
    batch, warns = BATCHES[name]
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
