"""Some models of other libraries at every run of the tests, where those are installed; all: ``make models-others``."""

import copy

import pytest
from models import divided
from models.cuts import compare
from models.others import page
from models.others.recipe import Foreign
from models.others.timm_models import _fewer
from models.others.zoo import find, is_installed
from models.table import Layout
from models.zoo import DoesNotBuild, plain_step
from torch import nn, ones

# Of every library several kinds; which layout each is compared in goes round.
SOME = (
    "torch.TransformerEncoder.causal",
    "torch.Transformer",
    "torch.TransformerDecoder.norm_first",
    "torch.LSTM.bidirectional",
    "torch.GRUCell",
    "torch.MultiheadAttention.add_bias_kv",
    "torch.Sequential.in_place",
    "torch.Sequential.conv2d",
    "timm.byobnet",
    "timm.convnext",
    "timm.vision_transformer",
    "timm.xcit",
    "timm.efficientvit_msra",
    "timm.resnet",
    "diffusers.AutoencoderKL",
    "diffusers.ChromaTransformer2DModel",
    "diffusers.CogVideoXTransformer3DModel",
    "diffusers.DiTTransformer2DModel",
    "diffusers.FluxTransformer2DModel",
    "diffusers.PixArtTransformer2DModel",
    "diffusers.SD3Transformer2DModel",
    "diffusers.UNet2DConditionModel",
    "monai.BasicUNet",
    "monai.UNETR",
    "x_transformers.Decoder",
    "x_transformers.alibi_pos_bias",
    "x_transformers.num_residual_streams",
    "peft.IA3",
    "peft.LORA",
)
LAYOUTS = ("pp2", "tp2", "pp4")


# What torch and the libraries warn about is theirs.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("place", "name"), list(enumerate(SOME)), ids=lambda value: str(value))
def test_a_model_of_another_library_is_cut_or_shared_right(place, name):
    library = name.partition(".")[0]
    if not is_installed(library):
        pytest.skip(f"{library} is not installed (make others)")
    specimen = find(name).build()
    expected = plain_step(copy.deepcopy(specimen.model), specimen.batch, 2)
    layout = LAYOUTS[place % len(LAYOUTS)]
    if layout == "tp2":
        result = divided.compare(specimen, expected, 2)
    else:
        result = compare(specimen, expected, Layout(int(layout[-1])))
    assert result["right"], f"{layout}: {result['error']}"


def test_a_model_that_cannot_be_made_tells_all_reasons():
    def refuse(reason):
        def attempt():
            raise ValueError(reason)

        return attempt

    model = Foreign("torch.none", lambda: [refuse("too wide"), refuse("too deep"), refuse("too wide")], lambda _: [])
    with pytest.raises(DoesNotBuild, match=r"^ValueError: too wide; ValueError: too deep$"):
        model.build()


def test_what_is_random_is_off_and_what_is_zero_is_not():
    layer = nn.Linear(4, 4)
    nn.init.zeros_(layer.weight)
    model = Foreign(
        "torch.one", lambda: [lambda: nn.Sequential(layer, nn.Dropout(0.5))], lambda _: [{"input": ones(4, 4)}]
    )
    specimen = model.build()
    assert specimen.model[1].p == 0
    assert specimen.model[0].weight.all()


def test_numbers_of_layers_are_cut_down():
    assert _fewer((3, 4, 23, 3)) == (2, 2, 2, 2)
    assert _fewer(12) == 4
    assert _fewer([True, 9]) == [True, 2]


@pytest.mark.filterwarnings("ignore")  # it imports the libraries that are installed
def test_the_page_counts_what_is_right():
    right = {"right": True, "seconds": 1.0, "share": 0.5}
    wrong = {"right": False, "error": "PartitionError: no blocks | here"}
    one = {"name": "timm.a", "builds": True, "class": "A", "parameters": 1234, "blocks": 4}
    text = page.part(
        [
            {**one, "pp2": right, "pp4": wrong, "tp2": right},
            {**one, "name": "monai.b", "pp2": right, "pp4": right, "tp2": right},
            {"name": "monai.c", "builds": False, "reason": "not deterministic by itself"},
        ]
    )
    assert "| all | 3 | 2 | 2 (100.0 %) | 1 (50.0 %) | 2 (100.0 %) |" in text
    assert "| timm | 1 | 1 | 1 (100.0 %) | 0 (0.0 %) | 1 (100.0 %) |" in text
    assert "| timm.a | pp=4 | PartitionError: no blocks \\| here |" in text
    assert "| monai.b | A | 1,234 | 4 | 3.0 | right | right | right | 0.50 |" in text
    assert "| monai.c | not deterministic by itself |" in text
