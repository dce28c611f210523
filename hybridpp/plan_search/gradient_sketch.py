"""Comparison of results and of gradients, and the sketches of gradients that are kept for it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn

# Relative to the largest number. Some modules compute in fp32 whatever their dtype, so right results may be
# off by 1e-6 (if all is fp32, by 1e-5); wrong ones are off by the order of the numbers themselves.
_TOLERANCE = {torch.float64: 2e-5, torch.float32: 3e-4}

Sketch: TypeAlias = tuple[Tensor, ...]
"""For each dimension of a tensor, its sum over the others, weighted by random numbers; a vector itself.

Different tensors have different sketches (with probability one: the random numbers are independent of both). A sketch
of a block's largest weight has a ten-thousandth of its size. Along the dimension in which a tensor is sharded, its
sketch is made of the ranks' sketches; where ranks hold summands, the sketches are summands, too.
"""


def sketch(tensor: Tensor) -> Sketch:
    """The sketch of a tensor."""
    if tensor.dim() < 2:
        return (tensor.detach().clone(),)
    return tuple(_along(tensor.detach(), dim) for dim in range(tensor.dim()))


def no_sketch(tensor: Tensor) -> Sketch:
    """The sketch of zeros of a tensor's shape."""
    return tuple(tensor.new_zeros(size) for size in tensor.shape) if tensor.dim() else (tensor.new_zeros(()),)


@contextmanager
def sketched_on_arrival(parameters: Mapping[str, nn.Parameter]) -> Iterator[dict[str, Sketch]]:
    """Inside, each gradient is replaced by its sketch as soon as it is computed, which bounds memory."""
    arrived: dict[str, Sketch] = {}

    def keep(name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None, "it has just arrived"
        found = sketch(parameter.grad)
        # Reentrant checkpointing computes the gradient in parts.
        arrived[name] = tuple(map(torch.add, arrived[name], found)) if name in arrived else found
        parameter.grad = None

    hooks = [
        parameter.register_post_accumulate_grad_hook(partial(keep, name))  # type: ignore[no-untyped-call]  # torch
        for name, parameter in parameters.items()
    ]
    try:
        yield arrived
    finally:
        for hook in hooks:
            hook.remove()


def _along(tensor: Tensor, kept: int) -> Tensor:
    # From the outer dimensions inwards, so that nothing is copied.
    for dim in reversed(range(kept + 1, tensor.dim())):
        tensor = torch.tensordot(tensor, _weights(tensor.shape[dim], dim).to(tensor), ([dim], [0]))
    for dim in range(kept):
        tensor = torch.tensordot(tensor, _weights(tensor.shape[0], dim).to(tensor), ([0], [0]))
    return tensor


def _weights(size: int, dim: int) -> Tensor:
    """Random weights, different for each dimension, scaled so that a weighted sum has the size of its terms."""
    numbers = torch.randn(size, generator=torch.Generator().manual_seed(dim))
    return numbers.div_(max(size, 1) ** 0.5)


def close(found: Tensor, expected: Tensor, scale: float = 0.0) -> bool:
    """Whether numbers are equal but for rounding; ``scale`` allows 5 % more where all numbers are small."""
    if found.shape != expected.shape:
        return False
    limit = _TOLERANCE.get(expected.dtype, 3e-4) * (largest(expected) + 0.05 * scale)
    return torch.allclose(found, expected, rtol=0.0, atol=limit, equal_nan=True)


def largest(numbers: Tensor) -> float:
    """The largest absolute value; 0 where there is none."""
    return float(numbers.abs().nan_to_num(0.0, 0.0, 0.0).max()) if numbers.numel() else 0.0
