"""What a block does otherwise in training than in evaluation: a plan must hold in both."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hybridpp.nn import walk
from hybridpp.nn.torch_private import TorchDispatchMode, parameters_of, pytree, schema_of, storage_id

_DROPS = frozenset(
    f"{kind}dropout{suffix}" for kind in ("", "alpha_", "feature_", "feature_alpha_") for suffix in ("", "_")
) | {f"dropout{dims}d" for dims in (1, 2, 3)}
_WITH_DROPOUT = frozenset(("scaled_dot_product_attention", "multi_head_attention_forward"))


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch
    """While active, records what a block runs.

    These are the calls of its modules that hold parameters, since a shard of a module communicates when it is called
    and not when its weights are used; and the operations on floating-point numbers: which, on which parameters, and on
    what shapes.

    Args:
        block: that runs. It gets hooks.

    Attributes:
        run: the calls and operations, in order.
        written: the parameters that are written to, by name, with their values before.
    """

    def __init__(self, block: nn.Module):
        super().__init__()  # type: ignore[no-untyped-call]  # torch
        self._names = {storage_id(held): name for name, held in walk.named_parameters(block)}
        self._parameters = dict(walk.named_parameters(block))
        self.run: list[Any] = []
        self.written: dict[str, Tensor] = {}
        for name, module in walk.named_modules(block):
            if parameters_of(module):
                module.register_forward_pre_hook(partial(self._note_call, name))

    def _note_call(self, name: str, *_: Any) -> None:
        self.run.append(name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # No tree, as most arguments are tensors: a search is a few hundred of these.
        flat = [part for leaf in (*args, *kwargs.values()) for part in (leaf if isinstance(leaf, list) else (leaf,))]
        tensors = [leaf for leaf in flat if isinstance(leaf, Tensor)]
        if _writes(func):
            self._keep_values(func, args, kwargs)
        if any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors):
            read = tuple((self._name(tensor), tensor.shape) for tensor in tensors)
            # Checkpointing detaches what it is given, and computes the same.
            if func is not torch.ops.aten.detach.default or read[0][0] is not None:
                self.run.append((func, read))
        return func(*args, **kwargs)

    def _name(self, tensor: Tensor) -> str | None:
        return self._names.get(storage_id(tensor)) if tensor.layout is torch.strided else None

    def _keep_values(self, func: Any, args: Any, kwargs: Any) -> None:
        for number, argument in enumerate(schema_of(func).arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = args[number] if number < len(args) else kwargs.get(argument.name)
            for tensor in pytree.tree_leaves(given):
                name = self._name(tensor) if isinstance(tensor, Tensor) else None
                if name is not None and name not in self.written:
                    self.written[name] = self._parameters[name].detach().clone()

    def put_back(self) -> None:
        """Give the parameters that were written to their values before."""
        with torch.no_grad():
            for name, values in self.written.items():
                self._parameters[name].copy_(values)


@cache
def _writes(operation: Any) -> bool:
    return bool(schema_of(operation).is_mutable)


@contextmanager
def constant_draws() -> Iterator[None]:
    """Inside, nothing is dropped and random numbers are constants, so that shards of a block compute what it does."""
    draws = _ConstantDraws()  # type: ignore[no-untyped-call]  # torch
    with torch.random.fork_rng(devices=[]), draws, _NoDropout():
        torch.manual_seed(0)  # for what draws in one operation with its computation
        yield


class _NoDropout(TorchFunctionMode):
    """Leaves out dropout, so that what is left of two modes can be compared."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in _DROPS:
            return args[0] if args else kwargs["input"]
        if name in _WITH_DROPOUT and "dropout_p" in kwargs:
            kwargs = {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)


class _ConstantDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch
    """Replaces random floating-point numbers: what is kept with some probability is kept; others are one half."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        name = schema_of(func).name.rpartition("::")[2]
        if "dropout" in name or "attention" in name:
            return func(*args, **kwargs)
        drawn = func(*args, **kwargs)
        for tensor in pytree.tree_leaves(drawn):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                tensor.fill_(1.0 if name.startswith("bernoulli") else 0.5)
        return drawn
