"""Text from a boosted model: transformers' own ``generate``, whose calls of the model run through the stages."""

import copy
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hybridpp.cluster import gather_numbers
from hybridpp.errors import ConfigError
from hybridpp.nn.peft_model import is_peft_model
from hybridpp.nn.pretrained_model import is_pretrained_model
from hybridpp.plugin import StepOptions
from hybridpp_plugins.engine import Engine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ONCE = StepOptions(return_loss=False, return_outputs=True, outputs_on="all", num_microbatches=1)


def generate(engine: Engine, inputs: Any, settings: Mapping[str, Any]) -> Any:
    """What ``model.generate`` of the complete model returns. Collective: all ranks."""
    model = _generating(engine.model)
    steps = _Steps(engine)
    shell = _shell_of(model, steps)
    given = dict(inputs) if isinstance(inputs, Mapping) else {} if inputs is None else {"inputs": inputs}
    both = sorted(given.keys() & settings.keys())
    if both:
        raise ConfigError(f"generate got {both[0]} twice. Pass it once.")
    settings = {**settings, **steps.choose_cache(model, settings)}
    was_training = engine.model.training
    engine.model.eval()
    try:
        with torch.no_grad():
            result = shell.generate(**given, **settings)  # type: ignore[operator]  # of transformers
            steps.finish()
    finally:
        engine.model.train(was_training)
    return result


def _generating(model: nn.Module) -> "PreTrainedModel":
    base: Any = model.get_base_model() if is_peft_model(model) else model  # type: ignore[operator]  # of peft
    if not is_pretrained_model(base) or not base.can_generate():
        raise ConfigError(
            f"generate needs a model of transformers that generates text: got {type(base).__name__}. Call "
            "execute_pipeline(..., return_outputs=True, outputs_on='all') for other models."
        )
    return base


def _is_prompt(model: Any) -> bool:
    return any(config.is_prompt_learning for config in model.peft_config.values())


class _Steps:
    """Calls of the model, which all replicas make as often as the one that makes the most."""

    def __init__(self, engine: Engine):
        self.device = engine.device
        self._engine = engine
        self._last: dict[str, Any] | None = None
        self._takes_cache = False
        self.cache: Any = None

    def choose_cache(self, model: "PreTrainedModel", settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of ``generate`` with which it keeps a cache, or none.

        Raises:
            ConfigError: the script asks for a cache that this model cannot have, or brings one.
        """
        from hybridpp_plugins.key_value_cache import StageCache, why_no_cache  # noqa: PLC0415  # imports transformers

        if settings.get("past_key_values") is not None or settings.get("cache_implementation") is not None:
            raise ConfigError(
                "generate keeps its own cache of keys and values, of each stage's layers. Leave past_key_values and "
                "cache_implementation out."
            )
        names = inspect.signature(type(model).forward).parameters
        self._takes_cache = "use_cache" in names
        why = why_no_cache(model, settings) if "past_key_values" in names else "its forward takes none"
        if why is None and self._engine.staged.is_sequence_parallel:
            why = "enable_sequence_parallelism=True divides sequences"
        if why is None and is_peft_model(self._engine.model) and _is_prompt(self._engine.model):
            why = "its adapter extends the prompt"
        wanted = settings.get("use_cache")
        if wanted and why is not None:
            raise ConfigError(
                f"generate keeps no cache of keys and values of this {type(model).__name__}, because {why}: got "
                "use_cache=True. Leave it out."
            )
        if why is not None or wanted is False:
            return {"use_cache": False}
        self.cache = StageCache()
        return {"use_cache": True, "past_key_values": self.cache}

    def run(self, inputs: dict[str, Any]) -> Any:
        self._last = inputs
        self._are_any_left(True)
        num_new = next(inputs[name].shape[1] for name in ("input_ids", "inputs_embeds", *inputs) if name in inputs)
        outputs = self._step(inputs, self.cache, num_new)
        if self.cache is not None:
            # What only says which tokens there are is as long as they; a replica that goes on alone sees the new ones.
            total = self.cache.length + num_new
            self._last = {
                name: value[:, -num_new:] if value.dim() > 1 and value.shape[1] == total else value
                for name, value in inputs.items()
            }
            self.cache.length = total
        return outputs

    def _step(self, inputs: dict[str, Any], cache: Any, num_new: int) -> Any:
        from hybridpp_plugins.key_value_cache import CachedCalls, UncachedCalls  # noqa: PLC0415  # imports transformers

        uncached = UncachedCalls() if self._takes_cache else None
        with self._engine.staged.with_options(uncached if cache is None else CachedCalls(cache, num_new)):
            return self._engine.step(iter([inputs]), None, _ONCE)["outputs"]

    def finish(self) -> None:
        """Take part in the calls of replicas that are not done yet."""
        while self._are_any_left(False):
            assert self._last is not None, "generate calls the model at least once"
            self._step(self._last, None, 0)

    def _are_any_left(self, is_left: bool) -> bool:
        if self._engine.layout.dp.size == 1:
            return is_left
        rows = gather_numbers(self._engine.layout.control, "in booster.generate", [float(is_left)])
        return any(row[0] for row in rows)


class _PassThrough(nn.Module):
    """Stands for an encoder: what it would encode goes along as its output, to the step that runs both."""

    def __init__(self, names: tuple[str, ...]):
        super().__init__()
        self.names = names

    def forward(self, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutput  # noqa: PLC0415  # whoever has the model imported it

        self.name = next(name for name in self.names if kwargs.get(name) is not None)
        return BaseModelOutput(last_hidden_state=kwargs[self.name])


def _shell_of(model: "PreTrainedModel", steps: _Steps) -> nn.Module:
    """A model of the same kind without weights, whose forward is a step of the boosted one."""
    encoder = _PassThrough((model.main_input_name, "inputs_embeds"))

    def forward(shell: Any, **inputs: Any) -> Any:
        inputs.pop("past_key_values", None)
        encoded = inputs.pop("encoder_outputs", None)
        if encoded is not None:
            inputs[encoder.name] = encoded[0]
        return steps.run({name: value for name, value in inputs.items() if isinstance(value, Tensor)})

    # Transformers looks there for what it may pass, such as position numbers that skip padding.
    vars(forward)["__signature__"] = inspect.signature(type(model).forward)
    device = steps.device
    methods: dict[str, Any] = {
        "forward": forward,
        "device": property(lambda shell: device),
        "__module__": type(model).__module__,
    }
    if model.config.is_encoder_decoder:
        methods["get_encoder"] = lambda shell, *args, **kwargs: encoder
    kind: Any = type(type(model).__name__, (type(model),), methods)
    with torch.device("meta"):
        shell: nn.Module = kind(copy.deepcopy(model.config))
    shell.generation_config = model.generation_config  # type: ignore[assignment]  # transformers
    return shell.eval()
