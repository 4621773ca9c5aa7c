"""The generic Join: code of torch's documentation with torch's classes and with ours, pure hooks, and what is refused."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.algorithms.join as torch_join
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from tests.ddp.ddp_problem import loss, make_model
from tests.helpers import raises_text, warned

CLASSES = {"torch": torch_join, "fjoin": fjoin}
# (classes of the joinables, class of the Join): each Join takes both kinds.
PAIRS = [("torch", "torch"), ("fjoin", "fjoin"), ("torch", "fjoin"), ("fjoin", "torch")]


def make_counter(kind: str, join: str, device: str = "cpu") -> Any:
    """The example of torch's documentation: how many inputs have all ranks had together."""
    classes, context = CLASSES[kind], CLASSES[join]

    class Hook(classes.JoinHook):  # type: ignore[misc,name-defined]
        def __init__(self, counter: Any, sync_max_count: bool, name: str) -> None:
            self.counter, self.sync_max_count, self.name = counter, sync_max_count, name

        def main_hook(self) -> None:
            self.counter.log.append(f"main {self.name}")
            dist.all_reduce(torch.zeros(1, device=device), group=self.counter.group)

        def post_hook(self, is_last_joiner: bool) -> None:
            self.counter.log.append(f"post {self.name} {is_last_joiner}")
            if self.sync_max_count:
                rank = dist.get_rank(self.counter.group)
                common = torch.tensor([rank if is_last_joiner else -1], device=device)
                dist.all_reduce(common, op=dist.ReduceOp.MAX, group=self.counter.group)
                dist.broadcast(self.counter.count, group_src=int(common.item()), group=self.counter.group)

    class Counter(classes.Joinable):  # type: ignore[misc,name-defined]
        def __init__(self, log: list[str], name: str = "a", group: Any = None) -> None:
            super().__init__()
            self.count = torch.zeros(1, device=device)
            self.log, self.name, self.group = log, name, group or dist.group.WORLD

        def __call__(self) -> Any:
            # torch's own notification, as in existing classes, works in either Join
            notify = torch_join.Join if kind == "torch" else context.Join
            work = notify.notify_join_context(self)
            ones = torch.ones(1, device=device)
            dist.all_reduce(ones, group=self.group)
            self.count += ones
            self.log.append(f"step {self.name}")
            return work

        def join_hook(self, **kwargs: Any) -> Any:
            self.log.append(f"kwargs {self.name} {sorted(kwargs)}")
            return Hook(self, kwargs.get("sync_max_count", False), self.name)

        @property
        def join_device(self) -> torch.device:
            return torch.device(device)

        @property
        def join_process_group(self) -> Any:
            return self.group

    return Counter


def counted(kind: str, join: str, inputs: list[int], names: str, settings: dict[str, Any]) -> Any:
    """Counters with the names: their counts, the log, works or None, whether the configuration is left on, and the error."""
    log, works, error = list[str](), [], ""
    make = make_counter(kind, join)
    counters = [make(log, name) for name in names]
    try:
        with CLASSES[join].Join(counters, **settings):
            for _ in range(inputs[dist.get_rank()]):
                works += [counter() is None for counter in counters]
    except RuntimeError as raised:
        error = f"{type(raised).__name__}: {raised}"
    return [counter.count.item() for counter in counters], log, works, counters[0]._join_config.enable, error


@pytest.mark.sample(2)
@pytest.mark.parametrize("inputs", [[2, 2, 2], [0, 0], [5, 0, 3, 1]], ids=str)
@pytest.mark.parametrize(("kind", "join"), PAIRS)
def test_counting_the_inputs_of_all_ranks(pool: Any, kind: str, join: str, inputs: list[int]) -> None:
    for rank, ((total,), log, _, left_on, _) in enumerate(
        pool.run(len(inputs), counted, kind, join, inputs, "a", {"sync_max_count": True})
    ):
        mains = max(inputs) - inputs[rank]
        want = ["kwargs a ['sync_max_count']", *["step a"] * inputs[rank], *["main a"] * mains, f"post a {mains == 0}"]
        assert (total, log) == (sum(inputs), want)
        assert left_on == (join == "torch"), "torch leaves its configuration on; ours does not"


@pytest.mark.parametrize(("kind", "join"), PAIRS)
def test_several_joinables_and_early_termination(pool: Any, kind: str, join: str) -> None:
    """Hooks run in the order given, and only the first joinable's notification is a message; throwing ends all."""
    (counts, log, works, *_), (counts_1, log_1, *_) = pool.run(2, counted, kind, join, [1, 2], "ab", {})
    begin = ["kwargs a []", "kwargs b []", "step a", "step b"]
    assert log == [*begin, "main a", "main b", "post a False", "post b False"]
    assert log_1 == [*begin, "step a", "step b", "post a True", "post b True"]
    assert counts == [2, 2] and counts_1 == [3, 3]
    # Through torch's own notification ours gives no handle: the message has been sent by then.
    assert works == [(kind, join) == ("torch", "fjoin"), True]
    name = "RuntimeError" if join == "torch" else "EarlyTermination"
    throws = {"throw_on_early_termination": True}
    for rank, (_, log, *_, text) in enumerate(pool.run(3, counted, kind, join, [3, 1, 2], "a", throws)):
        want = "Rank 1 exhausted all inputs." if rank == 1 else "Detected at least one rank that exhausted inputs."
        assert text.startswith(f"{name}: {want}") and log.count("step a") == 1, (rank, text)
        assert join == "torch" or rank == 1 or "rank 1" in text
    for _, log, *_, text in pool.run(2, counted, kind, join, [2, 2], "a", throws):
        assert (log.count("step a"), text) == (2, "")


def test_disabled_join_does_nothing(pool: Any) -> None:
    for _, log, *_ in pool.run(2, counted, "torch", "fjoin", [1, 1], "a", {"enable": False}):
        assert log == ["kwargs a []", "step a"]


# -- pure hooks --------------------------------------------------------------------------------------------


def joined_sum(inputs: list[float]) -> Any:
    """A state renewed by pure functions: the sum of all inputs, and weights taken from the last joiner."""
    mesh = fjoin.mesh({"data": -1})
    total = fjoin.as_joinable(lambda start=0.0: tx.JoinHook(lambda s: s + tx.psum(0.0, "data")), 0.0, mesh=mesh)
    weights = fjoin.as_joinable(tx.broadcast_from_last("data"), torch.full((2,), float(mesh.rank)), mesh=mesh)
    with fjoin.Join([total, weights], start=1.0) as join, fjoin.bind(mesh):
        for x in inputs:
            fjoin.Join.notify_join_context(total)
            total.state = total.state + tx.psum(x, "data")
    return float(total.state), weights.state.tolist(), join.last_joiner, join.iterations


@pytest.mark.parametrize(
    ("inputs", "last"), [([[1.0], [2.0, 3.0], [4.0, 5.0]], 1), ([[], [1.0]], 1), ([[], []], 0), ([[1.0, 2.0]] * 3, 0)]
)
def test_pure_hooks_simulated_and_real(pool: Any, inputs: list[list[float]], last: int) -> None:
    """Ties between last joiners go to the lowest rank, visibly; the simulation equals the processes."""
    most = max(map(len, inputs))
    want = [(sum(map(sum, inputs)), [last] * 2, last, most)] * len(inputs)
    assert tx.simulate(joined_sum, {"data": len(inputs)}, inputs) == want
    assert pool.each(joined_sum, inputs) == want


def test_the_configuration_is_reset_after_an_exception() -> None:
    one = fjoin.as_joinable(tx.JoinHook())
    before = one._join_config
    with contextlib.suppress(KeyError), fjoin.Join([one]):
        raise KeyError
    assert one._join_config is before
    fjoin.Join([one])  # not entered: nothing changes either
    assert one._join_config is before
    with fjoin.Join([one]):
        raises_text(fjoin.JoinError, lambda: fjoin.Join([one]).__enter__(), "inside another Join")
    with fjoin.Join([one]):
        pass


# -- what is refused ---------------------------------------------------------------------------------------


def joinables(n: int) -> str:
    mesh = fjoin.mesh({"data": -1})
    many = [fjoin.as_joinable(tx.JoinHook(), mesh=mesh) for _ in range(n)]
    words = ("rank 2 differs from rank 0 in its joinables", "same order")
    return raises_text(fjoin.DesyncError, lambda: fjoin.Join(many).__enter__(), *words)


def test_ranks_refuse_other_joinables_and_groups(pool: Any) -> None:
    assert len(tx.simulate(joinables, {"data": 3}, [1, 1, 2])) == 3
    pool.run(2, other_groups)


def other_groups() -> None:
    make, other = make_counter("fjoin", "fjoin"), dist.new_group([0, 1])
    raises_text(ValueError, lambda: fjoin.Join([]), "at least one joinable")
    raises_text(ValueError, lambda: fjoin.Join([make([]), make([], group=other)]), "process group")
    dist.barrier()  # the other rank may still be making the group


def left_behind() -> tuple[int, bool, list[str]]:
    """A warning names an optimizer that the Join does not know; after a Join that has failed the module is as it was."""
    ddp = DistributedDataParallel(make_model())
    module, optimizer = ddp.module, torch.optim.Adam(ddp.parameters(), 0.1)

    def joined() -> None:
        with fjoin.Join([ddp]):
            for _ in range(2):
                loss(ddp, torch.ones(2, 4, dtype=torch.float64)).backward()
                optimizer.step()
                optimizer.zero_grad()

    texts = [text for text in warned(joined) if "fall behind" in text]
    with contextlib.suppress(KeyError), fjoin.Join([ddp], divide_by_initial_world_size=False):
        raise KeyError
    module(torch.ones(2, 4).double()).sum().backward()
    return len(ddp._forward_hooks), "_sync_buffers" in vars(ddp), texts


def test_an_unknown_optimizer_and_a_failed_join(pool: Any) -> None:
    for hooks, syncs, (text,) in pool.run(2, left_behind):
        assert (hooks, syncs) == (0, False) and "Adam" in text and "Join([ddp, optimizer])" in text
