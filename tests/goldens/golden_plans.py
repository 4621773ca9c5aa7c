"""What is known of a row without a step: its explanation, its spec, its fingerprint."""

from __future__ import annotations

import functools
import json
import re
import warnings
from collections.abc import Callable
from typing import Any

from fjoin import transforms as tx
from fjoin.transforms.base import specs
from tests.goldens.golden_problem import start
from tests.goldens.golden_rows import ROWS, WORLDS


def worlds_of(name: str) -> list[dict[str, int]]:
    return [world for world in WORLDS if world.keys() == ROWS[name].axes.keys()]


def explained(name: str) -> dict[str, str]:
    """World -> the table as text, or the error."""
    out = {}
    for world in worlds_of(name):
        make = ROWS[name].make
        params = start(ROWS[name].dtype)
        out[str(world)] = _text(functools.partial(_table, make, params, world))
    return out


def _table(make: Callable[[], tx.Pipeline], params: Any, world: dict[str, int]) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        text = str(tx.explain(make(), params, world, bucket_bytes=24))
    return re.sub(" {3,}", "  ", text)


def spec(name: str) -> str:
    """The pipeline as it prints."""
    return repr(ROWS[name].make())


def fingerprint(name: str) -> str:
    """The fingerprint; of a row with functions none, since it is that of the code as Python compiles it."""
    made = ROWS[name].make()
    return "holds functions" if '"function"' in json.dumps(specs.encode(made)) else specs.fingerprint(made)


def _text(make: Callable[[], str]) -> str:
    try:
        return make()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def plan(name: str) -> dict[str, Any]:
    return {"spec": spec(name), "fingerprint": fingerprint(name)}
