"""The handle of a registered hook or pipeline."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..transforms.layout._pieces import Pieces
from ..transforms.pipelines._pipeline import Pipeline
from ..transforms.pipelines._tree_memory import PipelineState
from ..transforms.pipelines.explain._explanation import Explanation
from ..transforms.transform._transform import Transform
from ..transforms.transform._weights import host_weight
from ..transforms.tree._state_dict import restored, to_state_dict
from ._hook import DDPRun


class Handle:
    """A registered hook; made by `fjoin.ddp.register`.

    Attributes:
        step: The number of synchronised backward passes so far.
        skipped: The number of steps left out by `skip_if_nonfinite` or `dynamic_loss_scale`.
        total: The sum of the ranks' weights in the last synchronised pass, or the number of ranks with a weight above 0
            where the mean counts ranks; NaN where the hook does not reduce.
    """

    def __init__(self, run: DDPRun) -> None:
        self._run = run

    def weight(self, weight: float) -> None:
        """Set this rank's weight in the mean for the next synchronised backward pass; 1 where it is not set.

        It is a number of the host: for a tensor on a device the host waits.

        Raises:
            ValueError: a weight that is neither 0 nor from 1e-30 to 1e30.
            TypeError: no number.
        """
        self._run.pending = host_weight("weight", weight)

    @property
    def step(self) -> int:
        return self._run.step

    @property
    def skipped(self) -> int:
        own = self._run.pipeline_step
        return 0 if own is None or own.outer is None else int(own.outer.skipped)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times its scale, to call backward on; for a pipeline in `dynamic_loss_scale`.

        Raises:
            TypeError: the pipeline scales no losses.
        """
        own = self._run.pipeline_step
        if own is None or own.scaling is None:
            raise TypeError("only a pipeline in dynamic_loss_scale(...) scales losses; call loss.backward()")
        return own.scaling(loss, own.outer.scale)

    @property
    def total(self) -> float:
        return self._run.total.read()

    def flush(self) -> None:
        """Average what the ranks have trained since the last average; for the end of training, on all ranks.

        Same as: `TrainStep.flush`, for the module's own parameters.

        Raises:
            TypeError: only a hook is registered, no pipeline.
            NonFinite: on all ranks: some of them left out one of the last two steps.
            DesyncError: on all ranks: others have begun a pass, or flush after another step.
        """
        if self._run.pipeline_step is None:
            raise TypeError("only a pipeline has parameters to average; a hook alone is registered")
        self._run.flush()

    def explain(self, at_step: int = 0) -> Explanation:
        """The messages of a synchronised backward pass, as by `fjoin.transforms.explain`; also before any pass.

        The buckets are those of the last pass; before the first pass, those of the first. From the second pass on the
        module uses other buckets, cut in the order in which gradients arrive.

        Args:
            at_step: The number of the pass, counted from 0; see `fjoin.transforms.explain`.
        """
        return self._run.explain(at_step)

    @property
    def what(self) -> Pipeline | Transform:
        """The pipeline, or the hook where only that is registered."""
        return self._run.what

    @property
    def axes(self) -> dict[str, int]:
        """Axis name -> number of ranks."""
        return dict(self._run.mesh.shape)

    @property
    def pieces(self) -> Pieces | None:
        """The pieces that ranks own, of a pipeline that shards."""
        return self._run.pieces

    @property
    def pipeline(self) -> Any:
        """The state in the form of `pipeline.init` and `pipeline.step`, keyed by path, in views; of a hook alone, the hook's."""
        run, parts = self._run, self._run.stages.parts
        hook = run.hook_state if len(parts) > 1 else run.hook_state[0] if parts else ()
        own = run.pipeline_step
        if own is None:
            return hook
        window = torch.zeros((), dtype=torch.float64)
        state = PipelineState(hook, dict(own.stepper.states), *own.ends, run.step, window, own.gather_state)
        return state if own.outer is None else own.outer._replace(inner=state)

    @property
    def checksum(self) -> int:
        """A number of the parameters that go with the state; 0 where all ranks have equal ones after each step."""
        own = self._run.pipeline_step
        return 0 if own is None else own.checksum()

    def state_dict(self) -> dict[str, Any]:
        """The state of the hook and of the optimizer: tensors and numbers, by parameter path, never by bucket."""
        return self.dict_of(self.pipeline, self._run.step, self._run.total.read(), self.checksum)

    def dict_of(self, state: Any, step: int, total: float, parameters: int) -> dict[str, Any]:
        """What `load_state_dict` takes, of a state in the form of `pipeline`.

        Args:
            step, total, parameters: As in `state_dict`.
        """
        own, parts = self._run.pipeline_step, self._run.stages.parts
        inner = state if own is None or own.outer is None else state.inner
        hook = inner if own is None else inner.hook
        stages = hook if len(parts) > 1 else (hook,) if parts else ()
        found: dict[str, Any] = {"step": step, "total": total, "hook": to_state_dict(stages)}
        if own is None:
            return found
        return found | {
            "outer": to_state_dict(None if own.outer is None else state._replace(inner=own.outer.inner)),
            "after": to_state_dict(inner.after),
            "on_state": to_state_dict(inner.on_state),
            "gather": to_state_dict(inner.gather),
            "optimizer": {path: to_state_dict(one) for path, one in inner.optimizer.items()},
            "parameters": parameters,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state made by `state_dict`, for the same pipeline and parameters. All ranks must load the same step.

        Between averages each rank has weights and a state of its own. Its weights are loaded after the module is made,
        since DistributedDataParallel(...) sends rank 0's to all ranks:

            model = DistributedDataParallel(inner)
            inner.load_state_dict(own_weights)
            handle = register(model, pipeline)
            handle.load_state_dict(own_state)

        Raises:
            ValueError: the state of another pipeline, or of other parameters.
            DesyncError: in the next backward pass, on all ranks: they have loaded different steps, or a rank has other
                weights than those with which its state was saved.
        """
        run = self._run
        if (expected := self.state_dict().keys()) != state_dict.keys():
            raise ValueError(
                f"a state_dict() of this hook has {sorted(expected)}, got {sorted(state_dict)}; a pipeline and a hook alone have "
                f"different states"
            )
        hook_state = restored("the state of the hook", run.hook_state, state_dict["hook"])
        if run.pipeline_step is not None:
            run.pipeline_step.load_state_dict(state_dict)
        run.agreements.forget()
        run.hook_state, run.step, run.loaded = hook_state, state_dict["step"], True
        run.total.take(torch.tensor(state_dict["total"], dtype=torch.float64))
