"""show, verify and export."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fjoin
from fjoin import checkpoint
from fjoin.checkpoint.__main__ import main
from fjoin.checkpoint._folder import Folder
from fjoin.checkpoint._manifest import Manifest
from tests.checkpoint.saved_steps import a_state, fill, forge, new_manifest, put, save
from tests.helpers import raises_text


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run of two steps."""
    folder = Folder(tmp_path / "run")
    save(folder, 100)
    save(folder, 200)
    return folder.path


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    for manifest in (fill(tmp_path, 7, "b" * 32), new_manifest(0)):
        again = Manifest.from_bytes(manifest.to_bytes())
        assert again == manifest and again.to_bytes() == manifest.to_bytes()


def test_verify_finds_every_kind_of_damage(run: Path) -> None:
    step = run / "step-00000200"
    assert checkpoint.verify(run) == checkpoint.verify(step) == []
    for name in ("rank-0.safetensors", "rank-1.safetensors", "manifest.json", "COMMIT"):
        sound = (step / name).read_bytes()
        for at in (0, len(sound) // 2, len(sound) - 1):
            (step / name).write_bytes(sound[:at] + bytes([sound[at] ^ 4]) + sound[at + 1 :])
            assert [name in problem for problem in checkpoint.verify(step)] == [True], (name, at)
        (step / name).unlink()
        assert [name in problem for problem in checkpoint.verify(step)] == [True], name
        (step / name).write_bytes(sound)
    (step / "more").write_bytes(b"")
    assert ["more" in problem and "unexpected" in problem for problem in checkpoint.verify(step)] == [True]
    (step / "more").unlink()
    (step / "manifest.json").write_bytes((run / "step-00000100" / "manifest.json").read_bytes())
    assert "not the one that COMMIT beside it covers" in checkpoint.verify(step)[0]


def test_export_writes_the_parameters_whole_and_without_their_prefix(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    checkpoint.export(run, out)
    found, state = load_file(out), a_state()
    assert found.keys() == {"w", "b", "m"} and torch.equal(found["w"], state["params.w"])
    assert torch.equal(torch.view_as_complex(found["b"]), state["params.b"])
    assert torch.equal(found["m"], torch.arange(12.0).reshape(3, 4)), "pieces are joined"
    raises_text(fjoin.CheckpointError, lambda: checkpoint.export(run, out), "exists")
    assert sorted(tmp_path.iterdir()) == [out, run]
    step = run / "step-00000200"
    error = json.loads((step / "manifest.json").read_bytes())["leaves"]["error"]
    for name, words in (("params.error", "of 2 ranks"), ("none", "no leaves under 'params.'")):
        forge(step, "manifest.json", put("leaves", {name: error}))
        raises_text(fjoin.CheckpointError, lambda: checkpoint.export(run, tmp_path / "no"), words)


def test_the_program_prints_and_exits_with_0_1_or_2(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(run / "step-00000100")]) == 0 and "step 100" in capsys.readouterr().out
    assert main(["show", str(run)]) == 0
    text = capsys.readouterr().out
    assert "step 200" in text and "m: float32 [3, 4], {'cut': 'data'}, parts: 2" in text and "calls: [200]" in text
    command = [sys.executable, "-W", "error", "-m", "fjoin.checkpoint", "verify", str(run)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "no problems\n"
    assert main(["export", str(run), str(run / "out")]) == 0 and (run / "out").exists()
    (run / "step-00000200" / "rank-1.safetensors").unlink()
    assert main(["verify", str(run)]) == 1 and "rank-1.safetensors" in capsys.readouterr().out
    assert main(["show", str(run / "none")]) == 2 and "holds no step" in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit_:
        main(["shown", str(run)])
    assert exit_.value.code == 2
