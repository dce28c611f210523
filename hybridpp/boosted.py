"""What a script trains with, before and after boost."""

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hybridpp.errors import ConfigError


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


# The parts that a value of each kind can be.
_PARTS_OF = {
    "optimizer": ("optimizer",),
    "lr_scheduler": ("lr_scheduler",),
    "dataloader": ("dataloader",),
    "module": ("model", "criterion"),
    "dataset": (),
    "class": (),
}


def check_kinds(parts: Boosted) -> None:
    """Refuse parts in the place of others, such as the order of another library's ``prepare``.

    They are not put in order: what is returned comes in the order of :class:`Boosted`, and the script would take each
    part for another.

    Raises:
        ConfigError: something is in the place of another part, or is none of them.
    """
    wrong = []
    for name, value in parts._asdict().items():
        kind = _kind_of(value)
        if kind == "class":
            raise ConfigError(
                f"boost takes objects: got the class {value.__name__} as {name}. Pass an object: {value.__name__}(...)."
            )
        if name == "dataloader" and kind == "dataset":
            check_batches("boost", name, value)
        is_wrong = kind is not None and name not in _PARTS_OF[kind]
        is_wrong |= name == "criterion" and value is not None and not callable(value)
        is_wrong |= name == "dataloader" and value is not None and not _yields_batches(value)
        if is_wrong:
            wrong.append((name, value, kind))
    if wrong:
        found = ", ".join(f"{_described(value)} as {name}" for name, value, _ in wrong)
        named = [part for _, _, kind in wrong if kind for part in _PARTS_OF[kind][:1]]
        by_name = (
            f", for example boost(model, optimizer, {', '.join(f'{part}=...' for part in named)})" if named else ""
        )
        raise ConfigError(
            f"boost takes (model, optimizer, criterion, dataloader, lr_scheduler) and returns them in this order: got "
            f"{found}. Pass them in this order, None for what there is not, or by name{by_name}."
        )


def check_batches(call: str, name: str, value: Any) -> None:
    """Refuse what yields no batches, such as a dataset.

    Args:
        call: that takes it, in the error.
        name: of its argument.
        value: of the argument.

    Raises:
        ConfigError: it is a dataset, whose items are samples, or cannot be iterated over.
    """
    if _kind_of(value) == "dataset":
        raise ConfigError(
            f"{call} takes a dataloader: got a dataset, {type(value).__name__}, as {name}. Pass "
            "plugin.prepare_dataloader(dataset, batch_size=...)."
        )
    if not _yields_batches(value):
        raise ConfigError(
            f"{call} takes a dataloader, or another iterable of batches: got {type(value).__name__} as {name}. Pass "
            "plugin.prepare_dataloader(dataset, batch_size=...)."
        )


def _kind_of(value: Any) -> str | None:
    """What a part is, where its type tells."""
    if isinstance(value, type):
        return "class"
    if isinstance(value, list | tuple) and value and all(isinstance(one, Optimizer) for one in value):
        return "optimizer"
    if isinstance(value, nn.Module):
        return "module"
    if isinstance(value, Optimizer):
        return "optimizer"
    if isinstance(value, DataLoader):
        return "dataloader"
    if (isinstance(value, Dataset) and not isinstance(value, IterableDataset)) or _is_table(value):
        return "dataset"
    return "lr_scheduler" if isinstance(value, LRScheduler) or _steps_rates(value) else None


def _is_table(value: Any) -> bool:
    """Whether it is a dataset of Hugging Face's library, which iterates over its rows."""
    return type(value).__module__.partition(".")[0] == "datasets" and hasattr(value, "column_names")


def _steps_rates(value: Any) -> bool:
    """Whether it is a schedule that does not derive from torch's."""
    return callable(getattr(value, "step", None)) and isinstance(getattr(value, "optimizer", None), Optimizer)


def _yields_batches(value: Any) -> bool:
    # Rows of arrays and of tensors are samples.
    return isinstance(value, Iterable) and not (isinstance(value, dict | str | bytes) or hasattr(value, "__array__"))


def _described(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} of {', '.join(sorted({type(one).__name__ for one in value})) or 'nothing'}"
    return type(value).__name__
