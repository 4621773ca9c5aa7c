"""The speed of codecs on one core: GB of float32 per second, on one bucket's flat buffer.

OMP_NUM_THREADS=1 python benchmarks/codecs.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from timing import seconds

from fjoin import transforms as tx

ELEMENTS = 5 * 2**20 // 4  # a bucket of 5 MiB
CODECS: dict[str, Callable[[], tx.Codec]] = {
    "bfloat16": tx.bfloat16,
    "float16": tx.float16,
    "fp8 e4m3": tx.fp8,
    "fp8 e5m2": lambda: tx.fp8(dtype=torch.float8_e5m2),
    "int8": tx.int8,
    "int8 by chance": lambda: tx.int8(stochastic=True),
    "uint8 per tensor": tx.uint8,
    "uint8 per channel": lambda: tx.uint8(512),
    "int4": tx.int4,
    "qsgd": tx.qsgd,
    "sign": tx.sign,
    "top_k 1 %": lambda: tx.top_k(0.01),
}


def rate(run: Callable[[], Any]) -> float:
    """GB of float32 per second."""
    return 4 * ELEMENTS / seconds(run, 9, 5) / 1e9


def main() -> None:
    torch.set_num_threads(1)
    places = torch.arange(ELEMENTS, dtype=torch.int32).view(1, -1)
    x = torch.randn(1, ELEMENTS, generator=torch.Generator().manual_seed(0))
    noise_rate, rand_rate = (
        rate(tx.Noise(places, torch.tensor(1), torch.tensor(2)).uniform),
        rate(lambda: torch.rand(1, ELEMENTS)),
    )
    print(f"random bits: {noise_rate:.2f} GB/s of float32, torch.rand: {rand_rate:.2f}\n")
    print("| codec | encode GB/s | decode GB/s | bytes per element |\n|---|---|---|---|")
    for name, make in CODECS.items():
        codec = make()
        noise = (tx.Noise(places, torch.tensor(1), torch.tensor(2)),) if codec.stochastic else ()
        data = codec.encode(x, *noise)
        both = rate(lambda: codec.encode(x, *noise)), rate(lambda: codec.decode(data, ELEMENTS))  # noqa: B023
        print(f"| {name} | {both[0]:.2f} | {both[1]:.2f} | {codec.width(ELEMENTS) / ELEMENTS:.3f} |")


if __name__ == "__main__":
    main()
