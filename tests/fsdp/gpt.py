"""A small GPT, uneven batches of it, its shards, and the same training in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fjoin
from fjoin import transforms as tx

WIDTH, VOCABULARY, LENGTH, STEPS = 8, 13, 6, 5
Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(n, t, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, t, d))
        return x + self.down(F.gelu(self.up(x)))


class GPT(nn.Module):
    """Of `scale` all ranks but the first have nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.scale, self.head = nn.Parameter(torch.ones(1)), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)


def make_model(seed: int = 0, dtype: torch.dtype = torch.float64) -> GPT:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return GPT().to(dtype)


def frozen_model() -> GPT:
    model = make_model()
    for p in (model.places.weight, model.blocks[0].up.weight):  # type: ignore[union-attr]
        p.requires_grad_(False)  # type: ignore[operator]
    return model


def make_batches(rank: int, uneven: bool = True) -> list[Batch]:
    """The batches of a rank, which are uneven in number and in length."""
    g, found = torch.Generator().manual_seed(100 + rank), []
    for _ in range(max(1, STEPS - rank) if uneven else STEPS):
        t = int(torch.randint(LENGTH // 2, LENGTH + 1, (), generator=g)) if uneven else LENGTH
        tokens = torch.randint(0, VOCABULARY, (2, t + 1), generator=g)
        found.append((tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()))
    return found


def tokens(batch: Batch) -> int:
    return batch[1].numel()


def loss_of(model: Any, batch: Batch) -> Tensor:
    logits = model(batch[0]).flatten(0, 1)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), batch[1])


def shard(model: Any, mesh: Any, **options: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def full(model: nn.Module) -> dict[str, Tensor]:
    """The whole parameters, on all ranks."""
    return {path: p.full_tensor().detach().clone() for path, p in model.named_parameters()}  # type: ignore[operator]


class Case(NamedTuple):
    """A pipeline, and how it is trained.

    Attributes:
        window: Batches to a step.
        over: What a rank counts.
        poisoned: A step in which rank 1 has a loss of NaN, which all ranks leave out.
        idle_nan: Whether a rank that is out of input has a loss of NaN.
        axes: "replicate" and "data", or "data" alone, whose size is then that of all ranks.
        tolerance: Of the largest difference.
    """

    pipeline: Callable[[], tx.Pipeline]
    make: Callable[[], GPT] = make_model
    window: int = 1
    over: str = "weight"
    poisoned: int | None = None
    idle_nan: bool = False
    uneven: bool = True
    replicas: int = 1
    tolerance: float = 1e-12


def mesh_of(case: Case, ranks: int) -> tuple[Any, Any, fjoin.Mesh | None]:
    """The mesh that torch shards over, and that of the pipeline."""
    if case.replicas == 1:
        return init_device_mesh("cpu", (ranks,), mesh_dim_names=("data",)), None, None
    grid = init_device_mesh("cpu", (case.replicas, ranks // case.replicas), mesh_dim_names=("replicate", "data"))
    return grid["data"], grid, fjoin.mesh(grid)


def train(model: Any, handle: Any, case: Case, rank: int, mesh: Any, batches: list[Batch] | None = None) -> None:
    own = make_batches(rank, case.uneven) if batches is None else batches
    for i, batch in enumerate(loop := fjoin.join(own, weight=tokens, accumulate=case.window, mesh=mesh)):
        loss = loss_of(model, batch)
        if (i == case.poisoned and rank == 1) or (case.idle_nan and not loop.weight):
            loss = loss * float("nan")
        handle.backward(loss, loop.weight, sync=loop.sync_gradients)
        if loop.sync_gradients:
            handle.step()


def in_one_process(case: Case, ranks: int) -> list[tuple[dict[str, Tensor], Any]]:
    """(parameters, state) of each replica: the same pipeline on gradients of plain autograd of all its batches at once."""
    size = ranks // case.replicas

    def replica(number: int) -> Any:
        model, pipeline = case.make(), case.pipeline()
        params = {path: p.detach().clone() for path, p in model.named_parameters() if p.requires_grad}
        state = pipeline.init(params)
        of = [make_batches(number * size + rank, case.uneven) for rank in range(size)]
        most = max(len(make_batches(rank, case.uneven)) for rank in range(ranks))
        for first in range(0, most, case.window):
            parts = [batch for own in of for batch in own[first : first + case.window]]
            weights = [tokens(batch) if case.over == "weight" else 1 for batch in parts]
            total = size if case.over == "world" else sum(weights)
            if first == case.poisoned:
                continue
            with torch.no_grad():
                for path, p in model.named_parameters():
                    p.copy_(params.get(path, p))
            scale = float(getattr(state, "scale", 1.0))
            model.zero_grad()
            for batch, weight in zip(parts, weights, strict=True):
                (loss_of(model, batch) * (weight / total * scale)).backward()
            grads = {
                path: p.grad if p.grad is not None else torch.zeros_like(p)
                for path, p in model.named_parameters()
                if path in params
            }
            weight = sum(map(tokens, parts)) if case.over == "weight" else len(parts)
            params, state = pipeline.step(params, grads, state, weight=float(weight))
        return pipeline.flush(params, state)

    return tx.simulate(replica, {"replicate": case.replicas, "data": 1}, list(range(case.replicas)))
