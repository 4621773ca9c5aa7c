"""The generic Join, written from torch's documentation: the same code with torch's classes and with ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.algorithms.join as torch_join

import fjoin
from tests.helpers import raises_text

CLASSES = {"torch": torch_join, "fjoin": fjoin}
# (classes of the joinables, class of the Join): each Join takes both kinds.
PAIRS = [("torch", "torch"), ("fjoin", "fjoin"), ("torch", "fjoin"), ("fjoin", "torch")]


def make_counter(kind: str, join: str) -> Any:
    """The example of torch's documentation: how many inputs have all ranks had together."""
    classes, context = CLASSES[kind], CLASSES[join]

    class Hook(classes.JoinHook):  # type: ignore[misc,name-defined]
        def __init__(self, counter: Any, sync_max_count: bool, name: str) -> None:
            self.counter, self.sync_max_count, self.name = counter, sync_max_count, name

        def main_hook(self) -> None:
            self.counter.log.append(f"main {self.name}")
            dist.all_reduce(torch.zeros(1), group=self.counter.group)

        def post_hook(self, is_last_joiner: bool) -> None:
            self.counter.log.append(f"post {self.name} {is_last_joiner}")
            if self.sync_max_count:
                rank = dist.get_rank(self.counter.group)
                common = torch.tensor([rank if is_last_joiner else -1])
                dist.all_reduce(common, op=dist.ReduceOp.MAX, group=self.counter.group)
                dist.broadcast(self.counter.count, group_src=int(common.item()), group=self.counter.group)

    class Counter(classes.Joinable):  # type: ignore[misc,name-defined]
        def __init__(self, log: list[str], name: str = "a", group: Any = None) -> None:
            super().__init__()
            self.count, self.max_count = torch.zeros(1), torch.zeros(1)
            self.log, self.name, self.group = log, name, group or dist.group.WORLD

        def __call__(self) -> Any:
            # torch's own notification, as in existing classes, works in either Join
            notify = torch_join.Join if kind == "torch" else context.Join
            work = notify.notify_join_context(self)
            ones = torch.ones(1)
            dist.all_reduce(ones, group=self.group)
            self.count += ones
            self.log.append(f"step {self.name}")
            return work

        def join_hook(self, **kwargs: Any) -> Any:
            self.log.append(f"kwargs {self.name} {sorted(kwargs)}")
            return Hook(self, kwargs.get("sync_max_count", False), self.name)

        @property
        def join_device(self) -> torch.device:
            return torch.device("cpu")

        @property
        def join_process_group(self) -> Any:
            return self.group

    return Counter


def count(kind: str, join: str, inputs: list[int], settings: dict[str, Any]) -> Any:
    log: list[str] = []
    counter = make_counter(kind, join)(log)
    with CLASSES[join].Join([counter], sync_max_count=True, **settings):
        for _ in range(inputs[dist.get_rank()]):
            counter()
    return counter.count.item(), log, counter._join_config.enable


@pytest.mark.sample(2)
@pytest.mark.parametrize("inputs", [[3, 1], [0, 2, 2], [2, 2, 2], [0, 0], [5, 0, 3, 1]], ids=str)
@pytest.mark.parametrize(("kind", "join"), PAIRS)
def test_counting_the_inputs_of_all_ranks(pool: Any, kind: str, join: str, inputs: list[int]) -> None:
    n, most = len(inputs), max(inputs)
    for rank, (total, log, left_on) in enumerate(pool.run(n, count, kind, join, inputs, {})):
        assert total == sum(inputs)
        mains = most - inputs[rank]
        want = ["kwargs a ['sync_max_count']", *["step a"] * inputs[rank], *["main a"] * mains, f"post a {mains == 0}"]
        assert log == want
        assert left_on == (join == "torch"), "torch leaves its configuration on; ours does not"


def several(kind: str, join: str) -> Any:
    log: list[str] = []
    make = make_counter(kind, join)
    first, second = make(log, "a"), make(log, "b")
    works = []
    with CLASSES[join].Join([first, second], note=1):
        for _ in range(1 + dist.get_rank()):
            works += [first() is None, second() is None]
    return log, works, first.count.item(), second.count.item()


@pytest.mark.parametrize(("kind", "join"), PAIRS)
def test_several_joinables_in_order(pool: Any, kind: str, join: str) -> None:
    """Hooks run in the order given, and only the first joinable's notification is a message."""
    (log, works, *counts), (log_1, _, *counts_1) = pool.run(2, several, kind, join)
    begin = ["kwargs a ['note']", "kwargs b ['note']", "step a", "step b"]
    assert log == [*begin, "main a", "main b", "post a False", "post b False"]
    assert log_1 == [*begin, "step a", "step b", "post a True", "post b True"]
    assert counts == [2, 2] and counts_1 == [3, 3]
    # Through torch's own notification ours gives no handle: the message has been sent by then.
    assert works == [(kind, join) == ("torch", "fjoin"), True]


def disabled(kind: str, join: str) -> Any:
    log: list[str] = []
    counter = make_counter(kind, join)(log)
    with CLASSES[join].Join([counter], enable=False):
        counter()
    return log


@pytest.mark.parametrize(("kind", "join"), PAIRS)
def test_disabled_join_does_nothing(pool: Any, kind: str, join: str) -> None:
    assert pool.run(2, disabled, kind, join) == [["kwargs a []", "step a"]] * 2


def throw(kind: str, join: str, inputs: list[int]) -> Any:
    log: list[str] = []
    counter = make_counter(kind, join)(log)
    try:
        with CLASSES[join].Join([counter], throw_on_early_termination=True):
            for _ in range(inputs[dist.get_rank()]):
                counter()
    except RuntimeError as error:
        return type(error).__name__, str(error), log.count("step a")
    return "", "", log.count("step a")


@pytest.mark.parametrize(("kind", "join"), PAIRS)
def test_throwing_on_early_termination(pool: Any, kind: str, join: str) -> None:
    name = "RuntimeError" if join == "torch" else "EarlyTermination"
    for rank, (got, text, steps) in enumerate(pool.run(3, throw, kind, join, [3, 1, 2])):
        want = "Rank 1 exhausted all inputs." if rank == 1 else "Detected at least one rank that exhausted inputs."
        assert got == name and text.startswith(want) and steps == 1, (rank, got, text)
        assert join == "torch" or rank == 1 or "rank 1" in text
    assert pool.run(2, throw, kind, join, [2, 2]) == [("", "", 2)] * 2


def refuse(join: str) -> list[str]:
    make = make_counter("fjoin", join)
    other = dist.new_group([0, 1])
    texts = [
        raises_text(ValueError, lambda: CLASSES[join].Join([]), "at least one joinable"),
        raises_text(ValueError, lambda: CLASSES[join].Join([make([]), make([], group=other)]), "process group"),
    ]
    dist.barrier()  # the other rank may still be making the group
    return texts


@pytest.mark.parametrize("join", CLASSES)
def test_raises_on_bad_input(pool: Any, join: str) -> None:
    for texts in pool.run(2, refuse, join):
        assert all(texts)


def messages(join: str, settings: dict[str, Any]) -> tuple[int, int]:
    """All-reduces per iteration and at the end, in addition to the counter's own."""
    sent = 0
    kept = dist.all_reduce, dist.all_to_all_single

    def watch(call: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal sent
            sent += 1
            return call(*args, **kwargs)

        return counted

    counter = make_counter(join, join)([])
    dist.all_reduce, dist.all_to_all_single = map(watch, kept)
    try:
        with CLASSES[join].Join([counter], **settings):
            before = sent  # our Join has compared the ranks' joinables
            for _ in range(5):
                counter()
            within = sent
    finally:
        dist.all_reduce, dist.all_to_all_single = kept
    return (within - before) / 5 - 1, sent - within


def test_one_message_in_each_iteration(pool: Any) -> None:
    """Ours always sends one; torch sends two with throw_on_early_termination."""
    assert pool.run(2, messages, "fjoin", {}) == [(1, 1)] * 2
    assert pool.run(2, messages, "fjoin", {"throw_on_early_termination": True}) == [(1, 1)] * 2
    assert pool.run(2, messages, "torch", {}) == [(1, 1)] * 2
    assert pool.run(2, messages, "torch", {"throw_on_early_termination": True}) == [(2, 1)] * 2
