"""Losses that couple the samples of a batch, computed of the outputs of all replicas."""

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridpp.cluster import Group, as_carried, gather_numbers
from hybridpp.config import PipelineConfig
from hybridpp.errors import ConfigError
from hybridpp.nn.deferred_tensor import with_values
from hybridpp.nn.torch_private import pytree
from hybridpp.pipeline import CriterionAdapter, RankBatchInfo, leaf_dims

# The relative difference that the kernels of a device may make between one computation and the same again.
_TOLERANCE, _LEAST = 1e-5, 1e-6
_STREAM = zlib.crc32(b"coupled criterion")


def check_undivided(criterion: CriterionAdapter, infos: Sequence[RankBatchInfo]) -> None:
    """Refuse micro-batches, whose samples do not come together. On every rank alike.

    Raises:
        ConfigError: a replica has several.
    """
    most = int(max(info.num_microbatches for info in infos))
    if most > 1:
        raise ConfigError(
            f"a criterion with coupled=True needs all samples of a replica at once: got {most} micro-batches. Use "
            "num_microbatches=1, and more replicas for more samples; gradient_checkpoint_config saves memory."
        )


def check_alike(losses: Sequence[float]) -> None:
    """Refuse replicas' losses that differ, of a coupled criterion. On every rank alike.

    Args:
        losses: by replica; inf and NaN show nothing.

    Raises:
        ConfigError: they do, so something that the criterion reads is not that of all replicas.
    """
    finite = [loss for loss in losses if math.isfinite(loss)]
    if any(not math.isclose(loss, finite[0], rel_tol=_TOLERANCE, abs_tol=_LEAST) for loss in finite):
        shown = ", ".join(f"{loss:.6g}" for loss in losses)
        raise ConfigError(
            "a criterion with coupled=True gets the outputs and inputs of all replicas, so its loss must be the same "
            f"on all of them: got {shown}. It reads what each replica makes of its own samples and what cannot be "
            "joined: a tensor without a dimension of samples (the model's own loss, or a mean over samples), a list, "
            "or an attribute of the model. Let the model return a number for each sample, of which the criterion "
            "takes the mean, and make lists of the batch tensors. See docs/losses.md."
        )


class CoupledLoss:
    """A criterion that is called with the outputs and inputs of all replicas, as if one had computed them all.

    Every replica computes the same loss. Its gradient goes to the replica's own outputs, and the gradients of the
    replicas add up to that of the whole batch. A tensor of the outputs that has no samples (a learned temperature) is
    one that each replica has, so its gradient is divided by their number. Random numbers that the criterion draws are
    the same on all replicas.

    Collective: all replicas, at each call; one all-gather for each tensor of the outputs and the inputs, and one of a
    number in host memory before them: an error may have ended the step on a replica, which the script catches there.

    Args:
        criterion: of outputs and inputs.
        replicas: the ranks that compute losses.
        sizes: samples of each replica.
        pipeline: where tensors have their samples.
        seed: seeds the random generators with a number, alike on all replicas.
        is_first: whether it is looked for tensors that all replicas have alike, and which hold no samples. Alike on all
            replicas.
        control: all ranks; None: there are several stages, where no step goes on after an error.
    """

    def __init__(
        self,
        criterion: CriterionAdapter,
        replicas: Group,
        sizes: Sequence[int],
        pipeline: PipelineConfig,
        seed: Callable[[int], None],
        *,
        is_first: bool = False,
        control: Group | None = None,
    ):
        self._criterion, self._replicas, self._sizes, self._pipeline = criterion, replicas, sizes, pipeline
        self._seed, self._control, self._has_met = seed, control, False
        self._is_first = is_first
        self._alike: list[str] = []
        self._has_unlike = False

    def _meets(self, is_here: bool) -> bool:
        """Whether all replicas have come as far. Collective: all ranks."""
        self._has_met = True
        if self._control is None:
            return True
        return all(row[0] for row in gather_numbers(self._control, "at a coupled criterion", [float(is_here)]))

    def settle(self) -> None:
        """After an error before the criterion was called: tell the other replicas, which wait there."""
        if not self._has_met:
            self._meets(False)

    def __call__(self, outputs: Any, inputs: Any) -> Any:
        """The loss of the samples of all replicas; 0 if one does not come: the step is refused at its end.

        Raises:
            ConfigError: a tensor of the outputs holds no samples, and has as many rows as if it did.
        """
        if not self._meets(True):
            leaves = [leaf for leaf in pytree.tree_leaves(with_values(outputs)) if isinstance(leaf, Tensor)]
            zeros = [leaf.nan_to_num().sum() * 0 for leaf in leaves if leaf.requires_grad]
            return torch.stack([one.float() for one in zeros]).sum() if zeros else torch.zeros(())
        all_outputs = self._gathered(outputs, self._pipeline.dims_of_outputs)
        if self._alike and self._has_unlike:
            raise ConfigError(
                f"the tensor {self._alike[0]} of the outputs is the same on all replicas, and has as many rows as if "
                "it held their samples, so that a criterion with coupled=True would get it once for each replica. Say "
                "that it holds none: HybridParallelPlugin(output_dims={'prototypes': None}), with its name; None for "
                "an entry of a tuple, as in output_dims=(0, None)."
            )
        all_inputs = self._gathered(inputs, self._pipeline.batch_dims or 0)
        self._seed(_STREAM)
        return self._criterion(all_outputs, all_inputs)

    def _gathered(self, tree: Any, dims: Any) -> Any:
        tree = with_values(tree)
        paths, structure = pytree.tree_flatten_with_path(tree)
        leaves = [leaf for _, leaf in paths]
        own = self._sizes[self._replicas.rank]
        along = leaf_dims(tree, dims)
        rows = [
            leaf.shape[dim] // own
            if isinstance(leaf, Tensor) and dim is not None and dim < leaf.dim() and leaf.shape[dim] % own == 0
            else 0
            for leaf, dim in zip(leaves, along, strict=True)
        ]
        if self._is_first:
            self._check_rows(leaves, rows)
        for index, (leaf, dim) in enumerate(zip(leaves, along, strict=True)):
            if rows[index] and dim is not None:
                leaves[index] = self._joined(leaf, dim, rows[index], pytree.keystr(paths[index][0]))
            elif isinstance(leaf, Tensor) and leaf.requires_grad:
                leaves[index] = _Shared.apply(leaf, self._replicas.size)  # type: ignore[no-untyped-call]  # torch
        return pytree.tree_unflatten(leaves, structure)

    def _check_rows(self, leaves: Sequence[Any], rows: Sequence[int]) -> None:
        """Refuse tensors that do not fit those of other replicas. Collective: all replicas."""
        tensor = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)
        if tensor is None:
            return
        own = torch.tensor([float(zlib.crc32(repr(rows).encode()))], dtype=torch.float64, device=tensor.device)
        if len({float(one) for one in self._replicas.all_gather(own)}) > 1:
            raise ConfigError(
                "a criterion with coupled=True gets tensors with as many rows for each sample on all replicas: the "
                f"replicas have {', '.join(map(str, self._sizes))} samples, and their tensors do not fit these. Say "
                "which ones hold no samples: HybridParallelPlugin(output_dims={'prototypes': None}), or batch_dims "
                "for the batch, with their names."
            )

    def _compare(self, parts: Sequence[Tensor], dim: int, name: str) -> None:
        """Note whether all replicas have the same tensor, and one whose rows differ."""
        is_alike = all(part.shape == parts[0].shape and torch.equal(part, parts[0]) for part in parts[1:])
        self._has_unlike |= not is_alike
        if is_alike and not torch.equal(parts[0], parts[0].flip(dim)):
            self._alike.append(name)

    def _joined(self, own: Tensor, dim: int, rows: int, name: str) -> Tensor:
        """The tensors of all replicas; gradients go to that of this one."""
        size = max(self._sizes) * rows
        padding = list(own.shape)
        padding[dim] = size - own.shape[dim]
        padded = torch.cat([own.detach(), own.new_zeros(padding)], dim)
        parts = self._replicas.all_gather(as_carried(padded.contiguous()))
        cut = [part.narrow(dim, 0, count * rows) for part, count in zip(parts, self._sizes, strict=True)]
        if self._is_first and own.requires_grad:
            self._compare(cut, dim, name)
        cut[self._replicas.rank] = own
        return torch.cat(cut, dim)


class _Shared(torch.autograd.Function):
    """A tensor that each replica has of its own, though it is one: their gradients add up to one."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, num_replicas: int) -> Tensor:
        ctx.num_replicas = num_replicas
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] / ctx.num_replicas, None
