"""The initial state of training."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..agreement._program_check import check_program, same_values
from ..buckets._flat_params import Storage
from ..transforms._axis_env import bind_axes
from ..transforms.layout._buckets import Bucket, bucket_sizes, make_layout
from ..transforms.layout._pieces import labels
from ..transforms.plan._plan import warn_if_silent
from ._run import Run
from .state._ends import init_ends
from .state._params import check_values, flatten
from .state._state_data import StateData


def make_state_data(
    run: Run, params: Any, buffers: dict[str, Tensor] | None, sync: str | None, bucket_bytes: int | None
) -> StateData:
    """Check that all ranks run the same program, and make the data of a state at step 0; see `TrainStep.init`."""
    flat, rebuild = flatten(params)
    pipeline, mesh = run.pipeline, run.mesh
    if sync is not None:
        check_values(flat)
    pipeline.check(flat)

    pieces = None
    if pipeline.sharding is not None:
        with bind_axes(mesh.axes):
            pieces = pipeline.sharding.pieces(flat, bucket_bytes)
    layout = pieces.buckets if pieces else make_layout(flat, labels(pipeline.optimizer), bucket_bytes)
    run.agreements.ids.number()
    check_program(
        mesh,
        pipeline,
        run.on_buffers,
        flat,
        bucket_sizes(flat.values(), bucket_bytes)[0],
        run.accumulate,
        run.weighs,
        buffers,
        sync,
    )
    run.passes.check(buffers is not None)
    if run.ranks > 1 and mesh.rank == 0:
        warn_if_silent(pipeline, (pipeline.hook, *pipeline.ends), tuple(mesh.shape), run.ranks, stacklevel=4)

    def memory(bucket: Bucket) -> Tensor | None:  # pieces are gathered without a copy
        return mesh.zeros(bucket.numel, bucket.dtype, bucket.device, (pieces.axis,)) if pieces else None

    storage = Storage(layout, flat, pipeline.optimizer, pieces, memory)
    own = None if buffers is None else {path: b.detach().clone() for path, b in buffers.items()}
    if sync == "broadcast":
        for tensor in [*storage.flats, *(own or {}).values()]:
            for axis in mesh.over(run.axes):
                if axis.size > 1:
                    tensor.copy_(axis.run("pbroadcast", tensor, 0))
    elif sync == "check":
        same_values(mesh, storage.leaves, own)
    # After `sync`, from the final parameters.
    storage.make_slots(exact=pipeline.sharding is not None and pipeline.sharding.codec is not None)
    held = storage.own_leaves()
    hook = run.hook.init(storage)
    slots = storage.optimizer_states() if pipeline.ends else {}
    ends = init_ends(pipeline, held, slots, storage.flats)
    run.close()
    run.token = object()  # states of an earlier init may have another layout
    outer = pipeline.skips.begin(()) if pipeline.skips else None
    body = StateData(storage, own, hook, ends, rebuild, owner=run.token, outer=outer)
    body.buffers_before = own
    if own is not None and run.on_buffers is not None:
        body.buffers_state = run.on_buffers.init(own)
    return body
