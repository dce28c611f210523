"""Activation checkpointing: blocks that store only their inputs and are recomputed in the backward pass."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hybridpp.cluster import get_dist_logger
from hybridpp.config import PipelineGradientCheckpointConfig
from hybridpp.errors import PartitionError
from hybridpp.module_adapter import AdapterLayer, Forward, ModuleAdapter
from hybridpp.nn.checkpointing import in_checkpoint
from hybridpp.nn.pretrained_model import has_cache_switch
from hybridpp.nn.snapshot import Snapshot
from hybridpp.nn.torch_private import version_or_none
from hybridpp.partition.calls import UnitCall
from hybridpp.partition.compiled import is_compiled_by_script
from hybridpp.partition.containers import ContainerSnapshot, tensors_in
from hybridpp.partition.unit_state import UnitStateRecorder


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
    config: PipelineGradientCheckpointConfig | None,
    blocks: Sequence[Sequence[str]],
    sequence_blocks: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> tuple[tuple[str, ...], ...]:
    """The blocks of each stage that are recomputed: the first ones.

    Args:
        config: how many; None: none.
        blocks: of each stage.
        sequence_blocks: blocks that run on sequence shards, with the modules inside that must run within the block's
            forward.

    Raises:
        PartitionError: a stage has fewer blocks than ``num_ckpt_layers_per_stage`` says, or a part of a block in
            ``sequence_blocks`` would be recomputed without it.
    """
    if config is None:
        return ((),) * len(blocks)
    chosen = []
    for stage, names in enumerate(blocks):
        count = config.num_recomputed(stage, len(names))
        if count > len(names):
            raise PartitionError(
                f"num_ckpt_layers_per_stage requests {count} recomputed blocks of stage {stage}, which has "
                f"{len(names)}. The stages have {', '.join(str(len(stage_blocks)) for stage_blocks in blocks)}."
            )
        chosen.append(tuple(names[:count]))
    _refuse_parts([name for names in chosen for name in names], sequence_blocks)
    return tuple(chosen)


def _refuse_parts(recomputed: Sequence[str], sequence_blocks: Mapping[str, Collection[str]]) -> None:
    """Refuse parts of sequence-parallel blocks: the sequence is sharded in the block's forward."""
    for block, modules in sequence_blocks.items():
        for name in recomputed:
            if name != block and any(f"{module}.".startswith(f"{name}.") for module in modules):
                raise PartitionError(
                    f"a part of a sequence-parallel block cannot be recomputed alone: the cut is inside {block!r}, and "
                    f"gradient_checkpoint_config recomputes {name!r}. Cut before or after {block!r}, or leave out "
                    "gradient_checkpoint_config or enable_sequence_parallelism."
                )


class Recomputable:
    """Runs some units so that of their forward only the inputs are kept, while a stage is active that wants it.

    What comes again in the backward pass finds everything as it was: lists, dicts and objects among the inputs (a
    key-value cache), and what the unit keeps on itself. Buffers are copies, so that running statistics move once.

    Args:
        adapter: of the model.
        units: names of those that each stage of this rank recomputes, by stage.

    Raises:
        PartitionError: when such a unit, or container code, writes to its inputs in place, so that they are lost.
    """

    def __init__(self, adapter: ModuleAdapter, units: Mapping[int, Sequence[str]]):
        modules = {name: adapter.model.get_submodule(name) for names in units.values() for name in names}
        self._stages = {
            stage: {name: UnitStateRecorder(name, modules[name]) for name in names} for stage, names in units.items()
        }
        self._recorders: Mapping[str, UnitStateRecorder] = {}
        for name, module in modules.items():
            # A unit that is compiled in place is compiled together with its hooks.
            wrap = adapter.wrap_call if is_compiled_by_script(module) else adapter.wrap
            wrap(module, AdapterLayer.RECOMPUTE, self._run, name)

    @contextmanager
    def active(self, stage: int) -> Iterator[None]:
        """Recompute the units of ``stage`` whose forward runs inside the block."""
        before, self._recorders = self._recorders, self._stages[stage]
        try:
            yield
        finally:
            self._recorders = before

    def _run(self, name: str, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        recorder = self._recorders.get(name)
        # The model itself may checkpoint the call, which suffices.
        if recorder is None or not torch.is_grad_enabled() or in_checkpoint():
            return forward(*args, **kwargs)
        repeated = _RecomputedCall(recorder, forward, (args, kwargs))
        output = checkpoint(repeated, args, kwargs, use_reentrant=False)
        repeated.check_inputs()
        return output


class _RecomputedCall:
    """A call that is made in the forward, and may be repeated in the backward pass."""

    def __init__(self, calls: UnitStateRecorder, forward: Forward, inputs: Any):
        self._calls = calls
        self._forward = forward
        self._state = calls.begin()
        self._given, self._objects = ContainerSnapshot(inputs), Snapshot.reachable_from(inputs)
        self._versions = [(tensor, version_or_none(tensor)) for tensor in tensors_in(inputs)]
        self._is_again = False

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._is_again:
            self._is_again = True
            output = self._forward(*args, **kwargs)
            self._calls.end(self._state)
            return output
        self.check_inputs()
        with self._state.restored(), self._as_before(args, kwargs):
            return self._forward(*args, **kwargs)

    def check_inputs(self) -> None:
        if any(version_or_none(tensor) != version for tensor, version in self._versions):
            raise PartitionError(
                f"an input of unit {self._calls.name!r} is written to in place, so the unit cannot be recomputed. Do "
                "not write to it, or leave gradient_checkpoint_config out."
            )

    @contextmanager
    def _as_before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        later = Snapshot.reachable_from((args, kwargs)), self._given.now()
        self._objects.restore()
        self._given.restore()
        try:
            yield
        finally:
            later[0].restore()
            later[1].restore()


def warn_of_cache(model: nn.Module) -> None:
    """Warn of a transformers model whose key-value cache would undo recomputation: it is one of the blocks' arguments.

    It is not switched off: that changes the kernels' memory layout, and with it the results' last bits.
    """
    if has_cache_switch(model) and getattr(getattr(model, "config", None), "use_cache", False):
        get_dist_logger().warning(
            f"{type(model).__name__} caches keys and values, so those of every block are kept for the backward pass, "
            "although gradient_checkpoint_config recomputes the blocks. Set model.config.use_cache = False.",
            ranks=[0],
        )
