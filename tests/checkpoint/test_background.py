"""A save in the background holds the values at its call, whatever is written afterwards; one that fails is told, and costs nothing else."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optree
import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from fjoin.checkpoint import _save
from tests.checkpoint.rows import RUNS
from tests.checkpoint.runs import Step, quiet
from tests.checkpoint.test_values import Dict
from tests.helpers import raises_text, same_bits

START = {"w": torch.linspace(-1, 1, 300_000), "small": torch.ones(7)}


def make_step() -> fjoin.TrainStep:
    hook = tx.chain(tx.mean("data"), tx.clip_by_global_norm(9.0))
    pipeline = tx.fuse(hook, tx.inject_hyperparameters(tx.adam(0.1)), after=tx.every(3, tx.ema(0.5)))
    return fjoin.train_step(lambda p, x: sum((v * x).square().sum() for v in p.values()), pipeline)


def begun() -> tuple[fjoin.TrainStep, fjoin.TrainState]:
    step = make_step()
    return step, step(step.init(START), torch.ones(()))[0]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The thread writes once this is set."""
    write, gate = _save.write_file, threading.Event()

    def late(*args: Any) -> Any:
        assert gate.wait(60)
        return write(*args)

    monkeypatch.setattr(_save, "write_file", late)
    yield gate
    gate.set()


def leaves() -> dict[str, Any]:
    """What a state dict may hold. Each is the only one of its dtype and device when it is saved alone."""
    x = torch.arange(1.0, 7)
    return {
        "0-d": x.sum(), "empty": torch.zeros(0, 3), "a view": x.clone()[2:5], "every second one": torch.ones(4, 4)[:, ::2],
        "expanded": torch.ones(1).expand(4), "transposed": x.clone().view(2, 3).T, "large": torch.ones(1 << 17),
        "complex": x.to(torch.complex64), "conj": torch.tensor([1 + 2j]).conj(), "negative": torch.tensor([1 + 2j]).conj().imag,
        "bool": x > 2, "bfloat16": x.bfloat16(), "fp8": x.to(torch.float8_e4m3fn), "int": x.int(),
        "Parameter": torch.nn.Parameter(x.clone()), "a buffer that needs gradients": (x.clone().requires_grad_() * 1),
        "numpy memory": torch.from_numpy(np.arange(5.0)), "shared memory": x.clone().share_memory_(),
        "a list": [x.clone(), 3, [x.double()]], "a dict": {"a": {"b": x.clone()}, 1: "text"}, "a tuple": (x.clone(), None),
        "a module": torch.nn.Linear(3, 2, bias=False).state_dict(), "a number": 2.5, "extra": {"x": x.clone(), "y": [1, 2.5]},
    }  # fmt: skip


def fill(value: Tensor) -> None:
    value.untyped_storage().fill_(65)


def resize(value: Tensor) -> None:
    if not value.requires_grad:
        value.resize_(0)


def replace(value: Tensor) -> None:
    value.data = torch.full((3,), 65, dtype=value.dtype)


def overwrite(value: Any, write: Callable[[Tensor], None]) -> None:
    """Overwrite all that is in a value, and empty its containers."""
    if isinstance(value, Tensor):
        write(value)
    elif isinstance(value, (dict, list, tuple)):
        for one in value.values() if isinstance(value, dict) else value:
            overwrite(one, write)
        if not isinstance(value, tuple):
            value.clear()


def plain(value: Any) -> Any:
    """As a load returns it."""
    if isinstance(value, Tensor):
        bits = value.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        return bits.view(torch.uint8) if bits.dtype is torch.float8_e4m3fn else bits
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return type(value)(map(plain, value)) if isinstance(value, (list, tuple)) else copy.deepcopy(value)


@pytest.mark.parametrize("write", [fill, resize, replace])
def test_a_save_holds_the_values_at_its_call_of_every_kind_of_leaf(
    write: Callable[[Tensor], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each kind alone, and all together."""
    wrong = []
    for name in (*leaves(), "together"):
        with monkeypatch.context() as patch:
            gate, original = threading.Event(), _save.write_file
            patch.setattr(_save, "write_file", lambda *args, gate=gate: gate.wait(60) and original(*args))  # noqa: B023
            held = leaves() if name == "together" else {name: leaves()[name]}
            want, extra = plain(held), held.pop("extra", None)
            runs = fjoin.Checkpoints(tmp_path / name, {"it": Dict(held)}, background=True)
            runs.save(1, extra=extra)
            overwrite([held, extra], write)
            gate.set()
            runs.wait()
        again = fjoin.Checkpoints(tmp_path / name, {"it": (loaded := Dict())})
        again.restore()
        got = dict(loaded) | ({} if extra is None else {"extra": again.extra})
        if not same_bits(plain(got), want):
            wrong.append(name)
    assert not wrong


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [name for name, run in RUNS.items() if run.how == "step"])
def test_a_save_holds_the_values_at_its_call_of_every_kind_of_state(
    name: str, gate: threading.Event, tmp_path: Path
) -> None:
    """On all ranks, with a position in the data and its streams of random numbers."""
    run = RUNS[name]._replace(background=True)
    overwritten: list[int] = []

    def save(rank: int) -> Any:
        with fjoin.mesh(run.axes) as mesh:
            program = Step(run, str(tmp_path), mesh)
            program.begin(())
            for call in range(run.cut):
                program.call(run.batch(rank, call))
            loop, state = fjoin.join([1, 2, 3], mesh=mesh), program.state.clone()
            want = plain((program.values(), position := loop.state_dict()))
            loop.load_state_dict(position)
            program.runs.save(state, data=loop)
            held = state.params, state.pipeline, state.buffers, state.on_buffers, position
            for leaf in optree.tree_leaves(held, none_is_leaf=False):
                if isinstance(leaf, Tensor):
                    fill(leaf)
            overwritten.append(rank)
            if len(overwritten) == run.ranks:
                gate.set()
            program.runs.wait()
            return want

    def load(rank: int) -> Any:
        with fjoin.mesh(run.axes) as mesh:
            program, loop = Step(run, str(tmp_path), mesh), fjoin.join([1, 2, 3], mesh=mesh)
            program.state = program.runs.restore(program.start, program.buffers, data=loop)
            return program.values(), plain(loop.state_dict())

    with quiet():
        ranks = list(range(run.ranks))
        saved, loaded = (tx.simulate(of, run.axes, ranks) for of in (save, load))
    assert same_bits(loaded, saved)


def no_memory(*args: Any) -> Any:
    raise MemoryError("no memory to write")


def no_thread(self: Any) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(
    ("of", "name", "fault", "words"),
    [(_save, "write_file", no_memory, "no memory to write"), (threading.Thread, "start", no_thread, "can't start new thread")],
)  # fmt: skip
def test_a_save_that_fails_lets_training_go_on(
    of: Any, name: str, fault: Any, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    step, state = begun()
    runs = fjoin.Checkpoints(tmp_path, step, background=True)
    with monkeypatch.context() as patch:
        patch.setattr(of, name, fault)
        runs.save(state)
        state, _ = step(state, torch.ones(()))
        raises_text(fjoin.CheckpointError, runs.wait, words, "step 1 has not been saved")
    assert state.step == 2 and not list(tmp_path.iterdir())
    assert runs.save(state)
    runs.wait()
    assert fjoin.checkpoint.verify(tmp_path) == []


TELLS = """
import sys, torch, fjoin
from fjoin import transforms as tx
from fjoin.checkpoint import _save
def full(*args): raise OSError(28, "No space left on device")
_save.write_file = full
step = fjoin.train_step(lambda p, x: p["w"].sum() * x, tx.fuse(tx.mean("data"), tx.sgd(0.1)))
fjoin.Checkpoints(sys.argv[1], step, background=True).save(step.init({"w": torch.ones(2)}))
"""


def test_a_save_that_has_failed_unseen_is_told_at_the_end_of_the_program(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", TELLS, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert "step 0 has not been saved" in done.stderr and "No space left" in done.stderr


@pytest.fixture
def rank_1_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    write = _save.write_file

    def full(path: Path, *args: Any) -> Any:
        if "rank-00001" in path.name:
            raise OSError(28, "No space left on device")
        return write(path, *args)

    monkeypatch.setattr(_save, "write_file", full)


@pytest.mark.parametrize("background", [False, True])
def test_a_rank_that_cannot_write_is_an_error_on_all(background: bool, rank_1_is_full: None, tmp_path: Path) -> None:
    def run() -> str:
        step, state = begun()
        runs = fjoin.Checkpoints(tmp_path, step, background=background)

        def save() -> None:
            runs.save(state)
            runs.wait()

        return raises_text(fjoin.CheckpointError, save, "No space left", "step 1")

    tx.simulate(run, {"data": 2})
    assert not list(tmp_path.iterdir())


def test_a_save_that_never_ends_is_given_up_after_an_error_of_the_loop(rank_1_is_full: None, tmp_path: Path) -> None:
    """Rank 0 waits for rank 1."""

    def run() -> None:
        step, state = begun()
        with fjoin.Checkpoints(tmp_path, step, background=True) as runs:
            runs.save(state)
            raise RuntimeError("of the loop")

    began = time.monotonic()
    with pytest.raises(RuntimeError, match="of the loop"):
        tx.simulate(run, {"data": 2})
    assert time.monotonic() - began < 30 and not list(tmp_path.iterdir())
    assert not [thread for thread in threading.enumerate() if thread.name == "fjoin save"]
