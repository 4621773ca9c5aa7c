"""`explain`: the messages of a pipeline before it runs, counted in a step without data."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from ..axes import Axis, Message, all_to_all_single, bind_axes, names, psum, sent_bytes, to_order
from ..base import Call, Needs, Transform, Tree, check_transform, checks, record_words, shares, timings, trees
from ..combinators import behind, stages
from ..layout import Bucket, Pieces, bind_pieces, bucket_sizes, make_layout, record_bucket
from ..optimizers import masters_of, state_fields
from ._pipeline import Pipeline, parts_of
from ._plan import make_plan, records_of, takes_flat


class Row(NamedTuple):
    """One stage of a pipeline in one step."""

    stage: str  # its repr
    needs: Needs
    when: str  # "each step", with the number of its leaves; or "step 3" where other steps may have others
    messages: tuple[Message, ...]
    state_bytes: int  # the bytes that one rank keeps between steps


class Explanation(NamedTuple):
    """The result of `explain`; print it, or read its rows. All figures are for one rank and one step."""

    rows: tuple[Row, ...]  # hook, optimizer, parameter transform, in this order
    axes: dict[str, int]  # name -> ranks

    @classmethod
    def of_step(
        cls, pipeline: Pipeline, step: Callable[[Any], object], state: Any, axes: Mapping[str, Axis], at_step: int
    ) -> Explanation:
        """The messages of a step of this rank as it runs in `Pipeline.step`, all in one row.

        Args:
            step: Takes a step with a state without data.
            state: The state of the pipeline.
        """
        notes, sizes = list[Message](), {name: one.size for name, one in axes.items()}
        here: dict[str, Any] = {n: CountingAxis(n, one.size, notes, sizes, int(one.index())) for n, one in axes.items()}
        with torch.device("meta"), bind_axes(here):
            step(optree.tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, _at(state, at_step)))
        row = Row(repr(pipeline), Needs.TREE, _when(pipeline.hook, at_step), tuple(notes), _bytes_of(state))
        return cls((row,), sizes)

    @property
    def messages(self) -> int:
        return sum(len(row.messages) for row in self.rows)

    @property
    def payload_bytes(self) -> int:
        return sum(m.payload_bytes for row in self.rows for m in row.messages)

    @property
    def sent_bytes(self) -> int:
        return sum(m.sent_bytes for row in self.rows for m in row.messages)

    @property
    def state_bytes(self) -> int:
        return sum(row.state_bytes for row in self.rows)

    def __str__(self) -> str:
        table = [("stage", "needs", "when", "collective", "dtype", "messages", "payload", "sent", "state")]
        for row in self.rows:
            groups: dict[tuple[str, str], list[Message]] = {}
            for m in row.messages:
                groups.setdefault((f"{m.collective}({m.axis})", str(m.dtype).removeprefix("torch.")), []).append(m)
            first, *others = [(*key, *_sums(some)) for key, some in groups.items()] or [("-", "-", *_sums(()))]
            stage = row.stage if len(row.stage) <= 60 else row.stage[:57] + "..."
            table.append((stage, str(row.needs), row.when, *first, _bytes(row.state_bytes)))
            table += [("", "", "", *line, "") for line in others]
        when = next((row.when for row in self.rows if row.when.startswith("step ")), "")
        sums = _sums([m for row in self.rows for m in row.messages])
        table.append(("total per rank and step", "", when, "", "", *sums, _bytes(self.state_bytes)))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in table)


def _sums(messages: Sequence[Message]) -> tuple[str, str, str]:
    """The number of messages, their payloads, and what is sent."""
    payloads, sent = sum(m.payload_bytes for m in messages), sum(m.sent_bytes for m in messages)
    return str(len(messages)), _bytes(payloads), _bytes(sent)


def _bytes(n: int) -> str:
    value, unit = float(n), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"


def explain(
    pipeline: Pipeline | Transform,
    params: Tree,
    axes: Mapping[str, int],
    *,
    bucket_bytes: int | None = None,
    at_step: int = 0,
    buffers: Mapping[str, Tensor] | None = None,
    on_buffers: Transform | None = None,
) -> Explanation:
    """The messages and the state of each stage of a pipeline in one step, per rank, before anything runs.

    The stages are run once on tensors without data, over axes that only record the messages; nothing is declared by
    hand. Gradients are split into the buckets of `fjoin.train_step`, and each stage runs on a bucket or on the whole
    tree as it does there. The messages of an outer step with a delay are listed in the step in which the first begins.

    Args:
        pipeline: A `Pipeline`, or a `Transform` alone.
        params: The parameters; only paths, shapes and dtypes are used.
        axes: Axis name -> number of ranks.
        bucket_bytes: As in `fjoin.train_step`; by default as is best for the device of `params`.
        at_step: The step, counted from 0. Stages with a warm-up or a period may send other messages in other steps;
            their rows say so.
        buffers, on_buffers: As in `fjoin.train_step`: the buffers, path -> tensor, and their transform.

    Returns:
        An `Explanation`: `print` gives a table, `rows` the figures. `sent` assumes a ring.

    Raises:
        TypeError: neither pipeline nor transform; a stage that reads a tensor's value; a leaf that is no dense tensor.
        ValueError: no axis, a size that is no whole number from 1, or more than 2^20 ranks; a negative step;
            `on_buffers` without buffers.

    >>> from fjoin import transforms as tx
    >>> pipeline = tx.fuse(tx.mean("data"), tx.sgd(0.1, momentum=0.9))
    >>> what = explain(pipeline, {"w": torch.zeros(1000)}, {"data": 8})
    >>> what.messages, what.payload_bytes, what.state_bytes
    (1, 4080, 4004)
    """
    if bucket_bytes is not None:
        checks.whole_number("bucket_bytes", bucket_bytes, 1)
    checks.whole_number("at_step", at_step, 0)
    if not isinstance(buffers, Mapping | None):
        raise TypeError(f"explain: buffers must be a mapping from paths to tensors, got {buffers!r}")
    if on_buffers is not None:
        check_transform(on_buffers, "explain: on_buffers")
        if buffers is None:
            raise ValueError(f"on_buffers={on_buffers!r} was given without buffers")
    sizes = bucket_sizes(optree.tree_leaves(params), bucket_bytes)  # before the stages get tensors without data
    return Counting(pipeline, params, axes, sizes, buffers=buffers, on_buffers=on_buffers).explanation(at_step)


class CountingAxis(Axis):
    """An axis that records messages and returns values of the right shape."""

    def __init__(self, name: str, size: int, notes: list[Message], whole: dict[str, int], rank: int = 0) -> None:
        self.name, self.size, self._notes, self._whole, self._rank = name, size, notes, whole, rank

    def index(self) -> Tensor:
        return torch.tensor(self._rank, device="cpu")

    def run(self, op: str, x: Tensor, arg: Any) -> Tensor:
        sent = to_order(x, op == "pmax") if op in ("pmax", "pmin") else x
        payload, splits = sent.numel() * sent.element_size(), arg if op == "all_to_all_single" else None
        of_ring = sent_bytes(op, payload, self.size, splits)
        if self.size > 1:
            self._notes.append(Message(op, self.name, sent.dtype, payload, of_ring))
        if splits is not None:
            return x.new_zeros(sum(splits[1]), *x.shape[1:])
        if op == "all_gather":
            return x.new_zeros(self.size, *x.shape)
        return x.new_zeros(x.shape[1:]) if op == "psum_scatter" else torch.zeros_like(x)

    def joint(self, axes: tuple[str, ...]) -> CountingAxis | None:
        if axes != tuple(self._whole):
            return None
        return type(self)(" x ".join(axes), math.prod(self._whole.values()), self._notes, self._whole)


MOST_RANKS = 2**20


class Counting:
    """A step without data, whose parts are run over axes that only record the messages.

    Args:
        pipeline: A pipeline, or a hook alone.
        params: The parameters; only paths, shapes and dtypes are used.
        axes: Axis name -> number of ranks.
        sizes: The sizes of buckets in bytes; see `bucket_sizes`.
        buckets: Those of a DistributedDataParallel, whose messages carry gradients only.
        uses, compares: Whether its ranks sum which parameters are in use, and compare hyperparameters.
        buffers, on_buffers: The buffers, and their transform.

    Raises:
        TypeError: neither pipeline nor transform; a leaf that is no dense tensor.
        ValueError: axes that no mesh can have.
    """

    def __init__(
        self,
        pipeline: Pipeline | Transform,
        params: Tree,
        axes: Mapping[str, int],
        sizes: tuple[int | None, int | None] = (None, None),
        *,
        buckets: tuple[Bucket, ...] | None = None,
        uses: bool = False,
        compares: bool = True,
        buffers: Mapping[str, Tensor] | None = None,
        on_buffers: Transform | None = None,
    ) -> None:
        self._sizes = checks.axis_sizes(axes, MOST_RANKS)
        if not isinstance(pipeline, (Pipeline, Transform)):
            raise TypeError(f"explain takes a pipeline or a transform, got {pipeline!r}")
        self._pipeline = pipeline if isinstance(pipeline, Pipeline) else None
        self._hook = pipeline.hook if isinstance(pipeline, Pipeline) else pipeline
        self._parts = parts_of(pipeline, on_buffers)._replace(compares=compares)
        self._in_module, self._uses = buckets is not None, uses
        for path, leaf in trees.named_leaves(params).items():
            trees.check_dense(f"params[{path!r}]", leaf)
        self._notes: list[Message] = []
        self._recorders = {name: CountingAxis(name, n, self._notes, self._sizes) for name, n in self._sizes.items()}
        paths, leaves, _ = trees.flatten_in_insertion_order(params)
        self._pieces: Pieces | None = None
        with self._running():
            self._params = {path: torch.zeros(p.shape, dtype=p.dtype) for path, p in zip(paths, leaves, strict=True)}
            if self._pipeline is not None and self._pipeline.sharding is not None:
                self._pieces = self._pipeline.sharding.pieces(self._params, *sizes)
            self._buffers = {path: torch.zeros(b.shape, dtype=b.dtype) for path, b in (buffers or {}).items()}
            in_step = self._pieces.buckets if self._pieces else make_layout(self._params, lambda path: 0, *sizes)
        # The values that this rank steps.
        self._own: dict[str, Tensor] = self._pieces.own(self._params) if self._pieces else self._params
        self._layout = in_step if buckets is None else buckets
        self._plan = make_plan(self._hook, self._sizes, *self._parts.ends)
        words = record_words.words_dtype(bucket.dtype for bucket in self._layout)
        self._dtype = torch.float64 if self._in_module else words

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """A context without data, with the axes bound."""
        with torch.device("meta"), bind_axes(self._recorders), bind_pieces(self._pieces), torch.no_grad():  # type: ignore[arg-type]
            yield

    def explanation(self, step: int) -> Explanation:
        """The messages of a step."""
        with self._running():
            return Explanation(tuple(self._rows(step)), self._sizes)

    def _rows(self, step: int) -> Iterator[Row]:
        """The stages of the hook, what ranks sum beside gradients, the optimizer, and what comes after it."""
        records = records_of(self._plan, self._parts, step, "module" if self._in_module else "buckets")
        parts, reduced, pieces, own = stages(self._hook), self._plan.reduced(step), self._pieces, self._own
        call = Call(None, step)
        for axes in reduced.shares:  # the ranks have summed these
            call.know(axes, shares.totals_of(1.0, 1.0))
        values = self._params
        for i, part in enumerate(parts):
            sent = self._sent(self._stage, i, part, values, call)
            yield _row(part, step, sent, part.init(values))
            call = behind(part, call)
            values = own if part.sharded_over else values
        late = [axes for axes, goes in ((self._plan.loop_axes, records.apart), (reduced.axes, records.verdict)) if goes]
        for axes in (*records.before, *late):
            if sent := self._sum(self._words(axes), axes):
                yield Row("(the step's own counts)", Needs.LAYOUT, _when(self._hook, step), sent, 0)
        if self._uses:
            sent = self._sum(torch.zeros(len(self._params)), tuple(self._sizes))
            yield Row("(parameters that are used)", Needs.LAYOUT, "each step", sent, 0)
        slots: Any = {}
        if self._pipeline is not None:
            slots = self._pipeline.optimizer.init(own)
            yield from _optimizer_rows(self._pipeline, own, slots)
        if self._parts.after is not None:
            yield from self._ends(self._parts.after, step, masters_of(own, slots))
        yield from self._ends(self._parts.on_state, step, state_fields(slots))
        if records.pieces is not None:
            sent = self._sum(torch.zeros(2, dtype=torch.float64), (records.pieces,))
            yield Row("(whether all pieces are finite)", Needs.TREE, "each step", sent, 0)
        if self._pipeline is not None and (sharding := self._pipeline.sharding) is not None and pieces is not None:
            codec = "" if sharding.codec is None else f" by {sharding.codec!r}"
            state = sharding.init(pieces, own, slots)
            sent = self._sent(sharding.gather, pieces, self._params, own, slots, state)
            yield Row(f"(the parameters of all ranks{codec})", Needs.LAYOUT, "each step", sent, _bytes_of(state))
        yield from self._ends(self._parts.on_buffers, step, self._buffers, sharded=False)
        if self._pipeline is not None and self._pipeline.skips is not None:
            state = self._pipeline.skips.begin(())
            yield Row(f"{self._pipeline.spec.name or 'custom'}(...)", Needs.TREE, "each step", (), _bytes_of(state))

    def _sent(self, run: Callable[..., object], *args: Any) -> tuple[Message, ...]:
        """The messages of a part of the step."""
        del self._notes[:]
        run(*args)
        return tuple(self._notes)

    def _sum(self, words: Tensor, axes: tuple[str, ...]) -> tuple[Message, ...]:
        """The messages of a sum over the ranks of some axes, if there are several."""
        return self._sent(psum, words, axes) if self._ranks(axes) > 1 else ()

    def _ranks(self, axes: tuple[str, ...]) -> int:
        return math.prod(self._sizes.get(name, 1) for name in axes)

    def _words(self, axes: tuple[str, ...]) -> Tensor:
        """The record in a message of its own."""
        count = len(record_words.record_names(self._ranks(axes))) * record_words.words_per_scalar(self._dtype)
        return torch.zeros(count, dtype=self._dtype)

    def _ends(self, part: Transform | None, step: int, values: Tree, sharded: bool = True) -> Iterator[Row]:
        """A transform at the end of a step."""
        axis = self._pieces.axis if self._pieces is not None and sharded else None
        call = Call(step=step).inside(persistent=True, sharded_over=axis)
        for one in stages(part) if part is not None else ():
            state = one.init(values)
            yield _row(one, step, self._sent(_run, one, values, self._params, state, call), state)

    def _stage(self, i: int, part: Transform, values: dict[str, Tensor], call: Call) -> None:
        """Run a stage of the hook."""
        early = stages(self._plan.early) if self._plan.early is not None and self._layout else []
        if part is self._plan.reduce or i < len(early):
            self._in_buckets(part, values, call)
        elif part is not self._plan.clip or (self._in_module and call.sharded_over):
            # The step knows the norm itself; of pieces it is in the message that says whether they are finite.
            _run(part, values, values, part.init(values), call)

    def _in_buckets(self, part: Transform, values: dict[str, Tensor], call: Call) -> None:
        """Run a stage bucket by bucket.

        One message of a plain reduction carries the record, if there is a bucket for it.
        """
        plain, carrier, words = part is self._plan.reduce, None, torch.zeros(0)
        # A module's buckets are not those from which pieces are cut, so one bucket may hold parts of several.
        in_parts = self._in_module and self._pieces is not None
        flat = plain or (self._plan.early is not None and takes_flat(self._plan.early) and not in_parts)
        if plain and part.facts.reduces is not None and not self._in_module:
            words, carrier = self._words(names(part.facts.reduces.axis)), record_bucket(self._layout)
            if carrier is None or part.sharded_over:
                carrier = None
                psum(words, part.facts.reduces.axis)
        full = None if flat else part.init(values)
        for k, bucket in enumerate(self._layout):
            pieces = self._pieces
            if pieces is not None:
                pieces = pieces.among(bucket.paths) if in_parts else pieces.flat(k, "") if flat else pieces.only(k)
                if plain and in_parts:
                    _send_slices(pieces, bucket)
                    continue
            with bind_pieces(pieces):
                if flat:
                    some = {"": torch.zeros(bucket.numel, dtype=bucket.dtype)}
                    some = pieces.own(some) if pieces and call.sharded_over else some
                    if k == carrier:  # behind the gradients, in the same buffer
                        some = {"": torch.cat([some[""], words])}
                    state = part.init(some)
                else:
                    some = {path: values[path] for path in bucket.paths}
                    state = trees.restrict(full, self._params, some)
                _run(part, some, some, state, call)


def _send_slices(pieces: Pieces, bucket: Bucket) -> None:
    """The message of a module's bucket: all slices of other ranks at once."""
    sizes = [sum(stop - start for start, stop in of.values()) for of in pieces.slices_of_all]
    give, take = [0, *sizes[1:]], [0, *(sizes[0] for _ in sizes[1:])]
    flat = torch.zeros(sum(give), dtype=bucket.dtype)
    all_to_all_single(flat, pieces.axis, input_split_sizes=give, output_split_sizes=take)


def _row(part: Transform, step: int, sent: tuple[Message, ...], state: Any) -> Row:
    return Row(repr(part), part.needs, _when(part, step), sent, _bytes_of(state))


def _when(part: Transform, step: int) -> str:
    return f"step {step}" if timings.changes_with_steps(part) else "each step"


def _optimizer_rows(pipeline: Pipeline, params: dict[str, Tensor], states: Any) -> Iterator[Row]:
    """One row for each different optimizer, with the number of its leaves."""
    served: dict[Any, list[str]] = {}
    for path in params:
        served.setdefault(id(pipeline.optimizer.at(path)), []).append(path)
    for paths in served.values():
        part = pipeline.optimizer.at(paths[0])
        when = "each step" if len(paths) == len(params) else f"each step, {len(paths)} of {len(params)} leaves"
        needs = Needs.NOTHING if part.elementwise else Needs.LEAVES
        yield Row(repr(part), needs, when, (), _bytes_of([states[path] for path in paths]))


def _bytes_of(state: Any) -> int:
    """The bytes of the tensors of a state, each counted once."""
    found = {id(t): t for t in optree.tree_leaves(state) if isinstance(t, Tensor)}
    return sum(t.numel() * t.element_size() for t in found.values())


def _run(part: Transform, values: Tree, params: dict[str, Tensor], state: Any, call: Call) -> None:
    """Call a stage in the step of the call.

    Raises:
        TypeError: it reads a tensor's value.
    """
    try:
        part.run(dict(values), _at(state, call.step or 0), params, call)
    except (RuntimeError, NotImplementedError) as error:
        if "meta tensor" not in str(error).lower():  # a part of torch's errors for tensors without data
            raise
        text = f"{part!r} reads a tensor's value ({error}), so its messages are not known before it runs"
        raise TypeError(f"{text}; decide by host integers in the state, or with torch.where") from None


def _at(state: Any, step: int) -> Any:
    """The state with its host counters `step` set to this step; of windows of several calls, before their last call."""
    if hasattr(state, "before_the_end"):
        return state.before_the_end(_at(state.inner, step))
    if hasattr(state, "_fields"):
        parts = zip(state._fields, state, strict=True)
        return type(state)(*(step if name == "step" and type(v) is int else _at(v, step) for name, v in parts))
    return type(state)(_at(part, step) for part in state) if type(state) in (tuple, list) else state
