"""Which embeddings only look up rows."""

from torch import nn


def is_lookup(module: nn.Module) -> bool:
    """Whether a module is an embedding whose rows do not affect each other, so that ranks can hold some each."""
    # Another parameter (T5Gemma2 has one that replaces a row) would be masked and summed like the rows.
    if not isinstance(module, nn.Embedding) or [name for name, _ in module.named_parameters()] != ["weight"]:
        return False
    return not (module.max_norm or module.sparse or module.scale_grad_by_freq)
