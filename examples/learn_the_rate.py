"""A learning rate learned by gradient descent: the derivative of a training run by its rate and momentum.

python examples/learn_the_rate.py
"""

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value

from fjoin import transforms as tx

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
start = {path: p.detach() for path, p in model.named_parameters()}
x = torch.randn(32, 3).double()
y = x.prod(1, keepdim=True)


def loss_fn(params: dict[str, Tensor]) -> Tensor:
    return torch.nn.functional.mse_loss(functional_call(model, params, x), y)


def after_training(hyper: dict[str, Tensor]) -> Tensor:
    """The loss after 12 steps, as a function of the logarithm of the rate, and of the momentum."""
    opt, params = tx.sgd(hyper["log_rate"].exp(), momentum=hyper["momentum"]), start
    state = opt.init(params)
    for _ in range(12):
        params, state = opt.step(params, torch.func.grad(loss_fn)(params), state)
    return loss_fn(params)


hyper = {"log_rate": torch.tensor(0.01).log().double(), "momentum": torch.tensor(0.5).double()}

# Check the derivative against finite differences.
slopes, first = grad_and_value(after_training)(hyper)
for name, slope in slopes.items():
    h = 1e-5
    up, down = (after_training({**hyper, name: hyper[name] + sign * h}) for sign in (1, -1))
    assert abs(slope - (up - down) / (2 * h)) < 1e-8, name

outer = tx.adam(0.1)
outer_state = outer.init(hyper)
for i in range(25):
    slopes, loss = grad_and_value(after_training)(hyper)
    print(
        f"{i:2d}: rate {hyper['log_rate'].exp():.4f}, momentum {hyper['momentum']:.3f}: loss after training {loss:.5f}"
    )
    hyper, outer_state = outer.step(hyper, slopes, outer_state)
last = after_training(hyper)
print(f"loss after training {first:.5f} -> {last:.5f}")
assert last < 0.8 * first
