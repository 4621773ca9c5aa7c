"""Checkpoints that were written when format 1 was released, in the folder `format_1`, are read for ever: the runs go on."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from safetensors.torch import load_file

import fjoin
from fjoin import transforms as tx
from fjoin.transforms.base.state_dicts import names_of
from tests.helpers import same_bits

FOLDER = Path(__file__).with_name("format_1")
EXPECTED = json.loads((FOLDER / "expected.json").read_text())
START = {
    "layer": {"w": torch.linspace(-1, 1, 15).reshape(5, 3), "b": torch.zeros(5)},
    "scale": torch.ones(()),
    "none": torch.zeros(0, 2),
}
BUFFERS = {"mean": torch.zeros(3, dtype=torch.float64), "count": torch.zeros((), dtype=torch.int64)}
EXTRA = {"best": [0.5, None, "text"], "seen": {"rows": torch.arange(4, dtype=torch.int16)}}
END = 5  # steps
# In which `fjoin.Shuffled(40, 8, seed=1)` took the samples then.
ORDER = [
    28, 19, 6, 3, 17, 26, 9, 15, 34, 2, 36, 0, 35, 13, 27, 8, 18, 24, 32, 12,
    37, 4, 38, 20, 5, 30, 21, 29, 39, 16, 11, 10, 25, 31, 22, 33, 7, 14, 23, 1,
]  # fmt: skip


def pipelines() -> dict[str, tx.Pipeline]:
    """Two with residuals, of which one has averages, one whose states are cut, and one whose ranks differ."""
    feedback = tx.chain(tx.error_feedback(tx.compress(tx.int8(block=4), tx.mean("data"))), tx.clip_by_global_norm(5.0))
    return {
        "feedback": tx.skip_if_nonfinite(tx.fuse(feedback, tx.adamw(0.1), after=tx.ema(0.5))),
        "zero": tx.zero(tx.mean("data"), tx.mixed_precision(tx.adam(0.1)), "data"),
        "local": tx.local_sgd(tx.sgd(0.1, momentum=0.5), tx.mean("data"), 2),
        "power": tx.fuse(tx.error_feedback(tx.power_sgd("data", min_compression_rate=1.0)), tx.sgd(0.1)),
    }


def make_step(name: str) -> fjoin.TrainStep:
    def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
        out = (batch @ params["layer"]["w"].T + params["layer"]["b"]) * params["scale"]
        new = {"mean": buffers["mean"] + batch.mean(0).double(), "count": buffers["count"] + 1}
        return out.float().square().mean() + params["none"].sum(), None, new

    return fjoin.train_step(loss_fn, pipelines()[name], on_buffers=tx.average_buffers("data"))


def start(name: str) -> Any:
    """Parameters; in bfloat16 where the optimizer keeps master copies."""
    dtype = torch.bfloat16 if name == "zero" else torch.float32
    return {
        key: ({k: v.to(dtype) for k, v in p.items()} if isinstance(p, dict) else p.to(dtype))
        for key, p in START.items()
    }


def objects() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), 0.1)}


def train(of: dict[str, Any], steps: range) -> None:
    for i in steps:
        of["optimizer"].zero_grad()
        of["model"](torch.full((4, 3), 0.5 + i) * torch.arange(12.0).reshape(4, 3)).square().sum().backward()
        of["optimizer"].step()


def run(name: str, folder: Path) -> Any:
    """On each rank: the run from its checkpoint to its end: the state at both, and what is kept beside."""
    step = make_step(name)
    values = torch.randn(40, 3, generator=torch.Generator().manual_seed(5)).to(start(name)["scale"].dtype)
    samples = torch.empty_like(values)
    samples[torch.randperm(40, generator=torch.Generator().manual_seed(1))] = values[ORDER]
    data = torch.utils.data.DataLoader(samples, batch_sampler=fjoin.Shuffled(40, 8, seed=1))  # type: ignore[arg-type]
    loop, runs = step.join(data), fjoin.Checkpoints(folder, step)
    state = runs.restore(start(name), BUFFERS, data=loop)
    restored = state.clone()
    for batch in loop:
        state, _ = step(state, batch)
        if state.step == END:
            loop.stop()
    return restored, state.clone(), runs.extra


def digests(state: Any) -> dict[str, Any]:
    """Name -> checksum of the bytes, or number, of all that a later call reads."""
    tree = {"params": state.params, "buffers": state.buffers, "pipeline": state.pipeline, "batches": state.batches}
    leaves: list[Any] = optree.tree_leaves(tree)
    return {
        name: zlib.crc32(leaf.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        if isinstance(leaf, torch.Tensor)
        else leaf
        for (name, read), leaf in zip(names_of(tree), leaves, strict=True)
        if read
    }


def flat(params: Any) -> list[float]:
    return [value for leaf in optree.tree_leaves(params) for value in leaf.double().flatten().tolist()]


def restored(name: str, folder: Path) -> list[Any]:
    shutil.copytree(FOLDER / name, folder / name)
    return tx.simulate(lambda rank: run(name, folder / name), {"data": 2}, [0, 1])


@pytest.mark.parametrize("name", [*EXPECTED])
def test_every_byte_verifies(name: str) -> None:
    folder = FOLDER / name
    assert fjoin.checkpoint.verify(folder) == []
    assert json.loads((folder / "step-00000003" / "manifest.json").read_text())["version"] == 1


# The text of a pipeline has the names that factories had then.
@pytest.mark.filterwarnings("ignore:the checkpoint is of")
@pytest.mark.parametrize("name", [*pipelines()])
def test_a_run_goes_on(name: str, tmp_path: Path) -> None:
    for rank, (state, end, extra) in enumerate(restored(name, tmp_path)):
        found, want = digests(state), EXPECTED[name]["restored"][rank]
        # Residuals have other units, and nothing is beside them.
        again = [path for path in want if ".error." in path or ".last." in path or path.endswith(".counted")]
        assert {path: of for path, of in found.items() if path not in again} == {
            path: of for path, of in want.items() if path not in again
        }
        params = torch.tensor(EXPECTED[name]["end"][rank])  # other processors round otherwise
        torch.testing.assert_close(torch.tensor(flat(end.params)), params, rtol=0.02, atol=0.02)
        assert same_bits(extra, EXTRA)


def test_objects_go_on() -> None:
    """As torch's own do that are filled from the file by another reader. (Their gradients are rounding noise behind the
    normalization, of which Adam makes steps, so what torch 2.13 came to is not what another release comes to.)
    """
    of, others = objects(), objects()
    done = fjoin.load(FOLDER / "objects", of)
    (file,) = (FOLDER / "objects").glob("*/*.safetensors")
    held = load_file(file)
    others["model"].load_state_dict({name: held[f"objects.model.{name}"] for name in others["model"].state_dict()})
    train(others, range(1))  # which makes the optimizer's state
    others["model"].load_state_dict({name: held[f"objects.model.{name}"] for name in others["model"].state_dict()})
    saved = others["optimizer"].state_dict()
    for number, state in saved["state"].items():
        state.update({key: held[f"objects.optimizer.state.{number}.{key}"] for key in state})
    others["optimizer"].load_state_dict(saved)
    for both in (of, others):
        train(both, range(done, END))
    assert same_bits(of["model"].state_dict(), others["model"].state_dict())
    assert same_bits(of["optimizer"].state_dict(), others["optimizer"].state_dict())
