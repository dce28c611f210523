"""Initial values of single tensors of a model, by the model's own initialisation."""

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hybridpp.errors import ConfigError
from hybridpp.nn.snapshot import Replacements
from hybridpp.nn.torch_private import buffers_of, parameters_of, version_of

Initializer = Callable[[nn.Module], Any]


class InitialValues:
    """Makes the initial value of any tensor of a model, one at a time, the same wherever it is asked for.

    The modules' own methods are called: ``_init_weights(module)`` of the nearest module above that has it, as in
    transformers; else ``reset_parameters()`` of the module, and then of those above it, which may rescale. Random
    numbers are drawn by torch's generator of the CPU, which is seeded with the seed and the tensor's name before each
    call, so a value depends on nothing else. Memory: the one tensor.

    Args:
        model: its tensors may be anywhere, cut or sharded; they are not touched.
        shapes: of the complete tensors that it holds here, by name; a tied one by its first name.
        dtypes: of them.
        seed: of the random numbers.
        initialize: called with each module, from a tensor's up to the model, instead of its own methods.
    """

    def __init__(
        self,
        model: nn.Module,
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, torch.dtype],
        seed: int,
        initialize: Initializer | None = None,
    ):
        self._model, self._shapes, self._dtypes, self._seed, self._initialize = model, shapes, dtypes, seed, initialize

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """A context for the other methods, in which the model holds complete tensors on the meta device."""
        replaced = Replacements()
        try:
            for path, module in self._model.named_modules():
                # Of a model that was cut, attributes hold what stands for the parameters of other stages.
                for held in (parameters_of(module), buffers_of(module), vars(module)):
                    names = [f"{path}.{key}".lstrip(".") for key in held]
                    for (key, tensor), name in zip(list(held.items()), names, strict=True):
                        if isinstance(tensor, Tensor) and name not in self._shapes:
                            replaced.put(
                                held, key, _like(tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
                            )
            for name in self._shapes:
                held = self._dict_of(name)
                kind = held.get(_key(name)) if _key(name) in held else nn.Parameter()
                replaced.put(held, _key(name), _like(kind, self._empty(name, "meta")))
            with torch.no_grad():
                yield
        finally:
            replaced.restore()

    def check(self) -> None:
        """Refuse tensors that no initialisation writes to; where the meta device shows that, nothing is computed.

        Raises:
            ConfigError: it names them.
        """
        # Some of torch's functions do nothing on the meta device.
        maybe = [name for name in self._shapes if not self._is_written(name, "meta")]
        missing = [name for name in maybe if not self._is_written(name, "cpu")]
        if missing:
            modules = ", ".join(sorted({type(self._model.get_submodule(_owner(name))).__name__ for name in missing}))
            raise ConfigError(
                f"no initialisation of {modules} writes to {', '.join(missing[:3])}{', …' if missing[3:] else ''}. "
                "Write a method reset_parameters(), or pass init_model(model, initialize=function), which is called "
                "with each module."
            )

    def _is_written(self, name: str, device: str) -> bool:
        with self._on(name, device) as (tensor, held):
            version = version_of(tensor)
            for call in self._calls(name):
                call()
            return held[_key(name)] is not tensor or version_of(tensor) != version

    def value(self, name: str) -> Tensor:
        """The initial value of a tensor, in host memory. Torch's generator is left as the last call leaves it."""
        with self._on(name, "cpu") as (_, held):
            for index, call in enumerate(self._calls(name)):
                digest = hashlib.blake2b(f"{self._seed} {index} {name}".encode(), digest_size=8).digest()
                _seed(int.from_bytes(digest, "big"))
                call()
            found: Tensor = held[_key(name)].detach()
            return found

    @contextmanager
    def _on(self, name: str, device: str) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """A context in which a tensor is on ``device``; its value is it, and the dict that holds it."""
        held = self._dict_of(name)
        before = held[_key(name)]
        held[_key(name)] = tensor = _like(before, self._empty(name, device))
        try:
            yield tensor, held
        finally:
            held[_key(name)] = before

    def _dict_of(self, name: str) -> dict[str, Any]:
        """The dict of its module that holds a tensor, or what stands for it."""
        module = self._model.get_submodule(_owner(name))
        dicts: tuple[dict[str, Any], ...] = (vars(module), buffers_of(module), parameters_of(module))
        return next((held for held in dicts if _key(name) in held), dicts[-1])

    def _empty(self, name: str, device: str) -> Tensor:
        return torch.empty(self._shapes[name], dtype=self._dtypes[name], device=device)

    def _calls(self, name: str) -> Iterator[Callable[[], Any]]:
        """What initialises the module that holds a tensor, and then those above it."""
        path = _owner(name)
        holders: list[Any] = [self._model.get_submodule(above) for above in _upwards(path)]
        for depth, module in enumerate(holders):
            owner = next((above for above in holders[depth:] if callable(getattr(above, "_init_weights", None))), None)
            if self._initialize is not None:
                yield functools.partial(self._initialize, module)
            elif owner is not None:
                yield functools.partial(owner._init_weights, module)
            else:
                own = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
                if callable(own):
                    yield own


def _seed(number: int) -> None:
    """Seed torch's generators: ``torch.manual_seed`` also notes the stack, for devices that are not in use."""
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(number)


def _like(kind: Any, tensor: Tensor) -> Tensor:
    return nn.Parameter(tensor, requires_grad=False) if isinstance(kind, nn.Parameter) else tensor


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _key(name: str) -> str:
    return name.rpartition(".")[2]


def _upwards(path: str) -> Iterator[str]:
    """A module's path, its parent's, and so on to the model's."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""
