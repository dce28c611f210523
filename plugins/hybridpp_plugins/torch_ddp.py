"""DistributedDataParallel's keywords, as settings of HybridParallelPlugin."""

from typing import Any, Literal

from hybridpp.config import Precision
from hybridpp_plugins.hybrid_parallel import HybridParallelPlugin
from hybridpp_plugins.preset import FP8, Preset, given_to, same, with_more
from hybridpp_plugins.signature import line_by_line

KEYWORDS = Preset(
    takes=same("broadcast_buffers", "precision") | {"bucket_cap_mb": "ddp_bucket_cap_mb"},
    hints=frozenset({"find_unused_parameters", "check_reduction", "gradient_as_bucket_view", "static_graph"}),
    refused={"fp8_communication": FP8},
)


class TorchDDPPlugin(HybridParallelPlugin):
    """Trains a complete replica on every rank: HybridParallelPlugin with ``zero_stage=0``, by DDP's keywords.

    Collective: every rank of the world must construct it, with the same settings.

    Args:
        broadcast_buffers: as in HybridParallelPlugin.
        bucket_cap_mb: its ``ddp_bucket_cap_mb``.
        find_unused_parameters, check_reduction, gradient_as_bucket_view, static_graph: without effect; parameters that
            a step does not use are always allowed.
        fp8_communication: only False is supported.
        precision: as in HybridParallelPlugin; None: that of ``Booster(mixed_precision=...)``, else fp32.
        more: further settings of HybridParallelPlugin, but for ``tp_size``, ``pp_size`` and ``zero_stage``.

    Raises:
        ConfigError: a setting is unknown, wrong or not supported.

    Example:
        >>> plugin = TorchDDPPlugin(bucket_cap_mb=50, max_norm=1.0)
        >>> plugin.zero_stage, plugin.settings.optimizer.ddp_bucket_cap_mb
        (0, 50)
    """

    @line_by_line
    def __init__(
        self,
        broadcast_buffers: bool = True,
        bucket_cap_mb: float = 25,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        fp8_communication: bool = False,
        *,
        precision: Precision | Literal["fp32", "fp16", "bf16"] | None = None,
        **more: Any,
    ):
        settings = KEYWORDS.settings(TorchDDPPlugin, given_to(locals()))
        settings |= {"tp_size": 1, "pp_size": 1, "zero_stage": 0}
        super().__init__(**with_more(TorchDDPPlugin, settings, more))
