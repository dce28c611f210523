"""Find the normalisation modules of a model."""

import re

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from hybridpp.nn.torch_private import BatchNorm, ConvNd, InstanceNorm

# LlamaRMSNorm, LayerNorm2d, NemotronLayerNorm1P, Qwen3NextRMSNormGated; not InklingNormedEmbedding, DPTNormalEstimator.
_IS_CALLED = re.compile(r"norm(alization)?(layer)?(\d+[a-z]?)?(_?gated)?$", re.IGNORECASE)
# Their subclasses may have any name (BitGroupNormActivation).
_OF_TORCH = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, InstanceNorm)
_OTHER_LAYERS = (nn.Linear, nn.Embedding, ConvNd)


def norm_modules(model: nn.Module) -> set[nn.Module]:
    """The normalisation modules of a model, by class: a norm of torch's, or a class whose name ends in "norm".

    Not included are: batch normalisation, which has its own rule; modules with weights in submodules (a sublayer with
    its norm); layers with normalised weights and the parametrizations that normalise them; modules that share a weight
    with a module that is no norm.

    Example:
        >>> [type(norm) for norm in norm_modules(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.BatchNorm1d(2)))]
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
    if isinstance(module, (BatchNorm, *_OTHER_LAYERS)):
        return False
    if not isinstance(module, _OF_TORCH) and not _IS_CALLED.search(type(module).__name__):
        return False
    return all(next(child.parameters(), None) is None for child in module.children())
