"""Sixteen learning rates in one call: a whole training run as a function of its rate, mapped over the rates.

python examples/sweep.py
"""

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from fjoin import transforms as tx

STEPS = 60
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
start = {path: p.detach().clone() for path, p in model.named_parameters()}
x = torch.randn(64, 4).double()
y = torch.sin(x.sum(1, keepdim=True))


def loss_fn(params: dict[str, Tensor]) -> Tensor:
    return torch.nn.functional.mse_loss(functional_call(model, params, x), y)


def train(rate: Tensor) -> Tensor:
    """The loss after all steps."""
    opt, params = tx.adamw(rate), start
    state = opt.init(params)
    for _ in range(STEPS):
        params, state = opt.step(params, grad(loss_fn)(params), state)
    return loss_fn(params)


def with_torch(rate: float) -> float:
    model.load_state_dict(start)
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    for _ in range(STEPS):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return loss_fn(dict(model.named_parameters())).item()


rates = torch.logspace(-4, 0, 16, dtype=torch.float64)
losses = vmap(train)(rates)
for rate, loss in zip(rates.tolist(), losses.tolist(), strict=True):
    print(f"learning rate {rate:.5f}: loss {loss:.6f}")
best = int(losses.argmin())
print(f"best: {rates[best]:.5f}")
worst = max(abs(loss - with_torch(rate)) for rate, loss in zip(rates.tolist(), losses.tolist(), strict=True))
print(f"{worst:.1e} from sixteen trainings with torch.optim.AdamW")
assert 0 < best < 15 and worst < 1e-8
