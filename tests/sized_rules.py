"""Optimizers whose rule for a parameter depends on its sizes."""

import torch
from torch import optim


class SizedRule(optim.Optimizer):
    """Descends along what a subclass makes of a gradient."""

    def __init__(self, params, lr=1e-2, **settings):
        super().__init__(params, {"lr": lr, **settings})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                parameter.sub_(self.direction(parameter.grad, group), alpha=group["lr"])


class FactoredFrom(SizedRule):
    """Second moments by row and column, as Adafactor's, of matrices of which both sides have ``least`` elements."""

    def __init__(self, params, lr=1e-2, least=128):
        super().__init__(params, lr, least=least)

    def direction(self, gradient, group):
        square = gradient.square() + 1e-12
        if gradient.dim() == 2 and min(gradient.shape) >= group["least"]:
            square = torch.outer(square.mean(1), square.mean(0)) / square.mean()
        return gradient / square.sqrt()


class InBlocksOf256(SizedRule):
    """Rounds to 8 bits in blocks of 256, as torchao does, where they fill a tensor of 4096 elements or more."""

    def direction(self, gradient, group):
        if gradient.numel() < 4096 or gradient.numel() % 256:
            return gradient
        blocks = gradient.reshape(-1, 256)
        scale = blocks.abs().amax(1, keepdim=True) / 127 + 1e-12
        return ((blocks / scale).round() * scale).view_as(gradient)


class FromTo(SizedRule):
    """Takes the mean off gradients of a number of elements between two bounds."""

    def __init__(self, params, least=0, most=2**60):
        super().__init__(params, least=least, most=most)

    def direction(self, gradient, group):
        return gradient - gradient.mean() if group["least"] <= gradient.numel() <= group["most"] else gradient


class MatricesOnly(SizedRule):
    """Takes matrices, and no others."""

    def direction(self, gradient, group):
        rows, columns = gradient.shape
        return gradient / (gradient.norm() + rows / columns)


class FindsItsStepSize(optim.Optimizer):
    """Grows one step size for all parameters, once it has taken some steps."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1.0, "found": 1e-9, "noted": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        noted = self.param_groups[0]["noted"] + sum(p.grad.abs().sum().item() for p in held)
        for group in self.param_groups:
            group["noted"], group["found"] = noted, max(group["found"], 1e-12 * noted)
        for parameter in held:
            parameter.sub_(parameter.grad.sign(), alpha=group["found"])
