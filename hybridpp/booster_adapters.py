"""The part of the booster that adds and saves adapters (LoRA), which the peft library makes."""

from pathlib import Path
from typing import Any

from torch import nn

from hybridpp.booster_saves import BoosterSaves
from hybridpp.errors import ConfigError
from hybridpp.nn.peft_model import is_peft_model
from hybridpp.saving import is_file_name


class BoosterAdapters(BoosterSaves):
    """What :class:`hybridpp.Booster` does with adapters."""

    def enable_lora(
        self,
        model: nn.Module,
        pretrained_dir: str | Path | None = None,
        lora_config: Any = None,
        *,
        bnb_quantization_config: None = None,
        quantize: bool = False,
    ) -> nn.Module:
        """Freeze a model and add an adapter to it, which is all that is trained. Call it before :meth:`boost`.

        Make the optimizer afterwards, from the parameters of the result that require a gradient: only these have
        optimizer state. The layers of a new adapter start with random numbers, so all ranks need the same seed
        (``launch_from_torch(seed=...)``). Nothing is communicated.

        Args:
            model: not boosted yet; its weights are frozen in place.
            pretrained_dir: a folder with an adapter to go on with; None: the adapter is new.
            lora_config: a ``peft.LoraConfig``, or the config of another of peft's methods; needed for a new adapter.
            bnb_quantization_config, quantize: only the defaults are supported.

        Returns:
            A ``peft.PeftModel`` around the model.

        Raises:
            ConfigError: peft is not installed, the adapter does not fit, or an argument is missing or not supported.
        """
        if bnb_quantization_config is not None or quantize:
            raise ConfigError(
                "quantized weights cannot be cut or sharded: got quantize or bnb_quantization_config. Leave it out, "
                "and use precision='bf16'."
            )
        if not self.plugin.support_lora():
            raise ConfigError(f"{type(self.plugin).__name__} adds no adapters. Wrap the model with peft before boost.")
        if pretrained_dir is None and lora_config is None:
            raise ConfigError("enable_lora needs lora_config=peft.LoraConfig(...), or pretrained_dir: got neither.")
        if pretrained_dir is not None and not Path(pretrained_dir, "adapter_config.json").is_file():
            raise ConfigError(f"{pretrained_dir} holds no adapter_config.json. Pass the folder of a saved adapter.")
        if self._runs.has(model):
            raise ConfigError(
                f"an adapter is added before boost: this {type(model).__name__} is boosted. Make the model anew, and "
                "call enable_lora first."
            )
        try:
            import peft  # noqa: PLC0415  # an extra
        except ImportError as error:
            raise ConfigError("enable_lora needs peft. Run: pip install 'hybridpp[lora]'.") from error
        try:
            if pretrained_dir is None:
                adapted: nn.Module = peft.get_peft_model(model, lora_config)
            else:
                adapted = peft.PeftModel.from_pretrained(
                    model, str(pretrained_dir), is_trainable=True, config=lora_config
                )
        except Exception as error:  # of whatever does not fit
            raise ConfigError(
                f"peft adds no adapter to this {type(model).__name__}: {type(error).__name__}: {error}"
            ) from error
        return adapted

    def save_lora_as_pretrained(self, model: nn.Module, checkpoint: str | Path, use_safetensors: bool = True) -> None:
        """Write the adapters of a boosted model to a folder that ``peft.PeftModel.from_pretrained`` reads.

        Collective: every rank of the world; rank 0 writes.

        Args:
            model: the boosted model, which :meth:`enable_lora` or peft made.
            checkpoint: the folder.
            use_safetensors: only True is supported.

        Raises:
            CheckpointError: the folder cannot be written; raised on every rank.
            ConfigError: the model has no adapters, or an argument is not supported.
        """
        if use_safetensors is not True:
            raise ConfigError("adapters are saved as safetensors only: got use_safetensors=False. Leave it out.")
        if not is_peft_model(model):
            raise ConfigError(
                f"save_lora_as_pretrained saves adapters: got {type(model).__name__} without any. Call "
                "booster.enable_lora before boost, or booster.save_model."
            )
        if is_file_name(Path(checkpoint)):
            raise ConfigError(f"adapters are saved to a folder: got {str(checkpoint)!r}. Pass a folder's name.")
        self.save_model(model, checkpoint)
