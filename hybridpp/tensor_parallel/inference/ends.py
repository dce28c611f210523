"""Embeddings and heads around a model's blocks: large tables that can be divided by their rows."""

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from hybridpp.tensor_parallel.plan import Kind
from hybridpp.tensor_parallel.shard import is_lookup

# A smaller table is not worth the communication.
_LEAST_SHARE = 0.25
# What can be asked of a part and of the whole alike.
_ALIKE = ("dtype", "device", "requires_grad", "is_meta", "is_cuda", "is_cpu", "is_sparse", "layout", "ndim")
_ABOUT = {vars(torch._C.TensorBase)[name].__get__ for name in _ALIKE}
_SHAPE = vars(torch._C.TensorBase)["shape"].__get__
_ABOUT |= {Tensor.dim, Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size}


class Ends(NamedTuple):
    """What was found.

    Attributes:
        styles: of the modules that hold large tables, by name.
        reasons: why a large table stays whole, by its first module's name.
    """

    styles: dict[str, str]
    reasons: dict[str, str]


class Table(NamedTuple):
    """A large weight.

    Attributes:
        modules: that hold it, by name; the first one is where it is looked up.
        key: its name there.
    """

    modules: dict[str, nn.Module]
    key: str

    def is_in(self, leaves: Iterable[Any]) -> bool:
        """Whether one of these is what is in its place; a fake one, while a model on the meta device is traced."""
        current = next(iter(self.modules.values()))._parameters[self.key]
        if current is None or (current.is_meta and not isinstance(current, FakeTensor)):
            return False
        return any(leaf is current for leaf in leaves)


class Uses:
    """How a model's large tables are used in a run.

    Attributes:
        tables: by the parameter's name.
        called: the modules that hold them and were called.
        otherwise: the tables that were used in any other way than by calling their modules with one tensor.
    """

    def __init__(self, tables: Mapping[str, Table]):
        self.tables = tables
        self.called: set[str] = set()
        self.otherwise: set[str] = set()
        self.depth = 0


class _Looking(TorchFunctionMode):
    def __init__(self, uses: Uses):
        super().__init__()
        self._uses = uses

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        uses = self._uses
        # A trace asks for shapes itself, which cannot be told from the model's own asking.
        traced = func == _SHAPE and any(isinstance(leaf, FakeTensor) for leaf in args)
        if not uses.depth and func not in _ABOUT and not traced:
            leaves = pytree.tree_leaves((args, kwargs))
            uses.otherwise |= {name for name, table in uses.tables.items() if table.is_in(leaves)}
        return func(*args, **(kwargs or {}))


def large_tables(model: nn.Module, blocks: Iterable[str]) -> dict[str, Table]:
    """The large weights of two dimensions outside of ``blocks``, by name."""
    inside = [model.get_submodule(name) for name in blocks]
    least = _LEAST_SHARE * max((sum(p.numel() for p in block.parameters()) for block in inside), default=torch.inf)
    others = {id(parameter) for block in inside for parameter in block.parameters()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tables: dict[str, Table] = {}
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is None or parameter.dim() != 2 or id(parameter) in others or parameter.numel() < least:
                continue
            tables.setdefault(names[id(parameter)], Table({}, key)).modules[name] = module
    return tables


@contextmanager
def watched_tables(tables: Mapping[str, Table]) -> Iterator[Uses]:
    """Inside, a run of the model tells how its tables are used."""
    uses = Uses(tables)

    def enter(name: str, table: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            uses.called.add(name)
            uses.depth += 1
            if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
                uses.otherwise.add(table)

        return hook

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        uses.depth -= 1

    hooks = []
    for name, table in tables.items():
        for place, module in table.modules.items():
            hooks.append(module.register_forward_pre_hook(enter(place, name), with_kwargs=True))
            hooks.append(module.register_forward_hook(leave, always_call=True))
    try:
        with _Looking(uses):
            yield uses
    finally:
        for hook in hooks:
            hook.remove()


def infer_ends(uses: Uses) -> Ends:
    """Styles for the tables that nothing but embeddings and linear layers uses, which make rows of them or by them."""
    ends = Ends({}, {})
    for table, (modules, _) in uses.tables.items():
        if not uses.called & modules.keys():
            continue
        styles = {name: _style(module) for name, module in modules.items()}
        first = next(iter(modules))
        if table in uses.otherwise:
            ends.reasons[first] = "its weight is used in another way than by calling it"
        elif not all(styles.values()):
            ends.reasons[first] = "its weight is not that of an embedding or a linear layer alone"
        else:
            ends.styles.update({name: style for name, style in styles.items() if style})
    return ends


def _style(module: nn.Module) -> str | None:
    if "forward" in vars(module):
        return None
    if type(module).forward is nn.Linear.forward:
        return Kind.GATHERED_COLUMN.value
    return Kind.VOCAB.value if is_lookup(module) and _is_by_row(module) else None


def _is_by_row(module: nn.Module) -> bool:
    """Whether each rank can look up its rows, and the sum is right: tried with a few rows in place of the module's."""
    width = module._parameters["weight"].shape[1]  # type: ignore[union-attr]  # it has one
    rows = torch.randn(4, width, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[0, 3, 1], [2, 2, 0]])
    try:
        with torch.no_grad():
            whole = _with_rows(module, rows)(ids)
            parts = [_with_rows(module, rows[start : start + 2])((ids - start) % 2) for start in (0, 2)]
    except Exception:  # whatever it makes of ids
        return False
    own = [part * (ids // 2 == place).unsqueeze(-1) for place, part in enumerate(parts)]
    return isinstance(whole, Tensor) and torch.equal(whole, own[0] + own[1])


def _with_rows(module: nn.Module, rows: Tensor) -> nn.Module:
    weight = module._parameters["weight"]
    made = copy.deepcopy(module, {id(weight): nn.Parameter(rows)})
    vars(made)["num_embeddings"], vars(made)["padding_idx"] = len(rows), None
    return made
