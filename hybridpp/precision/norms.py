"""Which modules of a model are norms."""

import re

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrize import ParametrizationList

# LlamaRMSNorm, LayerNorm2d, NemotronLayerNorm1P, Qwen3NextRMSNormGated; not InklingNormedEmbedding, DPTNormalEstimator.
_IS_CALLED = re.compile(r"norm(alization)?(layer)?(\d+[a-z]?)?(_?gated)?$", re.IGNORECASE)
# Subclasses need not say it (BitGroupNormActivation).
_OF_TORCH = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _InstanceNorm)
_OTHER_LAYERS = (nn.Linear, nn.Embedding, _ConvNd)


def norms(model: nn.Module) -> set[nn.Module]:
    """The modules that normalise, by their class: one of torch's, or one whose name ends with the word.

    No norms are: batch normalisation, which has a rule of its own; a module with weights in modules inside (a sublayer
    with its norm); a layer whose weights are normalised, and what normalises them; a module that shares a weight with
    one that is none.

    Example:
        >>> [type(norm) for norm in norms(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.BatchNorm1d(2)))]
        [<class 'torch.nn.modules.normalization.LayerNorm'>]
    """
    of_weights = {
        child for around in model.modules() if isinstance(around, ParametrizationList) for child in around.children()
    }
    found = {module for module in model.modules() if module not in of_weights and _is_norm(module)}
    shared = {
        id(parameter)
        for module in model.modules()
        if module not in found
        for parameter in module.parameters(recurse=False)
    }
    return {module for module in found if not any(id(parameter) in shared for parameter in module.parameters())}


def _is_norm(module: nn.Module) -> bool:
    if isinstance(module, (_BatchNorm, *_OTHER_LAYERS)):
        return False
    if not isinstance(module, _OF_TORCH) and not _IS_CALLED.search(type(module).__name__):
        return False
    return all(next(child.parameters(), None) is None for child in module.children())
