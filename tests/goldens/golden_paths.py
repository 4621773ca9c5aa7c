"""One row's training on each path: pure, as a train_step, and registered with a module.

Each function returns what one rank saw. An error that a path raises is part of the result.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import fjoin
from fjoin import transforms as tx
from tests.goldens.golden_problem import STEPS, WEIGHTS, Module, buffers_of, gradients, loss_fn, loss_of, start, weight
from tests.goldens.golden_records import Records, kept
from tests.goldens.golden_rows import ROWS, Row
from tests.traffic import Sent, watched

BUCKET_BYTES = 24  # two buckets of float32
BUCKET_MB = 2e-5  # of a module: 20 bytes


def _tried(run: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The record that `run` fills in; with the place and the text of the error that ended it."""
    seen: dict[str, Any] = {"at": "make", "params": [], "losses": [], "messages": []}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of pipelines that do not reduce, which are rows too
        try:
            run(seen)
            seen["error"] = None
        except Exception as error:
            seen["error"] = f"{seen['at']}: {type(error).__name__}: {error}"
    del seen["at"]
    return kept(seen)


def _keep(seen: dict[str, Any], params: Any, step: int) -> None:
    seen["params"].append({path: p.detach().clone() for path, p in params.items()})
    seen["at"] = f"step {step + 1}"


def _sent(messages: list[Sent]) -> list[str]:
    return [f"{m.name} {m.elements} {m.dtype.replace('torch.', '')} {m.bytes}" for m in messages]


def _scaled(grads: Any, state: Any) -> Any:
    """The gradients of a loss times the scale that the state holds."""
    return {path: g * state.scale.to(g.dtype) for path, g in grads.items()} if hasattr(state, "scale") else grads


def _pure_steps(seen: dict[str, Any], row: Row, weights: str, rank: int) -> None:
    pipeline, params = row.make(), start(row.dtype)
    seen["at"] = "init"
    state = pipeline.init(params)
    seen["at"] = "step 0"
    for step in range(STEPS):
        grads = _scaled(gradients(row, rank, step), state)
        params, state = pipeline.step(params, grads, state, weight=weight(weights, rank, step))
        _keep(seen, params, step)
    seen["state"] = tx.to_state_dict(state)


def pure(name: str) -> Records:
    """In lockstep: weights -> every rank's record."""
    row, out = ROWS[name], {}
    ranks = list(range(_size(row)))
    for weights in WEIGHTS:
        run = lambda rank: _tried(lambda seen: _pure_steps(seen, row, weights, rank))  # noqa: B023, E731
        out[weights] = tx.simulate(run, row.axes, ranks)
    return out


def _size(row: Row) -> int:
    out = 1
    for size in row.axes.values():
        out *= size
    return out


def _train(seen: dict[str, Any], row: Row, weights: str, mesh: Any) -> None:
    step_of = fjoin.train_step(
        loss_fn(row.loss), row.make(), mesh=mesh, weight=lambda b: b[1], **{"bucket_bytes": BUCKET_BYTES} | row.options
    )
    seen["at"] = "init"
    state = step_of.init(start(row.dtype), buffers_of(row.loss))
    seen["at"] = "step 0"
    for step in range(STEPS):
        batch = gradients(row, mesh.rank, step), weight(weights, mesh.rank, step)
        with watched() as messages:
            state, metrics = step_of(state, batch)
        seen["messages"].append(_sent(messages))
        sums = sorted((metrics.sums or {}).items())
        seen["losses"].append([float(metrics.loss), float(metrics.weight), *(float(x) for _, x in sums)])
        _keep(seen, state.params, step)
    last = state.clone()
    seen["state"] = tx.to_state_dict(last.pipeline)
    if row.loss == "buffers":
        seen["state"] |= tx.to_state_dict({"on_buffers": last.on_buffers, "buffers": last.buffers})
    step_of.close()


def trained(names: list[str]) -> list[dict[str, Any]]:
    """By `train_step`, over gloo."""
    out: list[dict[str, Any]] = []
    mesh = fjoin.mesh(ROWS[names[0]].axes, transport="gloo")
    for name in names:
        out.append({})
        for weights in WEIGHTS:
            out[-1][weights] = _tried(lambda seen: _train(seen, ROWS[name], weights, mesh))  # noqa: B023
            if out[-1][weights]["error"]:  # which may have ended the connections
                mesh.close()
                mesh = fjoin.mesh(ROWS[names[0]].axes, transport="gloo")
                break
    mesh.close()
    return out


def _register(seen: dict[str, Any], row: Row, weights: str, rank: int) -> None:
    model = torch.nn.parallel.DistributedDataParallel(Module(row.dtype), bucket_cap_mb=BUCKET_MB)
    handle = fjoin.ddp.register(model, row.make(), fjoin.mesh(row.axes) if len(row.axes) > 1 else None)
    scales = "dynamic_loss_scale" in repr(row.make())
    seen["at"] = "step 0"
    for step in range(STEPS):
        handle.weight(weight(weights, rank, step))
        model.zero_grad()
        with watched() as messages:
            loss = model(gradients(row, rank, step))
            (handle.scale(loss) if scales else loss).backward()
        seen["messages"].append(_sent(messages))
        seen["losses"].append([float(handle.total)])
        _keep(seen, dict(model.module.named_parameters()), step)
    seen["state"] = tx.to_state_dict(handle.state_dict())


def registered(names: list[str]) -> list[dict[str, Any]]:
    """In a module's backward passes, over gloo."""
    out: list[dict[str, Any]] = []
    for name in names:
        out.append({})
        for weights in WEIGHTS:
            out[-1][weights] = _tried(lambda seen: _register(seen, ROWS[name], weights, dist.get_rank()))  # noqa: B023
            if out[-1][weights]["error"]:
                break
    return out


def on_ranks(pool: Any, names: list[str], path: str) -> dict[str, Records]:
    """Some rows of the same axes, on one path."""
    if path == "pure":
        return {name: pure(name) for name in names}
    ranks = pool.run(_size(ROWS[names[0]]), registered if path == "registered" else trained, names)
    return {name: {case: [rank[i][case] for rank in ranks] for case in ranks[0][i]} for i, name in enumerate(names)}


def loss_is_linear() -> bool:
    """Whether the loss has the gradients that it is given."""
    grads = gradients(next(iter(ROWS.values())), 0, 0)
    params = {path: p.requires_grad_() for path, p in start(torch.float64).items()}
    loss_of(params, grads).backward()
    return all(torch.equal(p.grad, grads[path].double()) for path, p in params.items() if p.grad is not None)
