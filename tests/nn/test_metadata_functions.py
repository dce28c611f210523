"""Functions that need no values of a tensor."""

from typing import ClassVar

import torch
from torch import Tensor

from hybridpp.nn.metadata_functions import METADATA_FUNCTIONS


class Noted(Tensor):
    """Notes the functions it is given to."""

    seen: ClassVar = set()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.add(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_all_work_on_a_tensor_without_values():
    for function in METADATA_FUNCTIONS:
        function(torch.empty(2, 3, device="meta"))


def test_they_are_what_torch_function_is_given():
    x = torch.zeros(2, 3).as_subclass(Noted)
    Noted.seen.clear()
    x.shape, x.dtype, x.device, x.requires_grad, x.ndim, x.is_cuda, x.layout, x._version  # noqa: B018
    x.size(), x.dim(), x.numel(), len(x), x.is_floating_point()
    assert len(Noted.seen) == 13
    assert Noted.seen <= METADATA_FUNCTIONS
