"""The host waits for no device in a step of any pipeline: tensors without data stand for a device's."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from fjoin.records import DeviceReads
from fjoin.testing._devices import NoWaiting
from tests.goldens.golden_records import start
from tests.goldens.golden_rows import ADAM, MEAN, MOMENTUM, ROWS, TWO, Row

# Kernels without an implementation for tensors without data.
KERNELS = (
    "_fused_sgd_", "_fused_sgd_.tensor_lr", "_fused_adam_.tensor_lr", "_fused_adamw_.tensor_lr", "_fused_adagrad_",
)  # fmt: skip
# A train_step refuses accumulate; JAX needs values.
STEPS: dict[str, tuple[Row, dict[str, Any]]] = {
    **{name: (row, {}) for name, row in ROWS.items() if not name.startswith(("from_optax ", "accumulate "))},
    "accumulate in the step": (Row(lambda: tx.fuse(MEAN, MOMENTUM), TWO), {"accumulate": 2}),
    "accumulate in the step, zero": (Row(lambda: tx.zero(MEAN, ADAM, "data"), TWO), {"accumulate": 2}),
    "state kept": (Row(lambda: tx.fuse(MEAN, MOMENTUM), TWO), {"donate": False}),
}


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    for name in KERNELS:
        library.impl(name, lambda *args, **kwargs: None, "Meta")
    yield
    library._destroy()


def loss(params: Any, batch: Any) -> Any:
    return sum((params[path] * batch[path]).sum() for path in params)


@pytest.mark.sample(12)  # many rows are one transform with other options
@pytest.mark.parametrize("name", STEPS)
def test_no_step_waits_for_its_device(name: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(DeviceReads, "add", lambda *given: None)  # which is read when it has come to the host
    row, options = STEPS[name]

    def one_rank() -> None:
        mesh = fjoin.mesh(row.axes)
        weight = lambda batch: float(mesh.rank != 1)  # noqa: E731
        step = fjoin.train_step(loss, row.make(), mesh=mesh, weight=weight, bucket_bytes=24, **options)
        params = {path: p.to("meta") for path, p in start(row.dtype).items()}
        state, batch = step.init(params, sync=None), {path: torch.empty_like(p) for path, p in params.items()}
        for _ in range(options.get("accumulate", 1)):  # buffers are made
            state, _ = step(state, batch)
        with NoWaiting():
            for _ in range(4):
                state, _ = step(state, batch)
        assert all(p.is_meta for p in state.params.values())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of pipelines that do not reduce
        tx.simulate(one_rank, row.axes)
