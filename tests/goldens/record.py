"""Writes the files that test_goldens.py compares with.

    python tests/goldens/record.py [--to DIR] [--paths PATH ...] [--rows ROW ...]

With --to the files are written elsewhere, and `diff -r` tells how two commits differ on one machine.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")


def main() -> None:
    import torch

    from tests.goldens.golden_plans import explained, plan
    from tests.goldens.golden_records import HERE, machine
    from tests.goldens.golden_rows import PATHS, ROWS
    from tests.pool import Pool

    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--to", type=Path, default=HERE)
    parser.add_argument("--paths", nargs="+", default=[*PATHS, "plans"], choices=[*PATHS, "plans"])
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS), metavar="ROW")
    given = parser.parse_args()
    given.to.mkdir(parents=True, exist_ok=True)
    workers = Pool()
    for path in given.paths:
        if path == "plans":
            _update("plans", {name: plan(name) for name in given.rows}, given.to)
            _update("explained", {name: explained(name) for name in given.rows}, given.to)
        else:
            _record(workers, path, [name for name in given.rows if path in ROWS[name].paths], given.to)
        print(f"{path}: written for {machine()}", flush=True)
    workers.close()


def _update(file: str, rows: dict[str, Any], folder: Path) -> None:
    from tests.goldens.golden_records import load, save
    from tests.goldens.golden_rows import ROWS

    save(file, {name: row for name, row in (load(file, folder) | rows).items() if name in ROWS}, folder)


def _record(workers: Any, path: str, names: list[str], folder: Path) -> None:
    from tests.goldens.golden_paths import on_ranks
    from tests.goldens.golden_records import REFERENCE, load, machine, of_ranks, packed, recorded, save
    from tests.goldens.golden_rows import ROWS

    together: dict[str, list[str]] = {}
    for name in names:
        together.setdefault(str(ROWS[name].axes), []).append(name)
    records: dict[str, Any] = {}
    for group in together.values():
        for first in range(0, len(group), 16):
            records |= on_ranks(workers, group[first : first + 16], path)
    other = recorded(REFERENCE[path], folder) if path in REFERENCE else {}
    before, rows, bits = load(path, folder), {}, load("bits", folder)
    own = bits.setdefault(f"{machine()}, {path}", {})
    for name in names:
        fields, hashes = of_ranks(records[name])
        rows[name] = packed(fields, other.get(name))
        if name in before and before[name] != rows[name]:  # the hashes of other machines are of other values
            for others in (at for key, at in bits.items() if key.endswith(f", {path}")):
                others.pop(name, None)
        own[name] = hashes
    _update(path, rows, folder)
    save("bits", {key: at for key, at in bits.items() if at}, folder)


if __name__ == "__main__":
    main()
