"""Make sure that what is trained is what was boosted."""

from collections.abc import Iterator, Mapping

from torch import nn

from hybridpp.errors import ConfigError


class Trainable:
    """The parameters that the boosted optimizer knows.

    Args:
        parameters: by name.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]):
        self._parameters = dict(parameters)
        self._known = frozenset(map(id, self._parameters.values()))

    def check(self, model: nn.Module) -> None:
        """Refuse parameters that require a gradient now and did not at boost, or were not there.

        Raises:
            ConfigError: there is one.
        """
        if all(id(parameter) in self._known for parameter in _trained(model)):
            return
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad or id(parameter) in self._known:
                continue
            if name in self._parameters:
                raise ConfigError(
                    f"{name} was replaced by another parameter after booster.boost: the optimizer still has the old "
                    "one. Change weights in place, under torch.no_grad(), or replace them before."
                )
            raise ConfigError(
                f"{name} was frozen when the model was boosted, or not there, and requires a gradient now. "
                "Unfreeze or add it before booster.boost; freezing later is fine."
            )


def _trained(model: nn.Module) -> Iterator[nn.Parameter]:
    # At every step, so by hand: named_parameters() takes ten times as long.
    seen: set[int] = set()
    pending = [model]
    while pending:
        module = pending.pop()
        seen.add(id(module))
        for parameter in module._parameters.values():
            if parameter is not None and parameter.requires_grad:
                yield parameter
        pending += [child for child in module._modules.values() if child is not None and id(child) not in seen]
