"""The page that says which models are cut right."""

import re
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime

import torch
import transformers
from models.pool import Result


@dataclass(frozen=True)
class Layout:
    """How a model is cut: into ``pp_size * num_chunks`` stages.

    Attributes:
        pp_size: ranks.
        num_chunks: stages on each of them.
    """

    pp_size: int
    num_chunks: int = 1

    @property
    def key(self) -> str:
        """Under which a result holds it."""
        return f"pp{self.pp_size}" + (f"x{self.num_chunks}" if self.num_chunks > 1 else "")

    def __str__(self) -> str:
        return f"pp={self.pp_size}" + (f" x {self.num_chunks} chunks" if self.num_chunks > 1 else "")


_WHOLE = Layout(1)
_CUTS = (Layout(2), Layout(4), Layout(2, num_chunks=2))
LAYOUTS = (_WHOLE, *_CUTS)


def part(results: list[Result]) -> str:
    """Of docs/models.md, what is said of models that are cut."""
    results = sorted(results, key=lambda result: result["name"])
    built = [result for result in results if result["builds"]]
    rows = "\n".join(_row(result) for result in built)
    unbuilt = Counter(_kind(result["reason"]) for result in results if not result["builds"])
    kinds = "\n".join(f"| {count} | {kind} |" for kind, count in unbuilt.most_common())
    reasons = "\n".join(f"| {r['name']} | {cell(r['reason'], 160)} |" for r in results if not r["builds"])
    return f"""# Which models are cut right

Written by `make models-pp` on {datetime.now(UTC):%Y-%m-%d}, with torch {torch.__version__} and transformers \
{transformers.__version__}.

Each architecture (model type) in transformers' registry is tested with a tiny model. One rule over the names of the
configuration's fields makes it tiny, and one rule per kind of input makes its batch (`tests/models/`); no rule and no
code of the library names a model. An architecture *builds* if a step in plain PyTorch gives a finite loss and
gradients, the same ones twice. It is *right* if the loss and **every** parameter's gradient of
`booster.execute_pipeline` (2 micro-batches, fp32) agree with that step to 1e-6 (absolute, plus 1e-5 relative). Ranks
are threads of one process. At 2 x 2, each of the two ranks runs two of four stages. One class is tested for each
architecture.

{_totals(results, built)}
{_failures(built)}
## Architectures

Blocks: modules after which the model may be cut, for 4 stages. Crossing: values that are sent over a cut at pp=4, and
their bytes per sample of the tiny model, at the cut with the most bytes. s: CPU seconds for all three layouts. f64: in
fp32 rounding exceeds the limit; in fp64 nothing differs.

| architecture | class | blocks | crossing | s | {" | ".join(map(str, _CUTS))} |
|---|---|--:|--:|--:|{"---|" * len(_CUTS)}
{rows}

## What does not build

The rules that make configurations and batches do not fit these architectures. This says nothing about the library.

| number | kind |
|--:|---|
{kinds}

| architecture | reason, first try |
|---|---|
{reasons}
"""


def _totals(results: list[Result], built: list[Result]) -> str:
    lines = ["| | number | share |", "|---|--:|--:|", f"| architectures in the registry | {len(results)} | |"]
    lines.append(f"| build | {len(built)} | {share(len(built), len(results))} |")
    for layout in LAYOUTS:
        right = sum(result[layout.key]["right"] for result in built)
        lines.append(f"| of those, right at {layout} | {right} | {share(right, len(built))} |")
    return "\n".join(lines) + "\n"


def share(part: int, whole: int) -> str:
    """A percentage."""
    return f"{100 * part / max(whole, 1):.1f} %"


def _failures(built: list[Result]) -> str:
    failed = [
        (r["name"], layout, r[layout.key]["error"]) for r in built for layout in LAYOUTS if "error" in r[layout.key]
    ]
    if not failed:
        return ""
    rows = "\n".join(
        f"| {name} | {str(layout).removeprefix('pp=')} | {_category(error)} | {cell(error, 400)} |"
        for name, layout, error in failed
    )
    return f"""## What fails, and what the user is told

| architecture | pp | cause | error |
|---|--:|---|---|
{rows}
"""


def _category(error: str) -> str:
    for part, category in {
        "branches on": "container code reads computed values",
        "at least one block": "this forward runs fewer blocks than stages",
        "gradients differ": "wrong result",
        "takes more than": "too slow",
    }.items():
        if part in error:
            return category
    return "error"


def _row(result: Result) -> str:
    crossing = result["pp4"].get("crossing") or []
    count, size = max(crossing, key=lambda value: (value[1], value[0]), default=(0, 0))
    across = f"{count}: {size}" if crossing else ""
    cells = [_verdict(result[layout.key]) for layout in _CUTS]
    seconds = sum(result[layout.key].get("seconds", 0.0) for layout in _CUTS)
    name, kind, blocks = result["name"], result["class"], result["blocks"]
    return f"| {name} | {kind} | {blocks} | {across} | {seconds:.1f} | {' | '.join(cells)} |"


def quick(text: str) -> list[str]:
    """The quicker half of the architectures that a page calls right however they are cut."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    right = [row for row in rows if set(row[5:]) == {"right"} and row[4].replace(".", "").isdigit()]
    median = sorted(float(row[4]) for row in right)[len(right) // 2]
    return [row[0] for row in right if float(row[4]) <= median]


def _verdict(found: Result) -> str:
    if not found["right"]:
        return "**no**"
    return "right, f64" if found.get("double") else "right"


def cell(text: str, length: int) -> str:
    """Text that a table can hold."""
    text = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
    return text if len(text) <= length else text[: length - 1] + "…"


def _kind(reason: str) -> str:
    for pattern, kind in (
        (r"^ImportError", "needs a package that is not installed"),
        (r"^needs .* MiB", "too large when made tiny"),
        (r"^takes more than", "takes too long"),
        (r"^not deterministic", "not deterministic by itself"),
        (
            r"missing .* argument|have to specify|cannot be `None`|must be provided",
            "needs inputs that no rule here makes",
        ),
        (r"Validation|^ValueError|^KeyError", "refuses the configuration or the batch"),
        (r"^RuntimeError|^IndexError", "sizes that do not fit together"),
        (r"^TypeError|^AttributeError", "its default configuration lacks a value, or the batch lacks an input"),
    ):
        if re.search(pattern, reason):
            return kind
    return "other"
