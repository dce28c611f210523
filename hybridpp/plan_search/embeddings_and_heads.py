"""Embeddings and heads outside of a model's blocks: large tables that can be divided by rows."""

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hybridpp.nn import walk
from hybridpp.nn.embedding import is_lookup
from hybridpp.nn.torch_private import FakeTensor, TensorBase, parameters_of, pytree
from hybridpp.plan_search.trial_errors import failure_reason
from hybridpp.sharding_plan.plan import ShardKind

# A smaller table is not worth the communication.
_LEAST_SHARE = 0.25
# Number of rows for the trial of an embedding on two ranks.
_NUM_ROWS = 4
# Attributes that a shard and the full tensor have in common.
_SAME_FOR_SHARDS = ("dtype", "device", "requires_grad", "is_meta", "is_cuda", "is_cpu", "is_sparse", "layout", "ndim")
_METADATA = {vars(TensorBase)[name].__get__ for name in _SAME_FOR_SHARDS}
_SHAPE = vars(TensorBase)["shape"].__get__
_METADATA |= {Tensor.dim, Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size}


class EmbeddingsAndHeads(NamedTuple):
    """Styles of embeddings and heads.

    Attributes:
        styles: of the modules that hold large tables, by name.
        reasons: why a large table stays replicated, by the name of the first module that holds it.
    """

    styles: dict[str, str]
    reasons: dict[str, str]


class LargeTable(NamedTuple):
    """A large weight.

    Attributes:
        modules: that hold it, by name.
        key: its name in the first of them.
    """

    modules: dict[str, nn.Module]
    key: str

    def is_in(self, leaves: Iterable[Any]) -> bool:
        """Whether one of these is the table's current tensor: a fake one, while a meta model is traced."""
        current = parameters_of(next(iter(self.modules.values())))[self.key]
        if current is None or (current.is_meta and not isinstance(current, FakeTensor)):
            return False
        return any(leaf is current for leaf in leaves)


class TableUses:
    """How a run of the model uses its large tables.

    Attributes:
        tables: by the parameter's name.
        called: the modules that hold tables and were called.
        otherwise: tables that were used in another way than by a call of their modules with one tensor.
        depth: number of calls of such modules that are running.
    """

    def __init__(self, tables: Mapping[str, LargeTable]):
        self.tables = tables
        self.called: set[str] = set()
        self.otherwise: set[str] = set()
        self.depth = 0


class _UseRecorder(TorchFunctionMode):
    def __init__(self, uses: TableUses):
        super().__init__()
        self._uses = uses

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        uses = self._uses
        # A trace reads shapes, too, which looks like a read by the model.
        traced = func == _SHAPE and any(isinstance(leaf, FakeTensor) for leaf in args)
        if not uses.depth and func not in _METADATA and not traced:
            leaves = pytree.tree_leaves((args, kwargs))
            uses.otherwise |= {name for name, table in uses.tables.items() if table.is_in(leaves)}
        return func(*args, **(kwargs or {}))


def large_tables(model: nn.Module, blocks: Iterable[str]) -> dict[str, LargeTable]:
    """The large matrices outside of ``blocks``, by name."""
    inside = [model.get_submodule(name) for name in blocks]
    least = _LEAST_SHARE * max((sum(p.numel() for p in walk.parameters(block)) for block in inside), default=torch.inf)
    others = {id(parameter) for block in inside for parameter in walk.parameters(block)}
    names = {id(parameter): name for name, parameter in walk.named_parameters(model)}
    tables: dict[str, LargeTable] = {}
    for name, module in walk.named_modules(model):
        for key, parameter in parameters_of(module).items():
            if parameter is None or parameter.dim() != 2 or id(parameter) in others or parameter.numel() < least:
                continue
            tables.setdefault(names[id(parameter)], LargeTable({}, key)).modules[name] = module
    return tables


@contextmanager
def record_table_uses(tables: Mapping[str, LargeTable]) -> Iterator[TableUses]:
    """Inside, a run of the model records how its tables are used."""
    uses = TableUses(tables)

    def before_call(name: str, table: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            uses.called.add(name)
            uses.depth += 1
            if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
                uses.otherwise.add(table)

        return hook

    def after_call(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        uses.depth -= 1

    hooks = []
    for name, table in tables.items():
        for holder, module in table.modules.items():
            hooks.append(module.register_forward_pre_hook(before_call(holder, name), with_kwargs=True))
            hooks.append(module.register_forward_hook(after_call, always_call=True))
    try:
        with _UseRecorder(uses):
            yield uses
    finally:
        for hook in hooks:
            hook.remove()


def infer_embeddings_and_heads(uses: TableUses) -> EmbeddingsAndHeads:
    """Styles for tables that only embeddings and linear layers use."""
    found = EmbeddingsAndHeads({}, {})
    for table, (modules, _) in uses.tables.items():
        if not uses.called & modules.keys():
            continue
        first = next(iter(modules))
        if table in uses.otherwise:
            found.reasons[first] = "its weight is used in another way than by calling the module"
            continue
        styles = {name: _style(module) for name, module in modules.items()}
        reason = next((style.why_not for style in styles.values() if style.why_not), None)
        if reason is not None:
            found.reasons[first] = reason
        else:
            found.styles.update({name: style.text for name, style in styles.items()})
    return found


class _Style(NamedTuple):
    """The style of a module that holds a table, or why it has none."""

    text: str = ""
    why_not: str = ""


def _style(module: nn.Module) -> _Style:
    if "forward" not in vars(module):
        if type(module).forward is nn.Linear.forward:
            return _Style(ShardKind.GATHERED_COLUMN.value)
        if is_lookup(module):
            why_not = _row_sharding_obstacle(module)
            return _Style(why_not=why_not) if why_not else _Style(ShardKind.VOCAB.value)
    return _Style(why_not="it is no plain embedding or linear layer")


def _row_sharding_obstacle(module: nn.Module) -> str | None:
    """Why the table cannot be sharded by rows; None: it can. Tried with a few rows."""
    width = parameters_of(module)["weight"].shape[1]  # type: ignore[union-attr]  # it has one
    rows = torch.randn(_NUM_ROWS, width, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[0, 3, 1], [2, 2, 0]])
    try:
        with torch.no_grad():
            full = _with_rows(module, rows)(ids)
            parts = [_with_rows(module, rows[start : start + 2])((ids - start) % 2) for start in (0, 2)]
            # A module that does not return one row per id fails here.
            masked = [part * (ids // 2 == rank).unsqueeze(-1) for rank, part in enumerate(parts)]
            is_equal = torch.equal(full, masked[0] + masked[1])
    except Exception as error:  # the module may raise anything
        return f"in a trial with a few rows, it does not look up one row for each id ({failure_reason(error)})"
    return None if is_equal else "in a trial with a few rows, it does not look up one row for each id"


def _with_rows(module: nn.Module, rows: Tensor) -> nn.Module:
    weight = parameters_of(module)["weight"]
    copied = copy.deepcopy(module, {id(weight): nn.Parameter(rows)})
    # As at run time, for the full table and for a shard.
    vars(copied)["num_embeddings"], vars(copied)["padding_idx"] = _NUM_ROWS, None
    return copied
