"""Cut models of other libraries, share their layers, and compare each gradient with the whole model's."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from models import cuts, divided
from models.comparing import Comparison, examine
from models.pool import Result, Study
from models.table import Layout
from models.zoo import Buildable, Specimen

CUTS = (Layout(2), Layout(4))
SHARED = 2
KEYS = (*(layout.key for layout in CUTS), f"tp{SHARED}")


def _comparisons() -> dict[str, Comparison]:
    pieces: dict[str, Comparison] = {layout.key: partial(cuts.compare, layout=layout) for layout in CUTS}
    return pieces | {f"tp{SHARED}": partial(divided.compare, tp_size=SHARED)}


def _about(specimen: Specimen) -> Result:
    return {"parameters": sum(parameter.numel() for parameter in specimen.model.parameters())} | cuts.about(specimen)


def _examine(folder: Path, architecture: Buildable) -> Iterator[Result]:
    return examine(folder, architecture, _about, _comparisons())


def study(folder: Path) -> Study:
    """Of models of other libraries; ``folder`` keeps what was built."""
    return Study(partial(_examine, folder), KEYS, 400)
