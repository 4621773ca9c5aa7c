"""Every public name of 0.2.0 is still there, or docs/moving.md says what to write instead."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest

NAMES: dict[str, str] = json.loads(Path(__file__).with_name("names_0_2_0.json").read_text())
MOVING = Path(__file__).parents[1] / "docs" / "moving.md"


def lost(face: str, names: list[str], page: str) -> list[str]:
    """The names that the face has no more, and that stand in no code of the page."""
    told = set(re.findall(r"\w+", " ".join(re.findall(r"`[^`]+`|```.*?```", page, re.DOTALL))))
    module = importlib.import_module(face)
    return [name for name in names if not hasattr(module, name) and name not in told]


@pytest.mark.parametrize("face", NAMES)
def test_names_of_0_2_0_are_there_or_on_the_page(face: str) -> None:
    assert lost(face, NAMES[face].split(), MOVING.read_text()) == []


def test_a_name_that_the_page_forgets_is_noticed() -> None:
    assert lost("fjoin", ["Join", "gone", "told"], "use `told` and not gone") == ["gone"]
