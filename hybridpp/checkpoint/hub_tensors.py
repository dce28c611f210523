"""How the tensors of a Hugging Face folder follow from a model's, found out without any values.

transformers writes the names, and some layouts, of older versions: of a model that holds experts stacked, a tensor for
each. Its function converts a complete state dict. Here it runs once on the meta device, where each result remembers
what it was computed from; then it runs on what one group of results needs, while the folder is written.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hybridpp.checkpoint.safetensors_file import StoredSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# An attribute of transformers' classes.
_LEFT_OUT = "_keys_to_ignore_on_save"


class OutputGroup(NamedTuple):
    """Tensors of a folder that are made together.

    Attributes:
        sources: names of the model's tensors that they are made from.
        outputs: by name in the folder.
        shell: the model that converts them, on the meta device; None: each output is the source.
    """

    sources: tuple[str, ...]
    outputs: Mapping[str, StoredSpec]
    shell: "PreTrainedModel | None" = None

    def made(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The outputs, from the sources."""
        if self.shell is None:
            (source,) = self.sources
            return dict.fromkeys(self.outputs, tensors[source])
        with torch.no_grad():
            found = _reverted(self.shell, tensors)
        # By order: what a name becomes may depend on names that other groups have.
        return dict(zip(self.outputs, found.values(), strict=True))


def plain_groups(specs: Mapping[str, StoredSpec], aliases: Mapping[str, str]) -> list[OutputGroup]:
    """Every tensor under its own name, and under its aliases.

    Args:
        specs: of the model's tensors.
        aliases: further names of some, each with the name that is in ``specs``.
    """
    names: dict[str, list[str]] = {name: [name] for name in specs}
    for alias, name in aliases.items():
        names[name].append(alias)
    return [OutputGroup((name,), dict.fromkeys(names[name], spec)) for name, spec in specs.items()]


def hub_groups(
    shell: "PreTrainedModel", specs: Mapping[str, StoredSpec], aliases: Mapping[str, str]
) -> list[OutputGroup]:
    """What ``save_pretrained`` would write, and from what.

    Args:
        shell: the complete model, on the meta device.
        specs, aliases: see :func:`plain_groups`.
    """
    kept = _kept_names(shell, [*specs, *aliases], aliases)
    source_of = {name: aliases.get(name, name) for name in kept}
    inputs = {name: _empty(specs[source]) for name, source in source_of.items()}
    origins = _Origins(inputs)
    with origins:
        outputs = _reverted(shell, inputs)
    own = {id(tensor): name for name, tensor in inputs.items()}
    groups: list[OutputGroup] = []
    converted: list[tuple[set[str], str]] = []
    for name, tensor in outputs.items():
        if id(tensor) in own:
            groups.append(OutputGroup((source_of[own[id(tensor)]],), {name: StoredSpec.of(tensor)}))
        else:
            converted.append((origins.of(tensor), name))
    if converted:
        groups += _converted_groups(shell, inputs, {name: outputs[name] for _, name in converted}, converted)
    return groups


def _converted_groups(
    shell: "PreTrainedModel",
    inputs: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor],
    converted: Iterable[tuple[set[str], str]],
) -> list[OutputGroup]:
    """The smallest groups that give the outputs when they are converted by themselves; one group if that fails."""
    merged: list[tuple[set[str], list[str]]] = []
    for sources, name in converted:
        touching = [entry for entry in merged if entry[0] & sources]
        merged = [entry for entry in merged if not entry[0] & sources]
        names = [other for entry in touching for other in entry[1]]
        merged.append((sources.union(*(entry[0] for entry in touching)), [*names, name]))
    groups = [_group(shell, inputs, outputs, *entry) for entry in merged]
    if all(group is not None for group in groups):
        return [group for group in groups if group is not None]
    sources = set[str]().union(*(entry[0] for entry in merged))
    return [
        OutputGroup(tuple(sorted(sources)), {name: StoredSpec.of(tensor) for name, tensor in outputs.items()}, shell)
    ]


def _group(
    shell: "PreTrainedModel",
    inputs: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor],
    sources: set[str],
    names: list[str],
) -> OutputGroup | None:
    """A group that gives outputs of the right names and shapes; None: it does not."""
    try:
        found = _reverted(shell, {name: inputs[name] for name in inputs if name in sources})
    except Exception:  # of a conversion that needs more
        return None
    specs = {name: StoredSpec.of(tensor) for name, tensor in found.items()}
    if specs != {name: StoredSpec.of(outputs[name]) for name in names}:
        return None
    return OutputGroup(tuple(name for name in inputs if name in sources), specs, shell)


def _reverted(shell: "PreTrainedModel", tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    # transformers' loading takes 3 s to import, which jobs without its models do not need.
    from transformers.core_model_loading import revert_weight_conversion  # noqa: PLC0415

    return dict(revert_weight_conversion(shell, dict(tensors)))


def _kept_names(shell: "PreTrainedModel", names: Iterable[str], aliases: Mapping[str, str]) -> list[str]:
    """The names that a folder has: of a tied weight one, and not those that the class leaves out."""
    from transformers.modeling_utils import remove_tied_weights_from_state_dict  # noqa: PLC0415

    ignored = set(getattr(shell, _LEFT_OUT, None) or ())
    first = {name: torch.zeros(1) for name in names if name not in aliases}
    stand_ins = {name: first[aliases.get(name, name)] for name in names if name not in ignored}
    return list(remove_tied_weights_from_state_dict(stand_ins, shell))


def _empty(spec: StoredSpec) -> Tensor:
    return torch.empty(spec.shape, dtype=spec.dtype, device="meta")


class _Origins(TorchFunctionMode):
    """Inside, each result of a torch function remembers the tensors that it was computed from.

    Args:
        inputs: the tensors, by name.
    """

    def __init__(self, inputs: Mapping[str, Tensor]):
        super().__init__()
        self._names = {id(tensor): {name} for name, tensor in inputs.items()}
        self._alive: list[Tensor] = []  # an id is that of one tensor only as long as it lives

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        names = set[str]().union(*(self.of(tensor) for tensor in _tensors_in([args, kwargs or {}])))
        if names:
            for tensor in _tensors_in(result):
                self._names[id(tensor)] = self.of(tensor) | names
                self._alive.append(tensor)
        return result

    def of(self, tensor: Tensor) -> set[str]:
        """The names of what a tensor was computed from."""
        return self._names.get(id(tensor), set())


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)
