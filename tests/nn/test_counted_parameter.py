import copy

import torch
from torch import nn

from hybridpp.nn.counted_parameter import CountedParameter
from hybridpp.nn.torch_private import version_of


def test_what_is_written_through_data_is_counted():
    flat = torch.arange(6.0)
    parameter, other = nn.Parameter(flat[:4]), nn.Parameter(flat[4:])
    parameter.mark = "kept"
    parameter.__class__ = CountedParameter
    assert (parameter.mark, parameter.is_leaf, parameter.data.requires_grad) == ("kept", True, False)
    writes = [
        lambda: parameter.data.mul_(2.0),
        lambda: torch._foreach_add_([parameter.data], 1.0),
        lambda: parameter.data[1:].zero_(),
        lambda: setattr(parameter, "data", parameter.data * 2.0),
        lambda: nn.utils.vector_to_parameters(torch.ones(4), [parameter]),
    ]
    for write in writes:
        before = version_of(parameter)
        write()
        assert version_of(parameter) > before
    assert torch.equal(parameter, torch.ones(4))
    assert version_of(other) == version_of(parameter)  # they lie in one tensor


def test_a_counted_parameter_becomes_a_plain_one_and_copies_work():
    parameter = nn.Parameter(torch.ones(3))
    parameter.__class__ = CountedParameter
    assert type(copy.deepcopy(parameter)) is CountedParameter
    parameter.sum().backward()
    parameter.__class__ = nn.Parameter
    assert type(parameter) is nn.Parameter
    before = version_of(parameter)
    parameter.data.mul_(2.0)
    assert version_of(parameter) == before
    assert torch.equal(parameter.grad, torch.ones(3))
