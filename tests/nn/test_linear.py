import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hybridpp.nn.linear import LinearShape, is_linear, is_matrix_layer, linear_shape, linear_shapes, output_dim


class Scaled(nn.Linear):
    """A subclass that is one too."""


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Linear(3, 5), LinearShape(0, 1, num_outputs=5, num_inputs=3)),
        (Scaled(3, 5), LinearShape(0, 1, num_outputs=5, num_inputs=3)),
        (Conv1D(5, 3), LinearShape(1, 0, num_outputs=5, num_inputs=3)),
    ],
)
def test_outputs_are_where_the_layer_kind_has_them(module, shape):
    assert linear_shape(module) == shape
    assert module.weight.shape[output_dim(module)] == 5
    assert is_linear(module)


@pytest.mark.parametrize("module", [nn.Embedding(3, 5), nn.LayerNorm(3), nn.Conv2d(1, 1, 3), nn.Identity()])
def test_modules_of_other_kinds_have_no_linear_shape(module):
    assert linear_shape(module) is None
    assert not is_linear(module)
    assert not is_matrix_layer(module)


def test_linear_shapes_are_listed_by_name():
    block = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 4)))
    assert {name: shape.num_outputs for name, shape in linear_shapes(block).items()} == {"0": 2, "2.0": 4}


def test_any_module_with_only_a_matrix_is_a_matrix_layer():
    router = nn.Module()
    router.weight = nn.Parameter(torch.zeros(2, 3))
    assert is_matrix_layer(router)
    router.child = nn.Identity()
    assert not is_matrix_layer(router)
