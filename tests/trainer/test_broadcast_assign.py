"""How parameters get what a broadcast brought: they take over its memory, or it is copied into them."""

import pytest
import torch

from syncd.transports.torch_tensors import assign


def values(*shape, dtype=torch.float32):
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one = torch.nn.Parameter(torch.zeros(3, 4))
        self.two = self.one
        self.register_buffer("held", torch.zeros(2))


def test_parameters_take_over_the_memory_and_the_module_uses_it():
    module = torch.nn.Linear(4, 3)
    before = dict(module.named_parameters())
    state, new = module.state_dict(keep_vars=True), {"weight": values(3, 4), "bias": values(3)}
    assert assign(state, new)
    for name, parameter in module.named_parameters():
        assert parameter is before[name]
        assert parameter.data_ptr() == new[name].data_ptr()
        assert parameter.requires_grad
    sent = torch.ones(4)
    assert torch.equal(module(sent), new["weight"] @ sent + new["bias"])
    assert assign(state, {name: tensor + 1 for name, tensor in new.items()})
    assert torch.equal(module.weight, new["weight"] + 1)


def test_names_of_one_parameter_stay_tied_and_buffers_are_filled():
    module = Tied()
    held = module.held.data_ptr()
    assert assign(module.state_dict(keep_vars=True), {"one": values(3, 4), "held": values(2)})
    assert module.one is module.two
    assert torch.equal(module.two, values(3, 4))
    assert module.held.data_ptr() == held
    assert torch.equal(module.held, values(2))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nn.Parameter(torch.zeros(2, 3)).detach(),
        lambda: torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16)),
        lambda: torch.nn.Parameter(torch.zeros(3, 2).T),
        lambda: torch.nn.Parameter(torch.zeros(2, 3).share_memory_()),
    ],
    ids=["detached", "other dtype", "other strides", "shared with processes"],
)
def test_what_others_may_refer_to_or_what_differs_is_filled_in_place(make):
    target, new = make(), values(2, 3)
    before = target.data_ptr()
    assert not assign({"w": target}, {"w": new})
    assert target.data_ptr() == before != new.data_ptr()
    assert torch.equal(target.float(), new)


def test_parameters_that_share_memory_by_views_are_filled_in_place():
    memory = torch.zeros(4)
    one, two = torch.nn.Parameter(memory), torch.nn.Parameter(memory)
    assert not assign({"one": one, "two": two}, {"one": values(4)})
    assert torch.equal(two, values(4))
