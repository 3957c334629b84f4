"""A module that takes another's place keeps what wrappers did to it."""

import torch
from torch import nn

from nanotrain_core.layout.roles import Role, overridden_by, override_forward, replace_module, tag, tag_of


def test_a_replacement_has_the_tag_and_runs_the_hooks_of_both_in_order():
    old, new = tag(nn.Linear(2, 2), Role.COLUMN, unit=2), nn.Linear(2, 2)
    seen = []
    old.register_forward_pre_hook(lambda module, args: seen.append("old before"))
    handle = old.register_forward_hook(lambda module, args, out: seen.append("old after"))
    new.register_forward_hook(lambda module, args, out: seen.append("new after"))
    assert replace_module(old, new) is new
    assert tag_of(new) == tag_of(old)
    new(torch.zeros(2))
    assert seen == ["old before", "old after", "new after"]
    handle.remove()
    seen.clear()
    new(torch.zeros(2))
    assert seen == ["old before", "new after"]


def test_hooks_with_keywords_and_of_backward_move_too():
    old, new = nn.Linear(2, 2), nn.Linear(2, 2)
    seen = []
    old.register_forward_pre_hook(lambda module, args, kwargs: seen.append("forward"), with_kwargs=True)
    old.register_full_backward_hook(lambda module, inputs, outputs: seen.append("backward"))
    replace_module(old, new)(torch.zeros(2, requires_grad=True)).sum().backward()
    assert seen == ["forward", "backward"]


def test_a_forward_that_was_taken_over_stays_inside_the_hooks_of_a_replacement():
    old, new = nn.Linear(2, 2), nn.Linear(2, 2)
    old.register_forward_pre_hook(lambda module, args: (args[0] + 1,))

    def double(module, x):
        return x * 2, module

    override_forward(old, double)
    assert overridden_by(old) is double
    assert overridden_by(new) is None
    replace_module(old, new)
    result, module = new(torch.tensor(3.0))
    assert result == 8
    assert module is new
