"""show, verify and export."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fjoin
from fjoin import checkpoint
from fjoin.checkpoint.__main__ import main
from fjoin.checkpoint._files import write_file
from fjoin.checkpoint._folder import Folder
from fjoin.checkpoint._manifest import Leaf, Part
from tests.checkpoint.saved_steps import a_state, new_manifest, read_safetensors, save
from tests.helpers import raises_text


def two_steps(path: Path) -> Folder:
    folder = Folder(path / "run")
    save(folder, 100)
    save(folder, 200)
    return folder


def test_show_names_the_step_and_its_leaves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = two_steps(tmp_path)
    assert main(["show", str(folder.path)]) == 0
    text = capsys.readouterr().out
    assert "step 200" in text and "m: float32 [3, 4], {'cut': 'data'}, parts: 2" in text and "calls: [200]" in text
    assert main(["show", str(folder.step_path(100))]) == 0 and "step 100" in capsys.readouterr().out


def test_verify_finds_every_kind_of_damage(tmp_path: Path) -> None:
    folder = two_steps(tmp_path)
    step = folder.step_path(200)
    assert checkpoint.verify(folder.path) == checkpoint.verify(step) == []
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
    older = folder.step_path(100) / "manifest.json"
    (step / "manifest.json").write_bytes(older.read_bytes())
    assert "not the one that COMMIT beside it covers" in checkpoint.verify(step)[0]


def test_verify_finds_parts_that_do_not_fit_their_leaves(tmp_path: Path) -> None:
    wrong = {
        "shape": Leaf([3], "float32", {}, [Part(0, "w")]),
        "dtype": Leaf([4], "int32", {}, [Part(0, "w")]),
        "missing": Leaf([4], "float32", {}, [Part(0, "v")]),
        "complex": Leaf([4], "complex128", {}, [Part(0, "w")]),
        "float64 for complex128": Leaf([4], "complex128", {}, [Part(0, "d")]),
        "hole at the end": Leaf([5], "float32", {}, [Part(0, "w", 0, 0)]),
        "hole at the start": Leaf([5], "float32", {}, [Part(0, "w", 0, 1)]),
        "beyond": Leaf([4], "float32", {}, [Part(0, "w", 0, 2)]),
    }
    for number, (case, leaf) in enumerate(wrong.items()):
        folder = Folder(tmp_path / str(number))
        temporary = folder.begin(1)
        files = [write_file(temporary / "a", {"w": torch.ones(4), "d": torch.ones(4, dtype=torch.float64)})]
        step = folder.commit(temporary, new_manifest(1, files=files, leaves={"params.leaf": leaf}))
        assert len(problems := checkpoint.verify(step)) == 1 and ("leaf'" in problems[0] or "'v'" in problems[0]), case
        raises_text(fjoin.CheckpointError, lambda: checkpoint.export(step, tmp_path / "out"), problems[0])  # noqa: B023


def test_export_writes_the_parameters_whole_and_without_their_prefix(tmp_path: Path) -> None:
    folder, out = two_steps(tmp_path), tmp_path / "out.safetensors"
    checkpoint.export(folder.path, out)
    found, state = read_safetensors(out.read_bytes()), a_state()
    assert found.keys() == {"w", "b"} and torch.equal(found["w"], state["params.w"])
    assert torch.equal(torch.view_as_complex(found["b"]), state["params.b"])
    raises_text(fjoin.CheckpointError, lambda: checkpoint.export(folder.path, out), "exists")
    assert sorted(tmp_path.iterdir()) == [out, folder.path]


def test_export_joins_pieces_and_refuses_parameters_that_differ_by_rank(tmp_path: Path) -> None:
    flat = torch.arange(6.0)
    pieces = [Part(0, "0", 0, 0), Part(0, "2", 1, 2)]
    each = [Part(0, "0", 0), Part(0, "2", 1)]
    for name, shape, parts in (("pieces", [2, 3], pieces), ("each", [2], each)):
        folder = Folder(tmp_path / name)
        temporary = folder.begin(1)
        tensors = {"0": flat[:2], "2": flat[2:] if name == "pieces" else flat[2:4]}
        leaves = {"params.w": Leaf(shape, "float32", {}, parts)}
        folder.commit(temporary, new_manifest(1, files=[write_file(temporary / "a", tensors)], leaves=leaves))
    checkpoint.export(tmp_path / "pieces", tmp_path / "out")
    assert torch.equal(read_safetensors((tmp_path / "out").read_bytes())["w"], flat.reshape(2, 3))
    raises_text(fjoin.CheckpointError, lambda: checkpoint.export(tmp_path / "each", tmp_path / "no"), "of 2 ranks")


def test_the_program_prints_and_exits_with_0_1_or_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = two_steps(tmp_path)
    run = str(folder.path)
    assert main(["show", run]) == 0 and "step 200" in capsys.readouterr().out
    assert main(["verify", run]) == 0 and capsys.readouterr().out == "no problems\n"
    assert main(["export", run, str(tmp_path / "out")]) == 0 and (tmp_path / "out").exists()
    (folder.step_path(200) / "rank-1.safetensors").unlink()
    assert main(["verify", run]) == 1 and "rank-1.safetensors" in capsys.readouterr().out
    assert main(["show", str(tmp_path / "none")]) == 2 and "holds no step" in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit_:
        main(["shown", run])
    assert exit_.value.code == 2


def test_the_program_runs_by_its_name(tmp_path: Path) -> None:
    folder = two_steps(tmp_path)
    command = [sys.executable, "-W", "error", "-m", "fjoin.checkpoint", "verify", str(folder.path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "no problems\n"
