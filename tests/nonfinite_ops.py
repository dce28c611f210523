"""Values that become inf or NaN on their way, forwards and backwards."""

import torch


def spoilt(tensor, value):
    """A copy with the first number replaced."""
    spoilt = tensor.clone()
    spoilt.view(-1)[0] = value
    return spoilt


class Through(torch.autograd.Function):
    """Changes the gradient on its way back."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.change(gradient), None
