"""show, verify and export; on files with right checksums that fjoin would never write they give one error that says what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

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
    assert "step 200" in text and "m: float32 [3, 4], a slice over data, parts: 2" in text and "calls: [200]" in text
    command = [sys.executable, "-W", "error", "-m", "fjoin.checkpoint", "verify", str(run)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "no problems\n"
    assert main(["export", str(run), str(run / "out")]) == 0 and (run / "out").exists()
    (run / "step-00000200" / "rank-1.safetensors").unlink()
    assert main(["verify", str(run)]) == 1 and "rank-1.safetensors" in capsys.readouterr().out
    assert main(["show", str(run / "none")]) == 2 and "holds no step" in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit_:
        main(["shown", str(run)])
    assert exit_.value.code == 2


# -- forged files --------------------------------------------------------------------------------------------------------


def raw(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def one(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


PART, NAME, W, FOUR = ("leaves", "params.m", "parts", 0), ("files", 0, "name"), ("leaves", "params.w"), bytes(4)
MANIFESTS: list[tuple[Any, str]] = [
    (put("version", 2), "version is 2: this fjoin reads version 1; read it with"),
    (put("version", True), "version is True"),
    (lambda value: value.pop("version"), "version is None"),
    (put("more", 1), "more"),
    (put("run", "../x"), "run is '../x'"),
    (put("step", True), "step is True"),
    (put("axes", "data", 0), "0 ranks"),
    (put("axes", "data", 3), "3 ranks"),
    (put("settings", []), "settings is []"),
    (put("numbers", "calls", 3), "int"),
    (put("numbers", "calls", [1, 2, 3]), "2 ranks"),
    (put("ranks", [{}]), "2 ranks"),
    (put("ranks", [1, 2]), "2 ranks"),
    (put("leaves", "params.m", "shape", [-3, -4]), "[-3, -4]"),
    (put("leaves", "params.m", "shape", [3, True]), "[3, True]"),
    (put("leaves", "params.m", "shape", [0, 2**62]), "a shape is"),
    (put("leaves", "params.m", "dtype", "float31"), "float31"),
    (put("leaves", "params.m", "dtype", {}), "unhashable"),
    (put("leaves", "params.m", "placement", None), "leaves['params.m']"),
    (put("leaves", "params.m", "parts", []), "leaves['params.m']"),
    *((put(*PART, "file", file), f"leaves['params.m'] has LeafPart(file={file}") for file in (2, None, -1)),
    (put(*PART, "rank", 2), "of 2 files, 2 ranks, 12 elements"),
    (put(*PART, "rank", -1), "rank=-1"),
    (put(*PART, "start", 13), "start=13"),
    (put(*PART, "start", -1), "start=-1"),
    *((put(*NAME, name), repr(name)) for name in ("../a", "a/b", "a..b", ".", "a\n", "COMMIT", "manifest.json")),
    (put("files", 0, "size", 2**40), "1 blocks"),
    (put("files", 0, "size", "1"), "str"),
    *((data, "manifest.json") for data in (b"", b"[]", b"{", b"\xff", b"[" * 200_000, b'{"version": 1}')),
    # -- parts that do not fit their leaves
    (put(*W, "shape", [3]), "'params.w'"),
    (put(*W, "dtype", "int32"), "'params.w'"),
    (put(*W, "dtype", "complex128"), "'params.w'"),
    (put("leaves", "scales", "dtype", "complex128"), "'scales'"),  # float64 without two columns
    (put(*W, "parts", 0, "name", "v"), "'v'"),
    (put(*W, "parts", 0, "name", ["v"]), "'params.w'"),
    (put("leaves", "params.m", "shape", [13]), "'params.m'"),
    (put(*PART, "start", 1), "'params.m'"),
    (put("leaves", "params.m", "parts", 1, "start", 8), "'params.m'"),
]
HEADERS: dict[str, tuple[bytes, str]] = {
    "no header": (b"1234", "of 4"), "length beyond the file": (raw(one(), FOUR, 10**6), "the header ends at byte"),
    "length of 2^63": (raw(one(), FOUR, 2**63), "the header ends at byte"), "length 0": (raw(b"", FOUR), "JSON"),
    "a list": (raw([1, 2]), "TypeError"), "no JSON": (raw(b"{x}   "), "JSON"),
    "no UTF-8": (raw(b'{"\xff": 1}'), "decode"),
    "nested": (raw(b'{"w":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "recursion"),
    "a missing key": (raw({"w": {"dtype": "F32", "shape": []}}), "data_offsets"),
    "unknown dtype": (raw(one("F33"), FOUR), "F33"), "dtype of another kind": (raw(one(["F32"]), FOUR), "list"),
    "negative dims": (raw(one(shape=(-1, -1)), FOUR), "[-1, -1]"),
    "bool for a dim": (raw(one(shape=(True,)), FOUR), "[True]"),
    "float for a dim": (raw(one(shape=(1.0,)), FOUR), "[1.0]"),
    "huge dim": (raw(b'{"w":{"dtype":"F32","shape":[1' + b"0" * 5000 + b'],"data_offsets":[0,4]}}', FOUR), "digits"),
    "overflow to empty": (raw(one(shape=(0, 2**40, 2**40), offsets=(0, 0))), "a shape is"),
    **{f"offsets {offsets}": (raw(one(offsets=offsets), FOUR), "data_offsets of 'w'")
       for offsets in ((0, 8), (-4, 0), (4, 0), (0, 4, 4), (0, 3))},
    "overlap": (raw(one() | {"v": one()["w"]}, FOUR), "no two tensors in one place"),
    "hole": (raw(one(offsets=(4, 8)), 2 * FOUR), "no hole"),
    "bytes after the last": (raw(one(), FOUR + b"1"), "the end of the file"),
    "sound, without the leaves": (raw(one(), FOUR), "no tensor"),
}  # fmt: skip
FORGED = [("manifest.json", *row) for row in MANIFESTS] + [("rank-1.safetensors", *row) for row in HEADERS.values()]


@pytest.mark.parametrize(("name", "new", "words"), FORGED, ids=map(str, range(len(FORGED))))
def test_it_is_refused(name: str, new: Any, words: str, tmp_path: Path) -> None:
    step = save(Folder(tmp_path), 7)
    assert checkpoint.verify(step) == []
    forge(step, name, new)
    problem, *_ = checkpoint.verify(step)
    assert words in problem and str(step) in problem
    raises_text(fjoin.CheckpointError, lambda: checkpoint.export(step, tmp_path / "out"), problem)


@pytest.mark.parametrize("odd", [{}, {"$dict": [1]}, {"$dict": [[[], 1]]}, {"$tensor": []}, {"$float": "x"}], ids=str)
def test_an_odd_state_dict_is_refused(tmp_path: Path, odd: Any) -> None:
    objects = {"it": torch.nn.Linear(1, 1)}
    forge(fjoin.save(tmp_path, objects, 1), "manifest.json", put("ranks", 0, "objects", "it", odd))
    raises_text(fjoin.CheckpointError, lambda: fjoin.load(tmp_path, objects), "manifest.json", "use another step")
