"""What the state of a manifest may hold: all of it but tensors, of a run, an optimizer or an LR schedule."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from hybridpp.checkpoint.plain_values import decode
from hybridpp.checkpoint.schema import (
    BrokenRuleError,
    Rule,
    flag,
    integer,
    items,
    mapping,
    one_of,
    optional,
    positive_number,
    record,
    require,
    text,
)
from hybridpp.errors import CheckpointError

_DTYPES = frozenset(
    str(value).removeprefix("torch.")
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and value.is_floating_point
)
# A loader draws once for each pass that there was.
_MOST_PASSES = 10**7
_MOST_RANKS = 2**24


def _plain(value: Any, where: str) -> None:
    """What :func:`~hybridpp.checkpoint.plain_values.encode` writes."""
    try:
        decode(value)
    except CheckpointError as error:
        raise BrokenRuleError(f"{where}: {error}") from error


def _plain_dict(value: Any, where: str) -> None:
    _plain(value, where)
    require(isinstance(decode(value), dict), where, value, "a dict")


def _extra_state(value: Any, where: str) -> None:
    """What modules return from ``get_extra_state``, by the names that torch gives it."""
    mapping(_plain)(value, where)
    for name in value:
        require(name.endswith("_extra_state"), f"a name in {where}", name, "one that ends in _extra_state")


def _entry_of_optimizer(value: Any, where: str) -> None:
    """How an entry of an optimizer's state is kept: a tensor of the parameter's shape, another tensor, or a value."""
    is_tensor = value in (["like"], ["full"])
    is_value = isinstance(value, list) and len(value) == 2 and value[0] == "value"
    require(is_tensor or is_value, where, value, "['like'], ['full'] or ['value', a value]")
    if is_value:
        _plain(value[1], f"{where}[1]")


def _position(value: Any, where: str) -> None:
    """A position in the data: epoch, samples, passes, size of the dataset, seed."""
    items(optional(integer(-(2**63), 2**64 - 1)), exactly=5)(value, where)
    for number, most in enumerate((2**31, 2**63 - 1, _MOST_PASSES)):
        integer(0, most)(value[number], f"{where}[{number}]")
    optional(integer())(value[3], f"{where}[3]")


_SEED = integer(-(2**63), 2**64 - 1)
_PROGRESS = record({}, {"seed": _SEED, "num_steps": integer(), "num_evaluations": integer()})
_OPTIMIZER = record(
    {
        "class": optional(text()),
        "settings": items(mapping(_plain)),
        "groups": items(record({"names": items(text())})),
        "state": mapping(mapping(_entry_of_optimizer)),
        "counts": record({"applied": integer(), "skipped": integer(), "last_skipped": flag}),
        "loss_scale": optional(
            record({"scale": positive_number, "clean_steps": integer(), "overflows": integer(), "settled": flag})
        ),
    },
    is_open=True,
)
_ORIGIN = record(
    {"aliases": mapping(text()), "dtype": optional(one_of(_DTYPES)), "other_dtypes": mapping(one_of(_DTYPES))},
    {"config": optional(record({"model_type": text()}, is_open=True))},
    is_open=True,
)
_MODEL = record(
    {
        "class": text(),
        "progress": _PROGRESS,
        "extra_state": _extra_state,
        "optimizer": optional(_OPTIMIZER),
        "lr_scheduler": optional(_plain_dict),
        "data": optional(_position),
    },
    {"origin": optional(_ORIGIN), "imported_from": text()},
    is_open=True,
)
_KINDS: dict[str, Rule] = {
    "models": record(
        {
            "models": items(_MODEL),
            "extras": _plain_dict,
            "generators": optional(
                record({"states": items(_plain_dict), "of_ranks": items(integer(), most=_MOST_RANKS)})
            ),
            "replicas_of_ranks": items(integer(), most=_MOST_RANKS),
        },
        is_open=True,
    ),
    "optimizer": record({"optimizer": _OPTIMIZER, "model": text(), "progress": _PROGRESS}, is_open=True),
    "lr_scheduler": record({"lr_scheduler": record({"class": text(), "state": _plain_dict})}, is_open=True),
}
"""The rule of a state, by the entry that says of what it is."""

_SIZES = record(
    {}, {**{f"{axis}_size": integer(1, _MOST_RANKS) for axis in ("dp", "pp", "tp")}, "zero_stage": integer(0, 3)}
)


def check_state(state: Any, layout: Any, keys: Collection[str]) -> None:
    """Check the state of a manifest, and its layout.

    Args:
        state: as JSON has it.
        layout: that the run had.
        keys: of the manifest's tensors.

    Raises:
        BrokenRuleError: something is not what a save writes.
    """
    _SIZES(layout, "layout")
    require(isinstance(state, dict), "state", state, "an object")
    kinds = [kind for kind in _KINDS if kind in state]
    if len(kinds) != 1:
        raise BrokenRuleError(f"state has {sorted(state)[:8]}, and must have one of {', '.join(_KINDS)}")
    _KINDS[kinds[0]](state, "state")
    if kinds == ["models"]:
        _check_ranks(state, layout)
    for number, holder in enumerate(state.get("models", [state])):
        if (optimizer := holder.get("optimizer")) is not None:
            _check_optimizer(optimizer, f"model{number}/optimizer/", keys)


def _check_ranks(state: Mapping[str, Any], layout: Mapping[str, Any]) -> None:
    """Check that each rank of the layout has a replica and, if any has, states of generators."""
    replicas, generators = state["replicas_of_ranks"], state["generators"]
    sizes = [layout.get(f"{axis}_size", 0) for axis in ("dp", "pp", "tp")]
    where, rule = "state.replicas_of_ranks", f"the replicas of all ranks of the layout {dict(layout)}"
    require(len(replicas) == sizes[0] * sizes[1] * sizes[2], where, replicas, rule)
    require(set(replicas) == set(range(sizes[0])), where, replicas, rule)
    if generators is not None:
        where, of_ranks = "state.generators.of_ranks", generators["of_ranks"]
        rule = f"a number of one of the {len(generators['states'])} states for each rank"
        require(len(of_ranks) == len(replicas), where, of_ranks, rule)
        require(max(of_ranks) < len(generators["states"]), where, of_ranks, rule)


def _check_optimizer(optimizer: Mapping[str, Any], prefix: str, keys: Collection[str]) -> None:
    """Check that groups have settings, and that each tensor of the state is described."""
    groups = [group["names"] for group in optimizer["groups"]]
    names = [name for group in groups for name in group]
    num_settings = len(optimizer["settings"])
    require(num_settings == len(groups), "the optimizer's settings", num_settings, f"those of {len(groups)} groups")
    require(len(set(names)) == len(names), "the optimizer's groups", names, "disjoint")
    described = set(_tensors_of(optimizer["state"], prefix))
    stray = next((key for key in keys if key.startswith(prefix) and key not in described), None)
    if stray is not None:
        raise BrokenRuleError(f"the tensor {stray!r:.120} is none that the optimizer's state describes")


def _tensors_of(state: Mapping[str, Mapping[str, Any]], prefix: str) -> Iterator[str]:
    for name, entries in state.items():
        yield from (f"{prefix}{name}/{key}" for key, (kind, *_) in entries.items() if kind != "value")
