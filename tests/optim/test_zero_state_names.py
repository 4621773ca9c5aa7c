"""The states of ZeroRedundancyOptimizer have the names of torch's own optimizers, both ways."""

import pytest
import torch
import torch.distributed as dist

import fjoin

CLASSES = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    (torch.optim.Muon, {"lr": 0.1}),
    (torch.optim.AdamW, {"lr": 0.1}),
]


def _step(optimizer, p, seed):
    p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
    optimizer.step()


@pytest.mark.parametrize(("optimizer_class", "arguments"), CLASSES, ids=lambda one: getattr(one, "__name__", ""))
def test_states_go_from_torch_to_zero_and_back(optimizer_class, arguments):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        theirs, ours = torch.ones(3, 2).requires_grad_(), torch.ones(3, 2).requires_grad_()
        optimizer = optimizer_class([theirs], **arguments)
        _step(optimizer, theirs, 0)
        zero = fjoin.ZeroRedundancyOptimizer([ours], optimizer_class, **arguments)
        ours.data.copy_(theirs.data)
        zero.load_state_dict(optimizer.state_dict())
        for seed in (1, 2):
            _step(optimizer, theirs, seed)
            _step(zero, ours, seed)
        torch.testing.assert_close(ours, theirs)
        zero.consolidate_state_dict()
        state, expected = zero.state_dict()["state"][0], optimizer.state_dict()["state"][0]
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(torch.as_tensor(state[name]), torch.as_tensor(value), check_dtype=False)
    finally:
        dist.destroy_process_group()
