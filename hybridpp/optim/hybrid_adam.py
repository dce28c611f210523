"""Adam and AdamW under the name Colossal-AI gave them, on torch's own fused kernels."""

from collections.abc import Iterable
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor
from torch.optim import Adam

from hybridpp.errors import ConfigError
from hybridpp.optim.fused import is_dense

_FUSED_DEVICE_TYPES = frozenset({"cpu", "cuda", "mps", "xpu"})


class AdamOptions(TypedDict, total=False):
    """Options that :class:`HybridAdam` passes on to ``torch.optim.Adam``."""

    amsgrad: bool
    maximize: bool
    capturable: bool
    differentiable: bool
    foreach: bool | None
    fused: bool | None


class HybridAdam(Adam):
    """``torch.optim.AdamW`` (or ``Adam``) that uses torch's fused kernel where there is one; it needs no compiler.

    A parameter group is fused if all its parameters are floating-point tensors on a CPU, CUDA, MPS or XPU device when
    the group is added. For other groups torch chooses the implementation, which is foreach on accelerators. Parameters
    may move between those devices, or change their dtype, until the first step. Moments have the parameter's dtype, as
    always in torch: half-precision training needs fp32 master weights, which the plugin keeps.

    Args:
        params: parameters, named parameters or parameter groups, as for every torch optimizer.
        lr: learning rate.
        betas: decay rates of the first and second moment.
        eps: added to the denominator.
        weight_decay: decay coefficient.
        adamw_mode: True decays the weights themselves (AdamW), False adds the decay to the gradient (Adam).
        bias_correction: accepted for compatibility, as True only.
        nvme_offload_fraction: accepted for compatibility, as 0.0 only.
        nvme_offload_dir: accepted for compatibility, as None only.
        **options: ``amsgrad``, ``maximize``, ``capturable``, ``differentiable``, ``foreach`` and ``fused`` of
            ``torch.optim.Adam``. ``foreach`` or ``fused``, given here or in a group, overrides the choice above.

    Raises:
        ConfigError: ``bias_correction=False`` or NVMe offload is requested, or an option is unknown.
        ValueError: torch refuses a value, such as a negative ``lr``.

    Example:
        >>> optimizer = HybridAdam(torch.nn.Linear(2, 2).parameters(), lr=3e-4, weight_decay=0.01)
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]],
        lr: float | Tensor = 1e-3,
        *,  # torch and Colossal-AI order the rest differently, so positions would be ambiguous
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw_mode: bool = True,
        bias_correction: bool = True,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: str | None = None,
        **options: Unpack[AdamOptions],
    ) -> None:
        _refuse_what_is_not_offered(bias_correction, nvme_offload_fraction, nvme_offload_dir)
        _refuse_unknown_options(options)
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            decoupled_weight_decay=adamw_mode,
            **options,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as every torch optimizer does, and choose the fused kernel for it where that can run."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["fused"] is None and group["foreach"] is None and not group["differentiable"]:
            # None leaves the choice to torch; False would also keep it from choosing foreach.
            group["fused"] = all(_can_fuse(param) for param in group["params"]) or None

    def _init_group(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], *state_lists: list[Tensor]
    ) -> bool:
        """Gather a group's tensors for one step, all laid out in memory like their parameter if the step is fused.

        Works around torch's fused CPU kernels, which walk parameter, gradient and moments by address and never compare
        strides (2.13: a transposed gradient updates the wrong elements, an expanded one is read out of bounds); its
        CUDA kernels raise (pytorch #106951). Gradients in flat buckets and moments from a checkpoint are contiguous
        even where the parameter is not. Can go when torch checks or copies by itself.
        """
        if group["fused"]:
            for param in group["params"]:
                if param in self.state:
                    _lay_out_state_like(param, self.state[param])
        has_complex: bool = super()._init_group(group, params, grads, *state_lists)  # type: ignore[no-untyped-call]
        if group["fused"]:
            grads[:] = [_laid_out_like(param, grad) for param, grad in zip(params, grads, strict=True)]
        return has_complex


def _can_fuse(param: Tensor) -> bool:
    return param.is_floating_point() and param.device.type in _FUSED_DEVICE_TYPES and is_dense(param)


def _laid_out_like(param: Tensor, value: Tensor) -> Tensor:
    if value.stride() == param.stride():
        return value
    return torch.empty_like(param, dtype=value.dtype).copy_(value)


def _lay_out_state_like(param: Tensor, state: dict[str, Any]) -> None:
    for name, value in state.items():
        if name != "step":
            state[name] = _laid_out_like(param, value)


def _refuse_what_is_not_offered(
    bias_correction: bool, nvme_offload_fraction: float, nvme_offload_dir: str | None
) -> None:
    if not bias_correction:
        raise ConfigError(
            f"HybridAdam always corrects the bias of its moments: got bias_correction={bias_correction}. Leave it out; "
            f"a learning-rate warm-up has a similar effect on the first steps."
        )
    if nvme_offload_fraction != 0.0 or nvme_offload_dir is not None:
        raise ConfigError(
            f"HybridAdam does not offload its state to NVMe: got nvme_offload_fraction={nvme_offload_fraction}, "
            f"nvme_offload_dir={nvme_offload_dir!r}. Leave both out; more pipeline stages divide the state too."
        )


def _refuse_unknown_options(options: AdamOptions) -> None:
    unknown = sorted(options.keys() - AdamOptions.__annotations__.keys())
    if unknown:
        raise ConfigError(
            f"HybridAdam has no option of this name: got {', '.join(unknown)}. "
            f"Use one of {', '.join(AdamOptions.__annotations__)}, or put extra keys into the parameter groups."
        )
