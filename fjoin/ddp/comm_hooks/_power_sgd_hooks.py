"""torch's PowerSGD communication hooks as transforms, with torch's names and defaults."""

from __future__ import annotations

from collections.abc import Callable

from ...transforms._check import AxisName, flag, whole_number
from ...transforms.feedback._error_feedback import error_feedback
from ...transforms.power_sgd._power_sgd import batched_power_sgd, power_sgd
from ...transforms.transform._transform import Transform
from ...transforms.transform._weights import Over


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

    Same as: torch's powerSGD_hook with PowerSGDState, DDPCommHookType.POWER_SGD and, with rank 2, POWER_SGD_RANK2. It has no
        compression_stats_logging_frequency: `handle.explain()` shows them; nor batch_tensors_with_same_shape, which it
        decides.

    >>> fjoin.ddp.powerSGD_hook(2, use_error_feedback=False, start_powerSGD_iter=10)
    switch_after(10, mean('data', over='world'), power_sgd('data', rank=2, over='world'))
    """
    return _low_rank(
        power_sgd,
        matrix_approximation_rank,
        start_powerSGD_iter,
        min_compression_rate,
        use_error_feedback,
        warm_start,
        orthogonalization_epsilon,
        random_seed,
        axis,
        over,
    )


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

    Same as: torch's batched_powerSGD_hook, DDPCommHookType.BATCHED_POWER_SGD and, with rank 2, BATCHED_POWER_SGD_RANK2, which raises
        in the first pass that it is to compress.

    >>> fjoin.ddp.batched_powerSGD_hook(use_error_feedback=False, start_powerSGD_iter=0)
    batched_power_sgd('data', over='world')
    """
    return _low_rank(
        batched_power_sgd,
        matrix_approximation_rank,
        start_powerSGD_iter,
        min_compression_rate,
        use_error_feedback,
        warm_start,
        orthogonalization_epsilon,
        random_seed,
        axis,
        over,
    )


def _low_rank(
    make: Callable[..., Transform],
    rank: int,
    start: int,
    rate: float,
    feeds_back: bool,
    warm: bool,
    epsilon: float,
    seed: int,
    axis: AxisName,
    over: Over,
) -> Transform:
    whole_number("matrix_approximation_rank", rank, 1)
    whole_number("start_powerSGD_iter", start, 0)
    hook = make(
        axis, rank, start=start, min_compression_rate=rate, warm_start=warm, epsilon=epsilon, seed=seed, over=over
    )
    return error_feedback(hook) if flag("use_error_feedback", feeds_back) else hook
