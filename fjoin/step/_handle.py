"""What the handles of registered modules share, and what guards the parameters that they step."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from ..transforms.pipelines import Explanation, Pipeline


class ModuleHandle:
    """A hook or a pipeline in a registered module.

    Attributes:
        skipped: The number of steps left out by `skip_if_nonfinite` or `dynamic_loss_scale`.
        total: The sum of the ranks' weights in the last step, or the number of ranks with a weight above 0 where the
            mean counts ranks; NaN where the hook does not reduce.
    """

    def __init__(self, run: Any) -> None:
        self.run: Any = run  # a `DDPRun`, or a `ShardedRun`

    @property
    def skipped(self) -> int:
        return int(getattr(self.run.state, "skipped", 0))

    @property
    def total(self) -> float:
        return float(self.run.last_total)

    @property
    def pipeline(self) -> Any:
        """The state in the form of `pipeline.init` and `pipeline.step`, keyed by path; of a hook alone, the hook's."""
        return self.run.state

    def flush(self) -> None:
        """Average what the ranks have trained since the last average; for the end of training, on all ranks.

        Same as: `TrainStep.flush`, for the module's own parameters.

        Raises:
            TypeError: only a hook is registered, no pipeline.
            NonFinite: on all ranks: some of them left out one of the last two steps.
            DesyncError: on all ranks: others have begun a pass, or flush after another step.
        """
        if not isinstance(self.run.what, Pipeline):
            raise TypeError("only a pipeline has parameters to average; a hook alone is registered")
        self.run.flush()

    def with_hyperparameters(self, **values: float) -> None:
        """Change hyperparameters between steps, on all ranks alike, for an optimizer that is wrapped in
        `inject_hyperparameters`.

        They are part of the state, and are saved with it.

        Args:
            values: Name -> value, as for `tx.with_hyperparameters`.

        Raises:
            ValueError: no optimizer has a hyperparameter of this name, or a value is not finite.
            TypeError: a value that is no number.
            DesyncError: in the next step, on all ranks: their values differ.
        """
        self.run.change(values)

    def explain(self, at_step: int = 0) -> Explanation:
        """The messages of a step, as by `fjoin.transforms.explain`; also before any step.

        In a DistributedDataParallel the buckets are those of the last pass; before the first pass, those of the first.
        From the second pass on the module uses other buckets, cut in the order in which gradients arrive. The messages
        of fully_shard itself are not among them.

        Args:
            at_step: The number of the step, counted from 0; see `fjoin.transforms.explain`.
        """
        return self.run.explain(at_step)

    def __repr__(self) -> str:
        run = self.run
        steps = "stepped" if isinstance(run.what, Pipeline) else "a hook alone"
        ranks = " x ".join(f"{name}={size}" for name, size in run.mesh.shape.items())
        return f"{type(self).__name__}({run.what!r}, {len(run.leaves)} parameters, {steps}, ranks: {ranks}, step={run.steps})"


# Parameter -> (its path, by what it is stepped, whether another step is an error), of all registered modules.
_STEPPED: Any = WeakIdKeyDictionary()
_SEEN: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
_watch: Any = None


def guard_steps(params: Mapping[str, Tensor], by: str, refuses: bool = False) -> None:
    """Guard parameters that a registered pipeline steps from an optimizer of torch's that steps them again.

    Args:
        params: Path -> parameter.
        by: What steps them, and what to do, in words.
        refuses: Whether it is an error; else a warning.
    """
    global _watch
    for path, p in params.items():
        _STEPPED[p] = path, by, refuses
    _watch = _watch or register_optimizer_step_pre_hook(_meets_optimizer)


def free_steps(params: Iterable[Tensor]) -> None:
    """End the guard of parameters."""
    for p in params:
        _STEPPED.pop(p, None)


def _meets_optimizer(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if _SEEN.get(optimizer) == len(_STEPPED):
        return
    found = [_STEPPED[p] for group in optimizer.param_groups for p in group["params"] if p in _STEPPED]
    for path, by, refuses in found[:1]:
        text = f"this {type(optimizer).__name__} steps {path!r}, which {by}"
        if refuses:
            raise RuntimeError(text)
        warnings.warn(text, stacklevel=3)
    _SEEN[optimizer] = len(_STEPPED)


def after_backward(function: Callable[[], None]) -> None:
    """Call a function once the module has finished its pass, or now outside of a pass."""
    if torch._C._current_graph_task_id() < 0:
        function()
        return
    engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
    engine.queue_callback(lambda: engine.queue_callback(function))  # after the module's own callback, not yet queued


def raise_after_backward(error: Exception) -> None:
    """Raise an error after the module has finished its pass; the module would be unusable if its hook raised."""

    def last() -> None:
        raise error

    after_backward(last)
