"""The use of a slow link by gathered messages, whole and in pieces, while the processor computes as in a backward pass.

    python benchmarks/gather.py [--ranks N] [RATE ...]          rates in the notation of `tc`: 1gbit 100mbit

Seven messages of 2.6 MB, the codes of 5 MiB of gradients in bfloat16, start every 22 ms; it measures the time until all
have arrived.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launch import join, launch

from fjoin.groups import _axis, mesh_over

BYTES, MESSAGES, APART_S, ROUNDS = 2_621_448, 7, 0.022, {"1gbit": 15, "100mbit": 5}


def measure(rate: str) -> dict[str, float]:
    axis = mesh_over(dist.group.WORLD).axes["data"]
    codes, one = torch.zeros(BYTES, dtype=torch.uint8), torch.zeros(BYTES // 2, dtype=torch.bfloat16)
    rows, factor = [torch.zeros(BYTES, dtype=torch.uint8) for _ in range(axis.size)], torch.randn(200, 200)

    def ours(piece_bytes: int) -> Callable[[], Any]:
        def start() -> Any:
            _axis._PIECE_BYTES = piece_bytes
            return axis.begin("all_gather", codes, None)

        return start

    def in_pieces() -> Callable[[], Any]:
        pieces = -(-BYTES // _axis._PIECE_BYTES)
        columns = zip(*(row.chunk(pieces) for row in rows), strict=True)
        works = [
            dist.all_gather(list(to), piece, async_op=True)
            for to, piece in zip(columns, codes.chunk(pieces), strict=True)
        ]
        return lambda: [work.wait() for work in works]

    ways: dict[str, Callable[[], Any]] = {
        "gloo's all_gather": lambda: dist.all_gather(rows, codes, async_op=True).wait,
        "gloo's all_gather, in pieces": in_pieces,
        "gloo's all_reduce, as many bytes": lambda: dist.all_reduce(one, async_op=True).wait,
        "ours, whole": ours(BYTES),
        "ours, in pieces": ours(_axis._PIECE_BYTES),
    }
    if axis.size > 2:
        ways = {name: way for name, way in ways.items() if not name.startswith("ours")}  # ours are gloo's there
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    order, shuffle = list(ways), random.Random(0).shuffle
    for _ in range(ROUNDS.get(rate, 5)):
        shuffle(order)
        for way in order:
            dist.barrier()
            start, waits = time.perf_counter(), []
            for _ in range(MESSAGES):
                waits.append(ways[way]())
                end = time.perf_counter() + APART_S
                while time.perf_counter() < end:
                    torch.mm(factor, factor)
            for wait in waits:
                wait()
            seconds[way].append(time.perf_counter() - start)
    return {way: statistics.median(times) for way, times in seconds.items()}


def main() -> None:
    from link import link

    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("rates", nargs="*", default=list(ROUNDS))
    args = parser.parse_args()
    for rate in args.rates:
        with link(rate, args.ranks) as where:
            ranks = launch(rate, "", 0, (), script="gather.py", **where)
        print(rate)
        for way in ranks[0]:
            print(f"  {way:34s} {max(rank[way] for rank in ranks) * 1e3:7.1f} ms", flush=True)


def rank(rate: str, out: str) -> None:
    torch.set_num_threads(1)
    join()
    Path(out).write_text(json.dumps(measure(rate)))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank(sys.argv[1], sys.argv[4])
    else:
        main()
