"""torch's communication hooks as transforms, with torch's names and defaults."""

from __future__ import annotations

import torch

from ...transforms._check import AxisName, whole_number
from ...transforms.axes._primitive import names
from ...transforms.codecs._blocks import uint8
from ...transforms.combinators._conditional import switch_after
from ...transforms.reductions._compress import cast, quantized_mean
from ...transforms.reductions._mean import mean, noop
from ...transforms.transform._transform import Transform
from ...transforms.transform._weights import Over
from ._post_local_sgd_state import PostLocalSGDState


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
    cast(torch.float16, mean('data', over='world'))
    """
    return cast(torch.float16, mean(axis, over))


def bf16_compress_hook(*, axis: AxisName = "data", over: Over = "world") -> Transform:
    """The mean in bfloat16, on any backend; sums are taken in float32.

    Args, Raises: as `allreduce_hook`.

    Same as: torch's bf16_compress_hook, DDPCommHookType.BF16_COMPRESS, which needs NCCL.

    >>> fjoin.ddp.bf16_compress_hook()
    cast(torch.bfloat16, mean('data', over='world'))
    """
    return cast(torch.bfloat16, mean(axis, over))


def quantization_pertensor_hook(*, axis: AxisName = "data", over: Over = "world") -> Transform:
    """The mean in bytes, with one scale for each rank's message to another rank about a bucket.

    Args, Raises: as `allreduce_hook`.

    Same as: torch's quantization_pertensor_hook, DDPCommHookType.QUANTIZE_PER_TENSOR, which needs NCCL and sends ranks / 2 times
        the bytes. On two ranks the numbers are the same; on more each rank quantizes its part of the mean once more.

    >>> fjoin.ddp.quantization_pertensor_hook()
    compress(uint8(), mean('data', over='world'))
    """
    return quantized_mean(axis, uint8(), over)


def quantization_perchannel_hook(bucket_size: int = 512, *, axis: AxisName = "data", over: Over = "world") -> Transform:
    """The mean in bytes, with one scale for every `bucket_size` elements.

    Args:
        bucket_size: Elements that share a scale, at least 1.
        axis, over: as `allreduce_hook`.

    Raises:
        ValueError: `bucket_size` is no whole number above 0, or `over` none of the three.

    Same as: torch's quantization_perchannel_hook, DDPCommHookType.QUANTIZE_PER_CHANNEL, as `quantization_pertensor_hook`.

    >>> fjoin.ddp.quantization_perchannel_hook()
    compress(uint8(block=512), mean('data', over='world'))
    """
    return quantized_mean(axis, uint8(whole_number("bucket_size", bucket_size, 1)), over)


def noop_hook() -> Transform:
    """Send nothing: every rank keeps its own gradients.

    Same as: torch's noop_hook, DDPCommHookType.NOOP.

    >>> fjoin.ddp.noop_hook()
    noop()
    """
    return noop()


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
    later = mean(subgroup, over) if post_local_gradient_allreduce else noop()
    return switch_after(start_localSGD_iter, mean(axis, over), later)
