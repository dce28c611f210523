"""An optimizer whose update of a parameter depends on all others."""

import torch
from torch import optim


class NormedTogether(optim.SGD):
    """Divides by the norm of all gradients that it is given."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)

    def step(self, closure=None):
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in held])
        for parameter in held:
            parameter.grad = parameter.grad / norm
        return super().step(closure)
