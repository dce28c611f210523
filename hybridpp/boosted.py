"""What a script trains with, before and after boost."""

from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader


class Criterion(Protocol):
    """A callable that returns the loss of one micro-batch as a scalar tensor with a graph.

    Three forms are understood: ``criterion(outputs, inputs)``, where ``outputs`` is what the model returned and
    ``inputs`` the micro-batch as the dataloader gave it; ``criterion(outputs)``; and torch's losses
    (``nn.CrossEntropyLoss()``, ``F.mse_loss``), whose target is the last entry of a tuple, or the one entry of a dict
    that the model's forward does not take. A module of two arguments, or a function whose second one is called
    ``target``, ``labels`` or the like, is called as those are, unless the second argument is called ``inputs``,
    ``batch`` or the like.

    The loss is a mean over the samples of the micro-batch. Two attributes change that:

    - ``num_items(inputs)`` returns what the mean is taken over, such as the number of tokens that count; an int, or a
      tensor with one element. Micro-batches and replicas are weighted by it.
    - ``reduction = "sum"``: the loss is a sum over the samples.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor: ...


class Boosted(NamedTuple):
    """The five parts of a run: what ``Plugin.configure`` is given, and what it and ``Booster.boost`` return.

    It unpacks in this order, and ``parts._replace(model=...)`` is a copy with another part.

    Attributes:
        model: the script's module. A plugin may return another one; ``HybridParallelPlugin`` returns the same object.
        optimizer: made on all parameters of ``model``. Whatever a plugin returns has ``step``, ``zero_grad``,
            ``state_dict`` and ``param_groups``; None where the script gave none.
        criterion: as the script gave it, or None.
        dataloader: as the script gave it, or None; usually from :meth:`hybridpp.plugin.Plugin.prepare_dataloader`.
        lr_scheduler: made on ``optimizer``; or None.
    """

    model: nn.Module
    optimizer: Optimizer | None = None
    criterion: Criterion | None = None
    dataloader: DataLoader[Any] | None = None
    lr_scheduler: LRScheduler | None = None
