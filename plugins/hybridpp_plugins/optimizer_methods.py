"""Methods of the wrapped optimizer beside its step, which may write to what this rank updates."""

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from torch import Tensor
from torch.optim import Optimizer

from hybridpp.errors import ConfigError
from hybridpp.nn.bit_hash import bit_hash
from hybridpp.nn.torch_private import version_of


def is_own_method(name: str, attribute: Any) -> bool:
    """Whether an attribute of an optimizer is a function that torch's optimizers do not have."""
    return inspect.isroutine(attribute) and not hasattr(Optimizer, name)


class Written(NamedTuple):
    """What tensors hold, to find out whether something has written to them.

    Attributes:
        versions: of the tensors; what is written through ``.data`` of plain parameters does not change them.
        hashes: of their bits.
    """

    versions: tuple[int, ...]
    hashes: tuple[int, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "Written":
        """What they hold now. The host waits for the device."""
        return cls(
            tuple(version_of(tensor) for tensor in tensors.values()),
            tuple(int(bit_hash(tensor)) for tensor in tensors.values()),
        )


def refuse_hidden_gradients(optimizer: Optimizer, name: str, why: str, error: Exception | None = None) -> NoReturn:
    """Refuse a method that has written to weights while gradients wait for a step that it could not see.

    Args:
        optimizer: that has it.
        name: of the method.
        why: it could not see them.
        error: that it has raised instead, of reading them for example.

    Raises:
        ConfigError: always.
    """
    did = "wrote to weights" if error is None else f"raised {type(error).__name__}"
    raise ConfigError(
        f"{type(optimizer).__name__}.{name} {did} between backward and step, where an optimizer reads "
        f"parameter.grad, and its tensors have no complete gradients there: {why}. Call it after step, or train with "
        'precision="fp32" or "bf16", zero_stage=0, tp_size=1 and pp_size=1.'
    ) from error
