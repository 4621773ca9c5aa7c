"""What the names of fjoin.transforms refuse."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import fjoin
from fjoin import transforms as tx
from fjoin.transforms.reductions._mean import coded_sum

NODES = {"node": 2, "local": 2}


def on(call: Callable[..., Any], *given: Any, **axes: int) -> Callable[[], Any]:
    """The call on simulated ranks, two of "data" if no axes are given."""
    return lambda: tx.simulate(call, axes or {"data": 2}, *given)


X = torch.ones(4, 3)
SGD, MEAN, INT8 = tx.sgd(0.1), tx.mean("data"), tx.int8()
CODED = tx.compress(INT8, MEAN)
FED, PARAMS = tx.error_feedback(CODED), {"a": torch.zeros(9), "b": torch.zeros(1)}


def of(call: Callable[..., Any]) -> Callable[[], Any]:
    """A collective of a (4, 3) leaf on three ranks."""
    return on(lambda: call(X), data=3)


def split(gives: Any, takes: Any, x: Any = None) -> Callable[[], Any]:
    """Row counts by rank, of three rows."""

    def one_rank(give: Any, take: Any) -> Any:
        tree = {"k": torch.ones(3)} if x is None else x
        return tx.all_to_all_single(tree, "data", input_split_sizes=give, output_split_sizes=take)

    return on(one_rank, gives, takes)


def updated(make: Callable[[], Any], grads: Any, params: Any = None, **axes: int) -> Callable[[], Any]:
    def one_rank() -> Any:
        hook = make()
        return hook.update(grads, hook.init(grads if params is None else params))

    return on(one_rank, **axes)


def complex_of(make: Callable[[], Any]) -> Callable[[], Any]:
    return updated(make, {"w": torch.ones(3, dtype=torch.complex64)}, {"w": torch.ones(3)}, data=2, node=2)


def deep() -> Any:
    return functools.reduce(lambda hook, _: tx.every(2, hook), range(100), MEAN)


def named_mean() -> Any:
    def mean(axis: str) -> Any:
        return tx.identity()

    return tx.factory(mean)


def twice(hook: Any) -> Callable[[], Any]:
    return lambda: tx.compress(tx.int4(), hook)


def quantized(name: str, *args: Any) -> Callable[[], Any]:
    return on(lambda: tx.quantized(getattr(tx, name), tx.int8())({"w": torch.ones(3, 2)}, *args))


SPLITS = [(1, 2), (2, 1)]
V, T = ValueError, TypeError
# Public name -> the call, the type of its error, and words of its text.
ROWS: dict[str, list[tuple[Any, ...]]] = {
    # -- axes
    "psum": [(of(lambda x: tx.psum(x, "node")), tx.UnboundAxis, "'node'", "['data']", "fjoin.mesh"),
    (of(lambda x: tx.psum(x, 3)), T, "named by a string")],
    "psum_scatter": [
        (of(lambda x: tx.psum_scatter({"k": x}, "data")), V, "'k'", "(4, 3)", "dimension 0", "size 3"),
        (of(lambda x: tx.psum_scatter(x, "data", tiled=True)), V, "a multiple of 3"),
    ],
    "all_to_all": [(of(lambda x: tx.all_to_all(x, "data", 5)), V, "dimension 5")],
    "all_gather": [
        (of(lambda x: tx.all_gather({"a": x}, "data", dim=5)), V, "dim is 5"),
        *((of(lambda x, dim=dim: tx.all_gather(x, "data", dim=dim)), V, "all_gather: dim", repr(dim)) for dim in (None, 0.0, True)),
        (of(lambda x: tx.all_gather(x, "data", tiled="no")), T, "all_gather: tiled", "'no'"),
        (of(lambda x: tx.psum_scatter(x, "data", dim="0")), V, "psum_scatter: the dim", "'0'"),
        (of(lambda x: tx.psum_scatter(x, "data", tiled=None)), T, "psum_scatter: tiled", "None"),
        (of(lambda x: tx.all_to_all(torch.ones(3, 2), "data", concat_dim=None)), V, "concat_dim", "None"),
    ],
    "pbroadcast": [(of(lambda x: tx.pbroadcast(x, "data", 3)), V, "0 to 2", "3")],
    "ppermute": [
        (of(lambda x: tx.ppermute(x, "data", [(0, 1), (0, 2)])), V, "source twice"),
        (of(lambda x: tx.ppermute(x, "data", [(0, 3)])), V, "target outside axis 'data'"),
    ],
    "pmax": [(of(lambda x: torch.func.grad(lambda x: tx.pmax(x, "data").sum())(x)), T, "pmax has no gradient")],
    "all_to_all_single": [
        (split([(1, 2)] * 2, [None] * 2), V, "output_split_sizes", "None", "both"),
        (split([(3,)] * 2, [(3,)] * 2), V, "input_split_sizes", "2 ranks", "(3,)"),
        (split([(4, -1)] * 2, SPLITS), V, "at least 0", "(4, -1)"),
        (split([(1.5, 1.5)] * 2, SPLITS), V, "whole number", "1.5"),
        (split([(1, 1)] * 2, [(1, 1)] * 2), V, "'k'", "(3,)", "must be 2"),
        (split(SPLITS, SPLITS, {"z": torch.ones(())}), V, "'z'", "()"),
        (split(SPLITS, [(2, 2), (2, 1)]), V, "rank 0", "sends itself 1 rows", "takes 2"),
        (split(SPLITS, [(1, 4), (2, 1)]), tx.CollectiveMismatch, "rank 1 sends 2 rows to rank 0, which takes 4"),
    ],
    "simulate": [
        *((lambda n=n: tx.simulate(lambda: 1, {"data": n}), V, "'data'", repr(n)) for n in (0, -2, 1.5, True, "2", None, 10**30, 4097)),
        (lambda: tx.simulate(lambda: None, {}), V, "axes is empty"), (lambda: tx.simulate(3, {"data": 2}), T, "function", "3"),
        (lambda: tx.simulate(lambda x: x, {"data": 2}, 3), T, "argument 0", "3"),
        (lambda: tx.simulate(lambda x: x, {"data": 2}, [1]), V, "1 values for 2 ranks"),
        (lambda: tx.psum(X, "rows"), tx.UnboundAxis, "'rows'", "Bound here: []", "fjoin.bind", "simulate"),
        (on(lambda: (tx.pmax if tx.axis_index("data") == 1 else tx.psum)(torch.ones(2), "data"), data=3), tx.CollectiveMismatch,
         "axis 'data'", "rank 0 calls psum(float32[2])", "rank 1 calls pmax(float32[2])"),
        (on(lambda: tx.psum(torch.ones(3 if tx.axis_index("data") == 2 else 2), "data"), data=3), tx.CollectiveMismatch,
         "psum(float32[2])", "rank 2 calls psum(float32[3])"),
        (on(lambda: tx.axis_index("data") != 1 and tx.psum(torch.ones(2), "data"), data=3), tx.CollectiveMismatch,
         "rank 0 waits in psum(float32[2]) over 'data'", "rank 1 has returned"),
        (on(lambda: tx.pbroadcast(torch.ones(1), "data", int(tx.axis_index("data")))), tx.CollectiveMismatch, "pbroadcast(float32[1], 0)",
         "[1], 1)"), (on(lambda: fjoin.mesh({"rows": 2})), V, "inside simulate", "'data': 2"),
        (on(lambda: fjoin.mesh({"data": 3})), V, "does not fit 2 ranks"),
    ],
    # -- codecs and reductions
    "top_k": [
        *((lambda k=k: tx.top_k(k), V, "k must be", repr(k)) for k in (0, 1.5, True, "1")),
        (lambda: tx.top_k(5).encode(torch.ones(1, 4)), V, "k is 5", "4 elements"), (lambda: tx.top_k(0.5, tx.int8), T, "Codec"),
    ],
    "qsgd": [(lambda: tx.qsgd(0), V, "levels", "0"), (lambda: tx.qsgd(128), V, "levels", "128"),
    (lambda: tx.qsgd().keyed(0.5, 0), V, "seed", "0.5")],
    "sign": [(lambda: tx.sign(0), V, "block must be"), (lambda: tx.uint8(0), V, "block must be"),
    (lambda: tx.fp8(dtype=torch.float16), V, "torch.float16", "float8_e4m3fn"),
    *((lambda block=block: tx.int8(block), V, "block", repr(block)) for block in (None, 0, 1.5, True))],
    "int8": [(lambda make=make: make(stochastic=3), T, "stochastic", "3") for make in (tx.int8, tx.int4, tx.fp8, tx.bfloat16)],
    "compress": [
        *((lambda seed=seed: tx.compress(INT8, MEAN, seed=seed), V, "seed", repr(seed)) for seed in (0.5, True, None)),
        (lambda: tx.compress(tx.qsgd().keyed(7, 0), MEAN), V, "has a key", "keyed(qsgd(), 7, 0)"),
        (on(lambda: coded_sum("data", tx.qsgd(), torch.ones(4))), V, "stochastic", "compress"),
        (lambda: tx.compress(tx.int8, MEAN), T, "compress: codec must be a Codec", "int8()"),
        (lambda: tx.compress(INT8, tx.clip_by_value(1.0)), T, "clip_by_value(1.0)", "keyword wire"),
        (lambda: tx.compress(torch.bfloat16, SGD), T, "compress: hook"),
        (lambda: tx.compress(torch.int8, MEAN), V, "torch.int8", "torch.bfloat16"),
        *((twice(hook), T, "int4()", "int8()", "leave one") for hook in (CODED, FED, tx.switch_after(5, MEAN, CODED))),
        (complex_of(lambda: CODED), T, "'w' is complex", "view_as_real"),
    ],
    "hierarchical_mean": [
        (lambda: tx.hierarchical_mean(3, "node"), V, "local", "3"),
        (lambda: tx.hierarchical_mean("data", "data"), V, "two axes", "'data'"),
        (lambda: tx.hierarchical_mean("local", "node", over="all"), V, "over", "'all'"),
        (complex_of(lambda: tx.hierarchical_mean("data", "node")), T, "'w' is complex", "view_as_real"),
    ],
    "error_feedback": [
        (lambda: tx.error_feedback(MEAN), T, "mean('data')", "compress(codec, mean(axis))"),
        (lambda: tx.error_feedback(tx.chain(FED, tx.clip_by_value(1.0))), T, "nothing in chain(error_feedback", "is lost"),
        (lambda: tx.error_feedback(tx.partition({"a": MEAN, "*": FED})), T, "nothing in partition(", "is lost"),
        (updated(lambda: tx.error_feedback(tx.compress(INT8, tx.mean(("node", "local")))), torch.ones(2),
        **NODES), V, "one axis", "chain"),
        (updated(lambda: tx.error_feedback(tx.chain(*(tx.compress(INT8, tx.mean(axis)) for axis in NODES))), torch.ones(2), **NODES), V,
         "twice", "chain(error_feedback(a), error_feedback(b))"),
        (updated(lambda: FED, {"w": torch.ones(4)}, {"w": torch.ones(3)}), V, "'w'", "(3,)", "(4,)"),
    ],
    "quantized": [
        (lambda: tx.quantized(tx.pmax, INT8), T, "pmax", "all_gather", "compress"),
        (lambda: tx.quantized(MEAN, INT8), T, "mean('data')", "compress(codec, hook)"),
        (lambda: tx.quantized(tx.psum, tx.int8), T, "int8", "quantized(psum, int8())"),
        (lambda: tx.quantized(tx.psum, INT8)(1.0, "data", dims=2), T, "dims"),
        (quantized("all_to_all", "data"), V, "all_to_all", "'w'"), (quantized("all_to_all", ("data",)), T, "('data',)"),
        (quantized("psum", "nowhere"), tx.UnboundAxis, "nowhere"),
        (on(lambda: tx.quantized(tx.psum, tx.qsgd())(torch.ones(3), "data")), V, "qsgd()", "keyed(seed, step)"),
    ],
    "power_sgd": [
        (lambda: tx.power_sgd("data").init({"a": {"b": X}, "a.b": X}), V, "several leaves", "'a.b'", "rename"),
        *((lambda rank=rank: tx.power_sgd("data", rank), V, "rank", "at least 1", repr(rank)) for rank in (0, 1.5, True)),
        *((lambda rate=rate: tx.power_sgd("data", min_compression_rate=rate), V, "min_compression_rate", repr(rate)) for rate in (0.0,
         float("nan"), "2")), (lambda: tx.power_sgd("data", epsilon=-1e-8), V, "epsilon", "-1e-08"),
        (lambda: tx.power_sgd("data", warmup_steps=-1), V, "warmup_steps"),
        (lambda: tx.power_sgd("data", seed=0.5), V, "seed", "0.5"), (lambda: tx.power_sgd("data", warm_start=1), T, "warm_start", "1"),
        (lambda: tx.batched_power_sgd("data", over="all"), V, "over", "'all'"),
        (complex_of(lambda: tx.power_sgd("data")), T, "'w' is complex"),
        (updated(lambda: tx.power_sgd("data"), {"a": torch.ones(9, 8)}, {"a": torch.ones(9, 7)}), V, "'a'", "(1, 8)", "another rank"),
    ],
    "mean": [
        (lambda: tx.mean("data", over="ranks"), V, "'weight', 'live' or 'world'", "'ranks'"),
        *((on(lambda given=given: MEAN.update(torch.ones(2), (), weight=given)), kind, "weight", text)
          for given, kind, text in ((10**400, V, "finite"), (1e300, V, "1e+300"), ("x", T, "'x'"), (-1.0, V, "must be a finite number"))),
        *((on(lambda given=given: MEAN.update(torch.ones(2),
        (), weight=given), data=1), T, "must be a number") for given in (1j, torch.tensor(1j))),
        (on(lambda: MEAN.update(torch.ones(2), (), weight=torch.ones(2)), data=1), V, "must be a scalar"),
    ],
    "scatter_mean": [(lambda: tx.scatter_mean(("node", "local")), T, "one axis", "chain(scatter_mean")],
    "tap": [(lambda: tx.tap(3), T, "3")], "switch_after": [(lambda: tx.switch_after(-1, MEAN, MEAN), V, "step", "-1")],
    "stateless": [(lambda: tx.stateless(3), T, "stateless", "3"),
    (lambda: tx.stateless(torch.sign, elementwise="tree"), T, "elementwise", "'tree'")],
    "masked": [
        (lambda: tx.masked(MEAN, 3), T, "which", "3"), (lambda: tx.masked(MEAN, ()), V, "which", "()", "nothing"),
        (lambda: tx.masked(MEAN, [3]), T, "which", "[3]"), (lambda: tx.masked(3, "*"), T, "3"),
        (lambda: tx.masked(tx.identity(), "c.*").init(PARAMS), V, "'c.*' matches no path"),
    ],
    "partition": [
        (lambda: tx.partition([SGD]), T, "mapping", "sgd(lr=0.1)"), (lambda: tx.partition(None), T, "mapping", "None"),
        (lambda: tx.partition({3: SGD}), T, "pattern", "3"), (lambda: tx.partition({}), V, "at least one pattern"),
        (lambda: tx.partition({"*": 3}), T, "'*'", "3"), (lambda: tx.partition({"a": SGD, "*": MEAN}), T, "must be a Transform"),
        (lambda: tx.partition({"a": SGD}).init(PARAMS), V, "'b'", "add '*'"),
        (lambda: tx.partition({"c.*": SGD, "*": SGD}).init(PARAMS), V, "['c.*']", "'a'"),
    ],
    "clip_by_global_norm": [(lambda: tx.clip_by_global_norm(0), V, "max_norm", "0"),
    (lambda: tx.clip_by_global_norm("1"), V, "max_norm must be a number", "'1'")],
    "clip_by_value": [(lambda: tx.clip_by_value(-1.0), V, "max_value", "-1.0")],
    "convert_sync_batchnorm": [
        (lambda: tx.convert_sync_batchnorm(3), T, "takes a module", "got 3"),
        (lambda: tx.convert_sync_batchnorm(nn.BatchNorm2d(3), None), T, "named by a string", "got None"),
        (lambda: tx.convert_sync_batchnorm(nn.BatchNorm2d(3))(torch.ones(2, 3, 1, 1)), tx.UnboundAxis, "data"),
    ],
    # -- pipelines
    "chain": [
        (lambda: tx.chain(SGD, MEAN), T, "argument 0", "an optimizer comes last"),
        *((lambda first=first: tx.chain(first, MEAN), V, "after accumulate", "accumulate(steps, chain(...))")
          for first in (tx.accumulate(2, tx.identity()), tx.skip_if_nonfinite(tx.accumulate(2, tx.identity())))),
        (lambda: tx.chain(tx.mean), T, "forget to call the factory"),
        (lambda: tx.chain(tx.fuse(MEAN, SGD)), T, "pipeline is complete already"),
        (lambda: tx.chain(MEAN, tx.clip_by_value(1.0)).update(PARAMS, ((),), None), V, "2 stages, but the state has 1"),
    ],
    "fuse": [
        (lambda: tx.fuse(MEAN, MEAN), T, "optimizer must be an Optimizer", "fuse(hook, optimizer)"),
        (lambda: tx.fuse(MEAN, torch.optim.SGD([X.clone().requires_grad_()])), T, "torch's SGD", "tx.sgd(lr)"),
        *((lambda hook=hook: tx.fuse(hook, SGD), T, "is of parameters, not of gradients", "after=")
          for hook in (tx.ema(0.9), tx.average_parameters("data"), tx.chain(MEAN, tx.average_state("data")))),
        *((lambda after=after: tx.fuse(MEAN, SGD, after), T, "would scale the parameters", "a stage of the hook")
          for after in (tx.clip_by_global_norm(1.0), tx.chain(MEAN, tx.clip_by_global_norm(1.0)))),
        (lambda: tx.fuse(SGD, MEAN), T, "an optimizer comes last"), (lambda: tx.fuse(MEAN, SGD, after=3), T, "fuse: after", "3"),
        (lambda: tx.fuse(SGD), T, "fuse", "'optimizer'", "hook, optimizer, after"),
        (lambda: tx.fuse(tx.chain(tx.scatter_mean("data"), tx.scatter_mean("local")), SGD), V, "shards twice"),
        (lambda: tx.fuse(tx.chain(tx.scatter_mean("data"), tx.power_sgd("node")), SGD), V, "power_sgd", "behind"),
        (lambda: tx.fuse(tx.chain(tx.scatter_mean("data"), MEAN), SGD), V, "mean('data')", "different pieces"),
        (lambda: tx.fuse(tx.chain(tx.scatter_mean("local"), tx.compress(torch.bfloat16, tx.mean(("node", "local")))), SGD), V,
         "over 'local'", "different pieces"),
        (lambda: tx.fuse(tx.every(2, tx.scatter_mean("data")), SGD), V, "every", "cannot hold"),
        (lambda: tx.fuse(tx.masked(tx.scatter_mean("data"), "a"), SGD), V, "masked", "cannot hold"),
        (lambda: tx.fuse(tx.scatter_mean("data"), SGD, MEAN), V, "mean('data')", "different pieces"),
        (lambda: tx.fuse(MEAN, SGD, gather_codec=INT8), V, "gather_codec=int8", "no scatter_mean"),
        (lambda: tx.fuse(MEAN, SGD, on_state=SGD), T, "on_state", "sgd"),
        (lambda: tx.fuse(MEAN, SGD, sharded_over=("data",)), T, "the name of one axis", "('data',)"),
        (lambda: tx.fuse(MEAN, SGD, sharded_over="node"), V, "must begin with mean('node')", "mean('data')"),
        (lambda: tx.fuse(tx.compress(torch.bfloat16, MEAN), SGD, sharded_over="data"), V, "nothing encodes", "compress"),
        (lambda: tx.simulate(lambda: tx.fuse(MEAN, tx.muon(), sharded_over="data").init({"w": X}), {"data": 2}), V,
         "'w' needs the whole parameter", "fjoin.fsdp.register"),
        (lambda: fjoin.save("never", tx.fuse(MEAN, SGD, sharded_over="data"), ({}, ())), T, "steps pieces", "state_dict"),
    ],
    "zero": [
        (lambda: tx.zero(tx.mean("node"), SGD, "data"), V, "no mean over 'data'"),
        (lambda: tx.zero(MEAN, SGD, "data").init(PARAMS), tx.UnboundAxis, "'data'", "fjoin.bind"),
        (on(lambda: tx.zero(MEAN, SGD, "data").init({"a.b": torch.ones(3), "a": {"b": torch.ones(4)}})), V, "have the paths ['a.b']"),
        (on(lambda: tx.zero(MEAN, tx.muon(0.1), "data").init({"w": torch.ones(3, 4), "b": torch.ones(3)})), V, "matrices only", "'b'"),
    ],
    "local_sgd": [
        (lambda: tx.local_sgd(SGD, MEAN, 0), V, "every", "got 0"), (lambda: tx.local_sgd(MEAN, MEAN, 2), T, "Optimizer"),
        (lambda: tx.local_sgd(SGD, MEAN, 2, state="forget"), V, "'keep' or 'average'", "'forget'"),
        (lambda: tx.local_sgd(SGD, tx.chain(MEAN, tx.mean("a")), 2, state="average"), V, "one mean", "chain("),
        (lambda: tx.local_sgd(SGD, "data", 2), T, "local_sgd: reduction", "'data'", "mean('data')"),
        *((lambda opt=opt: tx.local_sgd(opt, MEAN, 2, state="average").init({"w": torch.ones(2)}), T, name, "'w'")
          for opt, name in ((tx.nadam(), "mu_product"), (tx.asgd(), "eta"))),
    ],
    "post_local_sgd": [
        (lambda: tx.post_local_sgd(SGD, MEAN, 2, -1), V, "warmup_steps", "got -1"),
        (lambda: tx.post_local_sgd(SGD, tx.mean("a"), 4, 2, local=tx.mean("b")), V, "local=", "hook="),
    ],
    "diloco": [
        (lambda: tx.diloco(SGD, MEAN, 4, delay=4), V, "delay must be below every=4", "got 4"),
        (lambda: tx.diloco(SGD, MEAN, 4, mix=1.0), V, "mix", "1.0"),
        (lambda: tx.diloco(SGD, MEAN, 4, mix="a"), V, "mix", "'a'"),
        (lambda: tx.diloco(SGD, MEAN, 4, fragments=5), V, "5 fragments", "every=4"),
        (lambda: tx.diloco(SGD, MEAN, 4, fragments=0), V, "fragments", "got 0"),
        (lambda: tx.diloco(SGD, MEAN, 4, fragments=[]), V, "fragments", "got 0"),
        (lambda: tx.diloco(SGD, MEAN, 4, fragments=["*", "b", "*"]), V, "['*'] more than once"),
        (lambda: tx.diloco(SGD, MEAN, 4, fragments="wa"), T, "list of glob patterns", "'wa'", "['wa']"),
        (lambda: tx.diloco(SGD, MEAN, 4, fragments=["a", 3]), T, "a fragment", "got 3"),
        (lambda: tx.diloco(SGD, MEAN, 9, fragments=3).init(PARAMS), V, "3 fragments", "got 2", "'a', 'b'"),
        (lambda: tx.diloco(SGD, MEAN, 9, fragments=("a*",)).init(PARAMS), V, "'b'"),
        (lambda: tx.diloco(SGD, MEAN, 9, fragments=("a*", "b*", "c*")).init(PARAMS), V, "match no path", "c*"),
    ],
    "outer_step": [
        (lambda: tx.outer_step(tx.identity(), SGD), T, "identity()", "no reduction"),
        (lambda: tx.outer_step(tx.masked(MEAN, "w"), SGD), T, "no reduction"),
        (lambda: tx.outer_step(MEAN, MEAN), T, "Optimizer", "mean('data')"),
    ],
    "ema": [(lambda: tx.ema(1.0), V, "decay", "got 1.0"), (lambda: tx.fuse(tx.chain(MEAN, tx.ema(0.9)), SGD), T, "after=ema(")],
    "every": [
        (lambda: tx.every(0, MEAN), V, "steps", "0"), (lambda: tx.every(4, MEAN, first=-1), V, "first", "got -1"),
        (lambda: tx.every(4, MEAN, except_every=0), V, "except_every", "got 0"),
        (deep, V, "every", "101 deep", "at most 100"),
    ],
    "accumulate": [(lambda: tx.accumulate(1.5, MEAN), V, "steps", "1.5"),
        (updated(lambda: tx.masked(tx.accumulate(2, tx.identity()), "w"), {"w": torch.ones(2)}), V,
        "put accumulate around it")],
    "Transform": [
        (lambda: tx.Transform(lambda params: 1, lambda g, s: (g, s), "leaf"), T, "Needs.LEAVES", "'leaf'"),
        (lambda: tx.Transform(lambda params: (), lambda g: g), T, "(grads, state", "takes 1"),
    ],
    "factory": [(named_mean, V, "'mean' exists already")],
}  # fmt: skip

# What all names of a kind refuse: collectives, which a test also calls on real ranks, and hooks over axes.
TWICE: Any = ("data", "data")
PERM = [(0, 1)]
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "psum": tx.psum, "pmean": tx.pmean, "pmax": tx.pmax, "pmin": tx.pmin, "all_gather": tx.all_gather,
    "psum_scatter": tx.psum_scatter, "all_to_all": tx.all_to_all, "pbroadcast": lambda x, axis: tx.pbroadcast(x, axis, 0),
    "ppermute": lambda x, axis: tx.ppermute(x, axis, PERM), "axis_size": lambda x, axis: tx.axis_size(axis),
    "axis_index": lambda x, axis: tx.axis_index(axis),
}  # fmt: skip
OVER = ((TWICE, V, "names an axis twice"), (3, T, "got 3"), (None, T, "got None"))
ONE_AXIS = ("all_to_all", "pbroadcast", "ppermute")
COLLECTIVES: dict[str, list[tuple[Any, ...]]] = collections.defaultdict(list)
for name, call in CALLS.items():
    if name not in ONE_AXIS:
        COLLECTIVES[name] += [
            (lambda c=call, axis=axis: c(torch.ones(4), axis), kind, text) for axis, kind, text in OVER
        ]
    if "axis" not in name and name not in ("pmean", "pmin"):
        COLLECTIVES[name] += [
            (lambda c=call, d=dtype: c({"a": torch.ones(2).to(d)}, "data"), T, "'a'", str(dtype))
            for dtype in (torch.int16, torch.uint16, torch.float8_e4m3fn)
        ]
COLLECTIVES["pmax"] += [(lambda: tx.pmax(torch.ones(3) * 1j, "data"), T, "complex64", "order")]
COLLECTIVES["psum"] += [
    (lambda: tx.psum(torch.ones(3).to_sparse(), "data"), T, "sparse", "to_dense"),
    (lambda: tx.psum("x", "data"), T, "'x'", "tensors and numbers"),
]  # fmt: skip
COLLECTIVES["pbroadcast"] += [(lambda s=s: tx.pbroadcast(1.0, "data", s), V, "source", repr(s)) for s in (True, 1.0)]
COLLECTIVES["ppermute"] += [(lambda: tx.ppermute(1.0, "data", [1]), T, "perm", "pairs", "[1]")]  # type: ignore[list-item]


def over(name: str, make: Callable[[Any], Any]) -> list[tuple[Any, ...]]:
    """Axes that a hook refuses."""
    wrong = (
        (3, T, "got 3"), (None, T, "got None"), (["data"], T, "['data']"), (TWICE, V, "('data', 'data') names an axis twice"),
        ((), V, "at least one axis"),
    )  # fmt: skip
    return [(lambda axis=axis: make(axis), kind, text) for axis, kind, text in wrong]


HOOKS = {
    **{make.__name__: over(make.__name__, make) for make in (  # type: ignore[attr-defined]
        tx.mean, tx.sum_over, tx.average_buffers, tx.broadcast_buffers, tx.power_sgd, tx.batched_power_sgd, tx.broadcast_from_last)},
    "compress": over("compress", lambda axis: tx.compress(tx.int8(), tx.mean(axis))),
}  # fmt: skip
