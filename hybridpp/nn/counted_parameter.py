"""Parameters of which torch counts what is written through ``.data``, too."""

from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import increment_version

from hybridpp.nn.torch_private import TensorBase

_DATA: Any = vars(TensorBase)["data"]


class CountedParameter(nn.Parameter):
    """A parameter whose ``data`` shares its counter of versions: of any other, torch gives a view with its own.

    It has no state of its own: a plain parameter becomes one where its ``__class__`` is set, and the other way round.
    Torch's optimizers choose their fast kernels for plain parameters only, so it should be one of these in their steps.
    """

    @property
    def data(self) -> Tensor:
        """The values, without the graph."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        _DATA.__set__(self, value)
        increment_version(self)
