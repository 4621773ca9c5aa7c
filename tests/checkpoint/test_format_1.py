"""Checkpoints that were written when format 1 was released are read for ever."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fjoin
from fjoin import transforms as tx
from tests.checkpoint import format_1
from tests.checkpoint.test_extra import assert_equal

EXPECTED = json.loads((format_1.FOLDER / "expected.json").read_text())


def restored(name: str, folder: Path, ranks: int) -> list[Any]:
    shutil.copytree(format_1.FOLDER / name, folder / name)
    return tx.simulate(lambda rank: format_1.run(name, folder / name, 5, False), {"data": ranks}, list(range(ranks)))


@pytest.mark.parametrize("name", [*EXPECTED])
def test_every_byte_verifies(name: str) -> None:
    folder = format_1.FOLDER / name
    assert fjoin.checkpoint.verify(folder) == []
    assert json.loads((folder / "step-00000003" / "manifest.json").read_text())["version"] == 1


# The text of a pipeline has the names that factories had then.
@pytest.mark.filterwarnings("ignore:the checkpoint is of")
@pytest.mark.parametrize("name", [*format_1.pipelines()])
def test_a_run_goes_on(name: str, tmp_path: Path) -> None:
    for rank, (state, end, extra) in enumerate(restored(name, tmp_path, 2)):
        found, want = format_1.digests(state), EXPECTED[name]["restored"][rank]
        # Residuals have other units, and nothing is beside them.
        again = [path for path in want if ".error." in path or ".last." in path or path.endswith(".counted")]
        assert {path: of for path, of in found.items() if path not in again} == {
            path: of for path, of in want.items() if path not in again
        }
        params = torch.tensor(EXPECTED[name]["end"][rank])  # other processors round otherwise
        torch.testing.assert_close(torch.tensor(format_1.flat(end.params)), params, rtol=0.02, atol=0.02)
        assert_equal(extra, format_1.EXTRA)


@pytest.mark.parametrize("name", ["feedback", "zero"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_run_goes_on_on_other_ranks(ranks: int, name: str, tmp_path: Path) -> None:
    want = EXPECTED[name]["restored"][0]
    for state, _, extra in restored(name, tmp_path, ranks):
        found = format_1.digests(state)
        assert {path: found[path] for path in found if path.startswith(("params", "buffers"))} == {
            path: want[path] for path in want if path.startswith(("params", "buffers"))
        }
        assert state.step == format_1.STEPS
        assert_equal(extra, format_1.EXTRA)


def test_objects_go_on() -> None:
    """As torch's own do that are filled from the file by another reader. (Their gradients are rounding noise behind the
    normalization, of which Adam makes steps, so what torch 2.13 came to is not what another release comes to.)
    """
    of, others = format_1.objects(), format_1.objects()
    done = fjoin.load(format_1.FOLDER / "objects", of)
    (file,) = (format_1.FOLDER / "objects").glob("*/*.safetensors")
    held = load_file(file)
    others["model"].load_state_dict({name: held[f"objects.model.{name}"] for name in others["model"].state_dict()})
    format_1.train(others, range(1))  # which makes the optimizer's state
    others["model"].load_state_dict({name: held[f"objects.model.{name}"] for name in others["model"].state_dict()})
    saved = others["optimizer"].state_dict()
    for number, state in saved["state"].items():
        state.update({key: held[f"objects.optimizer.state.{number}.{key}"] for key in state})
    others["optimizer"].load_state_dict(saved)
    for both in (of, others):
        format_1.train(both, range(done, 5))
    assert_equal(of["model"].state_dict(), others["model"].state_dict())
    assert_equal(of["optimizer"].state_dict(), others["optimizer"].state_dict())
