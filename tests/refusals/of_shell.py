"""What the names of fjoin refuse, and values that functions of the user may not return."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import fjoin
import fjoin.checkpoint
import fjoin.ddp
import fjoin.jax
from fjoin import transforms as tx
from tests.training.small import step_of

X, P = torch.ones(3), {"w": torch.ones(3)}
MEAN, SGD = tx.mean("data"), tx.sgd(0.1)
PIPE = tx.fuse(MEAN, SGD)
NAN, INF = math.nan, math.inf
V, T = ValueError, TypeError
Given: Any = object()


def loss(params: Any, batch: Any) -> Tensor:
    return (params["w"] * batch).sum()  # type: ignore[no-any-return]


def made(pipeline: Any = PIPE, loss_fn: Any = loss, **options: Any) -> Callable[[], Any]:
    return lambda: fjoin.train_step(loss_fn, pipeline, **options)


def run(loss_fn: Callable[..., Any] = loss, params: Any = P, buffers: Any = None, **options: Any) -> Callable[[], Any]:
    """A step from `init`; where it is refused, the parameters stay as they are."""

    def steps() -> Any:
        step, state = step_of(loss_fn, PIPE, params, buffers, **options)
        try:
            return step(state, X)[1]
        finally:
            assert torch.equal(state.params["w"], X)

    return steps


def on(params: Any) -> Callable[[], Any]:
    return lambda: fjoin.train_step(loss, PIPE).init(params)


def summed(value: Any) -> Callable[[], Any]:
    return run(lambda p, b: (loss(p, b), {"sum": value}))


def weighed(value: Any) -> Callable[[], Any]:
    return run(weight=lambda b: value)


def evaluated(metric_fn: Any) -> Callable[[], Any]:
    return lambda: fjoin.evaluate(metric_fn, [1.0, 2.0])


def bound(call: Callable[[], Any]) -> Callable[[], Any]:
    def here() -> Any:
        with fjoin.bind(fjoin.mesh({"data": -1})):
            return call()

    return here


def stepped(grads: Any, state: Any = Given, params: Any = P) -> Callable[[], Any]:
    return bound(lambda: PIPE.step(params, grads, PIPE.init(params) if state is Given else state))


def inferred(first: bool) -> Callable[[], Any]:
    def steps() -> None:
        step = fjoin.train_step(loss, PIPE)
        state = None if first else step.init(P)
        with torch.inference_mode():
            step(step.init(P) if state is None else state, X)

    return steps


def again() -> None:
    step, state = step_of(loss, PIPE, P, accumulate=2)
    step(state, X)
    step(state, X)


def kept(detaches: bool) -> Any:
    """A hidden state that is kept for the next batch: torch's own error, unless it is detached."""
    hidden = [X]

    def recurrent(params: Any, batch: Tensor) -> Tensor:
        h = torch.tanh(params["w"] * hidden[0] + batch)
        hidden[0] = h.detach() if detaches else h
        return h.sum()

    step = fjoin.train_step(recurrent, PIPE)
    return step(step(step.init(P), X)[0], X)


def looked_up(params: Any, batch: Any) -> Tensor:
    return nn.functional.embedding(torch.tensor([0]), params["w"], sparse=True).sum()


def table(rows: int) -> Callable[[], Any]:
    """Gradients that are sparse, in a bucket with others or in a message of their own."""

    def steps() -> None:
        step = fjoin.train_step(looked_up, PIPE)
        step(step.init({"w": torch.ones(rows, 1), "v": torch.ones(2)}), X)

    return steps


model, W = nn.Linear(3, 1), torch.ones(2)
SPARSE, META = X.to_sparse(), torch.ones(3, device="meta")
ROWS: dict[str, list[tuple[Any, ...]]] = {
    "mesh": [
        *((lambda axes=axes: fjoin.mesh(axes), T, repr(axes), "mapping") for axes in ("data", ["data"], None)),
        (lambda: fjoin.mesh({1: 1}), T, "{1: 1}"), (lambda: fjoin.mesh({}), V, "at least one axis"),
        (lambda: fjoin.mesh({"data": 2}), V, "does not fit 1 ranks"), (lambda: fjoin.mesh({"a": 0}), V, "does not fit"),
        (lambda: fjoin.mesh({"a": -1, "b": -1}), V, "one size may be -1"),
        (lambda: fjoin.mesh({"a": torch.ones(2)}), V, "does not fit", "tensor"),
        (lambda: fjoin.mesh({"data": 1}, ordered="yes"), T, "ordered", "'yes'"),
        *((lambda t=t: fjoin.mesh({"data": -1}, timeout_s=t), V, "timeout_s", "seconds", repr(t))
          for t in (-1, 0, NAN, INF, 1e30, "5", True, None)),
    ],
    "bind": [(lambda: fjoin.bind(None).__enter__(), T, "bind: mesh", "None", "fjoin.mesh")],
    "evaluate": [
        (lambda: fjoin.evaluate(loss, [1], mesh="data"), T, "evaluate: mesh", "'data'"),
        (lambda: fjoin.evaluate(3, [1]), T, "metric_fn", "3"),
        (lambda: fjoin.evaluate(loss, 3), T, "loader", "iterable", "3"), (evaluated(lambda x: x), T, "name -> mean"),
        (evaluated(lambda x: {str(x): x}), V, "'2.0'", "'1.0'"),
        (lambda: fjoin.evaluate(lambda x: {"m": x}, [1.0], weight=lambda x: -1), V, "not negative"),
        *((evaluated(lambda x, value=value: {"m": value}), T, *texts) for value, *texts in (
            ("x", "'m'", "'x'"), (None, "'m'", "None"), (1j, "1j"), (torch.tensor(1j), "tensor"))),
        (evaluated(lambda x: {1: x}), T, "string", "1"), (evaluated(lambda x: {"sum": x}), T, "'sum'", "1.0"),
        (evaluated(lambda x: {"m": torch.ones(int(x))}), V, "'m'", "(2,)", "(1,)"),
        (lambda: tx.simulate(lambda name: fjoin.evaluate(lambda x: {name: x}, [1.0]), {"data": 2}, ["a", "b"]), fjoin.DesyncError,
         "rank 1", "'b'", "'a'"),
    ],
    "join": [
        (lambda: fjoin.join([1], mesh="data"), T, "join: mesh", "'data'"),
        (lambda: list(fjoin.join(3)), T, "loader", "iterable", "3"),
        (lambda: list(made()().join(3)), T, "loader", "iterable", "3"),
    ],
    "functional": [(lambda: fjoin.functional(W), T, "nn.Module")],
    "train_step": [
        (made(mesh="data"), T, "train_step: mesh", "'data'"), (made(donate="yes"), T, "donate", "'yes'"),
        (made(weight=3), T, "weight", "function", "3"), (made(loss_fn=None), T, "loss_fn must be a function", "None"),
        (made(MEAN), T, "pipeline must be a Pipeline", "fuse(hook, optimizer)"), (made(SGD), T, "pipeline must be a Pipeline"),
        (made(accumulate=0), V, "accumulate", "at least 1", "0"), (made(bucket_bytes=0), V, "bucket_bytes", "at least 1"),
        (made(tx.fuse(tx.accumulate(2, MEAN), SGD)), V, "accumulate=k"),
        (made(tx.fuse(tx.mean("rows"), SGD)), NameError, "'rows'", "['data']"),
        # -- parameters and buffers
        (on(None), T, "params", "None"), (on(model), T, "Linear", "fjoin.functional(module)"),
        (on(fjoin.functional(model)), T, "tuple", "fjoin.functional(module)"), (on(model.parameters()), T, "params", "generator"),
        (on({"w": META}), V, "params['w']", "meta"), (on({"w": SPARSE}), T, "params['w']", "sparse"),
        (on({"w": 3.0}), T, "params['w']", "float"),
        (on({"w": X.long()}), T, "params['w']", "int64"), (on({"w": X * 1j}), T, "params['w']", "complex64", "view_as_real"),
        (on({"w": X, "v": META}), V, "params['v'] lies on meta", "params['w'] on cpu", "fjoin.join(loader)"),
        (on({"w": TwoTensor(X, X)}), T, "params['w']", "TwoTensor", "fjoin.join(loader)"),
        (on({"a": {"b": X}, "a.b": X}), V, "'a.b'", "rename"), (on({"a": W, "b": W}), V, "'b'", "'a'", "same tensor", "fjoin.functional"),
        (run(buffers=[X]), T, "buffers", "tensor([1., 1., 1.])"), (run(buffers={"n": 3}), T, "buffers", "{'n': 3}"),
        (run(buffers={"n": X}), T, "with buffers", "loss_fn(params, buffers, batch)", "(params: 'Any', batch: 'Any')"),
        (run(lambda p, s, b: (loss(p, b), None, [1]), buffers={"n": X}), T, "buffers", "[1]"),
        (inferred(True), V, "init", "inference_mode"), (inferred(False), V, "a step", "inference_mode"),
        # -- losses
        (run(lambda p, buffers, b: loss(p, b)), T, "without buffers", "loss_fn(params, batch)", "(p, buffers, b)"),
        (run(lambda p: p["w"].sum()), T, "loss_fn(params, batch)", "(p)"),
        (run(lambda p, b: p["w"] * b), V, "0-d floating-point loss", "(3,)"), (run(lambda p, b: 3.0), V, "0-d floating-point loss", "3.0"),
        (run(lambda p, b: b.sum()), V, "does not depend on params", "detached"),
        (lambda: (s := fjoin.train_step(lambda p, b: b.sum(), PIPE))(s.init({}), X), V, "params holds no parameter"),
        (run(lambda p, b: (out := loss(p, b), out.backward())[0]), RuntimeError, "loss_fn has called backward", "return the loss"),
        (run(lambda p, b: loss(p, b).backward()), RuntimeError, "loss_fn has called backward"),
        (run(lambda p, b: (loss(p, b), 1, 2)), T, "loss or (loss, aux)", "3 values"),
        (lambda: (kept(detaches=True), kept(detaches=False)), RuntimeError, "backward through the graph a second time"),
        (table(2), T, "'w'", "sparse", "to_dense"), (table(2_000_000), T, "'w'", "sparse", "to_dense"),
        *((summed(value), T, "aux['sum']") for value in ([1], None, {3: 1.0})),
        (summed({"a": "1"}), T, "aux['sum']['a']", "'1'"), (summed({"a": W}), V, "aux['sum']['a']", "(2,)"),
        (summed({"a": torch.tensor(1j)}), V, "aux['sum']['a']", "complex64"), (summed({"a": 10**400}), V, "aux['sum']['a']", "1329 bits"),
        (summed({"a": 1e300}), V, "'a'", "1e+300", "float32", "scale it"),
        # -- weights and states
        (weighed(10**400), V, "weight(batch)", "finite", "1000000"), (weighed(W), V, "weight(batch)", "scalar", "tensor([1., 1.])"),
        *((weighed(w), V, "weight(batch)", repr(w), "ratios") for w in (1e300, 1e-42)),
        *((weighed(w), T, "weight(batch)", repr(w)) for w in ("3", None, [1], 1j)),
        *((weighed(w), V, "weight(batch) must be a finite number", repr(w)) for w in (-1.0, -1, NAN, INF)),
        (lambda: made()().init(P).with_hyperparameters(lr=1.0), V, "'lr'", "inject_hyperparameters(optimizer)"),
        (lambda: made()()({"w": X}, X), T, "from step.init", "dict"), (again, fjoin.DonatedState, "donated to step 0,"),
    ],
    "Pipeline": [
        (stepped({"w": X}, ()), V, "a tuple", "init or step returned"), (stepped({"v": X}), V, "lacks ['w']", "additional ['v']"),
        (stepped({"w": torch.ones(2)}), V, "grads['w']", "(2,)", "(3,)"), (stepped({"w": X.double()}), T, "float64", "float32"),
        (bound(lambda: PIPE.step(P, P, PIPE.init({"w": X, "v": X}))), V, "another tree or another pipeline"),
    ],
    "explain": [
        *((lambda n=n: tx.explain(PIPE, P, {"data": n}), V, "'data'", repr(n)) for n in (0, -2, 1.5, True, "2", None, 10**30, 2**21)),
        (lambda: tx.explain(3, {}, {"data": 2}), T, "takes a pipeline or a transform"),
        (lambda: tx.explain(PIPE, model, {"data": 2}), T, "is a Linear; expected", "fjoin.functional(module)"),
        (lambda: tx.explain(PIPE, P, {"data": 2}, buffers=1), T, "explain: buffers", "1"),
        (lambda: tx.explain(PIPE, P, "data"), T, "mapping", "'data'"), (lambda: tx.explain(PIPE, P, {}), V, "{'data': 4}"),
        (lambda: tx.explain(PIPE, {"w": 3}, {"data": 2}), T, "params['w']", "3", "tensor"),
        (lambda: tx.explain(PIPE, {"w": X.int()}, {"data": 2}), T, "params['w']", "int32"),
        *((lambda n=n: tx.explain(PIPE, P, {"data": 2}, bucket_bytes=n), V, "bucket_bytes", repr(n)) for n in (0, "1")),
    ],
}  # fmt: skip

# What the names for modules, optimizers, checkpoints and jax refuse.
LINEAR, ONE = nn.Linear(2, 2), torch.ones(1)
PARAMS, NOWHERE = list(LINEAR.parameters()), "/nowhere"
HOOKS = [
    getattr(fjoin.ddp, f"{name}_hook")
    for name in ("allreduce", "bf16_compress", "fp16_compress", "quantization_pertensor")
]
MODULES: dict[str, list[tuple[Any, ...]]] = {
    # -- modules in DistributedDataParallel
    **{hook.__name__: [(lambda hook=hook: hook(axis=3), T, "named by a string", "got 3")] for hook in HOOKS},
    **{hook.__name__: [(lambda hook=hook: hook(0), V, "matrix_approximation_rank must be", "got 0")]
       for hook in (fjoin.ddp.powerSGD_hook, fjoin.ddp.batched_powerSGD_hook)},
    **{name: [(lambda name=name: getattr(fjoin.ddp, name)(3, LINEAR, 3), T, "hook_with_zero_step", "got Linear"),
       (lambda name=name: getattr(fjoin.ddp, name)(3, object.__new__(nn.parallel.DistributedDataParallel), 3), T, "builtins.int")]
       for name in ("hook_with_zero_step", "hook_with_zero_step_interleaved")},
    "quantization_perchannel_hook": [(lambda: fjoin.ddp.quantization_perchannel_hook(0), V, "bucket_size must be", "got 0")],
    "post_localSGD_hook": [(lambda: fjoin.ddp.post_localSGD_hook(-1), V, "step must be", "got -1")],
    "PostLocalSGDState": [(lambda: fjoin.ddp.PostLocalSGDState(None, None, "x"), V, "start_localSGD_iter must be", "'x'")],
    "comm_hook": [(lambda: fjoin.ddp.comm_hook("x"), T, "DDPCommHookType", "ALLREDUCE")],
    "register": [(lambda: fjoin.ddp.register(LINEAR, tx.mean("data")), T, "takes a DistributedDataParallel", "Linear")],
    "register_ddp_comm_hook": [(lambda: fjoin.ddp.register_ddp_comm_hook("ALLREDUCE", LINEAR), T, "DistributedDataParallel", "Linear")],
    "load_into": [
        (lambda: fjoin.load_into(3, {}), T, "takes a module", "int"),
        *((lambda none=none: fjoin.load_into(LINEAR, none), V, "there is no value in", repr(none)) for none in ({}, None)),
        (lambda: fjoin.load_into(LINEAR, {"weight": ONE}), V, "'weight' has shape (1,)", "(2, 2)"),
    ],
    "checkpoint_wrapper": [(lambda: fjoin.checkpoint_wrapper(3), T, "takes a module", "int")],
    "offload_wrapper": [(lambda: fjoin.offload_wrapper(3), T, "takes a module", "int")],
    "value_and_grad": [
        (lambda: fjoin.value_and_grad(3), T, "loss_fn must be a function, got 3"),
        (lambda: fjoin.value_and_grad(len, has_aux=1), T, "has_aux"),
        *((lambda f=f, p=p, aux=aux: fjoin.value_and_grad(f, has_aux=aux)({"w": p}), kind, *words) for f, p, aux, kind, *words in (
            (lambda p: p["w"].sum(), ONE.long(), False, T, "'w'", "int64"), (lambda p: p["w"], 3.0, False, T, "'w'", "float"),
            (lambda p: p["w"], torch.ones(2), False, RuntimeError, "scalar outputs"),
            (lambda p: torch.ones(()), ONE, False, RuntimeError, "does not require grad"),
            (lambda p: 3.0, ONE, False, T, "must return a tensor"), (lambda p: p["w"].sum(), ONE, True, T, "(loss, aux)"),
        )),
    ],
    "sync_batch_norm": [
        (lambda: tx.sync_batch_norm(torch.ones(2, 3), (torch.ones(3),) * 2, axis=3), T, "named by a string", "got 3"),
        *((lambda a=a: tx.sync_batch_norm(*a, axis="data"), kind, *words) for a, kind, *words in (
            ((3, None), V, "(N, C, ...)", "3"), ((torch.ones(2, 3), None), T, "state must be a pair", "None"),
            ((torch.ones(2, 3), (torch.ones(2),) * 2), V, "state[0]", "(3,)"), ((torch.ones(2, 3), (torch.ones(3), 1)), V, "state[1]", "1"),
            ((torch.ones(2, 3), (torch.ones(3),) * 2, 3.0), V, "scale", "3.0"),
        )),
    ],
    # -- Join, optimizers and averagers
    "as_joinable": [
        (lambda bad=bad: fjoin.as_joinable(bad), T, "as_joinable: hook must be", repr(bad)) for bad in ("x", tx.JoinHook(3, 4))
    ],
    "Join": [
        (lambda: fjoin.Join([3]), V, "at least one joinable that communicates", "fjoin.as_joinable"),
        (lambda: fjoin.Join([torch.optim.SGD(PARAMS, 0.1)]), V, "communicates"),
        (lambda: fjoin.Join([LINEAR]), V, "got ['Linear']; wrap a module in DistributedDataParallel"),
        (lambda: fjoin.Join([fjoin.as_joinable(tx.JoinHook()), LINEAR]), T, "Linear"),
        (lambda: fjoin.Join([fjoin.as_joinable(lambda: 3)]), T, "tx.JoinHook(main, post)", "3"),
    ],
    "last_joiner": [(lambda: tx.last_joiner(True, "nowhere"), tx.UnboundAxis, "'nowhere'", "fjoin.bind")],
    "Optimizer": [(lambda: fjoin.Optimizer(PARAMS, 3), T, "takes an Optimizer of fjoin.transforms", "got 3")],
    "ZeroRedundancyOptimizer": [(lambda: fjoin.ZeroRedundancyOptimizer(PARAMS, torch.optim.SGD), V, "init_process_group first")],
    "PostLocalSGDOptimizer": [(lambda: fjoin.PostLocalSGDOptimizer(3, fjoin.PeriodicModelAverager(2)), T, "optim must be", "got 3")],
    "PeriodicModelAverager": [(lambda: fjoin.PeriodicModelAverager(0), V, "period must be", "got 0")],
    "HierarchicalModelAverager": [(lambda: fjoin.HierarchicalModelAverager({}), V, "at least one period", "{}")],
    "average_parameters": [(lambda: tx.average_parameters(()), V, "at least one axis", "()")],
    "average_state": [(lambda: tx.average_state(3), T, "named by a string", "got 3")],
    "ema_params": [(lambda: tx.ema_params({"w": ONE}, ()), V, "the state holds 0 averages", "state.pipeline")],
    "as_functional_optim": [(lambda: tx.as_functional_optim(3), V, "3 has no functional counterpart", "register")],
    "register_functional_optim": [(lambda: tx.register_functional_optim("x", 3), T, "factory must be a function", "got 3")],
    "cosine": [(lambda: tx.cosine("a", 3), T, "start", "'a'"), (lambda: tx.cosine(0.1, 0), V, "total_steps", "got 0")],
    "linear": [(lambda: tx.linear(0.1, 0.0, 0), V, "total_steps", "got 0")],
    "warmup": [(lambda: tx.warmup(-1, tx.linear(0.1, 0.0, 3)), V, "warmup_steps", "got -1")],
    "from_torch_scheduler": [
        (lambda: tx.from_torch_scheduler(lambda o: torch.optim.lr_scheduler.StepLR(o, 1), 0.1, 0), V, "total_steps", "0"),
    ],
    # -- codecs
    "bfloat16": [(lambda: tx.bfloat16(3), T, "stochastic must be True or False", "got 3")],
    **{make.__name__: [(lambda make=make: make(0), V, make.__name__, "block must be", "got 0")] for make in (tx.fp8, tx.int4, tx.uint8)},
    "auto_quantize": [(lambda: fjoin.auto_quantize(3, tx.int8()), T, "all_gather", "got 3")],
    # -- loops, checkpoints and jax
    "elastic": [
        *((lambda given=given: fjoin.elastic(lambda members: None, **given), kind, *words) for given, kind, *words in (
            ({"ranks": 0}, V, "ranks must be", "got 0"), ({"ranks": 2, "at_least": 3}, V, "at_least=3", "ranks=2"),
            ({"ranks": 1}, V, "FJOIN_STORE=host:port"), ({"ranks": 1, "store": "localhost"}, V, "host:port", "'localhost'"),
            ({"ranks": 1, "store": "127.0.0.1:1", "timeout_s": 0.1}, fjoin.PeerLost, "no store answers at 127.0.0.1:1"),
        )),
    ],
    "Shuffled": [
        (lambda: fjoin.Shuffled(4, 0), V, "batch_size must be", "got 0"), (lambda: fjoin.Shuffled(-1, 2), V, "n must", "-1"),
        (lambda: fjoin.Shuffled(10, 2, seed=1.5), T, "seed", "1.5"), (lambda: fjoin.Shuffled(10, 2).set_epoch(-1), V, "epoch", "-1"),
        (lambda: tx.simulate(lambda: fjoin.Shuffled(10, 2), {"data": 3}), V, "batch_size"),
        (lambda: fjoin.Shuffled(10, 2).set_epoch(0, -1), V, "step", "-1"),
    ],
    "show": [
        *((lambda every=every: fjoin.show(every), V, "every must be", f"got {every}") for every in (0, 2.5)),
        (lambda: fjoin.show(to=["run.log"]), T, "to=", "run.log", "(numbers, step)"),
    ],
    "trace": [(lambda: fjoin.trace(3).__enter__(), T, "os.PathLike")],
    "Checkpoints": [(lambda: fjoin.Checkpoints("x", 3), T, "a int cannot be saved", "pass a train_step")],
    "save": [(lambda: fjoin.save(NOWHERE, 3, 0), T, "a int cannot be saved", "pass a train_step")],
    "load": [(lambda: fjoin.load(NOWHERE, LINEAR), T, "a Linear cannot be saved", "pass a train_step")],
    "export": [(lambda: fjoin.checkpoint.export(NOWHERE, "/x"), fjoin.CheckpointError, "/nowhere holds no step")],
    "verify": [(lambda: fjoin.checkpoint.verify(NOWHERE), fjoin.CheckpointError, "/nowhere holds no step")],
    "loss": [(lambda: fjoin.jax.loss(3), T, "takes a function", "got 3")],
    "from_optax": [(lambda: fjoin.jax.from_optax(3), T, "takes an optax.GradientTransformation", "got 3")],
    "to_optax": [(lambda: fjoin.jax.to_optax(3), T, "Transform", "got 3")],
}  # fmt: skip
