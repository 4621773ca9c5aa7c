"""Generations of sixteen ranks: who is in them after deaths at any moment, and how a run ends whose ranks die, in the simulator."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fjoin
from fjoin import transforms as tx
from fjoin.generations._membership import Membership, RunStore
from tests.generations.runs import PARAMS, STEPS, Loader, Options, buffers, digest, make_step, replay


class Died(Exception):
    pass


class Town:
    """Processes as threads, which meet in one store. A thread that has died is known to have ended."""

    def __init__(self, ranks: int, at_least: int, timeout_s: float = 2.0) -> None:
        self.store, self.dead = dist.HashStore(), set[int]()
        self._limits = ranks, at_least, timeout_s
        self.formed = dict[int, list[tuple[int, ...]]]()  # generation -> what its members have seen of it
        self.ends = dict[int, str]()
        self.threads: list[threading.Thread] = []

    def start(self, seed: int, chance: float) -> None:
        thread = threading.Thread(target=self._live, args=(random.Random(seed), chance), daemon=True)
        self.threads.append(thread)
        thread.start()

    def _live(self, dice: random.Random, chance: float) -> None:
        one = Membership(*(RunStore("town", self.store) for _ in range(2)), *self._limits)
        one._processes.ended = lambda numbers: self.dead & set(numbers)  # type: ignore[method-assign]
        try:
            while one.form():
                self.formed.setdefault(one.generation, []).append(tuple(one.members))
                if dice.random() < chance:
                    raise Died
                try:
                    one.arrive()
                except fjoin.PeerLost:
                    continue
                if one.generation >= 6:
                    one.end_run("")
                    self.ends[one.number] = "done"
                    return
            self.ends[one.number] = "late"
        except fjoin.PeerLost as error:
            self.ends[one.number] = str(error)
        except Died:
            self.dead.add(one.number)

    def finish(self) -> None:
        end = time.monotonic() + 60
        for thread in self.threads:
            thread.join(end - time.monotonic())
        assert not any(thread.is_alive() for thread in self.threads)


@pytest.mark.parametrize("seed", range(3))
def test_deaths_at_any_moment_leave_one_record_for_each_generation(seed: int) -> None:
    """All members of a generation see the same record; who lived in one is in the next; nobody trains beside it."""
    town = Town(ranks=16, at_least=1)
    for number in range(16):
        town.start(100 * seed + number, chance=0.1)
    town.finish()
    records = {generation: set(seen) for generation, seen in town.formed.items()}
    assert all(len(seen) == 1 for seen in records.values())
    members = {generation: set(next(iter(seen))) for generation, seen in records.items()}
    survivors = set(range(1, 17)) - town.dead
    assert len(members[1]) == 16
    assert all(survivors <= members[generation] for generation in members)
    assert set(town.ends) == survivors
    assert set(town.ends.values()) <= {"done", "late"}


def test_a_newcomer_does_not_train_beside_members_that_live() -> None:
    town = Town(ranks=2, at_least=1, timeout_s=0.5)
    members = [Membership(*(RunStore("town", town.store) for _ in range(2)), 2, 1, 0.5) for _ in range(2)]
    threads = [threading.Thread(target=one.form, daemon=True) for one in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    newcomer = Membership(*(RunStore("town", town.store) for _ in range(2)), 2, 1, 0.5)
    done = threading.Event()

    def come() -> None:
        newcomer.form()
        done.set()

    threading.Thread(target=come, daemon=True).start()
    assert not done.wait(1.5)  # thrice the time for which it would wait alone
    members[0].leave()
    assert members[1].form()
    assert done.wait(10)
    assert members[1].members == newcomer.members == [members[1].number, newcomer.number]


def test_fewer_than_at_least_end_the_run() -> None:
    town = Town(ranks=3, at_least=2, timeout_s=0.3)
    town.start(0, chance=0.0)
    town.finish()
    assert list(town.ends.values()) == ["1 of at least 2 ranks have come within 0.3 s"]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_sixteen_simulated_ranks_that_die_end_as_their_ledger_says(accumulate: int) -> None:
    """A rank raises at a message. Each other one has the state before the step or after it; the newest counts."""
    options, dice = Options(ranks=16, epochs=2, accumulate=accumulate), random.Random(accumulate)
    total = -(-STEPS // accumulate) * options.epochs
    newest: tuple[int, Any] = 0, None
    ledger, ranks = list[int](), 16
    while newest[0] < total:
        held: dict[int, tuple[int, Any]] = {}
        victim, when = dice.randrange(ranks), accumulate * dice.randrange(1, 4)

        def one(
            rank: int, start: Any = newest, held: Any = held, dies: Any = (victim, when, "reduced", ranks > 5)
        ) -> None:
            calls = 0

            def at(place: str) -> None:
                nonlocal calls
                calls += place == "forward"
                if (rank, calls, place, True) == dies:
                    raise Died

            mesh = fjoin.mesh({"data": -1})
            step = make_step(mesh, options, at)
            state = step.init(PARAMS, buffers())
            if start[1] is not None:
                state = fjoin.training.loaded(state, step.run, *start[1])
            batches = step.join(Loader(mesh))
            batches.begin_at(state.step, accumulate)
            while batches.epoch < options.epochs:
                for x, y, *_ in batches:
                    state, metrics = step(state, (x, y))
                    if metrics.stepped:
                        kept = state.clone()
                        values = dict(kept.params), kept.pipeline, kept.buffers, kept.on_buffers, kept.batches
                        held[rank] = state.step, values
            held[-1] = state.step, digest(state)

        try:
            tx.simulate(one, {"data": ranks}, list(range(ranks)))
        except Exception as error:
            assert isinstance(error, Died) or isinstance(error.__cause__, Died), error
        steps = {number for rank, (number, _) in held.items() if rank not in (victim, -1)}
        assert not steps or max(steps) - min(steps) <= 1
        newest = max(
            [newest, *((number, values) for rank, (number, values) in held.items() if rank != -1)], key=lambda x: x[0]
        )
        ledger += [ranks] * (newest[0] - len(ledger))
        if -1 in held:
            break
        ranks -= 1
    assert held[-1] == (total, replay(ledger, options))
    assert len(set(ledger)) > 3


def test_the_simulated_run_equals_one_process_on_whole_batches() -> None:
    """Whatever the number of ranks: the weights of a step are its samples, so fewer ranks take the same step."""

    def displacement(ranks: int) -> torch.Tensor:
        def one(rank: int) -> torch.Tensor:
            mesh = fjoin.mesh({"data": -1})
            step = make_step(mesh, Options())
            state = step.init(
                {path: value.double() for path, value in PARAMS.items()}, {"mean": torch.zeros(16).double()}
            )
            for x, y, *_ in step.join(Loader(mesh)):
                state, _ = step(state, (x.double(), y.double()))
            return torch.cat([(state.params[path] - PARAMS[path]).flatten() for path in PARAMS])

        return tx.simulate(one, {"data": ranks}, list(range(ranks)))[0]

    whole = displacement(1)
    for ranks in (2, 5, 16):
        torch.testing.assert_close(displacement(ranks), whole, rtol=1e-9, atol=1e-12)
