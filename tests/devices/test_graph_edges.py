"""What stays right around captured steps: copies of states, numbers in batches, casts, random numbers, meshes that end."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import optree
import pytest
import torch

import fjoin
from fjoin import transforms as tx
from fjoin.groups._group_mesh import GroupMesh
from fjoin.groups._mesh import Mesh
from tests.devices.echo import EchoMesh
from tests.devices.graphs import Axis, Graph, graphs

MEAN = tx.mean("data")
X = {"x": torch.ones(3)}


def plain(p: Any, batch: Any) -> torch.Tensor:
    return (p["w"] * batch["x"]).sum()


def step_of(loss: Any, capture: bool = True, hook: Any = MEAN, mesh: Any = None, **after: Any) -> Any:
    pipeline = tx.fuse(hook, tx.sgd(0.1), **after)
    return fjoin.train_step(loss, pipeline, mesh=mesh or EchoMesh(Axis()), capture=capture)


def both(loss: Any, batches: list[Any]) -> list[tuple[list[Any], list[Graph]]]:
    """The losses, aux and last parameters of steps without graphs and with them, and the graphs."""
    out = []
    for capture in (False, True):
        with graphs() as made:
            step = step_of(loss, capture)
            state, seen = step.init({"w": torch.arange(1.0, 4.0)}), list[Any]()
            for batch in batches:
                state, metrics = step(state, batch)
                seen += [metrics.loss, repr(metrics.aux)]
            out.append(([*seen, state.params["w"].tolist()], made))
    return out


def tensors_in(state: Any) -> list[torch.Tensor]:
    return [x for x in optree.tree_leaves([state.params, state.pipeline]) if isinstance(x, torch.Tensor)]


FED_BACK = tx.error_feedback(tx.quantized_mean("data", tx.int8()))


@pytest.mark.parametrize("name", ["ema", "fed back"])
def test_a_clone_keeps_what_graphs_write_into(name: str) -> None:
    with graphs() as made:
        step = step_of(plain, after=tx.ema(0.9)) if name == "ema" else step_of(plain, hook=FED_BACK)
        state = step.init({"w": torch.ones(3)})
        for i in range(6):
            state, _ = step(state, {"x": torch.arange(3.0) + i})
        kept = state.clone()
        before = [x.clone() for x in tensors_in(kept)]
        for i in range(3):
            state, _ = step(state, {"x": torch.arange(3.0) - i})
        assert len(made) == 1 and made[0].replays == 6
        assert all(map(torch.equal, tensors_in(kept), before))
        assert not all(map(torch.equal, tensors_in(kept), tensors_in(state)))


@pytest.mark.parametrize(("one", "other"), [(1, True), (1, 1.0), (0.0, -0.0)])
def test_equal_numbers_of_other_kinds_get_other_graphs(one: Any, other: Any) -> None:
    def loss(p: Any, batch: Any) -> torch.Tensor:
        number = batch["n"]
        return plain(p, batch) * ({int: 1.0, bool: 2.0}.get(type(number)) or math.copysign(3.0, number))

    (want, _), (got, made) = both(loss, [{**X, "n": n} for n in [one] * 5 + [other] * 5])
    assert got == want and len(made) == 2


def test_a_number_that_is_not_one_is_the_same_form() -> None:
    (_, _), (_, made) = both(plain, [{**X, "n": math.nan + i} for i in range(5)])
    assert len(made) == 1


def test_a_loss_takes_gradients_by_its_batch() -> None:
    def loss(p: Any, batch: Any) -> torch.Tensor:
        x = batch["x"].requires_grad_()
        y = (p["w"] ** 2 * x).sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        return y + (slope**2).sum()

    (want, _), (got, made) = both(loss, [{"x": torch.full((3,), i / 100)} for i in range(6)])
    assert got == want and made[0].replays == 3


def test_random_numbers_differ_by_call() -> None:
    def loss(p: Any, batch: Any) -> Any:
        kept = tx.random.bernoulli(tx.random.fold_in(tx.random.key(0), tx.current_call()), 0.5, (3,))
        return plain(p, {"x": batch["x"] * kept}), kept.float()

    (want, _), (got, made) = both(loss, [X] * 9)
    assert got == want and made[0].replays == 6 and len(set(got[1::2])) > 3


def test_aux_of_old_buffers_is_what_it_was() -> None:
    def loss(p: Any, buffers: Any, batch: Any) -> Any:
        return plain(p, batch), buffers["count"], {"count": buffers["count"] + 1}

    for capture in (False, True):
        with graphs():
            step, seen = step_of(loss, capture), list[Any]()
            state = step.init({"w": torch.ones(3)}, {"count": torch.zeros(1)})
            for i in range(9):  # the seventh in another form, without a graph
                state, metrics = step(state, {**X, "n": i == 6})
                seen.append(metrics.aux)
            assert [x.item() for x in seen] == list(range(9))


def test_aux_of_numpy_and_nan() -> None:
    (want, _), (got, made) = both(lambda p, batch: (plain(p, batch), [np.ones(2), math.nan * 1]), [X] * 5)
    assert got == want and made[0].replays == 2


@pytest.mark.parametrize("capture", [False, True])
def test_an_autocast_around_the_loop_keeps_no_casts_of_earlier_steps(capture: bool) -> None:
    def loss(p: Any, batch: Any) -> torch.Tensor:
        return (batch["x"][None] @ p["m"]).sum().float()

    with graphs(), torch.autocast("cpu", torch.bfloat16):
        step, seen = step_of(loss, capture), list[float]()
        state = step.init({"m": torch.eye(3)})
        for i in range(8):
            state, metrics = step(state, {"x": torch.full((3,), 1.0 + (i == 6))})
            seen.append(metrics.loss)
        m, eye = 3.0, []
        for i in range(8):
            eye.append(m * (1 + (i == 6)))
            m -= 0.9 * (1 + (i == 6))
    assert seen == pytest.approx(eye, abs=0.05)


class Counting(EchoMesh):
    """Counts messages where they are called, as groups do: in a capture too, and not in a replay."""

    def __init__(self) -> None:
        self.count = 0
        mesh = self

        class Counted(Axis):
            def begin_reduce(self, buffer: torch.Tensor) -> Any:
                mesh.count += 1
                return super().begin_reduce(buffer)

        super().__init__(Counted())

    def _called(self) -> int:
        return self.count


def test_calls_are_counted_as_without_graphs() -> None:
    """Ranks that leave a loop compare them, and may have captured at other steps."""
    calls = []
    for capture in (False, True):
        with graphs() as made:
            mesh = Counting()
            step = step_of(plain, capture, mesh=mesh)
            state = step.init({"w": torch.ones(3)})
            for _ in range(7):
                state, _ = step(state, X)
            calls.append(mesh.calls())
    assert calls[0] == calls[1] > 6 and made[0].replays == 4


def test_graphs_are_freed_before_the_groups_of_their_mesh_end() -> None:
    """A communicator of NCCL waits for the graphs that hold its messages."""
    mesh = EchoMesh(Axis())
    with graphs() as made:
        step = step_of(plain, mesh=mesh)
        state = step.init({"w": torch.ones(3)})
        for _ in range(5):
            state, _ = step(state, X)
        mesh.use.free_graphs()
        assert made[0].freed
        for _ in range(5):  # as before, with graphs anew
            state, _ = step(state, X)
        assert made[1].replays == 2
        step.close()
        assert made[1].freed


@pytest.mark.parametrize("failure", ["", "a rank has failed"])
def test_a_mesh_that_ends_frees_graphs(failure: str, monkeypatch: Any) -> None:
    order = list[str]()
    monkeypatch.setattr("fjoin.groups._group_mesh.destroy", lambda *args: order.append("groups"))
    fake: Any = SimpleNamespace(
        _links=None, _all=[], _process=0, use=SimpleNamespace(free_graphs=lambda: order.append("graphs"))
    )
    GroupMesh._take_down(fake, failure)
    assert sorted(order) == ["graphs", "groups"] and (failure or order[0] == "graphs")


def test_ranks_of_nccl_capture_without_registered_memory(monkeypatch: Any) -> None:
    reason: Any = Mesh.against_graphs.fget  # type: ignore[attr-defined]
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    assert "NCCL_GRAPH_REGISTER=0" in reason(SimpleNamespace(size=2, nccl=True))
    assert not reason(SimpleNamespace(size=1, nccl=True)) and not reason(SimpleNamespace(size=2, nccl=False))
    monkeypatch.setattr(EchoMesh, "nccl", True)
    with (
        graphs(),
        pytest.raises(ValueError, match="capture=True: NCCL registers.*set NCCL_GRAPH_REGISTER=0 .*, or leave it out"),
    ):
        step_of(plain).init({"w": torch.ones(3)})
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    assert not reason(SimpleNamespace(size=2, nccl=True))
