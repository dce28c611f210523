"""Batches for models of texts and images, and of diffusers; those for others are tested where they are used."""

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    OPTConfig,
    OPTForCausalLM,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
    XLNetConfig,
    XLNetLMHeadModel,
)

from hybridpp.errors import ConfigError
from hybridpp.partition import describe_cut, describe_sample, has_samples, make_samples

SIDES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
TEXT = {**SIDES, "num_key_value_heads": 2, "vocab_size": 400}
IMAGES = {**SIDES, "image_size": 56, "patch_size": 14}
IMAGE = 300


def llava(**more):
    texts, images = LlamaConfig(**TEXT), CLIPVisionConfig(**IMAGES)
    config = LlavaConfig(text_config=texts, vision_config=images, image_token_index=IMAGE, **more)
    return LlavaForConditionalGeneration(config)


def llava_with_all_patches():
    return llava(vision_feature_select_strategy="full", image_seq_length=17)


def gemma():
    texts, images = {**TEXT, "head_dim": 16}, {**IMAGES, "vision_use_head": False}
    config = Gemma3Config(text_config=texts, vision_config=images, mm_tokens_per_image=4, image_token_index=IMAGE)
    return Gemma3ForConditionalGeneration(config)


def idefics():
    texts = {**TEXT, "model_type": "llama"}
    config = Idefics3Config(text_config=texts, vision_config=IMAGES, image_token_id=IMAGE, scale_factor=2)
    return Idefics3ForConditionalGeneration(config)


def mistral():
    texts = {**TEXT, "model_type": "mistral", "head_dim": 16}
    images = {**IMAGES, "model_type": "pixtral", "head_dim": 16}
    config = Mistral3Config(text_config=texts, vision_config=images, image_token_index=IMAGE, spatial_merge_size=2)
    return Mistral3ForConditionalGeneration(config)


def qwen():
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    images = {"depth": 2, "out_hidden_size": 32, "num_heads": 2, "fullatt_block_indexes": [1]}
    config = Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": rope},
        vision_config={**images, "hidden_size": 32, "intermediate_size": 64},
        image_token_id=IMAGE,
        video_token_id=301,
        vision_start_token_id=302,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def on_meta(make):
    with torch.device("meta"):
        return make().eval()


def runs(model, sample):
    try:
        return bool(describe_cut(model, 2, ((), sample)))
    except Exception:  # whatever a model's forward raises of images that do not fit
        return False


@pytest.mark.parametrize(
    ("make", "tokens", "pixels"),
    [
        (llava, 16, (2, 3, 56, 56)),
        (llava_with_all_patches, 17, (2, 3, 56, 56)),
        (gemma, 4, (2, 3, 56, 56)),
        (idefics, 4, (2, 1, 3, 56, 56)),
        (mistral, 4, (2, 3, 56, 56)),
        (qwen, 256, (2 * 1024, 1176)),
    ],
)
def test_a_model_of_images_gets_as_many_tokens_as_it_makes_of_them(make, tokens, pixels):
    model = on_meta(make)
    found = next(one for one in reversed(make_samples(model, 2, None, torch.float32)) if runs(model, one))
    assert found["pixel_values"].shape == pixels
    assert [(row == IMAGE).sum() for row in found["input_ids"]] == [tokens, tokens]
    assert found["input_ids"].shape[1] == tokens + 128
    *others, line = describe_sample(model, found)
    assert line == f"images: {tokens} of {tokens + 128} tokens of each sample, pixels {' x '.join(map(str, pixels))}"
    assert all(one.startswith("videos: none in the sample") for one in others)


def test_texts_have_as_many_images_as_are_asked_for():
    model = on_meta(gemma)
    first, *others = make_samples(model, 2, 32, torch.float32, images=3)
    assert runs(model, others[-1])
    assert others[-1]["pixel_values"].shape[0] == 6
    assert (others[-1]["input_ids"] == IMAGE).sum() == 2 * 3 * 4
    assert others[-1]["input_ids"].shape == (2, 32)
    assert [first.keys()] == [one.keys() for one in make_samples(model, 2, 32, torch.float32, images=0)]
    (line,) = describe_sample(model, first)
    assert line.startswith("images: none in the sample, so what the model computes of pixel_values is left out")
    # Three images have twelve tokens.
    assert make_samples(model, 2, 12, torch.float32, images=3)[1:] == []
    (line,) = describe_sample(model, first, 3, 12)
    assert "none in the sample (the tokens of the 3 images of each text leave no room for text), so what" in line
    (line,) = describe_sample(model, first, 1, 32)
    assert line.startswith("images: none in the sample (the model does not run on the image of each text that")


POSITIONS = {"num_hidden_layers": 2, "max_position_embeddings": 16, "vocab_size": 20, "hidden_size": 8}
HEADS = {"num_attention_heads": 1, "intermediate_size": 8}


@pytest.mark.parametrize(
    "make",
    [
        lambda: GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=2, n_head=1, n_positions=16, vocab_size=20)),
        lambda: BertForMaskedLM(BertConfig(**POSITIONS, **HEADS)),
        lambda: OPTForCausalLM(OPTConfig(**POSITIONS, ffn_dim=8, num_attention_heads=1, word_embed_proj_dim=8)),
    ],
)
def test_texts_beyond_learned_positions_are_refused_before_they_are_made(make):
    model = on_meta(make)
    assert runs(model, make_samples(model, 1, 16, torch.float32)[0])
    with pytest.raises(ConfigError, match=r"has 16 learned positions: got a sequence_length of 1,000,000,000\. Use at"):
        make_samples(model, 1, 10**9, torch.float32)


def test_texts_longer_than_a_rotary_model_names_are_told():
    model = on_meta(lambda: LlamaForCausalLM(LlamaConfig(**POSITIONS, **HEADS)))
    (line,) = describe_sample(model, make_samples(model, 1, 17, torch.float32)[0])
    assert line == "tokens: 17 of each sample, and the configuration is for 16"
    assert describe_sample(model, make_samples(model, 1, 16, torch.float32)[0]) == []


def test_a_model_of_relative_positions_gets_texts():
    model = on_meta(lambda: XLNetLMHeadModel(XLNetConfig(vocab_size=50, d_model=16, n_layer=1, n_head=2, d_inner=16)))
    assert model.config.max_position_embeddings == -1
    assert make_samples(model, 2, None, torch.float32)[0]["input_ids"].shape == (2, 128)


def test_nothing_is_said_of_what_a_model_does_not_take():
    text = on_meta(lambda: LlamaForCausalLM(LlamaConfig(**TEXT)))
    assert describe_sample(text, make_samples(text, 1, None, torch.float32)[0]) == []
    sizes = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 20}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes |= {f"{name}_token_id": 0 for name in ("pad", "bos", "eos", "decoder_start")}
    sound = on_meta(lambda: WhisperForConditionalGeneration(WhisperConfig(**sizes)))
    assert describe_sample(sound, make_samples(sound, 1, None, torch.float32)[0]) == []


def test_denoisers_get_latent_images_prompts_and_positions():
    diffusers = pytest.importorskip("diffusers")
    sizes = {"attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 8}
    with torch.device("meta"):
        flux = diffusers.FluxTransformer2DModel(
            num_layers=2, num_single_layers=2, in_channels=4, axes_dims_rope=(4, 6, 6), guidance_embeds=True, **sizes
        )
        dit = diffusers.DiTTransformer2DModel(
            num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=8
        )
        prior = diffusers.PriorTransformer(num_attention_heads=2, attention_head_dim=8, num_layers=1, embedding_dim=8)
    assert has_samples(flux)
    (sample,) = make_samples(flux, 3, 64, torch.float32)
    assert {name: tuple(one.shape) for name, one in sample.items()} == {
        "hidden_states": (3, 64, 4),
        "encoder_hidden_states": (3, 64, 32),
        "pooled_projections": (3, 8),
        "timestep": (3,),
        "guidance": (3,),
        "img_ids": (64, 3),
        "txt_ids": (64, 3),
    }
    assert runs(flux, sample)
    (sample,) = make_samples(dit, 3, None, torch.float32)
    assert sample["hidden_states"].shape == (3, 4, 8, 8)
    assert runs(dit, sample)
    assert not has_samples(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="takes no hidden_states or sample of in_channels channels"):
        make_samples(prior, 1, None, torch.float32)


@pytest.mark.parametrize(
    ("size", "length", "got"),
    [
        (10**14, None, "10{14} samples"),
        (2**62, 8, f"{2**62} samples of length 8"),
        (1, 10**30, "1 samples of length 10"),
    ],
)
def test_a_batch_that_no_memory_holds_is_refused(size, length, got):
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**TEXT))
    with pytest.raises(ConfigError, match=f"needs more memory than this process gets: got {got}"):
        make_samples(model, size, length, torch.float32)
