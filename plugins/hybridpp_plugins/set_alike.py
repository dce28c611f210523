"""What every rank must set alike, described as texts that are equal in all processes, and compared between ranks."""

import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hybridpp.cluster import Group, gather_numbers, gather_objects, name_ranks
from hybridpp.errors import ConfigError
from hybridpp.nn.torch_private import parameters_of
from hybridpp.nn.walk import ScriptListing
from hybridpp.plugin import Boosted
from hybridpp_plugins.replica_loader import ReplicaDataLoader

Facts: TypeAlias = dict[str, dict[str, str]]
"""By what has them ("": nothing needs to be named), what is set there: texts by name."""


class ComparedFacts(NamedTuple):
    """What is compared together.

    Attributes:
        facts: of this rank.
        advice: ends the error.
        rule: begins it.
        is_optional: whether a rank may have some facts less than others.
    """

    facts: Facts
    advice: str
    rule: str = "all ranks must be set alike"
    is_optional: bool = False


ALIKE = (
    "the same settings on every rank: they differ where a script reads them from a local file, the environment or the "
    "host."
)
"""Ends the advice about settings."""

# Attributes of models and schedules that belong to the host, and may differ.
_OF_HOST = frozenset({"device", "rank", "local_rank", "name_or_path", "_name_or_path", "transformers_version"})
_HOSTS_TEXT = re.compile(r".*[/\\].*|(cpu|cuda|mps|xpu)(:\d+)?", re.DOTALL)
_OF_ALL_MODULES = frozenset(vars(nn.Module()))
_MAX_TEXT, _MAX_DEPTH = 200, 12
# Ranks exchange a digest of each of so many parts of what they compare; only unequal parts are looked into.
_NUM_PARTS = 256
_MAX_PARTS, _MAX_TOLD = 8, 4
_CYCLE = "..."


def described(value: Any, depth: int = 0) -> str:
    """A text of a value, which is the same in all processes that have an equal one.

    Numbers are equal that compare equal; functions with the same name, constants, defaults and plain values in their
    closures; files with equal contents; objects whose state is not looked into with the same class.
    """
    if isinstance(value, Enum):
        return described(value.value)
    if value is None or isinstance(value, bool | str | bytes):
        return repr(value)
    if isinstance(value, int | float):
        return (
            repr(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else repr(value)
        )
    if depth > _MAX_DEPTH:
        return _CYCLE
    go_on = partial(described, depth=depth + 1)
    if isinstance(value, Path):
        return _file(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{go_on(key)}: {go_on(one)}" for key, one in value.items())) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(go_on, value)) + "]"
    if isinstance(value, AbstractSet):
        return "{" + ", ".join(sorted(map(go_on, value))) + "}"
    if isinstance(value, Tensor):
        small = value.numel() <= 4 and not value.is_meta
        return f"tensor {go_on(value.tolist()) if small else list(value.shape)} of {value.dtype}"
    if isinstance(value, torch.dtype | complex):
        return repr(value)
    return _object(value, depth)


def _object(value: Any, depth: int) -> str:
    go_on = partial(described, depth=depth + 1)
    if isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        closure = [content for name, cell in cells if not _is_of_host(name, content := _content(cell))]
        held = [*_constants(value.__code__), *closure, *(value.__defaults__ or ())]
        return f"{_name_of(value)}({', '.join(map(go_on, held))})"
    if isinstance(value, MethodType):
        return _name_of(value)
    if isinstance(value, partial):
        return f"partial {go_on(value.func)}{go_on(value.args)}{go_on(value.keywords)}"
    if is_dataclass(value) and not isinstance(value, type):
        return (
            f"{type(value).__name__}({', '.join(f'{f.name}={go_on(getattr(value, f.name))}' for f in fields(value))})"
        )
    if isinstance(value, LRScheduler):
        return f"{_name_of(type(value))}{go_on(_plain_items(vars(value)))}"
    # A function of torch and a class have names; an object is known by its class.
    return _name_of(value) if hasattr(value, "__qualname__") or hasattr(value, "__name__") else _name_of(type(value))


def _name_of(value: Any) -> str:
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", "")
    return f"{getattr(value, '__module__', None) or ''}.{name}".lstrip(".")


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _constants(code: CodeType) -> Iterable[Any]:
    """Names and plain constants of a function's code: two lambdas have one name."""
    yield code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _constants(constant)
        elif not isinstance(constant, str):  # docstrings
            yield constant


def _file(path: Path) -> str:
    try:
        return f"a file with CRC-32 {zlib.crc32(path.read_bytes()):08x}"
    except OSError:
        return f"{path.name!r}, which cannot be read"


def _is_of_host(name: str, value: Any) -> bool:
    """Whether an attribute may differ between ranks, because it names a device or a place of this host."""
    is_text = isinstance(value, str)
    return (
        name in _OF_HOST or isinstance(value, torch.device | Path) or (is_text and bool(_HOSTS_TEXT.fullmatch(value)))
    )


def _plain_items(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """What of an object's attributes is compared."""
    return {
        name: value
        for name, value in attributes.items()
        if not isinstance(value, Optimizer | nn.Module) and not _is_of_host(name, value)
    }


def setting_facts(given: Mapping[str, Any], settings: Sequence[Any]) -> Facts:
    """The settings of a plugin.

    Args:
        given: all keyword arguments, by name, so that a new one is compared without being listed anywhere.
        settings: what they came to: dataclasses, whose fields replace what was given under their names.
    """
    found = dict(given)
    for one in settings:
        _add_fields(one, found)
    if isinstance(schedule := found.get("schedule"), str) and Path(schedule).is_file():
        found["schedule"] = Path(schedule)
    return {"": {name: described(value) for name, value in found.items()}}


def _add_fields(settings: Any, found: dict[str, Any]) -> None:
    for field in fields(settings) if is_dataclass(settings) else ():
        value = getattr(settings, field.name)
        if is_dataclass(value) and field.name not in found:
            _add_fields(value, found)
        else:
            found[field.name] = value


def optimizer_facts(optimizer: Optimizer, names: Mapping[int, str]) -> Facts:
    """An optimizer's class and groups; ``names`` are those of the parameters, by id."""
    parts = getattr(optimizer, "optimizers", None)
    kinds = [type(one).__name__ for one in parts] if isinstance(parts, list) else type(optimizer).__name__
    facts = {
        "": {"the optimizer": described(kinds), "the number of parameter groups": str(len(optimizer.param_groups))}
    }
    facts[""]["the number of optimizer states"] = str(len(optimizer.state))
    for index, group in enumerate(optimizer.param_groups):
        own = [names.get(id(parameter), "") for parameter in group["params"]]
        facts[f"parameter group {index}"] = {
            "params": f"{len(own)} parameters from {own[0] if own else None} on, CRC-32 {_crc(' '.join(own)):08x}",
            **group_facts(group),
        }
    return facts


def group_facts(group: Mapping[str, Any]) -> dict[str, str]:
    """The settings of a parameter group, but for its parameters."""
    return {str(key): described(value) for key, value in group.items() if key not in ("params", "param_names")}


def schedule_facts(lr_scheduler: Any) -> Facts:
    """An LR schedule's class and, of one like torch's, what it goes by."""
    found = {"the LR schedule": _name_of(type(lr_scheduler)) if lr_scheduler is not None else "None"}
    if isinstance(lr_scheduler, LRScheduler):
        found |= {name: described(value) for name, value in _plain_items(vars(lr_scheduler)).items()}
    return {"": {"the LR schedule": found.pop("the LR schedule")}, "the LR schedule": found}


def model_facts(model: nn.Module, root: str) -> Facts:
    """By module: its class, whether it trains, plain public attributes, and which parameters are trained.

    Args:
        model: all of it.
        root: stands for the name of the model itself.
    """
    seen: set[int] = set()
    return {name or root: _module(module, seen) for name, module in model.named_modules()}


def _module(module: nn.Module, seen: set[int]) -> dict[str, str]:
    found = {"class": _name_of(type(module)), "training": repr(module.training)}
    for name, value in vars(module).items():
        if name in _OF_ALL_MODULES or name.startswith("_") or isinstance(value, ScriptListing):
            continue
        kind = type(value)
        if kind is bool or kind is int or kind is float:  # most are
            found[name] = described(value)
        elif callable(to_dict := getattr(value, "to_dict", None)) and not isinstance(value, type):
            if id(value) not in seen:  # one configuration serves many modules
                seen.add(id(value))
                found |= {f"{name}.{key}": described(one) for key, one in _plain_items(to_dict()).items()}
        elif not isinstance(value, nn.Module | Tensor) and not _is_of_host(name, value):
            found[name] = described(_plain_items(value) if isinstance(value, Mapping) else value)
    for name, parameter in parameters_of(module).items():
        if parameter is not None:
            found[f"{name}.requires_grad"] = repr(parameter.requires_grad)
    return found


def criterion_facts(criterion: Any) -> Facts:
    """A criterion: a module like a model, else by its name and constants; nothing where there is none."""
    if isinstance(criterion, nn.Module):
        return model_facts(criterion, "the criterion")
    if isinstance(criterion, FunctionType):
        # Not what is around it: a script's function may look at its rank there, to print on one.
        text = f"{_name_of(criterion)}({', '.join(map(described, _constants(criterion.__code__)))})"
        return {"": {"the criterion": text}}
    return {} if criterion is None else {"": {"the criterion": described(criterion)}}


def sections_of(parts: Boosted, names: Mapping[int, str]) -> list[ComparedFacts]:
    """What is compared of a boost's arguments; ``names`` are those of the parameters, by id."""
    optimizer, lr_scheduler, loader = parts.optimizer, parts.lr_scheduler, parts.dataloader
    return [
        ComparedFacts(
            optimizer_facts(optimizer, names) if isinstance(optimizer, Optimizer) else {},
            "Make the optimizer in the same way on every rank.",
        ),
        ComparedFacts(schedule_facts(lr_scheduler), "Make the LR schedule in the same way on every rank."),
        ComparedFacts(
            model_facts(parts.model, "the model"), "Make the model with the same configuration on every rank."
        ),
        ComparedFacts(criterion_facts(parts.criterion), "Give the same criterion on every rank.", is_optional=True),
        ComparedFacts(
            {"the dataloader": dict(loader.made_of)} if isinstance(loader, ReplicaDataLoader) else {},
            "Call plugin.prepare_dataloader with the same arguments on every rank: each replica gets its own samples.",
            is_optional=True,
        ),
    ]


def check_alike(control: Group, call: str, sections: Sequence[ComparedFacts]) -> None:
    """Refuse what differs between ranks. Collective: all ranks of ``control``; one exchange where nothing differs.

    Args:
        control: all ranks.
        call: that this rank is in, see :mod:`hybridpp.cluster.gather_numbers`.
        sections: what is compared, as many on all ranks; the first that differs is told.

    Raises:
        ConfigError: something differs; on every rank, with its name, the values and the ranks.
    """
    parts = [_parts(section.facts) for section in sections]
    digests = [float(_crc(repr(sorted(part.items())))) for facts in parts for part in facts]
    digest = float(_crc(repr(digests)))
    if len(set(gather_numbers(control, call, [digest]))) == 1:
        return
    rows = gather_numbers(control, call, digests)
    for index, section in enumerate(sections):
        first = index * _NUM_PARTS
        unequal = [n for n in range(_NUM_PARTS) if len({row[first + n] for row in rows}) > 1][:_MAX_PARTS]
        if unequal:
            own = {subject: held for subject, held in section.facts.items() if _part_of(subject) in unequal}
            clauses = differences(gather_objects(control, call, own), is_optional=section.is_optional)
            if clauses:
                raise ConfigError(f"{section.rule}: {listed(clauses)}. {section.advice}")


def _parts(facts: Facts) -> list[Facts]:
    parts: list[Facts] = [{} for _ in range(_NUM_PARTS)]
    for subject, held in facts.items():
        parts[_part_of(subject)][subject] = held
    return parts


def _part_of(subject: str) -> int:
    return _crc(subject) % _NUM_PARTS


def _crc(text: str) -> int:
    return zlib.crc32(text.encode(errors="surrogateescape"))


def differences(rows: Sequence[Facts], *, is_optional: bool = False) -> list[str]:
    """Clauses about what differs, from what each rank has, by rank: "max_norm is 1 on rank 0, 2 on ranks 1, 2".

    Args:
        rows: by rank.
        is_optional: whether what a rank does not have counts as equal.
    """
    clauses = []
    for subject in dict.fromkeys(subject for row in rows for subject in row):
        held = [row.get(subject, {}) for row in rows]
        for name in dict.fromkeys(name for one in held for name in one):
            ranks_of: dict[str, list[int]] = {}
            for rank, one in enumerate(held):
                if name in one or not is_optional:
                    ranks_of.setdefault(one.get(name, "missing"), []).append(rank)
            if len(ranks_of) > 1:
                values = (f"{_cut(value)} on {name_ranks(ranks)}" for value, ranks in ranks_of.items())
                clauses.append(f"{name}{f' of {subject}' if subject else ''} is {', '.join(values)}")
    return clauses


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}... (CRC-32 {_crc(text):08x})"


def listed(clauses: Sequence[str]) -> str:
    """The first of several clauses, and how many more there are."""
    more = len(clauses) - _MAX_TOLD
    return "; ".join(clauses[:_MAX_TOLD]) + (f"; and {more} more" if more > 0 else "")
