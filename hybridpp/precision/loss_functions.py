"""Torch's loss functions, which compute in fp32 when the forward of a half-precision model calls them."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hybridpp.nn.half import widened
from hybridpp.nn.torch_private import pytree

# Without linear_cross_entropy, which is a layer, too.
_IN_FUNCTIONAL = (
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cosine_embedding_loss",
    "cross_entropy",
    "ctc_loss",
    "gaussian_nll_loss",
    "hinge_embedding_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "margin_ranking_loss",
    "mse_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "multilabel_soft_margin_loss",
    "nll_loss",
    "poisson_nll_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
    "triplet_margin_with_distance_loss",
)
_IN_TORCH = (
    "binary_cross_entropy_with_logits",
    "cosine_embedding_loss",
    "ctc_loss",
    "hinge_embedding_loss",
    "kl_div",
    "margin_ranking_loss",
    "poisson_nll_loss",
    "triplet_margin_loss",
)
LOSS_FUNCTIONS = frozenset(
    [getattr(functional, name) for name in _IN_FUNCTIONAL] + [getattr(torch, name) for name in _IN_TORCH]
)


def widened_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A loss function's arguments, with half-precision tensors cast to fp32."""
    wide: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(Tensor, widened, (args, kwargs))
    return wide
