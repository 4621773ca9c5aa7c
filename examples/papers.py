"""Three methods of papers as transforms of one's own: EF21, deep gradient compression, 1-bit Adam.

python examples/papers.py

They stand on the public names alone. A message is in units of the mean: `call.share(axis)` is this rank's factor in it. So uneven
batches, and ranks without a batch, need nothing more. A rank sends its code to all others, so the bytes grow with the ranks. Copy
what you need.
"""

from typing import Annotated, Any, NamedTuple

import optree
import torch
from optree import tree_map

import fjoin
from fjoin import transforms as tx

# Each rank has its own. A run that is loaded on another number of ranks begins with their sum.
Summed = Annotated[tx.PerRank[dict], tx.Merge.SUM]


def zeros(params: Any) -> Any:
    """Zeros like the parameters, in at least float32."""
    return tree_map(lambda p: torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)), params)


def share_of(call: tx.Call, axis: str, grads: Any) -> Any:
    """This rank's factor in the mean. The message of the weights is made where the gradients are."""
    return call.share(axis, device=next((g.device for g in optree.tree_leaves(grads)), None))


def exchanged(codec: tx.Codec, x: Any, axis: str) -> tuple[Any, Any]:
    """This rank's values as all ranks decode them, and the sum of all ranks' decoded values."""
    rows = tx.quantized(tx.all_gather, codec)(x, axis)
    return tree_map(lambda r: r[tx.axis_index(axis)], rows), tree_map(lambda r: r.sum(0), rows)


def settled(share: Any, grads: Any, out: Any, new: Any, old: Any) -> tuple[Any, Any]:
    """The result in the gradients' dtypes, and the state.

    Where no rank has input, the result is 0 and the state stays. It stays too where the result is not finite.
    """
    fine: Any = True
    for leaf in optree.tree_leaves(out):
        fine = fine & leaf.isfinite().all()
    out = share.where_any_live(tree_map(lambda x, g: x.to(g.dtype), out, grads), tree_map(torch.zeros_like, grads))
    return out, tree_map(lambda a, b: torch.where(share.any_live_on(a.device) & fine, a, b), new, old)


def lossy_mean(axis: str, init: Any, update: Any) -> tx.Transform:
    """A transform whose result depends on which leaves share a message, and which sends later what it leaves out."""
    return tx.Transform(
        init,
        update,
        tx.Needs.LAYOUT,
        facts=tx.Facts(reduces=tx.Reduction(axis, "weight"), compression=tx.Compression(None)),
    )


class EF21State(NamedTuple):
    own: Summed  # the estimate that all ranks have of this rank's share * gradient
    whole: dict  # the sum of all ranks' estimates


@tx.factory
def ef21(axis: str, codec: tx.Codec) -> tx.Transform:
    """Each rank sends the difference between its gradient and the estimate that all ranks have of it.

        c <- code(share * g - h),  h <- h + c,  H <- H + sum of all c,  the result: H

    A rank without input has a share of 0, so its estimate approaches 0. The error of the codec must be smaller than its input,
    as that of `top_k` is.

    Source: Richtarik, Sokolov and Fatkhullin, EF21, arXiv:2106.05203, algorithm 2.
    """

    def init(params: Any) -> EF21State:
        return EF21State(zeros(params), zeros(params))

    def update(grads: Any, state: EF21State, params: Any, call: tx.Call) -> tuple[Any, EF21State]:
        share = share_of(call, axis, grads)
        gap = tree_map(lambda g, h: share.times(g, plus=-h), grads, state.own)
        sent, total = exchanged(codec, gap, axis)
        own, whole = tree_map(torch.add, state.own, sent), tree_map(torch.add, state.whole, total)
        return settled(share, grads, whole, EF21State(own, whole), state)

    return lossy_mean(axis, init, update)


class DGCState(NamedTuple):
    momentum: Summed
    unsent: Summed


@tx.factory
def dgc(axis: str, k: float = 0.001, momentum: float = 0.9) -> tx.Transform:
    """Each rank sends the largest elements of its accumulated momentum; the other elements keep accumulating.

        u <- m u + share * g,  v <- v + u,  c <- the largest k of v,  v <- v - c,  u <- 0 where c is not 0
        the result: sum of all c

    The transform contains the momentum, so the optimizer behind it needs none: `fuse(dgc(axis), sgd(lr))`. A rank without input
    goes on with its momentum, as one process does with that of the mean. This form has no clipping and no warm-up of k
    (sections 3.2 and 3.3 of the paper). On one rank nothing is encoded: the result is the momentum.

    Source: Lin et al., Deep Gradient Compression, arXiv:1712.01887: momentum correction and momentum factor masking.
    """

    def init(params: Any) -> DGCState:
        return DGCState(zeros(params), zeros(params))

    def update(grads: Any, state: DGCState, params: Any, call: tx.Call) -> tuple[Any, DGCState]:
        share = share_of(call, axis, grads)
        u = tree_map(lambda g, u: share.times(g, plus=momentum * u), grads, state.momentum)
        v = tree_map(torch.add, state.unsent, u)
        sent, total = exchanged(tx.top_k(k), v, axis)
        if tx.axis_size(axis) > 1:
            u = tree_map(lambda u, c: torch.where(c != 0, 0.0, u), u, sent)
        return settled(share, grads, total, DGCState(u, tree_map(torch.sub, v, sent)), state)

    return lossy_mean(axis, init, update)


class OneBitAdamState(NamedTuple):
    step: int  # calls so far
    m: tuple  # the average of gradients, and for each leaf the sum of the weights in it
    v: tuple  # the same of their squares
    error: Summed


@tx.factory
def one_bit_adam(axis: str, warmup_steps: int, betas: Any = (0.9, 0.999), eps: float = 1e-8) -> tx.Transform:
    """Adam's direction. Behind a warm-up the variance is fixed, and each rank sends the signs of its momentum.

        at first  g <- sum of share * g,  m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2
        then      x <- share * (b1 m + (1 - b1) g) + e,  c <- sign code of x,  e <- x - c,  m <- sum of all c
        result    m / n_m / (sqrt(v / n_v) + eps),  0 where v = 0

    with n the sum of the weights in an average: that is Adam's bias correction. The optimizer behind it only takes the step:
    `fuse(one_bit_adam(axis, 1000), sgd(lr))`. This form does not encode the sum once more: a rank sends its code to all others.

    Source: Tang et al., 1-bit Adam, arXiv:2102.02888, algorithm 1.
    """
    b1, b2 = betas

    def average(beta: float, old: Any, new: Any) -> Any:
        return tree_map(lambda a, x: beta * a + (1 - beta) * x, old, (new, tree_map(torch.ones_like, old[1])))

    def init(params: Any) -> OneBitAdamState:
        m, v = ((zeros(params), tree_map(torch.sum, zeros(params))) for _ in range(2))
        return OneBitAdamState(0, m, v, zeros(params))

    def update(grads: Any, state: OneBitAdamState, params: Any, call: tx.Call) -> tuple[Any, OneBitAdamState]:
        (step, m, v, error), share = state, share_of(call, axis, grads)
        step = step if call.step is None else call.step
        if step < warmup_steps:
            g = tx.psum(tree_map(lambda g, e: share.times(g.to(e.dtype)), grads, error), axis)
            m, v = average(b1, m, g), average(b2, v, tree_map(torch.square, g))
        else:
            own, n_m = average(b1, m, grads)
            x = tree_map(lambda own, e: share.times(own, plus=e), own, error)
            sent, total = exchanged(tx.sign(), x, axis)
            m, error = (total, n_m), tree_map(torch.sub, x, sent)
        out = tree_map(lambda m, n_m, v, n_v: torch.where(v == 0, 0.0, m / n_m / ((v / n_v).sqrt() + eps)), *m, *v)
        out, kept = settled(share, grads, out, (m, v, error), state[1:])
        return out, OneBitAdamState(step + 1, *kept)

    return lossy_mean(axis, init, update)


def main() -> None:
    """Trains on three simulated ranks with uneven batches. Where nothing is lost, the result is that of plain torch on all data."""
    import _small

    model, batches = _small.make_model(), [_small.make_batches(rank) for rank in range(3)]
    apply, start, _ = fjoin.functional(model)
    start = {path: p.detach().clone() for path, p in start.items()}

    def loss_fn(params: dict, batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(apply(params, {}, batch[0]), batch[1])

    def together(some: list) -> Any:
        return tuple(map(torch.cat, zip(*some, strict=True)))

    def train(hook: tx.Transform, lr: float) -> dict:
        def one_rank(own: list) -> dict:
            pipeline = tx.fuse(hook, tx.sgd(lr))
            step = fjoin.train_step(loss_fn, pipeline, weight=lambda batch: len(batch[1]), bucket_bytes=400)
            state = step.init(start)
            for batch in step.join(own):
                state, _ = step(state, batch)
            return dict(state.clone().params)

        return tx.simulate(one_rank, {"data": 3}, batches)[0]

    def with_torch(optimizer: torch.optim.Optimizer) -> dict:
        """The parameters of one process that steps on the samples of all ranks."""
        model.load_state_dict(start)
        for i in range(max(map(len, batches))):
            optimizer.zero_grad()
            _small.loss(model, together([own[i] for own in batches if i < len(own)])).backward()
            optimizer.step()
        return {path: p.detach().clone() for path, p in model.named_parameters()}

    everything = together([batch for own in batches for batch in own])
    sgd, adam = (
        with_torch(torch.optim.SGD(model.parameters(), 0.1)),
        with_torch(torch.optim.Adam(model.parameters(), 0.02)),
    )
    for hook, lossless, lr, want in (
        (ef21("data", tx.top_k(0.2)), ef21("data", tx.float32()), 0.1, sgd),
        (dgc("data", 0.2), dgc("data", 1.0), 0.1, sgd),  # an element that is always sent has no momentum
        (one_bit_adam("data", 4), one_bit_adam("data", 100), 0.02, adam),
    ):
        found = train(lossless, lr)
        worst = max(float((found[path] - p).abs().max()) for path, p in want.items())
        print(f"{lossless}: {worst:.1e} from one process of plain torch on all data")
        before, after, of_torch = (float(loss_fn(params, everything)) for params in (start, train(hook, lr), want))
        print(f"{hook}: loss {before:.3f} -> {after:.3f}, plain torch {of_torch:.3f}")
        assert worst < 1e-6 and after < before


if __name__ == "__main__":
    main()
