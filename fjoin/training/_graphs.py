"""Steps as graphs of a device: the kernels of a step are captured once, and later steps launch all of them by one call.

Only kernels are repeated. What Python computes in a step is not computed again, so each number of the host that a kernel
gets, the rank's weight among them, lies in one small tensor on the device, into which every step writes its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import optree
import torch
from torch import Tensor

from .._errors import CaptureError, FjoinError
from ..agreement._step_check import CountsOfAll
from ..buckets._flat_params import Storage
from ..groups._mesh import Mesh
from ..transforms import _devices
from ._flat_memory import tears
from .passes._forms import form_of, inputs_like, numbers_in
from .passes._iteration import Iteration
from .state._held_states import HeldStates, copy_of, tensors_in
from .state._state_data import StateData

if TYPE_CHECKING:
    from ._run import Run

# Steps without a graph for each form of a batch: kernels are loaded, and libraries allocate their memory.
_WARM_UP = 3
_MOST_FORMS = 64  # of batches; each has a graph with memory of its own


class Numbers(NamedTuple):
    """The numbers of the host that the kernels of a step get: floats, or 0-d float64 tensors on the device."""

    weight: Any  # of this rank's batch
    step_id: Any  # see `StepIds`
    has_next: Any  # see `Requests.write`
    call: Any  # see `current_call`


class Done(NamedTuple):
    """What the kernels of a step have made, besides the state."""

    aux: Any
    of_all: Callable[[], dict[str, Any]]  # waits for the record of all ranks that loop together
    measured: dict[str, Any]


class StepGraphs:
    """The graphs of one `Run`: one for each form of a batch, once it has come a few times.

    Args:
        refused: Arguments of the train_step, in words, that do not go with graphs.

    Raises:
        ValueError: there are any.
    """

    def __init__(self, mesh: Mesh, refused: Sequence[str] = ()) -> None:
        if refused:
            raise ValueError(f"capture=True cannot be combined with {' or '.join(refused)}; leave one of them out")
        self._mesh: Mesh = mesh
        self._stream: Any = None
        self._graphs: dict[Any, _Graph] = {}
        self.clear()
        mesh.use.graphs.add(self)

    def clear(self) -> None:
        """Free all graphs. A group of NCCL does not end before they are freed."""
        graphs, self._graphs = self._graphs, {}  # a mesh that is taken down frees them from another thread
        for one in graphs.values():
            one.graph.reset()  # not only where the last reference goes: that would hold Python's lock
        self._seen: dict[Any, tuple[int, Any]] = {}  # form -> the number of its steps so far, and the first aux
        self._states: HeldStates | None = None
        self._numbers: Tensor | None = None
        self._pool: Any = None

    def check(self, run: Run, storage: Storage) -> None:
        """Raise ValueError, which names the reason, where steps of this run cannot be captured."""
        devices, plan = {bucket.device for bucket in storage.layout}, run.agreements.plan
        for refused, reason in (
            (len(devices) != 1, f"the parameters lie on {len(devices)} devices"),
            (
                not all(map(_devices.is_accelerator, devices)),
                f"the parameters lie on the {next(iter(devices), 'cpu')}, and graphs are of accelerators",
            ),
            (any(axis.simulated for axis in run.mesh.axes.values()), "the ranks are simulated"),
            (plan.always is None, f"the messages of {plan.hook!r} change with the steps"),
            (plan.reduced(0).axes != plan.agree, f"{plan.hook!r} does not reduce over all ranks that loop together"),
            (storage.float16, "sums of float16 gradients are scaled by the weights of the step before, on the host"),
        ):
            if refused:
                raise ValueError(f"capture=True: {reason}; leave it out")
        if run.mesh.against_graphs:
            raise ValueError(f"capture=True: {run.mesh.against_graphs}, or leave it out")

    def step(self, run: Run, body: StateData, batch: Any, given: Numbers, iteration: Iteration | None) -> Done:
        """Run the kernels of a step, by a graph where there is one. A rank without input needs none."""
        device = body.storage.layout[0].device
        if self._states is None or not self._states.belong_to(body):
            self.clear()
            self._states = HeldStates(body, run.pipeline)
        caller, self._stream = _devices.current_stream(device), self._stream or _devices.new_stream(device)
        self._stream.wait_stream(caller)
        with self._stream:
            out = self._step(self._states, run, body, batch, given, iteration)
        caller.wait_stream(self._stream)
        return out

    def _step(
        self, states: HeldStates, run: Run, body: StateData, batch: Any, given: Numbers, iteration: Iteration | None
    ) -> Done:
        if not given.weight:
            return states.watched(body, lambda: run.kernels(body, batch, given, iteration))
        device = body.storage.layout[0].device
        autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
        tensors, form = form_of(batch, device)
        form = (form, None if iteration is None else iteration.replays, autocast, states.hyperparameters)
        graph = self._graphs.get(form)
        if graph is None:
            if self._warms_up(form):
                done = states.watched(body, lambda: run.kernels(body, batch, given, iteration))
                self._compare(form, done.aux)
                return done
            graph = self._graphs[form] = self._captured(states, run, body, batch, given, iteration)
        states.take(body)
        return graph.launch(run, body, tensors, given)

    def _warms_up(self, form: Any) -> bool:
        """Whether to run a step on a batch of this form without a graph."""
        known = form in self._seen
        if not known and len(self._seen) == _MOST_FORMS:
            self._seen[None] = 0, None  # once
            warnings.warn(
                f"capture=True: batches have had {_MOST_FORMS} different forms, and each needs a graph of its own; steps on others run "
                f"without one. Pad batches to a few sizes, and keep numbers that change out of them, or in tensors",
                stacklevel=8,
            )
        return self._seen[form][0] < _WARM_UP if known else True

    def _compare(self, form: Any, aux: Any) -> None:
        """Raise where aux holds numbers of the host that differ between steps: a graph would repeat those of one step."""
        count, first = self._seen.get(form, (0, None))
        found = numbers_in(aux)
        if count and repr(found) != repr(first):  # NaN is NaN
            raise CaptureError(
                f"capture=True: aux holds numbers of the host that change: {first} and then {found}. A captured step does not run "
                f"loss_fn again; return tensors of the device, or leave capture out"
            )
        if count or len(self._seen) < _MOST_FORMS:
            self._seen[form] = count + 1, found

    def _captured(
        self, states: HeldStates, run: Run, body: StateData, batch: Any, given: Numbers, iteration: Iteration | None
    ) -> _Graph:
        """Capture a step; its kernels do not run yet, and nothing is sent."""
        device, step_ids, traffic = body.storage.layout[0].device, run.agreements.ids, run.mesh.traffic
        if self._numbers is None:
            self._numbers = torch.zeros(len(Numbers._fields), dtype=torch.float64, device=device)
        _devices.write(list(map(float, given)), self._numbers)
        states.hold(body)
        body.storage.readers.wait()
        inputs = inputs_like(batch)
        torch.clear_autocast_cache()  # of parameters as they were before this step
        # A capture begins with a wait for the device, which would not hear of failed ranks.
        self._mesh.await_event(_devices.here(device))
        graph, sent, calls = _devices.new_graph(self._pool), traffic.sent_bytes, self._mesh.calls()
        try:
            with graph, run.step_check.reads.held() as held:
                numbers = Numbers(*self._numbers.unbind())
                numbers = numbers._replace(call=numbers.call.to(torch.int64))
                step_ids.give(body.step, numbers.step_id)
                done = run.kernels(body, inputs, numbers, iteration)
                states.write_back(body)
                ((_, words),), sums, measured = held, done.of_all(), done.measured
                result = torch.cat([words, torch.stack([x.double() for x in (*sums.values(), *measured.values())])])
        except FjoinError:
            raise
        except RuntimeError as error:
            # A capture that has failed raises at its end again, without the reason.
            cause = error.__context__ or error
            if isinstance(cause, FjoinError):
                raise cause from None
            raise CaptureError(
                f"capture=True: a step could not be captured: {cause}. loss_fn must not read values of the device on the host "
                f"(.item(), printing, a condition on a tensor), and must not copy tensors of the host to the device"
            ) from error
        finally:
            step_ids.give(body.step, given.step_id)
            states.give_back(body)
            body.torn = ""
        self._pool = self._pool or graph.pool()
        sent, traffic.sent_bytes = traffic.sent_bytes - sent, sent
        calls = self._mesh.calls() - calls
        traffic.by_graphs -= calls
        return _Graph(
            graph,
            self._numbers,
            tensors_in(inputs),
            optree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, done.aux, none_is_leaf=True),
            result,
            len(words),
            tuple(sums),
            tuple(measured),
            sent,
            calls,
        )


class _Graph(NamedTuple):
    """A captured step."""

    graph: Any
    numbers: Tensor  # the values of `Numbers`
    inputs: list[Tensor]  # the tensors of the batch
    aux: Any
    result: Tensor  # the words that the host reads later, the sums, and the numbers measured by the way
    n_words: int
    sums: tuple[str, ...]
    measured: tuple[str, ...]
    sent_bytes: int
    calls: int  # of collectives

    def launch(self, run: Run, body: StateData, batch: list[Tensor], given: Numbers) -> Done:
        """Run the step on a batch of the same form."""
        storage = body.storage
        if batch:
            with torch.no_grad():  # loss_fn may take gradients by them
                torch._foreach_copy_(self.inputs, batch)
        _devices.write(list(map(float, given)), self.numbers)
        storage.readers.wait()
        body.torn = tears(body.step)
        with run.mesh.traffic.span("graph"):
            self.graph.replay()
        for flat in storage.flats:
            torch.autograd.graph.increment_version(flat)
        # The next step writes into the memory of this one's results.
        result = self.result.clone()
        aux = optree.tree_map(copy_of, self.aux, none_is_leaf=True)
        words, sums, measured = result.tensor_split((self.n_words, self.n_words + len(self.sums)))
        of_all = dict(zip(self.sums, sums.unbind(), strict=True))
        run.step_check.reads.add((body.step, [CountsOfAll(0, of_all)]), words)
        run.mesh.traffic.sent_bytes += self.sent_bytes
        run.mesh.traffic.by_graphs += self.calls
        body.torn = ""
        return Done(aux, lambda: of_all, dict(zip(self.measured, measured.unbind(), strict=True)))
