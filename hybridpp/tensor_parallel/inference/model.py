"""Find out how a model can be divided, without knowing it: by its blocks' runs, checked by number."""

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hybridpp.tensor_parallel.division import Division
from hybridpp.tensor_parallel.inference.block import BlockPlan, BlockSearch, SampleCall, summed_modules
from hybridpp.tensor_parallel.inference.own_plan import differences
from hybridpp.tensor_parallel.plan import Plan


class Inference(NamedTuple):
    """What was found.

    Attributes:
        plan: styles, attributes and reasons, by module name.
        division: the same by parameter, and what styles cannot say: tables that are indexed by head, experts'
            tensors, arguments of which a rank takes its heads.
        summed: parameters that every rank has whole and whose gradient is the sum of the ranks' (norms per head).
        differences: where the model's own ``_tp_plan`` says something else, in words.
    """

    plan: Plan
    division: Division
    summed: frozenset[str]
    differences: tuple[str, ...]


def infer_plan(
    model: nn.Module,
    blocks: Iterable[str],
    sample_calls: Mapping[str, SampleCall],
    tp_size: int,
) -> Inference:
    """How the blocks of a model can be divided over ``tp_size`` ranks so that every number stays what it is.

    Of each kind of block one is copied, given made-up weights in which no mistake can hide, and tried in all ways that
    look possible; what does not give the whole copy's results and gradients is not in the plan. The model is left as it
    was. Its tensors must hold memory, but its weights' values do not matter.

    Args:
        model: whole.
        blocks: names of the modules to look into.
        sample_calls: for each block what it was called with once; blocks without are left whole.
        tp_size: by how much to divide.
    """
    known: dict[Hashable, BlockPlan] = {}
    reasons: dict[str, str] = {}
    found: dict[str, BlockPlan] = {}
    for name in blocks:
        if name not in sample_calls:
            reasons[name] = "was not called"
            continue
        block = model.get_submodule(name)
        kind = kind_of(block, *sample_calls[name])
        if kind not in known:
            known[kind] = _plan_of(block, sample_calls[name], tp_size)
        found[name] = known[kind]
    for name, parameter in _shared_otherwise(model, found).items():
        del found[name]
        reasons[name] = f"{parameter!r} is shared with a module that would use it in another way"
    styles: dict[str, str] = {}
    attributes: dict[str, dict[str, int]] = {}
    division, summed = Division(), frozenset[str]()
    for name, one in found.items():
        block = model.get_submodule(name)
        styles |= {_join(name, inner): style for inner, style in one.styles.items()}
        styles |= {_join(name, inner): "summed" for inner in summed_modules(block, one.summed)}
        reasons |= {_join(name, inner): reason for inner, reason in one.reasons.items()}
        for (inner, key), value in one.division.attributes.items():
            attributes.setdefault(_join(name, inner), {})[key] = value
        division |= one.division.inside(name)
        summed |= {_join(name, inner) for inner in one.summed}
    return Inference(Plan(styles, attributes, reasons), division, summed, differences(model, blocks, styles))


def _shared_otherwise(model: nn.Module, found: Mapping[str, BlockPlan]) -> dict[str, str]:
    """Blocks with a parameter that another module holds, too, and does not divide alike; with its name."""
    uses: dict[str, tuple[str, Hashable]] = {}
    for block, plan in found.items():
        uses |= {_join(block, name): (block, part) for name, part in plan.division.parts.items()}
        uses |= {_join(block, name): (block, "once") for name in plan.division.first_only}
        uses |= {_join(block, name): (block, "summed") for name in plan.summed - plan.division.parts.keys()}
    held: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                held.setdefault(id(parameter), []).append(_join(name, key))
    otherwise: dict[str, str] = {}
    for names in held.values():
        ways = [uses.get(name, ("", None)) for name in names]
        if len({way for _, way in ways}) > 1:
            otherwise |= {block: names[0] for block, _ in ways if block}
    return otherwise


def _plan_of(block: nn.Module, call: SampleCall, tp_size: int) -> BlockPlan:
    try:
        search = BlockSearch(block, call, tp_size)
    except Exception as error:  # the block's own, on numbers that it was not made for
        return BlockPlan(reasons={"": f"cannot be tried alone ({type(error).__name__}: {error})"})
    return search.run()


def _join(prefix: str, name: str) -> str:
    return ".".join(part for part in (prefix, name) if part)


def kind_of(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """What the plan of a block depends on: classes, sizes and settings of its modules, sizes of its arguments."""
    modules = tuple((name, type(module), _settings(module)) for name, module in block.named_modules())
    sizes = tuple((name, parameter.shape) for name, parameter in block.named_parameters())
    leaves, tree = pytree.tree_flatten((args, kwargs))
    shapes = tuple((leaf.shape, leaf.requires_grad) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves)
    return modules, sizes, shapes, str(tree)


def _settings(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (key, value)
        for key, value in vars(module).items()
        if isinstance(value, bool | int | float | str) and not key.endswith(("idx", "index", "_id"))
    )
