"""Where the sample comes from that a model is traced with, in this order."""

import random

import numpy
import pytest
import torch
from hybridpp_plugins.sample import find_samples
from support import image_batch, model_loss, sgd, tiny_vit
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BlipConfig,
    BlipForConditionalGeneration,
    CLIPConfig,
    CLIPModel,
    HubertConfig,
    HubertForCTC,
    LlamaConfig,
    LlamaForCausalLM,
    SiglipConfig,
    SiglipModel,
    Speech2TextConfig,
    Speech2TextForConditionalGeneration,
    T5Config,
    T5Model,
    VideoMAEConfig,
    VideoMAEForPreTraining,
    VideoMAEForVideoClassification,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import Loopback
from hybridpp.errors import ConfigError

SIZES = {"vocab_size": 32, "d_model": 8, "num_layers": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def sample_of(model, loader, given):
    """The first one."""
    return find_samples(model, loader, given, torch.device("cpu")).batches[0]


class Augmented(Dataset):
    """Draws from every generator; counts how often it was asked."""

    def __init__(self, size=6):
        self.size, self.asked = size, []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.asked.append(index)
        noise = torch.rand(()) + random.random() + numpy.random.rand()
        return torch.full((4,), float(index)) + 0 * noise


class Endless(IterableDataset):
    """Must not be read: what was read is gone."""

    def __iter__(self):
        raise AssertionError("read")


def test_a_sample_that_is_given_goes_before_all():
    loader = DataLoader(dataset := Augmented(), batch_size=4)
    assert sample_of(nn.Linear(4, 4), loader, {"x": (given := torch.ones(3, 4))})["x"] is given
    assert dataset.asked == []


def test_else_two_items_of_the_dataset_are_collated():
    loader = DataLoader(dataset := Augmented(), batch_size=4, collate_fn=lambda items: {"x": torch.stack(items)})
    sample = sample_of(nn.Linear(4, 4), loader, None)
    assert sample["x"].tolist() == [[0.0] * 4, [1.0] * 4]
    assert dataset.asked == [0, 1]


def test_nobody_notices_that_items_were_taken():
    model = nn.Linear(4, 4)

    def order(look):
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        sampler = RandomSampler(dataset := Augmented(), generator=torch.Generator().manual_seed(0))
        loader = DataLoader(dataset, batch_size=2, sampler=sampler)
        batches = iter(loader)
        first = next(batches)
        if look:
            sample_of(model, loader, None)
        drawn = torch.rand(()).item(), random.random(), numpy.random.rand()
        return [first.tolist(), *(batch.tolist() for batch in batches)], drawn

    assert order(look=True) == order(look=False)


@pytest.mark.parametrize("size", [1, 2])
def test_a_small_dataset_gives_what_it_has(size):
    assert len(sample_of(nn.Linear(4, 4), DataLoader(Augmented(size)), None)) == size


@pytest.mark.parametrize(
    ("make_model", "names"),
    [
        (lambda: LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=8, num_attention_heads=2)), {"input_ids"}),
        (
            lambda: BartForConditionalGeneration(
                BartConfig(**SIZES, encoder_attention_heads=2, decoder_attention_heads=2)
            ),
            {"input_ids", "attention_mask"},
        ),
        (
            lambda: T5Model(T5Config(**SIZES, d_kv=4, d_ff=8, num_heads=2, decoder_start_token_id=0)),
            {"input_ids", "decoder_input_ids", "decoder_attention_mask"},
        ),
    ],
    ids=["llama", "bart", "t5"],
)
@pytest.mark.parametrize("loader", [None, DataLoader(Endless()), DataLoader(Augmented(0))], ids=["none", "it", "empty"])
def test_else_a_model_of_texts_says_itself_what_it_takes(make_model, names, loader):
    with torch.device("meta"):
        model = make_model()
    assert set(sample_of(model, loader, None)) == names


@pytest.mark.parametrize("loader", [None, DataLoader(Endless()), DataLoader(Augmented(0))], ids=["none", "it", "empty"])
def test_else_one_error_says_what_to_pass(loader):
    text = (
        "cutting Linear into stages needs a sample of its inputs. "
        r"Pass dataloader= with an indexable dataset, or sample=batch, to booster\.boost\."
    )
    with pytest.raises(ConfigError, match=f"^{text}$"):
        sample_of(nn.Linear(4, 4), loader, None)


class Images(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {name: value[index] for name, value in image_batch(4).items()}


@pytest.mark.parametrize("by", ["sample", "dataloader"])
def test_boost_takes_either(by):
    def run():
        plugin = HybridParallelPlugin(tp_size=1, pp_size=2, num_microbatches=2, precision="fp32")
        booster = Booster(plugin=plugin, device="cpu")
        model = tiny_vit()
        optimizer = sgd(model.parameters())
        given = {"sample": image_batch(2)} if by == "sample" else {"dataloader": DataLoader(Images(), batch_size=4)}
        parts = booster.boost(model, optimizer, **given)
        data = iter([image_batch(4)])
        return booster.execute_pipeline(data, parts.model, model_loss, parts.optimizer)["loss"].item()

    with torch.no_grad():
        expected = tiny_vit()(**image_batch(4)).loss.item()
    assert Loopback(2).run(run) == [pytest.approx(expected, rel=1e-6)] * 2


WIDE = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
IMAGE = {**WIDE, "image_size": 16, "patch_size": 8}
TEXT = {**WIDE, "vocab_size": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
CODED = {
    **{"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 32, "decoder_start_token_id": 1},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_source_positions": 64, "max_target_positions": 16},
}
SOUND = {
    **WIDE,
    "conv_dim": (8, 8),
    "conv_stride": (5, 64),
    "conv_kernel": (10, 64),
    "num_conv_pos_embedding_groups": 2,
}
VIDEO = {**IMAGE, "num_frames": 4}
OTHERS = {
    "whisper": lambda: WhisperForConditionalGeneration(WhisperConfig(**CODED)),
    "speech_to_text": lambda: Speech2TextForConditionalGeneration(Speech2TextConfig(**CODED)),
    "wav2vec2": lambda: Wav2Vec2ForCTC(Wav2Vec2Config(**SOUND)),
    "hubert": lambda: HubertForCTC(HubertConfig(**SOUND)),
    "vit": lambda: tiny_vit(),
    "videomae": lambda: VideoMAEForVideoClassification(VideoMAEConfig(**VIDEO)),
    "clip": lambda: CLIPModel(CLIPConfig(text_config=TEXT, vision_config=IMAGE)),
    "siglip": lambda: SiglipModel(SiglipConfig(text_config=TEXT, vision_config=IMAGE)),
    "blip": lambda: BlipForConditionalGeneration(BlipConfig(text_config=TEXT, vision_config=IMAGE)),
}


def boost_without_sample(make_model):
    def run():
        plugin = HybridParallelPlugin(tp_size=1, pp_size=2, num_microbatches=2, precision="fp32")
        torch.manual_seed(0)
        model = make_model()
        Booster(plugin=plugin, device="cpu").boost(model, sgd(model.parameters()))
        return sum(parameter.numel() for parameter in model.parameters())

    return Loopback(2).run(run)


@pytest.mark.parametrize("kind", OTHERS)
def test_else_samples_are_made_from_the_configuration_until_one_runs(kind):
    assert all(boost_without_sample(OTHERS[kind]))


def test_else_one_error_says_what_was_tried():
    text = (
        r"VideoMAEForPreTraining does not run on the samples that were made from its configuration: "
        r"pixel_values \[2, 3, 16, 16\]; or pixel_values \[2, 4, 3, 16, 16\]\. The last one raised "
        r".* Pass dataloader= with an indexable dataset, or sample=batch, to booster\.boost\."
    )
    with pytest.raises(ConfigError, match=f"^{text}$"):
        boost_without_sample(lambda: VideoMAEForPreTraining(VideoMAEConfig(**VIDEO)))
