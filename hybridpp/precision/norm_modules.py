"""Find the normalisation modules of a model."""

import re

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from hybridpp.nn import walk
from hybridpp.nn.torch_private import BatchNorm, ConvNd, InstanceNorm

# LlamaRMSNorm, LayerNorm2d, NemotronLayerNorm1P, Qwen3NextRMSNormGated; not InklingNormedEmbedding, DPTNormalEstimator.
_IS_CALLED = re.compile(r"norm(alization)?(layer)?(\d+[a-z]?)?(_?gated)?$", re.IGNORECASE)
# Their subclasses may have any name (BitGroupNormActivation).
_OF_TORCH = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, InstanceNorm)
# On CUDA, the kernels behind these take half precision and hold mean, variance and all sums in fp32, those of the
# gradients of weights too. GroupNorm's hold mean and variance in the format of the input.
_FP32_INSIDE_ON_CUDA = (nn.LayerNorm.forward, nn.RMSNorm.forward)
_OTHER_LAYERS = (nn.Linear, nn.Embedding, ConvNd)


def fp32_norms(model: nn.Module, wanted: bool | None, device_type: str) -> set[nn.Module]:
    """The norms that compute in fp32 in a half-precision model.

    Args:
        model: to be looked at.
        wanted: whether norms do; None: those whose kernels on the device would compute sums or statistics in half
            precision.
        device_type: of the device that the model runs on.
    """
    norms = norm_modules(model) if wanted is not False else set()
    if wanted is None and device_type == "cuda":
        return {norm for norm in norms if not _is_fp32_inside_on_cuda(norm)}
    return norms


def _is_fp32_inside_on_cuda(norm: nn.Module) -> bool:
    # A forward of its own may compute anything.
    return "forward" not in vars(norm) and type(norm).forward in _FP32_INSIDE_ON_CUDA


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
        child
        for around in walk.modules(model)
        if isinstance(around, ParametrizationList)
        for child in around.children()
    }
    found = {module for module in walk.modules(model) if module not in of_weights and _is_norm(module)}
    shared = {
        id(parameter)
        for module in walk.modules(model)
        if module not in found
        for parameter in module.parameters(recurse=False)
    }
    return {module for module in found if not any(id(parameter) in shared for parameter in walk.parameters(module))}


def _is_norm(module: nn.Module) -> bool:
    if isinstance(module, (BatchNorm, *_OTHER_LAYERS)):
        return False
    if not isinstance(module, _OF_TORCH) and not _IS_CALLED.search(type(module).__name__):
        return False
    return not any(walk.parameters(child) for child in module.children())
