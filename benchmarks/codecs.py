"""How fast codecs encode and decode, on one core: GB of float32 a second, on one bucket's flat buffer.

OMP_NUM_THREADS=1 python benchmarks/codecs.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from fjoin import transforms as tx

ELEMENTS = 5 * 2**20 // 4  # a bucket of 5 MiB
CODECS: dict[str, Callable[[], tx.Codec]] = {
    "bfloat16": tx.bfloat16,
    "float16": tx.float16,
    "int8": tx.int8,
    "int4": tx.int4,
    "fp8 e4m3": tx.fp8,
    "fp8 e5m2": lambda: tx.fp8(dtype=torch.float8_e5m2),
}


def rate(run: Callable[[], Any]) -> float:
    """The median of several blocks."""
    blocks = []
    for _ in range(9):
        start = time.perf_counter()
        for _ in range(5):
            run()
        blocks.append((time.perf_counter() - start) / 5)
    return 4 * ELEMENTS / statistics.median(blocks) / 1e9


def main() -> None:
    torch.set_num_threads(1)
    x = torch.randn(1, ELEMENTS, generator=torch.Generator().manual_seed(0))
    print("| codec | encode GB/s | decode GB/s | bytes per element |\n|---|---|---|---|")
    for name, make in CODECS.items():
        codec = make()
        data = codec.encode(x)
        both = rate(lambda: codec.encode(x)), rate(lambda: codec.decode(data, ELEMENTS))  # noqa: B023
        print(f"| {name} | {both[0]:.2f} | {both[1]:.2f} | {codec.width(ELEMENTS) / ELEMENTS:.3f} |")


if __name__ == "__main__":
    main()
