"""Several optimizers, each on its own parameters, as one."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from hybridpp.errors import ConfigError


class JoinedOptimizer(Optimizer):
    """An optimizer whose step is that of each of several optimizers, which share no parameter.

    Its groups and its state are theirs: the same objects, so a learning-rate schedule may be made on it or on one of
    them. ``Booster.boost`` makes one of a list.

    Args:
        optimizers: in the order of their steps.

    Attributes:
        optimizers: as given.

    Raises:
        ConfigError: there is none, one is no optimizer, or two hold one parameter.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 2)
        >>> parts = [torch.optim.SGD([model.weight], lr=0.1), torch.optim.AdamW([model.bias], lr=0.01)]
        >>> [group["lr"] for group in JoinedOptimizer(parts).param_groups]
        [0.1, 0.01]
    """

    def __init__(self, optimizers: Sequence[Optimizer]):
        self.optimizers = tuple(optimizers)
        _check(self.optimizers)
        super().__init__([group for one in self.optimizers for group in one.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Take over the groups and the state of the optimizers."""
        # In place: whoever boosts an optimizer replaces the contents of these.
        self.param_groups[:] = [group for one in self.optimizers for group in one.param_groups]
        state = [item for one in self.optimizers for item in one.state.items()]
        self.state: defaultdict[Any, Any] = defaultdict(dict, state)
        for one in self.optimizers:
            one.state = self.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take the step of each; ``closure`` is called once, before them."""
        loss = None if closure is None else closure()
        for one in self.optimizers:
            one.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned: the groups of all, in their order."""
        groups, start = state_dict["param_groups"], 0
        if len(groups) != len(self.param_groups):
            raise ValueError(f"the state has {len(groups)} parameter groups, the optimizers {len(self.param_groups)}.")
        for one in self.optimizers:
            part = groups[start : start + len(one.param_groups)]
            start += len(part)
            indices = {index for group in part for index in group["params"]}
            state = {index: value for index, value in state_dict["state"].items() if index in indices}
            one.load_state_dict({"state": state, "param_groups": part})
        self._share()


def optimizer_name(optimizer: Optimizer) -> str:
    """The class of an optimizer; of several that were joined: ``"SGD + AdamW"``."""
    if isinstance(optimizer, JoinedOptimizer):
        return " + ".join(map(optimizer_name, optimizer.optimizers))
    return type(optimizer).__name__


def single_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that were joined, in the order of their groups; one that was not joined is the only one."""
    if not isinstance(optimizer, JoinedOptimizer):
        return [optimizer]
    return [single for one in optimizer.optimizers for single in single_optimizers(one)]


def _check(optimizers: Sequence[Any]) -> None:
    wrong = [type(one).__name__ for one in optimizers if not isinstance(one, Optimizer)]
    if wrong or not optimizers:
        raise ConfigError(
            f"several optimizers are a list of torch.optim optimizers: got {wrong[0] if wrong else 'an empty list'}."
        )
    seen: set[int] = set()
    for one in optimizers:
        own = {id(parameter) for group in one.param_groups for parameter in group["params"]}
        if own & seen:
            shape = next(tuple(p.shape) for group in one.param_groups for p in group["params"] if id(p) in own & seen)
            raise ConfigError(
                f"each parameter belongs to one optimizer: {type(one).__name__} holds a parameter of shape {shape} "
                "that an optimizer before it holds, too. Leave it out of one of them."
            )
        seen |= own
