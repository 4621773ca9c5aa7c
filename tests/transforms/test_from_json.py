"""The refusals of from_json, with the place in the text; for values that it reads see test_specs.py and the laws."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from fjoin import transforms as tx
from tests.helpers import raises_text


def node(name: str, **args: Any) -> str:
    return json.dumps({"name": name, "args": args})


MEAN = {"name": "mean", "args": {"axis": "data"}}

REFUSED: dict[str, tuple[str, tuple[str, ...]]] = {
    "no text": ("", ("no JSON", "line 1, column 1")),
    "broken": ('{"name": "sgd", "args": {"lr": }}', ("no JSON", "column 32", "lr")),
    "a number": ("3", ("3", "'name' and 'args'")),
    "a list": ("[1]", ("[1]", "'name' and 'args'")),
    "null": ("null", ("None", "'name' and 'args'")),
    "empty": ("{}", ("{}", "'name' and 'args'")),
    "a dtype alone": ('{"dtype": "load"}', ("'name' and 'args'",)),
    "no name": ('{"args": {}}', ("'name' and 'args'",)),
    "no args": ('{"name": "sgd"}', ("at the top", "['name']", "'args'")),
    "args null": ('{"name": "sgd", "args": null}', ("at the top", "sgd", "None", "an object")),
    "args a list": ('{"name": "sgd", "args": [0.1]}', ("at the top", "[0.1]", "an object")),
    "args null within": (node("every", steps=2, transform={"name": "identity", "args": None}), ("at args.transform", "None")),
    "more keys": ('{"name": "sgd", "args": {}, "code": 1}', ("['args', 'code', 'name']",)),
    "twice": ('{"name": "sgd", "name": "adam", "args": {}}', ("['name']", "twice")),
    "a name that is none": ('{"name": 3, "args": {}}', ("unknown transform 3", "'sgd'")),
    "a name that is a list": ('{"name": ["sgd"], "args": {}}', ("unknown transform ['sgd']",)),
    "another name": (node("sdg"), ("at the top", "'sdg'", "'sgd'")),
    "another argument": (node("sgd", lr=0.1, momentumm=0.9), ("sgd", "['momentumm']", "'momentum'")),
    "another argument within": (node("cast", dtype={"dtype": "float16"}, hook=MEAN | {"args": {"axis": "data", "ovr": 1}}),
                                ("at args.hook", "mean", "['ovr']", "'over'")),
    "an argument is missing": (node("clip_by_value"), ("clip_by_value", "['max_value']")),
    "an argument is refused": (node("sgd", lr=-1.0), ("at the top", "sgd", "lr must be at least 0", "-1.0")),
    "nan": ('{"name": "sgd", "args": {"lr": NaN}}', ("lr", "nan")),
    "infinity": ('{"name": "constant", "args": {"value": Infinity}}', ("value", "inf")),
    "a text for a number": (node("sgd", lr="x"), ("lr", "'x'")),
    "an object of other keys": (node("sgd", lr={"value": 1}), ("at args.lr", "['value']", "'dtype'")),
    "a function as dtype": (node("sgd", lr={"dtype": "manual_seed"}), ("at args.lr", "unknown dtype 'manual_seed'", "'float32'")),
    "a function to tap": (node("tap", function={"dtype": "compile"}), ("at args.function", "unknown dtype 'compile'")),
    "a function to mask": (node("masked", transform=MEAN, which={"dtype": "load"}), ("at args.which", "'load'")),
    "a module as dtype": (node("sgd", lr={"dtype": "nn"}), ("unknown dtype 'nn'",)),
    "a private name as dtype": (node("sgd", lr={"dtype": "__class__"}), ("unknown dtype '__class__'",)),
    "a dtype that is none": (node("sgd", lr={"dtype": 32}), ("unknown dtype 32",)),
    "a dtype where none belongs": (node("sgd", lr={"dtype": "float32"}), ("lr", "torch.float32")),
    "a tensor of a function": (node("sgd", lr={"tensor": [1], "dtype": "save"}), ("at args.lr", "unknown dtype 'save'")),
    "a tensor of texts": (node("sgd", lr={"tensor": ["a"], "dtype": "float32"}), ("at args.lr", "['a']", "float32")),
    "a ragged tensor": (node("sgd", lr={"tensor": [[1], [1, 2]], "dtype": "float32"}), ("at args.lr", "[[1], [1, 2]]")),
    "an object as tensor": (node("sgd", lr={"tensor": {}, "dtype": "float32"}), ("at args.lr", "{}")),
    "a number too large for its dtype": (node("sgd", lr={"tensor": 2**70, "dtype": "int64"}), ("at args.lr", "int64")),
    "a dict of no pairs": (node("partition", parts={"dict": [["*"]]}), ("at args.parts", "pairs")),
    "a dict of a dict": (node("partition", parts={"dict": {"*": 1}}), ("at args.parts", "pairs")),
    "a dict with a key twice": (node("partition", parts={"dict": [["*", MEAN], ["*", MEAN]]}), ("at args.parts", "twice")),
    "a dict with a transform as key": (node("partition", parts={"dict": [[MEAN, MEAN]]}), ("at args.parts", "no key")),
    "an unknown function": (node("tap", function={"function": "os.system"}), ("at args.function", "'os.system'", "functions=")),
    "a function that is none": (node("tap", function={"function": 3}), ("at args.function", "3")),
    "many digits": ('{"name": "sgd", "args": {"lr": ' + "1" * 5000 + "}}", ("cannot be read", "digits")),
    "deep lists": ("[" * 100_000, ("nested too deep",)),
    "deep lists that end": ('{"name": "sgd", "args": {"lr": ' + "[" * 400 + "]" * 400 + "}}", ("nested too deep", "args.lr.0.0")),
    "deep objects": ('{"name":"every","args":{"steps":2,"transform":' * 5000 + "{}" + "}}" * 5000, ("nested too deep",)),
    "deep transforms": ('{"name":"every","args":{"steps":2,"transform":' * 150 + json.dumps(MEAN) + "}}" * 150, ("deep", "100")),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_text_that_is_refused(case: str) -> None:
    text, parts = REFUSED[case]
    raises_text(ValueError, lambda: tx.from_json(text), *parts)


def test_only_factories_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr(torch, "manual_seed", lambda *args: called.append(args) or 0.1)
    raises_text(ValueError, lambda: tx.from_json(node("sgd", lr={"dtype": "manual_seed"})), "manual_seed")
    assert not called


def test_other_arguments_of_from_json() -> None:
    raises_text(TypeError, lambda: tx.from_json(None), "NoneType")  # type: ignore[arg-type]
    raises_text(TypeError, lambda: tx.from_json(b"{}"), "bytes")  # type: ignore[arg-type]
    raises_text(ValueError, lambda: tx.from_json(" " * (2**26 + 1)), "67108865 characters", "at most 67108864")
    text = node("tap", function={"function": "f"})
    raises_text(ValueError, lambda: tx.from_json(text, functions={"f": 3}), "functions['f']", "3")  # type: ignore[dict-item]
    assert tx.from_json(text, functions={"f": print}) == tx.tap(print)


def test_deep_nesting() -> None:
    hook = tx.mean("data")
    for _ in range(99):
        hook = tx.every(2, hook)
    assert tx.from_json(tx.to_json(hook)) == hook
    raises_text(ValueError, lambda: tx.every(2, hook), "every", "101 deep", "at most 100")
    wide = tx.chain(*(tx.clip_by_value(float(i + 1)) for i in range(500)))
    assert tx.from_json(tx.to_json(wide)) == wide


def test_tensors_are_read_back() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64):
        opt = tx.adam(torch.tensor(1, dtype=dtype))
        assert tx.from_json(tx.to_json(opt)) == opt
    betas = torch.tensor(0.8), torch.tensor(0.9)
    assert tx.from_json(tx.to_json(tx.adam(betas=betas))) == tx.adam(betas=betas)
