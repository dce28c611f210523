"""A recorded step of a job: what every rank did, held and sent. A value that is written as JSON."""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridpp.errors import ConfigError, named, text_of
from hybridpp.report.records import ROWS, RankRecord, StageRecord
from hybridpp.strict_json import parse_strictly
from hybridpp.timeline import Span, Timeline

FORMAT = "hybridpp-recording"
_MOST_BYTES = 2**30
VERSION = 1
FILE_NAME = "recording.json"


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The recorded steps of a job.

    Attributes:
        model: name of its class.
        created: when, as ISO 8601 in UTC.
        versions: of packages, by name.
        settings: of the plugin, those that matter for a step: ``tp_size``, ``schedule``, ...
        stages: of the model, in order.
        ranks: in order.
    """

    model: str
    created: str
    versions: Mapping[str, str]
    settings: Mapping[str, Any]
    stages: tuple[StageRecord, ...]
    ranks: tuple[RankRecord, ...]

    @property
    def num_steps(self) -> int:
        """How many steps were recorded."""
        in_phases = (phase.step for rank in self.ranks for phase in rank.phases)
        in_actions = (action.step for rank in self.ranks for action in rank.actions)
        return 1 + max((*in_phases, *in_actions), default=-1)

    @property
    def placement(self) -> tuple[int, ...]:
        """The pipeline position of every stage."""
        return tuple(stage.position for stage in self.stages)

    def pipelines(self) -> dict[tuple[int, int], tuple[RankRecord, ...]]:
        """The ranks of each pipeline in order, by replica and by place among the ranks that share layers."""
        found: dict[tuple[int, int], list[RankRecord]] = {}
        for rank in self.ranks:
            found.setdefault((rank.dp, rank.tp), []).append(rank)
        return {key: tuple(sorted(ranks, key=lambda rank: rank.pp)) for key, ranks in found.items()}

    def all_ranks(self) -> Timeline:
        """The actions of all ranks, by rank of the world."""
        spans = [
            Span(rank.rank, action.stage, action.kind, action.microbatch, action.start_ms, action.end_ms)
            for rank in self.ranks
            for action in rank.actions
        ]
        return Timeline(tuple(spans))

    def timeline(self, dp: int = 0, tp: int = 0) -> Timeline:
        """The actions of one pipeline, by position."""
        spans = [
            Span(rank.pp, action.stage, action.kind, action.microbatch, action.start_ms, action.end_ms)
            for rank in self.pipelines()[dp, tp]
            for action in rank.actions
        ]
        return Timeline(tuple(spans))

    def save(self, path: str | Path) -> Path:
        """Write it, by a rename of a complete file; returns where.

        Args:
            path: of a file that ends in .json, or of a folder, which is made: then the file is ``recording.json``.
        """
        file = Path(path)
        if file.suffix != ".json":
            file = file / FILE_NAME
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_name(f".{file.name}.{os.getpid()}")
        try:
            unfinished.unlink(missing_ok=True)  # of a killed process, or a link, through which nothing is written
            with unfinished.open("x", encoding="utf-8") as opened:
                opened.write(self.to_json())
            unfinished.replace(file)
        finally:
            unfinished.unlink(missing_ok=True)
        return file

    def to_json(self) -> str:
        """As JSON: see docs/report.md."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "model": self.model,
            "created": self.created,
            "versions": dict(self.versions),
            "settings": dict(self.settings),
            "columns": {name: kind._fields for name, kind in ROWS.items()},
            "stages": [stage._asdict() for stage in self.stages],
            "ranks": [rank.values() for rank in self.ranks],
        }
        return json.dumps(content, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, name: str = "the text") -> "Recording":
        """The recording that :meth:`to_json` wrote.

        Args:
            text: JSON.
            name: of its source, for errors.

        Raises:
            ConfigError: it is something else, of a newer version, or damaged.
        """
        content = _parsed(text, name)
        try:
            return cls(
                model=str(content["model"]),
                created=str(content["created"]),
                versions=dict(content["versions"]),
                settings=dict(content["settings"]),
                stages=tuple(StageRecord(**stage) for stage in content["stages"]),
                ranks=_ranks(content["ranks"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{name} is a damaged recording: {named(error)}. Record the step again.") from error


def find_recording(path: str | Path) -> Path:
    """The file of a recording: ``path`` itself, or the one in that folder.

    Raises:
        ConfigError: there is none.
    """
    found = Path(path)
    if not found.exists():
        raise ConfigError(f"there is no {str(path)!r}. Give the folder or file that recording.save wrote.")
    if not found.is_dir():
        return found
    if not (found / FILE_NAME).is_file():
        raise ConfigError(
            f"the folder {str(path)!r} has no {FILE_NAME}. Record a step with `booster.record_timeline(model)`, and "
            "call recording.save with this folder."
        )
    return found / FILE_NAME


def load_recording(path: str | Path) -> Recording:
    """Read what :meth:`Recording.save` wrote, from its file or folder.

    Raises:
        ConfigError: there is no recording, it is of a newer version, or damaged.
    """
    file = find_recording(path)
    if (size := file.stat().st_size) > _MOST_BYTES:
        raise ConfigError(f"{str(file)!r} has {size} bytes, and at most {_MOST_BYTES} are read. Record fewer steps.")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{str(file)!r} is no recording: it is not a text file. Give a {FILE_NAME}.") from error
    return Recording.from_json(text, repr(str(file)))


def _parsed(text: str, name: str) -> dict[str, Any]:
    try:
        content = parse_strictly(text)
    except ValueError as error:
        raise ConfigError(f"{name} is no recording: {text_of(error)}. Give a {FILE_NAME}.") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        is_timeline = isinstance(content, dict) and "spans" in content
        raise ConfigError(
            f"{name} is no recording: it is {'a timeline alone' if is_timeline else 'other JSON'}. Give a {FILE_NAME}, "
            "which recording.save writes."
        )
    version = content.get("version")
    if not isinstance(version, int) or not 1 <= version <= VERSION:
        raise ConfigError(
            f"{name} is a recording of version {version!r}, and this hybridpp reads versions up to {VERSION}. Update "
            "hybridpp, or record the step again."
        )
    return content


def _ranks(values: Iterable[Mapping[str, Any]]) -> tuple[RankRecord, ...]:
    ranks = tuple(RankRecord.of(value) for value in values)
    if not ranks or [rank.rank for rank in ranks] != list(range(len(ranks))):
        raise ValueError(f"the ranks must be numbered from 0: got {[rank.rank for rank in ranks]}")
    return ranks
