"""Some of the architectures of docs/models.md at every run of the tests; all of them: ``make models``."""

import copy
import functools
from pathlib import Path

import pytest
from models import divided, sequences
from models.cuts import compare
from models.sweep import with_part
from models.table import LAYOUTS, quick
from models.tp_table import AIM, HEADING
from models.zoo import architectures, build, plain_step

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
# Those that everyone knows, without those that tests of the plugin train: bert, gpt2, llama, mixtral, t5, vit.
KNOWN = {
    "bart",
    "opt",
    "swin",
    "resnet",
    "whisper",
    "albert",
    "wav2vec2",
}
NUMBER = 12
# Others are shared in the tests of the plugin: deepseek_v3, falcon, gpt2, mixtral, t5, vit.
DIVIDED = ("bloom", "distilbert", "whisper")
# Where two layers of each stack do not show everything: of these one in four is of another kind, and swin has four
# stages of two, each twice as wide as the one before.
SIZES = {"llama4_text": {"num_layers": 4}, "qwen3_next": {"num_layers": 4}, "swin": {"num_layers": 4, "head_width": 4}}


@functools.cache
def studied(name, num_layers=2):
    """An architecture with at least so many layers in each stack, and its step in plain PyTorch."""
    sizes = {"num_layers": num_layers} | SIZES.get(name, {})
    specimen = build(next(found for found in architectures() if found.name == name), **sizes)
    return specimen, plain_step(copy.deepcopy(specimen.model), specimen.batch, 2)


def some() -> list[str]:
    """The known ones, and of the others every so many of those that were right and quick."""
    others = [name for name in quick(PAGE.read_text()) if name not in KNOWN]
    return sorted({*KNOWN, *others[:: max(1, len(others) // (NUMBER - len(KNOWN)))][: NUMBER - len(KNOWN)]})


# What torch and transformers warn about is theirs.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("place", "name"), list(enumerate(some())), ids=lambda value: str(value))
def test_an_architecture_is_cut_right(place, name):
    cuts = LAYOUTS[1:]
    cut = cuts[place % len(cuts)]
    result = compare(*studied(name, cut.pp_size * cut.num_chunks), cut)
    assert result["right"], result["error"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", DIVIDED)
def test_an_architecture_shares_its_layers_right(name):
    result = divided.compare(*studied(name), 2)
    assert result["right"], result["error"]
    assert result["share"] <= AIM


# Of several kinds: fused and shared heads, two streams, experts on whole sequences, biases by head; blocks that cannot.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("bert", 0),
        ("clip", 0),
        pytest.param("deepseek_v3", 0, marks=pytest.mark.matrix),  # experts: llama4_text, qwen3_next
        ("gemma2", 0),
        ("llama4_text", 0),
        ("mpnet", 0),
        ("qwen3_next", 3),
        ("whisper", 0),
    ],
)
def test_blocks_of_an_architecture_run_on_shards_of_sequences(name, others):
    result = sequences.compare(*studied(name))
    assert result["right"], result["error"]
    assert result["blocks"]
    assert result["others"] == others


def test_a_wrong_number_is_seen():
    specimen, (loss, whole) = studied("distilbert")
    name = max(whole, key=lambda key: float(whole[key].abs().max()))
    assert divided.differences(specimen, (loss, whole), float(loss), whole)[0][0] <= 1
    off = divided.differences(specimen, (loss, whole), float(loss), whole | {name: 1.001 * whole[name]})
    assert off[0][1] == name
    assert 50 < off[0][0] < 101


def test_each_sweep_writes_its_own_part_of_the_page():
    page = with_part("", "cuts", "# Cuts\n")
    page = with_part(page, "layers", f"{HEADING}\n\nold\n")
    page = with_part(page, "layers", f"{HEADING}\n\nnew\n")
    page = with_part(page, "sequences", f"{sequences.HEADING}\n\nold\n")
    page = with_part(page, "sequences", f"{sequences.HEADING}\n\nnew\n")
    page = with_part(page, "cuts", "# Cuts anew\n")
    assert page == f"# Cuts anew\n\n{HEADING}\n\nnew\n\n{sequences.HEADING}\n\nnew\n"
    page = with_part(page, "layers", f"{HEADING}\n\nnewest\n")
    assert page == f"# Cuts anew\n\n{HEADING}\n\nnewest\n\n{sequences.HEADING}\n\nnew\n"
