"""torch's communication hooks, by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType

from ..groups import Communicator, mesh_over, world_size
from ..transforms.axes import names
from ..transforms.base import AxisName, Over, Transform, checks, shares
from ..transforms.codecs import uint8
from ..transforms.combinators import identity, switch_after
from ..transforms.reductions import batched_power_sgd, compress, error_feedback, mean, power_sgd


@dataclass(frozen=True)
class PostLocalSGDState:
    """The settings of `post_localSGD_hook` under torch's names, and the mesh of their process groups.

    Args:
        process_group: All ranks; by default those of the default process group.
        subgroup: This rank's subgroup, of consecutive ranks of `process_group`; by default the ranks of this host,
            whose number torchrun sets in LOCAL_WORLD_SIZE.
        start_localSGD_iter: The number of passes with the mean over all ranks.
        post_local_gradient_allreduce: Whether gradients are averaged over the subgroup afterwards.

    Raises:
        ValueError: `start_localSGD_iter` is no whole number, or negative.
        TypeError: another argument is none of these.

    Same as: torch's PostLocalSGDState. It counts no passes: `handle.step` does.

    >>> state = fjoin.ddp.PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=100)
    >>> fjoin.ddp.post_localSGD_hook(state)  # fjoin.ddp.register(model, post_localSGD_hook(state), state.mesh())
    switch_after(100, mean(('node', 'local'), over='world'), mean('local', over='world'))
    """

    process_group: Any
    subgroup: Any
    start_localSGD_iter: int
    post_local_gradient_allreduce: bool = True

    def __post_init__(self) -> None:
        checks.whole_number("start_localSGD_iter", self.start_localSGD_iter, 0)
        checks.flag("post_local_gradient_allreduce", self.post_local_gradient_allreduce)
        for name, group in (("process_group", self.process_group), ("subgroup", self.subgroup)):
            if group is not None and not isinstance(group, dist.ProcessGroup):
                raise TypeError(f"{name} must be a process group of torch.distributed, or None, got {group!r}")

    def mesh(self) -> Communicator:
        """The ranks of `process_group` in the axes "node" and "local", for `fjoin.ddp.register`.

        All ranks of `process_group` must call it.

        Raises:
            ValueError: the subgroups are not of consecutive ranks and of one size; `subgroup` is None, and
                LOCAL_WORLD_SIZE is not set.
        """
        ranks = world_size() if self.process_group is None else self.process_group.size()
        local = self._local(ranks)
        if ranks % local:
            raise ValueError(f"subgroups of {local} ranks do not divide the {ranks} ranks of process_group")
        return mesh_over(self.process_group, {"node": ranks // local, "local": local})

    def _local(self, ranks: int) -> int:
        """The number of ranks in a subgroup."""
        if self.subgroup is None:
            known = os.environ.get("LOCAL_WORLD_SIZE", "1" if ranks == 1 else "")
            if not known.isdecimal() or int(known) == 0:
                raise ValueError(
                    f"subgroup is None, which stands for the ranks of a host, but LOCAL_WORLD_SIZE is {known!r}; start the "
                    f"program with torchrun, or pass the subgroup: torch.distributed.new_subgroups(group_size=ranks of a host)[0]"
                )
            return int(known)
        of_all = dist.get_process_group_ranks(dist.group.WORLD if self.process_group is None else self.process_group)
        members = dist.get_process_group_ranks(self.subgroup)
        here = of_all.index(dist.get_rank()) // len(members) * len(members)
        if of_all[here : here + len(members)] != members:
            raise ValueError(
                f"subgroup must be one of equal groups of consecutive ranks of {of_all}, got {members}; use "
                f"torch.distributed.new_subgroups, or pass fjoin.ddp.register a fjoin.mesh"
            )
        return len(members)


def allreduce_hook(*, axis: AxisName = "data", over: Over = "world") -> Transform:
    """The mean over all ranks, which count alike.

    Args:
        axis: The axis, or a tuple of axes, to average over.
        over: The divisor, see `tx.mean`; with "weight" each rank counts by its `handle.weight(w)`.

    Returns:
        A `Transform`, for `fjoin.ddp.register`, `tx.fuse`, `tx.chain` and so on, as for all hooks here.

    Raises:
        ValueError: `over` is none of the three.

    Same as: torch's allreduce_hook, DDPCommHookType.ALLREDUCE.

    >>> fjoin.ddp.allreduce_hook()
    mean('data', over='world')
    """
    return mean(axis, over)


def fp16_compress_hook(*, axis: AxisName = "data", over: Over = "world") -> Transform:
    """The mean in float16, with sums in float32; a power of two that is sent along scales all values to fit.

    Args, Raises: as `allreduce_hook`.

    Same as: torch's fp16_compress_hook, DDPCommHookType.FP16_COMPRESS, which makes infinity of 1e5.

    >>> fjoin.ddp.fp16_compress_hook()
    compress(torch.float16, mean('data', over='world'))
    """
    return compress(torch.float16, mean(axis, over))


def bf16_compress_hook(*, axis: AxisName = "data", over: Over = "world") -> Transform:
    """The mean in bfloat16, on any backend; sums are taken in float32.

    Args, Raises: as `allreduce_hook`.

    Same as: torch's bf16_compress_hook, DDPCommHookType.BF16_COMPRESS, which needs NCCL.

    >>> fjoin.ddp.bf16_compress_hook()
    compress(torch.bfloat16, mean('data', over='world'))
    """
    return compress(torch.bfloat16, mean(axis, over))


def quantization_pertensor_hook(*, axis: AxisName = "data", over: Over = "world") -> Transform:
    """The mean in bytes, with one scale for each rank's message to another rank about a bucket.

    Args, Raises: as `allreduce_hook`.

    Same as: torch's quantization_pertensor_hook, DDPCommHookType.QUANTIZE_PER_TENSOR, which needs NCCL and sends ranks
        / 2 times the bytes. On two ranks the numbers are the same; on more each rank quantizes its part of the mean
        once more.

    >>> fjoin.ddp.quantization_pertensor_hook()
    compress(uint8(), mean('data', over='world'))
    """
    return compress(uint8(), mean(axis, over))


def quantization_perchannel_hook(bucket_size: int = 512, *, axis: AxisName = "data", over: Over = "world") -> Transform:
    """The mean in bytes, with one scale for every `bucket_size` elements.

    Args:
        bucket_size: Elements that share a scale, at least 1.
        axis, over: as `allreduce_hook`.

    Raises:
        ValueError: `bucket_size` is no whole number above 0, or `over` none of the three.

    Same as: torch's quantization_perchannel_hook, DDPCommHookType.QUANTIZE_PER_CHANNEL, as
    `quantization_pertensor_hook`.

    >>> fjoin.ddp.quantization_perchannel_hook()
    compress(uint8(block=512), mean('data', over='world'))
    """
    return compress(uint8(checks.whole_number("bucket_size", bucket_size, 1)), mean(axis, over))


def noop_hook() -> Transform:
    """Send nothing: every rank keeps its own gradients.

    Same as: torch's noop_hook, DDPCommHookType.NOOP.

    >>> fjoin.ddp.noop_hook()
    identity()
    """
    return identity()


def post_localSGD_hook(
    start_localSGD_iter: int | PostLocalSGDState,
    post_local_gradient_allreduce: bool = True,
    *,
    axis: AxisName = ("node", "local"),
    subgroup: AxisName = "local",
    over: Over = "world",
) -> Transform:
    """The mean over all ranks at first, then over a subgroup, or over no ranks.

    Pass it to `fjoin.ddp.register` with a mesh that has the axes, `fjoin.mesh({"node": -1, "local": ranks of a node})`.
    From then on other code must average the parameters.

    Args:
        start_localSGD_iter: The number of passes with the mean over all ranks; or a `PostLocalSGDState`, whose settings
            are used.
        post_local_gradient_allreduce: Whether gradients are averaged over the subgroup afterwards; otherwise they are
            left unchanged.
        axis: The axes of all ranks.
        subgroup: The axes, out of `axis`, of a rank's subgroup.
        over: As `allreduce_hook`.

    Raises:
        ValueError: `start_localSGD_iter` is no whole number, or negative; `subgroup` is not among the axes.

    Same as: torch's post_localSGD_hook with PostLocalSGDState.

    >>> fjoin.ddp.post_localSGD_hook(1000)
    switch_after(1000, mean(('node', 'local'), over='world'), mean('local', over='world'))
    """
    if not set(names(subgroup)) <= set(names(axis)):
        raise ValueError(f"the subgroup {subgroup!r} must be among the axes of all ranks, {axis!r}")
    if isinstance(start_localSGD_iter, PostLocalSGDState):
        post_local_gradient_allreduce = start_localSGD_iter.post_local_gradient_allreduce
        start_localSGD_iter = start_localSGD_iter.start_localSGD_iter
    later = mean(subgroup, over) if post_local_gradient_allreduce else identity()
    return switch_after(start_localSGD_iter, mean(axis, over), later)


def powerSGD_hook(
    matrix_approximation_rank: int = 1,
    start_powerSGD_iter: int = 1_000,
    min_compression_rate: float = 2.0,
    use_error_feedback: bool = True,
    warm_start: bool = True,
    orthogonalization_epsilon: float = 0.0,
    random_seed: int = 0,
    *,
    axis: AxisName = "data",
    over: Over = "world",
) -> Transform:
    """The mean with matrices sent as two thin factors, after an initial number of passes; see `tx.power_sgd`.

    Args:
        matrix_approximation_rank: Columns of the factors, at least 1.
        start_powerSGD_iter: The number of initial passes with a plain mean; 0 is allowed, since no state is kept by
            bucket.
        min_compression_rate: A matrix is compressed where (rows + columns) * rank * this < rows * columns.
        use_error_feedback: Whether each rank keeps the residual of its compression for the next passes.
        warm_start: Whether to start from the last pass's factors; otherwise from random ones.
        orthogonalization_epsilon: Added to norms that divide; norms of 0 are safe without it.
        random_seed: The seed of the random factors.
        axis, over: as `allreduce_hook`.

    Raises:
        ValueError, TypeError: an argument is none of these.

    Same as: torch's powerSGD_hook with PowerSGDState, DDPCommHookType.POWER_SGD and, with rank 2, POWER_SGD_RANK2. It
        has no compression_stats_logging_frequency: `handle.explain()` shows them; nor batch_tensors_with_same_shape,
        which it decides.

    >>> fjoin.ddp.powerSGD_hook(2, use_error_feedback=False, start_powerSGD_iter=10)
    switch_after(10, mean('data', over='world'), power_sgd('data', rank=2, over='world'))
    """
    rank, start, epsilon = matrix_approximation_rank, start_powerSGD_iter, orthogonalization_epsilon
    settings = dict(min_compression_rate=min_compression_rate, warm_start=warm_start, epsilon=epsilon, seed=random_seed)
    return _low_rank(power_sgd, axis, rank, start, use_error_feedback, over=over, **settings)


def batched_powerSGD_hook(
    matrix_approximation_rank: int = 1,
    start_powerSGD_iter: int = 1_000,
    min_compression_rate: float = 2.0,
    use_error_feedback: bool = True,
    warm_start: bool = True,
    orthogonalization_epsilon: float = 0.0,
    random_seed: int = 0,
    *,
    axis: AxisName = "data",
    over: Over = "world",
) -> Transform:
    """`powerSGD_hook` on one square matrix that holds a whole bucket; see `tx.batched_power_sgd`.

    Args, Raises: as `powerSGD_hook`.

    Same as: torch's batched_powerSGD_hook, DDPCommHookType.BATCHED_POWER_SGD and, with rank 2, BATCHED_POWER_SGD_RANK2,
        which raises in the first pass that it is to compress.

    >>> fjoin.ddp.batched_powerSGD_hook(use_error_feedback=False, start_powerSGD_iter=0)
    batched_power_sgd('data', over='world')
    """
    rank, start, epsilon = matrix_approximation_rank, start_powerSGD_iter, orthogonalization_epsilon
    settings = dict(min_compression_rate=min_compression_rate, warm_start=warm_start, epsilon=epsilon, seed=random_seed)
    return _low_rank(batched_power_sgd, axis, rank, start, use_error_feedback, over=over, **settings)


def _low_rank(
    make: Callable[..., Transform], axis: AxisName, rank: int, start: int, feeds_back: bool, **settings: Any
) -> Transform:
    checks.whole_number("matrix_approximation_rank", rank, 1)
    checks.whole_number("start_powerSGD_iter", start, 0)
    hook = make(axis, rank, warmup_steps=start, **settings)
    return error_feedback(hook) if checks.flag("use_error_feedback", feeds_back) else hook


_OF_TYPE: dict[str, Callable[..., Transform]] = {
    "ALLREDUCE": allreduce_hook,
    "FP16_COMPRESS": fp16_compress_hook,
    "BF16_COMPRESS": bf16_compress_hook,
    "QUANTIZE_PER_TENSOR": quantization_pertensor_hook,
    "QUANTIZE_PER_CHANNEL": quantization_perchannel_hook,
    "POWER_SGD": powerSGD_hook,
    "POWER_SGD_RANK2": partial(powerSGD_hook, 2),
    "BATCHED_POWER_SGD": batched_powerSGD_hook,
    "BATCHED_POWER_SGD_RANK2": partial(batched_powerSGD_hook, 2),
    "NOOP": lambda axis, over: noop_hook(),
}


def comm_hook(comm_hook_type: DDPCommHookType | str, axis: AxisName = "data", over: Over = "world") -> Transform:
    """The transform equivalent to one of torch's `DDPCommHookType`, with torch's settings.

    Args:
        comm_hook_type: A member of torch's DDPCommHookType, its name, or torch's BuiltinCommHookType.
        axis: The axis, or a tuple of axes, to average over.
        over: The divisor, see `tx.mean`: by default all ranks count alike, as in torch.

    Returns:
        A `Transform`, for `fjoin.ddp.register`, `tx.fuse`, `tx.chain` and so on.

    Raises:
        TypeError: no such type.
        ValueError: `over` is none of the three.

    >>> fjoin.ddp.comm_hook("QUANTIZE_PER_CHANNEL", over="weight")
    compress(uint8(block=512), mean('data'))
    """
    shares.check_over(over)
    given: Any = comm_hook_type
    name = given.name if isinstance(given, (DDPCommHookType, BuiltinCommHookType)) else given
    if not isinstance(name, str) or name not in _OF_TYPE:
        raise TypeError(
            f"comm_hook takes a member of DDPCommHookType or its name, one of {', '.join(_OF_TYPE)}, got {comm_hook_type!r}"
        )
    return _OF_TYPE[name](axis=axis, over=over)
