"""Cross-entropy of logits sharded by vocabulary, without a gather of them."""

from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from hybridpp.cluster import Group
from hybridpp.errors import ConfigError
from hybridpp.nn.torch_private import assert_async
from hybridpp.sharded_activations.collectives import copy_to_ranks, sum_over_ranks

Reduction = Literal["mean", "sum", "none"]


def vocab_parallel_cross_entropy(
    local_logits: Tensor,
    target: Tensor,
    group: Group,
    vocab_size: int,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """The loss that ``torch.nn.functional.cross_entropy`` gives for the full logits.

    With logits ``x`` over a vocabulary of ``V``, target ``t`` and label smoothing ``a``, a position's loss and gradient
    are::

        loss = log sum_v exp(x_v) - (1 - a) x_t - a / V sum_v x_v
        d loss / d x_v = softmax(x)_v - (1 - a) [v = t] - a / V

    so a rank sends the others three numbers per position about its shard of the vocabulary: the logarithm of its
    sum of exponentials, the target's logit where it has it, and, for smoothing, the sum of its logits (Shoeybi et al.
    2019, arXiv:1909.08053, section 3; there maximum, sum and logit are reduced one after the other). The gradient
    needs no communication. All of it is computed in fp32 at least.

    Collective: one all-gather over ``group`` of at most three fp32 numbers per position; every member must call it.

    Args:
        local_logits: this rank's shard ``[P]``, ``[N, P]`` or ``[N, P, ...]`` of the full ``[N, V, ...]``, where
            ``P = ceil(V / ranks)``: what exceeds ``V`` on the last ranks is padding and counts as -inf.
        target: classes of the full vocabulary, ``[]``, ``[N]`` or ``[N, ...]``; the same on all ranks.
        group: the ranks that share the vocabulary, in its order.
        vocab_size: ``V``.
        ignore_index: a target that counts neither in the sum nor in the mean.
        reduction: as in torch. The mean over nothing is NaN, with gradients of zero.
        label_smoothing: as in torch, between 0 and 1.

    Returns:
        The loss in the dtype of the logits, the same on all ranks.

    Raises:
        ConfigError: ``reduction`` or ``label_smoothing`` is none of torch's.
        RuntimeError: a target is no class of the vocabulary (on a device: at the next synchronization).
    """
    _check_options(reduction, label_smoothing)
    ignored = target == ignore_index
    # Unlike `if not …: raise`, this does not wait for a device.
    assert_async(
        (ignored | ((target >= 0) & (target < vocab_size))).all(),
        f"cross-entropy needs targets from 0 to {vocab_size - 1}, or ignore_index={ignore_index}.",
    )
    dim = min(local_logits.dim() - 1, 1)
    rows = local_logits.movedim(dim, -1).reshape(-1, local_logits.shape[dim])
    losses: Tensor = _Losses.apply(rows, target.reshape(-1), group, vocab_size, label_smoothing)  # type: ignore[no-untyped-call]  # torch
    losses = losses.view(target.shape).masked_fill(ignored, 0.0)
    if reduction == "mean":
        losses = losses.sum() / (~ignored).sum()
    elif reduction == "sum":
        losses = losses.sum()
    return losses.to(local_logits.dtype)


def _check_options(reduction: str, label_smoothing: float) -> None:
    if reduction not in get_args(Reduction) or not 0 <= label_smoothing <= 1:
        raise ConfigError(
            "cross-entropy takes a reduction of mean, sum or none and label_smoothing from 0 to 1: got "
            f"reduction={reduction!r}, label_smoothing={label_smoothing}."
        )


class _Losses(torch.autograd.Function):
    """Rows ``[N, P]`` of logits and targets ``[N]`` to losses ``[N]``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor, group: Group, vocab_size: int, smoothing: float) -> Tensor:
        start = group.rank * x.shape[1]
        width = min(max(vocab_size - start, 0), x.shape[1])
        local = x[:, :width].to(torch.promote_types(x.dtype, torch.float32))
        is_local = (target >= start) & (target < start + width)
        target_index = (target - start).masked_fill(~is_local, 0).unsqueeze(1)
        shares = [local.logsumexp(1), x.gather(1, target_index).squeeze(1).to(local.dtype).masked_fill(~is_local, 0.0)]
        if smoothing:
            shares.append(local.sum(1))
        all_shares = torch.stack(group.all_gather(torch.stack(shares)))
        total = all_shares[:, 0].logsumexp(0)
        losses = total - (1 - smoothing) * all_shares[:, 1].sum(0)
        if smoothing:
            losses -= smoothing / vocab_size * all_shares[:, 2].sum(0)
        ctx.save_for_backward(x, total, target_index, is_local)
        ctx.vocab_size, ctx.width, ctx.smoothing, ctx.group = vocab_size, width, smoothing, group
        return losses

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        x, total, target_index, is_local = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _Losses._recorded_backward(ctx, dy, x, total), None, None, None, None
        # Computed again from the logits, which are held anyway: nothing of their size is saved.
        dx = (x - total.unsqueeze(1)).exp_()
        if ctx.smoothing:
            dx -= ctx.smoothing / ctx.vocab_size
        dx.scatter_add_(1, target_index, (is_local.to(dx.dtype) * (ctx.smoothing - 1)).unsqueeze(1))
        dx *= dy.unsqueeze(1)
        dx[:, ctx.width :] = 0.0
        return dx.to(x.dtype), None, None, None, None

    @staticmethod
    def _recorded_backward(ctx: Any, dy: Tensor, x: Tensor, total: Tensor) -> Tensor:
        """The gradient, of which autograd records how it was computed (``create_graph=True``)."""
        _, _, target_index, is_local = ctx.saved_tensors
        local = x[:, : ctx.width].to(total.dtype)
        # As the numbers know it, the sum over the ranks is 1; its gradient is that of the total.
        share = sum_over_ranks((local.logsumexp(1) - total).exp(), ctx.group)
        total = copy_to_ranks(total + share.log(), ctx.group).unsqueeze(1)
        ones = torch.zeros_like(x, dtype=total.dtype).scatter(1, target_index, is_local.to(total.dtype).unsqueeze(1))
        dx = (local - total).exp() - ctx.smoothing / ctx.vocab_size - (1 - ctx.smoothing) * ones[:, : ctx.width]
        dx = dx * copy_to_ranks(dy, ctx.group).unsqueeze(1)
        return functional.pad(dx, (0, x.shape[1] - ctx.width)).to(x.dtype)
