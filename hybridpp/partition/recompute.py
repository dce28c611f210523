"""Activation checkpointing: blocks that keep their inputs only, and are run again when their backward pass comes."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hybridpp.config import PipelineGradientCheckpointConfig
from hybridpp.errors import PartitionError
from hybridpp.partition.belongings import Belongings
from hybridpp.partition.calls import UnitCall
from hybridpp.partition.intercept import Forward
from hybridpp.partition.structure import Given, tensors_in
from hybridpp.partition.trace import in_checkpoint
from hybridpp.partition.untouched import untouched


def blocks_by_stage(
    calls: Sequence[UnitCall], stages: Sequence[int], blocks: Sequence[str], num_stages: int
) -> list[list[str]]:
    """The blocks that each stage calls, in the order of their first calls."""
    found: list[dict[str, None]] = [{} for _ in range(num_stages)]
    for call, stage in zip(calls, stages, strict=True):
        if call.name in blocks:
            found[stage][call.name] = None
    return [list(names) for names in found]


def recomputed_blocks(
    config: PipelineGradientCheckpointConfig | None, blocks: Sequence[Sequence[str]]
) -> tuple[tuple[str, ...], ...]:
    """Which blocks of each stage are run again: the first ones.

    Raises:
        PartitionError: a stage has fewer blocks than ``num_ckpt_layers_per_stage`` says.
    """
    if config is None:
        return ((),) * len(blocks)
    chosen = []
    for stage, names in enumerate(blocks):
        count = config.num_recomputed(stage, len(names))
        if count > len(names):
            raise PartitionError(
                f"num_ckpt_layers_per_stage asks stage {stage} to recompute {count} blocks, and it has {len(names)}. "
                f"The stages have {', '.join(str(len(stage_blocks)) for stage_blocks in blocks)}."
            )
        chosen.append(tuple(names[:count]))
    return tuple(chosen)


class Recomputable:
    """Runs some units so that of their forward only the inputs are kept.

    What comes again in the backward pass finds everything as it was: lists, dicts and objects among the inputs (a
    key-value cache), and buffers are copies, so that running statistics move once.

    Args:
        modules: the units, by name.

    Raises:
        PartitionError: when such a unit, or glue, writes to its inputs in place: they are not there a second time.
    """

    def __init__(self, modules: Mapping[str, nn.Module]):
        self._modules = modules

    def wrapped(self, name: str, forward: Forward) -> Forward:
        """A unit's forward as it is to be called: itself, where all its activations are kept."""
        return functools.partial(self._run, name, forward) if name in self._modules else forward

    def _run(self, name: str, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        # Where the model checkpoints the call itself, that is enough.
        if not torch.is_grad_enabled() or in_checkpoint():
            return forward(*args, **kwargs)
        repeated = _Repeated(name, self._modules[name], forward, (args, kwargs))
        output = checkpoint(repeated, args, kwargs, use_reentrant=False)
        repeated.check_inputs()
        return output


class _Repeated:
    """A call that is made in the forward, and perhaps again in the backward pass."""

    def __init__(self, name: str, module: nn.Module, forward: Forward, inputs: Any):
        self._name = name
        self._module = module
        self._forward = forward
        self._given, self._objects = Given(inputs), Belongings(inputs)
        self._versions = [(tensor, tensor._version) for tensor in tensors_in(inputs) if not tensor.is_inference()]
        self._is_again = False

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._is_again:
            self._is_again = True
            return self._forward(*args, **kwargs)
        self.check_inputs()
        with untouched(self._module), self._as_before(args, kwargs):
            _copy_buffers(self._module)
            return self._forward(*args, **kwargs)

    def check_inputs(self) -> None:
        if any(tensor._version != version for tensor, version in self._versions):
            raise PartitionError(
                f"an input of unit {self._name!r} is written to in place, so the unit cannot be recomputed. Do not "
                "write to it, or leave gradient_checkpoint_config out."
            )

    @contextmanager
    def _as_before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        later = Belongings((args, kwargs)), self._given.now()
        self._objects.restore()
        self._given.restore()
        try:
            yield
        finally:
            later[0].restore()
            later[1].restore()


def _copy_buffers(module: nn.Module) -> None:
    for part in module.modules():
        for key, buffer in part._buffers.items():
            part._buffers[key] = buffer.clone() if isinstance(buffer, Tensor) else buffer
