"""Some of the architectures of docs/models.md at every run of the tests; all of them: ``make models``."""

import copy
from pathlib import Path

import pytest
from models.cuts import compare
from models.table import LAYOUTS, quick
from models.zoo import architectures, build, plain_step

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
# Those that everyone knows.
KNOWN = {
    "vit",
    "llama",
    "gpt2",
    "bert",
    "t5",
    "bart",
    "opt",
    "swin",
    "resnet",
    "mixtral",
    "whisper",
    "albert",
    "wav2vec2",
}
NUMBER = 40


def some() -> list[str]:
    """The known ones, and of the others every so many of those that were right and quick."""
    others = [name for name in quick(PAGE.read_text()) if name not in KNOWN]
    return sorted({*KNOWN, *others[:: max(1, len(others) // (NUMBER - len(KNOWN)))][: NUMBER - len(KNOWN)]})


# What torch and transformers warn about is theirs.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("place", "name"), list(enumerate(some())), ids=lambda value: str(value))
def test_an_architecture_is_cut_right(place, name):
    architecture = next(found for found in architectures() if found.name == name)
    specimen = build(architecture)
    cuts = LAYOUTS[1:]
    expected = plain_step(copy.deepcopy(specimen.model), specimen.batch, 2)
    result = compare(specimen, cuts[place % len(cuts)], expected)
    assert result["right"], result["error"]
