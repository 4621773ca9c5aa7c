"""The generic Join: code of torch's documentation with torch's classes and with ours, pure hooks, and what is refused."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.algorithms.join as torch_join
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from tests.helpers import max_diff, or_text, raises_text, same_bits, warned
from tests.oracle import whole_batch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, of torch.jit
    from torch.distributed.optim import ZeroRedundancyOptimizer


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).square().mean()


def batches_of(counts: list[int]) -> list[list[torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [[torch.randn(3, 4, generator=g, dtype=torch.float64) for _ in range(n)] for n in counts]


def state_of(optimizer: Any, params: list[Any]) -> list[Any]:
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        return []  # each rank has a part of it
    return [{k: torch.as_tensor(v).clone() for k, v in optimizer.state[p].items() if v is not None} for p in params]


CLASSES = {"torch": torch_join, "fjoin": fjoin}
# (classes of the joinables, class of the Join): each Join takes both kinds.
PAIRS = [("torch", "torch"), ("fjoin", "fjoin"), ("torch", "fjoin"), ("fjoin", "torch")]


def make_counter(kind: str, join: str, device: str = "cpu") -> Any:
    """The example of torch's documentation: how many inputs have all ranks had together."""
    classes, context = CLASSES[kind], CLASSES[join]

    class Hook(classes.JoinHook):  # type: ignore[misc,name-defined]
        def __init__(self, counter: Any, sync_max_count: bool, name: str) -> None:
            self.counter, self.sync_max_count, self.name = counter, sync_max_count, name

        def main_hook(self) -> None:
            self.counter.log.append(f"main {self.name}")
            dist.all_reduce(torch.zeros(1, device=device), group=self.counter.group)

        def post_hook(self, is_last_joiner: bool) -> None:
            self.counter.log.append(f"post {self.name} {is_last_joiner}")
            if self.sync_max_count:
                rank = dist.get_rank(self.counter.group)
                common = torch.tensor([rank if is_last_joiner else -1], device=device)
                dist.all_reduce(common, op=dist.ReduceOp.MAX, group=self.counter.group)
                dist.broadcast(self.counter.count, group_src=int(common.item()), group=self.counter.group)

    class Counter(classes.Joinable):  # type: ignore[misc,name-defined]
        def __init__(self, log: list[str], name: str = "a", group: Any = None) -> None:
            super().__init__()
            self.count = torch.zeros(1, device=device)
            self.log, self.name, self.group = log, name, group or dist.group.WORLD

        def __call__(self) -> Any:
            # torch's own notification, as in existing classes, works in either Join
            notify = torch_join.Join if kind == "torch" else context.Join
            work = notify.notify_join_context(self)
            ones = torch.ones(1, device=device)
            dist.all_reduce(ones, group=self.group)
            self.count += ones
            self.log.append(f"step {self.name}")
            return work

        def join_hook(self, **kwargs: Any) -> Any:
            self.log.append(f"kwargs {self.name} {sorted(kwargs)}")
            return Hook(self, kwargs.get("sync_max_count", False), self.name)

        @property
        def join_device(self) -> torch.device:
            return torch.device(device)

        @property
        def join_process_group(self) -> Any:
            return self.group

    return Counter


def counted(kind: str, join: str, inputs: list[int], names: str, settings: dict[str, Any]) -> Any:
    """Counters with the names: their counts, the log, works or None, whether the configuration is left on, and the error."""
    log, works, error = list[str](), [], ""
    make = make_counter(kind, join)
    counters = [make(log, name) for name in names]
    try:
        with CLASSES[join].Join(counters, **settings):
            for _ in range(inputs[dist.get_rank()]):
                works += [counter() is None for counter in counters]
    except RuntimeError as raised:
        error = f"{type(raised).__name__}: {raised}"
    return [counter.count.item() for counter in counters], log, works, counters[0]._join_config.enable, error


@pytest.mark.sample(2)
@pytest.mark.parametrize("inputs", [[2, 2, 2], [0, 0], [5, 0, 3, 1]], ids=str)
@pytest.mark.parametrize(("kind", "join"), PAIRS)
def test_counting_the_inputs_of_all_ranks(pool: Any, kind: str, join: str, inputs: list[int]) -> None:
    for rank, ((total,), log, _, left_on, _) in enumerate(
        pool.run(len(inputs), counted, kind, join, inputs, "a", {"sync_max_count": True})
    ):
        mains = max(inputs) - inputs[rank]
        want = ["kwargs a ['sync_max_count']", *["step a"] * inputs[rank], *["main a"] * mains, f"post a {mains == 0}"]
        assert (total, log) == (sum(inputs), want)
        assert left_on == (join == "torch"), "torch leaves its configuration on; ours does not"


@pytest.mark.parametrize(("kind", "join"), PAIRS)
def test_several_joinables_and_early_termination(pool: Any, kind: str, join: str) -> None:
    """Hooks run in the order given, and only the first joinable's notification is a message; throwing ends all."""
    (counts, log, works, *_), (counts_1, log_1, *_) = pool.run(2, counted, kind, join, [1, 2], "ab", {})
    begin = ["kwargs a []", "kwargs b []", "step a", "step b"]
    assert log == [*begin, "main a", "main b", "post a False", "post b False"]
    assert log_1 == [*begin, "step a", "step b", "post a True", "post b True"]
    assert counts == [2, 2] and counts_1 == [3, 3]
    # Through torch's own notification ours gives no handle: the message has been sent by then.
    assert works == [(kind, join) == ("torch", "fjoin"), True]
    name = "RuntimeError" if join == "torch" else "EarlyTermination"
    throws = {"throw_on_early_termination": True}
    for rank, (_, log, *_, text) in enumerate(pool.run(3, counted, kind, join, [3, 1, 2], "a", throws)):
        want = "Rank 1 exhausted all inputs." if rank == 1 else "Detected at least one rank that exhausted inputs."
        assert text.startswith(f"{name}: {want}") and log.count("step a") == 1, (rank, text)
        assert join == "torch" or rank == 1 or "rank 1" in text
    for _, log, *_, text in pool.run(2, counted, kind, join, [2, 2], "a", throws):
        assert (log.count("step a"), text) == (2, "")


def test_disabled_join_does_nothing(pool: Any) -> None:
    for _, log, *_ in pool.run(2, counted, "torch", "fjoin", [1, 1], "a", {"enable": False}):
        assert log == ["kwargs a []", "step a"]


# -- pure hooks --------------------------------------------------------------------------------------------


def joined_sum(inputs: list[float]) -> Any:
    """A state renewed by pure functions: the sum of all inputs, and weights taken from the last joiner."""
    mesh = fjoin.mesh({"data": -1})
    total = fjoin.as_joinable(lambda start=0.0: tx.JoinHook(lambda s: s + tx.psum(0.0, "data")), 0.0, mesh=mesh)
    weights = fjoin.as_joinable(tx.broadcast_from_last("data"), torch.full((2,), float(mesh.rank)), mesh=mesh)
    with fjoin.Join([total, weights], start=1.0) as join, fjoin.bind(mesh):
        for x in inputs:
            fjoin.Join.notify_join_context(total)
            total.state = total.state + tx.psum(x, "data")
    return float(total.state), weights.state.tolist(), join.last_joiner, join.iterations


@pytest.mark.parametrize(
    ("inputs", "last"), [([[1.0], [2.0, 3.0], [4.0, 5.0]], 1), ([[], [1.0]], 1), ([[], []], 0), ([[1.0, 2.0]] * 3, 0)]
)
def test_pure_hooks_simulated_and_real(pool: Any, inputs: list[list[float]], last: int) -> None:
    """Ties between last joiners go to the lowest rank, visibly; the simulation equals the processes."""
    most = max(map(len, inputs))
    want = [(sum(map(sum, inputs)), [last] * 2, last, most)] * len(inputs)
    assert tx.simulate(joined_sum, {"data": len(inputs)}, inputs) == want
    assert pool.each(joined_sum, inputs) == want


def test_the_configuration_is_reset_after_an_exception() -> None:
    one = fjoin.as_joinable(tx.JoinHook())
    before = one._join_config
    with contextlib.suppress(KeyError), fjoin.Join([one]):
        raise KeyError
    assert one._join_config is before
    fjoin.Join([one])  # not entered: nothing changes either
    assert one._join_config is before
    with fjoin.Join([one]):
        raises_text(fjoin.JoinError, lambda: fjoin.Join([one]).__enter__(), "inside another Join")
    with fjoin.Join([one]):
        pass


# -- what is refused ---------------------------------------------------------------------------------------


def joinables(n: int) -> str:
    mesh = fjoin.mesh({"data": -1})
    many = [fjoin.as_joinable(tx.JoinHook(), mesh=mesh) for _ in range(n)]
    words = ("rank 2 differs from rank 0 in its joinables", "same order")
    return raises_text(fjoin.DesyncError, lambda: fjoin.Join(many).__enter__(), *words)


def test_ranks_refuse_other_joinables_and_groups(pool: Any) -> None:
    assert len(tx.simulate(joinables, {"data": 3}, [1, 1, 2])) == 3
    pool.run(2, other_groups)


def other_groups() -> None:
    make, other = make_counter("fjoin", "fjoin"), dist.new_group([0, 1])
    raises_text(ValueError, lambda: fjoin.Join([]), "at least one joinable")
    raises_text(ValueError, lambda: fjoin.Join([make([]), make([], group=other)]), "process group")
    dist.barrier()  # the other rank may still be making the group


def left_behind() -> tuple[int, bool, list[str]]:
    """A warning names an optimizer that the Join does not know; after a Join that has failed the module is as it was."""
    ddp = DistributedDataParallel(make_model())
    module, optimizer = ddp.module, torch.optim.Adam(ddp.parameters(), 0.1)

    def joined() -> None:
        with fjoin.Join([ddp]):
            for _ in range(2):
                loss(ddp, torch.ones(2, 4, dtype=torch.float64)).backward()
                optimizer.step()
                optimizer.zero_grad()

    texts = [text for text in warned(joined) if "fall behind" in text]
    with contextlib.suppress(KeyError), fjoin.Join([ddp], divide_by_initial_world_size=False):
        raise KeyError
    module(torch.ones(2, 4).double()).sum().backward()
    return len(ddp._forward_hooks), "_sync_buffers" in vars(ddp), texts


def test_an_unknown_optimizer_and_a_failed_join(pool: Any) -> None:
    for hooks, syncs, (text,) in pool.run(2, left_behind):
        assert (hooks, syncs) == (0, False) and "Adam" in text and "Join([ddp, optimizer])" in text


# -- torch's own joinables in our Join: parameters and optimizer state equal on all ranks, and to one process --

PLAIN: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1), "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 0.05), "adam": lambda p: torch.optim.Adam(p, 0.05),
}  # fmt: skip
OPTIMIZERS: dict[str, Any] = PLAIN | {
    "torch's zero": lambda p: ZeroRedundancyOptimizer(p, torch.optim.AdamW, lr=0.05),
    "zero": lambda p: fjoin.ZeroRedundancyOptimizer(p, torch.optim.AdamW, lr=0.05),
    "local": lambda p: fjoin.PostLocalSGDOptimizer(PLAIN["adamw"](p), fjoin.PeriodicModelAverager(2)),
}  # fmt: skip
HOOKS: dict[str, Any] = {
    "": None, "allreduce": default_hooks.allreduce_hook, "fp16": default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
}  # fmt: skip


class Program(NamedTuple):
    """Training of modules d and g, which begin alike, in a Join.

    Attributes:
        counts: The batches of each rank.
        optimizer: Of OPTIMIZERS; or "over" which ranks a registered pipeline averages, so that it steps in backward passes.
        used: In each iteration the order of modules, and of their optimizers zd and zg; p is a forward pass alone, q without gradients.
        listed: The order of the Join's list.
        window: Passes to a step, in no_sync up to the last; of one number for each rank, or of all.
        clip: Whether gradients are clipped before a step, which a rank without input must do too.
        options: Of the DistributedDataParallel.
    """

    counts: list[int]
    optimizer: str = "adamw"
    used: str = "d zd"
    listed: str = "d zd"
    hook: str = ""
    window: Any = 1
    by_world: bool = True
    clip: bool = False
    options: dict[str, Any] = {}

    @property
    def over(self) -> Any:
        return self.optimizer.removeprefix("over ") if self.optimizer.startswith("over") else ""


def clip(params: Any) -> None:
    nn.utils.clip_grad_norm_(params, 0.01)


def train(program: Program) -> Any:
    """Two epochs: the modules' parameters, and the states of the optimizers."""
    modules: dict[str, Any] = {
        name: DistributedDataParallel(make_model(), **program.options) for name in "dg" if name in program.used
    }
    objects: dict[str, Any] = dict(modules)
    for name, ddp in modules.items():
        if program.over:
            fjoin.ddp.register(ddp, tx.fuse(tx.mean("data", over=program.over), tx.sgd(0.1, momentum=0.9)))
        else:
            objects[f"z{name}"] = OPTIMIZERS[program.optimizer](ddp.parameters())
        if HOOKS[program.hook] is not None:
            ddp.register_comm_hook(None, HOOKS[program.hook])
    settings: dict[str, Any] = {} if program.over else {"divide_by_initial_world_size": program.by_world}
    if program.clip:
        settings["before_step"] = lambda: clip(modules["d"].parameters())
    listed = [objects[name] for name in program.listed.split() if name in objects]
    window = program.window if isinstance(program.window, int) else program.window[dist.get_rank()]
    for _ in range(2):
        with fjoin.Join(listed, **settings):
            for i, batch in enumerate(batches_of(program.counts)[dist.get_rank()]):
                accumulates = (i + 1) % window != 0
                for name in program.used.split():
                    if name in "pq":
                        with torch.set_grad_enabled(name == "p"):
                            loss(modules["d"], batch)
                    elif name in modules:
                        with modules[name].no_sync() if accumulates else contextlib.nullcontext():
                            (loss(modules[name], batch) * (1 + "dg".index(name))).backward()
                    elif name in objects and not accumulates:
                        settings.get("before_step", lambda: None)()
                        objects[name].step()
                        objects[name].zero_grad()
                if program.over and not accumulates:
                    for ddp in modules.values():
                        ddp.zero_grad()
        for ddp in modules.values():
            ddp.zero_grad()
    params = [list(ddp.module.parameters()) for ddp in modules.values()]
    inner = [getattr(objects.get(f"z{name}"), "optim", objects.get(f"z{name}")) for name in modules]
    states = [state_of(one, ps) if program.optimizer in PLAIN else [] for one, ps in zip(inner, params, strict=True)]
    return [[p.detach().clone() for p in ps] for ps in params], states


def run(program: tuple[Any, ...]) -> Any:
    """Its end, or the text of its error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of unused parameters and of ZeRO
        return or_text(lambda: train(Program(*program)))


UNEVEN = [[3, 1], [0, 2, 4], [2, 0, 1, 3]]
PROGRAMS: list[Program] = [
    # Nothing drifts, no gradient is stale, in either order: over two epochs, and in optimizer state.
    *(Program(counts, optimizer, listed=listed) for counts, optimizer, listed in itertools.product(
        UNEVEN, ("momentum", "adamw", "torch's zero"), ("d zd", "zd d"))),
    # The divisor holds with every hook.
    *(Program([4, 1, 3], "momentum", hook=hook, by_world=by_world, window=window) for hook, by_world, window in itertools.product(
        HOOKS, (True, False), (1, 2))),
    *(Program(counts, options=options) for counts in ([4, 1], [0, 3, 2]) for options in (
        {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 1e-5})),
    *(Program(counts, options={"static_graph": True}) for counts in ([4, 1], [1, 3, 2])),
    Program([3, 1], "momentum", clip=True),
    # The order of the list is kept.
    *(Program([3, 1], optimizer, used, listed) for optimizer in ("adam", "torch's zero", "zero", "local") for used, listed in (
        ("d zd g zg", "d zd g zg"), ("d zd g zg", "zd d zg g"), ("d g zd zg", "d g zd zg"))),
    # A rank that ends within a window brings its gradients to the others' next step of a registered pipeline.
    *(Program(counts, f"over {over}", window=window) for counts, over, window in itertools.product(
        ([4, 1, 3], [3, 1, 1], [0, 5, 4]), ("weight", "live", "world"), (1, 2))),
    Program([3, 1], "over world", "d g", "d g"),
    *(Program(counts, "adam", "q d zd", by_world=counts[1] > 0) for counts in ([3, 0], [3, 1])),
]  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: " ".join(map(str, p)))
def test_it_is_one_process(pool: Any, program: Program) -> None:
    results = pool.run(len(program.counts), run, tuple(program))
    plain = program.optimizer if program.optimizer in PLAIN else "momentum" if program.over else "adamw"
    over = "world" if (program.over == "world" if program.over else program.by_world) else "live"
    settings = {"window": program.window, "of_window": bool(program.over)}
    before_step = (lambda model: clip(model.parameters())) if program.clip else None
    tolerance = 2e-3 if program.hook == "fp16" else 1e-12
    for i, factor in enumerate([1, 2] if "g" in program.used else [1]):
        model, own_loss = make_model(), lambda m, b, f=factor: f * loss(m, b)
        optimizer, params = PLAIN[plain](model.parameters()), list(model.parameters())
        for _ in range(2):
            whole_batch.train(
                model, optimizer, batches_of(program.counts), over, own_loss, before_step=before_step, **settings
            )
        state = state_of(optimizer, params)
        assert max_diff(params, [p.detach() for p in make_model().parameters()]) > 1e-3
        for own, own_state in results:
            assert max_diff(own[i], params) < tolerance
            assert same_bits((own[i], own_state[i]), (results[0][0][i], results[0][1][i])), "ranks differ"
            assert not own_state[i] or max_diff(own_state[i], state) < tolerance


# Programs that raise on all ranks, in the first iteration or as soon as a rank lacks input, and words of all errors.
ORDER, FORWARD, BACKWARD = "pass Join the order of the loop", "second forward pass", "has stepped once for 2 iterations"
REFUSED: list[tuple[Program, str]] = [
    (Program([3, 0], "zero", "g d zg zd", "d g zg zd"), ORDER), (Program([3, 1], "zero", "d d g zg zd", "d g zg zd"), ORDER),
    (Program([2, 2], "zero", "d g g zd zg", "d g zg zd"), ORDER),
    *((Program(counts, "adam", used, by_world=counts[1] > 0), words) for counts in ([3, 0], [3, 1])
      for used, words in (("p d zd", FORWARD), ("d d zd", BACKWARD))),
    (Program([0, 2, 2], "momentum", window=(1, 2, 1)), "no_sync"), (Program([2, 0], options={"static_graph": True}), "static_graph"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("program", "words"), REFUSED, ids=lambda p: " ".join(map(str, p)) if isinstance(p, Program) else ""
)
def test_it_is_refused_on_all_ranks(pool: Any, program: Program, words: str) -> None:
    texts = pool.run(len(program.counts), run, tuple(program))
    assert all(words in text and text.startswith(("JoinError", "PeerLost")) for text in texts), texts
    if words == "no_sync":
        assert [text.split(":")[0] for text in texts] == ["PeerLost", "JoinError", "PeerLost"]
        assert "inside no_sync" in texts[1] and "rank 2" in texts[1] and "rank 1 failed" in texts[0]
    if words == "static_graph":  # which rank 1 has never run: torch's own Join aborts the process
        assert texts[0].startswith("PeerLost") and "at least one batch" in texts[1]


# -- modules of other kinds: what each rank has at the end, equal to the bit -------------------------------


class Unused(nn.Linear):
    """One parameter is never used, one in the first iteration only, one is frozen, and the layer's own are used twice."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(4, 2)
        self.idle, self.once = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        twice = super().forward(super().forward(x) @ self.weight)
        return twice * self.frozen * (self.once if self.calls == 1 else 1)


class ByRank(nn.ModuleList):
    """Each rank uses another branch."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__([nn.Linear(4, 2), nn.Linear(4, 2)])

    def forward(self, x: Tensor) -> Any:
        return self[dist.get_rank()](x)


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def average(group: Any, buffers: dict[str, Tensor]) -> None:
    """After each forward pass, which torch's Join does not shadow."""
    for buffer in buffers.values():
        if buffer.is_floating_point():
            dist.all_reduce(buffer, group=group)
            buffer /= group.size()


# A module, its options, the counts, and what else is done: buffers averaged by a hook, or an evaluation on rank 1 alone.
MODULES: dict[str, tuple[Any, dict[str, Any], list[int], str]] = {
    **{f"unused {counts}": (Unused, {"find_unused_parameters": True}, counts, "") for counts in ([1, 4], [1, 4, 0, 2])},
    "by rank": (ByRank, {"static_graph": True}, [2, 5], ""),
    **{f"buffers {counts}": (normed, {}, counts, "") for counts in ([1, 4], [3, 0, 2])},
    "buffer hook": (normed, {}, [1, 3], "hook"), "evaluation": (normed, {}, [2, 4], "evaluation"),
}  # fmt: skip


def of_a_kind(name: str) -> Any:
    make, options, counts, more = MODULES[name]
    ddp = DistributedDataParallel(make(), **options)
    if more == "hook":
        ddp._register_buffer_comm_hook(ddp.process_group, average)
    optimizer = torch.optim.AdamW(ddp.parameters(), 0.1, weight_decay=0.5)
    g = torch.Generator().manual_seed(dist.get_rank())
    with fjoin.Join([ddp, optimizer]) as join:
        for _ in range(counts[dist.get_rank()]):
            optimizer.zero_grad()
            ddp(torch.randn(5, 4, generator=g)).square().mean().backward()
            optimizer.step()
            if more == "evaluation" and dist.get_rank() == 1:
                with torch.no_grad():
                    ddp.eval()
                    ddp(torch.ones(2, 4))
                    ddp.train()
    stepped = {path: p for path, p in ddp.module.named_parameters() if p in optimizer.state}
    steps = {path: float(optimizer.state[p]["step"]) for path, p in stepped.items()}
    values = {k: v.clone() for k, v in ddp.module.state_dict().items()}
    return values, state_of(optimizer, list(stepped.values())), steps, join.last_joiner, join.iterations


@pytest.mark.parametrize("name", MODULES)
def test_modules_of_other_kinds_end_equal_on_all_ranks(pool: Any, name: str) -> None:
    """Statistics of BatchNorm are counted on as long as any rank trains; parameters unused on all ranks are not stepped."""
    make, _, counts, _ = MODULES[name]
    results = pool.run(len(counts), of_a_kind, name)
    for values, states, steps, last, iterations in results:
        assert same_bits((values, states, steps), results[0][:3])
        assert last == counts.index(max(counts)) and iterations == max(counts)
        if make is Unused:
            assert steps == {"once": 1, "weight": max(counts), "bias": max(counts)}
        elif make is ByRank:
            assert len(steps) == 4
        else:
            assert values["1.num_batches_tracked"] == max(counts) and values["1.running_mean"].abs().max() > 0


def in_any_order(order: list[int]) -> Any:
    """DDP, two optimizers and a schedule, and clipping that must happen once in an iteration."""
    ddp = DistributedDataParallel(make_model())
    params, calls = list(ddp.parameters()), 0
    optimizers = [torch.optim.SGD(part, 0.1, momentum=0.9) for part in (params[:2], params[2:])]
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.5)

    def halve() -> None:
        nonlocal calls
        calls += 1
        for p in params:
            p.grad.mul_(0.5)

    joinables = [ddp, *optimizers, schedule]
    with fjoin.Join([joinables[i] for i in order], before_step=halve):
        for batch in batches_of([1, 4])[dist.get_rank()]:
            loss(ddp, batch).backward()
            halve()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()
    states = [state_of(o, o.param_groups[0]["params"]) for o in optimizers]
    return calls, schedule.get_last_lr(), [p.detach().clone() for p in params], states


def test_steps_follow_backward_and_schedules_follow_steps(pool: Any) -> None:
    a, b = pool.run(2, in_any_order, [3, 0, 2, 1])
    assert a[:2] == b[:2] == (4, [0.1 * 0.5**4]) and same_bits(a[2:], b[2:])


def inside_bind() -> bool:
    ddp = DistributedDataParallel(make_model())
    with fjoin.bind(fjoin.mesh({"data": -1})):
        before = len(dist.distributed_c10d._world.pg_map)
        for _ in range(3):
            fjoin.evaluate(lambda x: {"m": x}, [1.0])
        with fjoin.Join([ddp, fjoin.as_joinable(tx.JoinHook())]):
            pass
        return len(dist.distributed_c10d._world.pg_map) == before


def test_the_default_group_is_used_inside_bind_too(pool: Any) -> None:
    assert pool.run(2, inside_bind) == [True, True]
