"""One persistent pool of worker processes for all tests that need real ranks.

A job gets fresh process groups over the first n workers, so that tests cannot disturb each other. The
functions that run in the workers are found again by file and name: they stand at the top of a test file.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import importlib.util
import multiprocessing
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.ranks import context

WORKERS = 4
TIMEOUT_S = 120.0
# What gloo says, about once in ten thousand groups on a busy machine, and then the other ranks wait.
NOT_CONNECTED = "Gloo connectFullMesh failed"


class JobFailed(RuntimeError):
    """A worker raised; the message has its traceback."""


def _load(file: str, name: str) -> Callable[..., Any]:
    key = "job_" + file.removesuffix(".py").replace(os.sep, "_")  # two folders may have files of one name
    module = sys.modules.get(key)
    if module is None:
        spec = importlib.util.spec_from_file_location(key, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[key] = module
        spec.loader.exec_module(module)
    found: Callable[..., Any] = getattr(module, name)
    return found


def _worker(pipe: Connection, backend: str, index: int) -> None:
    sys.path.insert(0, os.path.dirname(os.path.dirname(__file__)))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # which NCCL avoids where it sees another one
    os.environ.setdefault("FJOIN_TRANSPORT", "gloo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    gc.freeze()  # a mesh that is closed looks for holders of its groups; not among the objects of imported modules
    if "nccl" in backend:
        # NCCL refuses two ranks on one GPU, unless they say that they are on two hosts.
        os.environ["NCCL_HOSTID"] = str(index)
        torch.cuda.set_device(index % torch.cuda.device_count())
    while (job := pipe.recv()) is not None:
        file, name, args, rank, n, store = job
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                dist.init_process_group(
                    backend, init_method=f"file://{store}", rank=rank, world_size=n,
                    timeout=datetime.timedelta(seconds=TIMEOUT_S / 2),
                )  # fmt: skip
                torch.manual_seed(rank)
                out = (True, _load(file, name)(*args))
            if dist.is_initialized():  # a rank that closes its connections at once disturbs one that still reads
                with contextlib.suppress(RuntimeError):
                    dist.barrier()
        except BaseException as error:
            out = (False, "".join(traceback.format_exception(error)))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        pipe.send(out)


class Pool:
    def __init__(self, backend: str = "gloo") -> None:
        self._backend = backend
        self._pipes: list[Any] = []
        self._processes: list[Any] = []

    def _start(self) -> None:
        # CUDA does not work in a process forked from one that has looked for devices.
        made: Any = multiprocessing.get_context("spawn") if "nccl" in self._backend else context
        for index in range(WORKERS):
            ours, theirs = made.Pipe()
            process = made.Process(target=_worker, args=(theirs, self._backend, index), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, n: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(*args)` on n ranks, with torch.distributed initialised: the results in rank order."""
        return self._run(function, [args] * n)

    def each(self, function: Callable[..., Any], own: Sequence[Any], *args: Any) -> list[Any]:
        """`function(own[rank], *args)` on as many ranks as there are such values."""
        return self._run(function, [(one, *args) for one in own])

    def _run(self, function: Callable[..., Any], args: list[tuple[Any, ...]]) -> list[Any]:
        n = len(args)
        if not self._processes:
            self._start()
        with tempfile.TemporaryDirectory() as folder:
            job = (function.__code__.co_filename, function.__name__)
            for rank in range(n):
                self._pipes[rank].send((*job, args[rank], rank, n, f"{folder}/store"))
            results: dict[int, Any] = {}
            while len(results) < n:
                ready = wait([self._pipes[r] for r in range(n) if r not in results], TIMEOUT_S)
                if not ready:
                    self.close()
                    raise JobFailed(
                        f"{function.__name__} did not end within {TIMEOUT_S} s on {n} ranks; done: {sorted(results)}"
                    )
                for pipe in ready:
                    rank = self._pipes.index(pipe)
                    try:
                        fine, value = results[rank] = pipe.recv()
                    except (EOFError, ConnectionResetError):
                        self.close()
                        raise JobFailed(f"{function.__name__}: worker {rank} died") from None
                    if not fine and NOT_CONNECTED in value:
                        self.close()
                        raise JobFailed(value)
        failed = [f"rank {r}:\n{text}" for r, (fine, text) in sorted(results.items()) if not fine]
        if failed:
            raise JobFailed("\n".join(failed))
        return [results[r][1] for r in range(n)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._pipes, self._processes = [], []
