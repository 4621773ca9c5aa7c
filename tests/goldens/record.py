"""Writes the files that test_goldens.py compares with.

    python tests/goldens/record.py [--to DIR] [--rows ROW ...]

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

    from tests.goldens.golden_records import HERE, explained, load, machine, plan, recorded_now, save
    from tests.goldens.golden_rows import ROWS

    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--to", type=Path, default=HERE)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS), metavar="ROW")
    given = parser.parse_args()
    given.to.mkdir(parents=True, exist_ok=True)

    def update(file: str, rows: dict[str, Any]) -> None:
        kept = {name: row for name, row in (load(file, given.to) | rows).items() if name in ROWS}
        save(file, kept, given.to)

    update("plans", {name: plan(name) for name in given.rows})
    update("explained", {name: explained(name) for name in given.rows})
    before, bits, rows = load("pure", given.to), load("bits", given.to), {}
    own = bits.setdefault(machine(), {})
    for name in given.rows:
        rows[name], hashes = recorded_now(name)
        if name in before and before[name] != rows[name]:  # the hashes of other machines are of other values
            for others in bits.values():
                others.pop(name, None)
        own[name] = hashes
    update("pure", rows)
    save("bits", {key: of for key, of in bits.items() if of}, given.to)
    print(f"written for {machine()}", flush=True)


if __name__ == "__main__":
    main()
