"""The rows of the table in docs/from-jax.md: a line of jax, and ours. `python -m tests.from_jax.rows` writes them into the page.

The texts are what the test runs, on both sides, so the page cannot say anything else.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tests.from_jax.collective_rows import COLLECTIVES, GRADIENTS, GRID, TRAINING
from tests.from_jax.function_rows import FUNCTIONS, KEYS, POLICIES
from tests.from_jax.optax_rows import OPTIMIZERS, SCHEDULES, STAGES, STEPS
from tests.from_jax.row import Row

PAGE = Path(__file__).parents[2] / "docs" / "from-jax.md"

SECTIONS = [COLLECTIVES, GRID, GRADIENTS, TRAINING, FUNCTIONS, POLICIES, OPTIMIZERS, STAGES, STEPS, SCHEDULES, KEYS]


class Case(NamedTuple):
    kind: str
    row: Row


CASES = {f"{section.title}: {row.ours}": Case(section.kind, row) for section in SECTIONS for row in section.rows}


def table() -> str:
    """The sections of the page, in Markdown."""
    lines: list[str] = []
    for section in SECTIONS:
        lines += [f"### {section.title}", "", section.intro, "", "| jax | fjoin | why |", "| --- | --- | --- |"]
        lines += [f"| `{row.jax}` | `{row.ours}` | {row.why} |".replace("  |", " |") for row in section.rows]
        lines += [""]
    return "\n".join(lines)


BEGIN, END = "<!-- rows of tests/from_jax/rows.py -->\n\n", "\n<!-- end of rows -->"

if __name__ == "__main__":
    text, end = PAGE.read_text(), END.strip()
    before, after = text.split(BEGIN.strip())[0], text.split(end)[1]
    PAGE.write_text(before + BEGIN + table() + END + after)
