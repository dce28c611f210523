"""Apply a sharding spec to a model: divide its parameters, and wrap the modules that compute with them."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from hybridpp.cluster import Group
from hybridpp.errors import ConfigError
from hybridpp.module_adapter import AdapterLayer, ModuleAdapter
from hybridpp.nn import walk
from hybridpp.nn.embedding import is_lookup
from hybridpp.nn.linear import is_linear, output_dim
from hybridpp.nn.names import qualified
from hybridpp.nn.torch_private import parameters_of
from hybridpp.sharding_plan.sharding_spec import DimShard, ShardingSpec
from hybridpp.tensor_parallel.apply_spec import apply_to_regions
from hybridpp.tensor_parallel.layers import (
    ColumnParallel,
    GatheredColumnParallel,
    RowParallel,
    ShardedLayer,
    UncopiedColumnParallel,
    VocabParallel,
)
from hybridpp.tensor_parallel.parameter_sharding import ParameterSharding, divide, sharding_of
from hybridpp.tensor_parallel.tp_context import TensorParallelContext

_SIZES = "sizes of its shard"


class ShardedModel(NamedTuple):
    """The result of :func:`shard`: a model with this rank's shards.

    Attributes:
        adapter: of the model.
        context: what its sharded layers share.
        layers: its sharded layers, by module.
        partial_grad: names of replicated parameters whose gradients have to be summed over the ranks.
        on_sequence_shards: modules inside of blocks that run on sequence shards; those who let them do so add them.
    """

    adapter: ModuleAdapter
    context: TensorParallelContext
    layers: Mapping[nn.Module, ShardedLayer]
    partial_grad: frozenset[str]
    on_sequence_shards: set[nn.Module]


def shard(adapter: ModuleAdapter, spec: ShardingSpec, group: Group, *, share_memory: bool = False) -> ShardedModel:
    """Let this rank hold its shards of a model's parameters; parameters and modules stay the same objects.

    Every rank of ``group`` must call it with the same model and spec; nothing is communicated.

    Args:
        adapter: of the model, with full parameters.
        spec: how it is sharded.
        group: the ranks.
        share_memory: let shards be views of the full parameters where that does not slow down their use. It is for
            trials: else every rank holds memory for its shards only.

    Raises:
        ConfigError: the spec does not fit the model.
    """
    model = adapter.model
    spec = _with_first_names(model, spec)
    shardings = _parameter_shardings(model, spec.params, group.size)
    spec |= _tied_modules(model, spec, shardings)
    for (name, attribute), value in spec.attributes.items():
        _set_attribute(adapter, walk.submodule(model, name), attribute, value)
    views = {id(weight) for weight in _linear_weights(model)} if share_memory else set()
    for parameter in walk.parameters(model):
        sharding = shardings.get(id(parameter))
        if sharding is not None:
            # Other kernels than those of linear layers may copy, or refuse, what is not contiguous.
            allow_view = share_memory and (sharding.dim == 0 or id(parameter) in views)
            adapter.noted(parameter, "tensor-parallel shard", undo=None)
            divide(parameter, sharding, group.rank, allow_view=allow_view)
    context = TensorParallelContext(group)
    layers: dict[nn.Module, ShardedLayer] = {}
    regions: list[str] = []
    for name in {**spec.holders(), **dict.fromkeys(sorted(spec.reduce_outputs | spec.gather_outputs))}:
        module = walk.submodule(model, name)
        if module in layers:
            continue
        if is_linear(module) or (isinstance(module, nn.Embedding) and name in spec.reduce_outputs):
            layers[module] = _sharded_layer(name, module, spec, context)
            _set_sizes(adapter, layers[module])
            adapter.wrap(module, AdapterLayer.SHARD, layers[module].run)
        else:
            regions.append(name)
    apply_to_regions(adapter, spec, regions, context)
    names = {id(parameter): name for name, parameter in walk.named_parameters(model)}
    partial = [model.get_parameter(name) for name in spec.partial_grad | spec.rank0_only]
    return ShardedModel(adapter, context, layers, frozenset(names[id(parameter)] for parameter in partial), set())


def _with_first_names(model: nn.Module, spec: ShardingSpec) -> ShardingSpec:
    """The spec with the first name of each module: several blocks may hold one, and it is prepared once."""
    first = {module: name for name, module in walk.named_modules(model)}
    every = dict(model.named_modules(remove_duplicate=False))
    if len(every) == len(first):
        return spec

    def rename(name: str) -> str:
        if name in every:
            return first[every[name]]
        holder, _, key = name.rpartition(".")
        return qualified(first[every[holder]], key)

    return spec.renamed(rename)


def _linear_weights(model: nn.Module) -> Iterator[nn.Parameter]:
    for module in walk.modules(model):
        if is_linear(module):
            yield from module.parameters(recurse=False)


def _set_attribute(adapter: ModuleAdapter, module: nn.Module, attribute: str, value: int) -> None:
    if "." not in attribute:
        adapter.set_attribute(module, attribute, value, _SIZES)
        return
    # Other modules read the same configuration: this one gets a copy.
    holder, _, attribute = attribute.partition(".")
    copied = copy.copy(getattr(module, holder))
    setattr(copied, attribute, value)
    adapter.set_attribute(module, holder, copied, _SIZES)


def _parameter_shardings(model: nn.Module, params: Mapping[str, DimShard], size: int) -> dict[int, ParameterSharding]:
    """By the parameter's ``id``.

    Raises:
        ConfigError: a parameter that several modules share would be divided in two ways.
    """
    names = {id(parameter): name for name, parameter in walk.named_parameters(model)}
    shardings: dict[int, ParameterSharding] = {}
    for name, dim_shard in params.items():
        parameter = model.get_parameter(name)
        # One copy of each piece is written as no copies.
        copies = dim_shard.copies if any(number > 1 for number in dim_shard.copies) else ()
        sharding = ParameterSharding(
            name=names[id(parameter)],
            full_shape=tuple(parameter.shape),
            shard=DimShard(dim_shard.dim, dim_shard.widths, copies),
            size=size,
        )
        if shardings.setdefault(id(parameter), sharding) != sharding:
            raise ConfigError(
                f"{sharding.name!r} is shared by several modules that tensor parallelism would divide in two ways, "
                f"one of them as {name!r}. Name the layers to divide in tensor_parallel_plan."
            )
    return shardings


def _tied_modules(model: nn.Module, spec: ShardingSpec, shardings: Mapping[int, ParameterSharding]) -> ShardingSpec:
    """The spec of modules that the spec does not name and that share a divided parameter: heads tied to an embedding.

    Embeddings, too: those of an encoder and a decoder may be two modules with one weight.
    """
    reduced, gathered = set[str](), set[str]()
    named = {id(walk.submodule(model, name)) for name in spec.holders()}
    for name, module in walk.named_modules(model):
        held = [key for key, parameter in parameters_of(module).items() if id(parameter) in shardings]
        if not held or id(module) in named:
            continue
        dim = shardings[id(parameters_of(module)[held[0]])].dim
        if held == ["weight"] and is_lookup(module) and dim == 0:
            reduced.add(name)
        elif held == ["weight"] and is_linear(module) and dim == output_dim(module):
            gathered.add(name)
        else:
            raise ConfigError(
                f"{name!r} ({type(module).__name__}) holds {held[0]!r}, which tensor_parallel_plan divides for another "
                "module, and cannot use a shard of it. Leave the other module out of the plan."
            )
    return ShardingSpec(reduce_outputs=frozenset(reduced), gather_outputs=frozenset(gathered))


def _sharded_layer(name: str, module: nn.Module, spec: ShardingSpec, context: TensorParallelContext) -> ShardedLayer:
    weight: Any = parameters_of(module)["weight"]
    sharding = sharding_of(weight)
    assert sharding is not None, "it was divided"
    if isinstance(module, nn.Embedding):
        return VocabParallel(module, context, sharding.local_shape[0])
    if name in spec.gather_outputs:
        return GatheredColumnParallel(module, context, sharding.full_shape[sharding.dim])
    if name in spec.reduce_outputs:
        return RowParallel(module, context)
    return (ColumnParallel if name in spec.copy_inputs else UncopiedColumnParallel)(module, context)


def _set_sizes(adapter: ModuleAdapter, layer: ShardedLayer) -> None:
    """Set the attributes in which a module records its sizes, which its forward may read, to those of its shard.

    An embedding and an ``nn.Linear`` whose outputs are gathered keep the full sizes: container code reads them
    (``arange(num_embeddings)``, logits viewed by ``out_features``), and their forwards do not.
    """
    module = layer.module
    if isinstance(layer, VocabParallel):
        if "padding_idx" in vars(module):
            adapter.set_attribute(module, "padding_idx", layer.local_padding_idx, _SIZES)
        return
    if isinstance(layer, GatheredColumnParallel) and isinstance(module, nn.Linear):
        return
    weight: Any = parameters_of(module)["weight"]
    first = output_dim(module)
    for names, dim in zip([("out_features", "nf"), ("in_features", "nx")], (first, 1 - first), strict=True):
        for name in names:
            if name in vars(module):
                adapter.set_attribute(module, name, weight.shape[dim], _SIZES)
