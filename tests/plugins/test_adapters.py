"""Adapters (LoRA): trained in every layout, saved in peft's own files, loaded into plain peft and back."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from support import assert_near, assert_same, model_loss, replica_part, sgd
from transformers import LlamaConfig, LlamaForCausalLM

from hybridpp import Booster, GeminiPlugin, HybridParallelPlugin, TorchFSDPPlugin
from hybridpp.cluster import Loopback
from hybridpp.errors import CheckpointError, ConfigError

peft = pytest.importorskip("peft", reason="peft is not installed")
# Which peft says when it saves embeddings, too.
pytestmark = pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
LORA = {"r": 1, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    ).train()


def adapted(**settings):
    model = llama()
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(**{**LORA, **settings}))


def tokens():
    ids = torch.randint(0, 32, (4, 6), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def trainable(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters() if parameter.requires_grad}


def boosted_adapter(model, **settings):
    booster = Booster(plugin=HybridParallelPlugin(num_microbatches=1, **settings), device="cpu")
    optimizer = sgd([parameter for parameter in model.parameters() if parameter.requires_grad])
    sample = {name: value[:1] for name, value in tokens().items()}
    return booster, *booster.boost(model, optimizer, model_loss, sample=sample)[:2]


def step(booster, model, optimizer):
    batch = replica_part(tokens(), booster.plugin.layout.here.dp, booster.plugin.dp_size)
    loss = booster.execute_pipeline(iter([batch]), model, model_loss, optimizer)["loss"].item()
    optimizer.step()
    return loss


def by_itself(model, num_steps=2):
    optimizer = sgd([parameter for parameter in model.parameters() if parameter.requires_grad])
    for _ in range(num_steps):
        model(**tokens()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return trainable(model)


LAYOUTS = [
    {"pp_size": 2, "tp_size": 2, "zero_stage": 1},
    {"zero_stage": 3},
    {"pp_size": 2, "zero_stage": 3, "precision": "bf16"},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_trained_adapter_is_what_one_process_trains(layout, tmp_path):
    def run():
        booster, model, optimizer = boosted_adapter(adapted(), **layout)
        for _ in range(2):
            step(booster, model, optimizer)
        booster.save_lora_as_pretrained(model, tmp_path / "adapter")
        booster.save_model(model, tmp_path / "all.safetensors")
        updated = sum(one.numel() for group in optimizer.param_groups for one in group["params"])
        booster, model, optimizer = boosted_adapter(adapted(), **layout)
        booster.load_model(model, tmp_path / "adapter")
        booster.save_model(model, tmp_path / "again")
        return updated

    updated = Loopback(2 * layout.get("pp_size", 1) * layout.get("tp_size", 1)).run(run)
    assert max(updated) <= sum(value.numel() for value in trainable(adapted()).values())
    tolerance = 2e-2 if "precision" in layout else 1e-6
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path / "adapter", is_trainable=True)
    expected = adapted()
    assert_near(trainable(loaded), by_itself(expected), tolerance)
    torch.testing.assert_close(loaded(**tokens()).logits, expected(**tokens()).logits, atol=tolerance, rtol=tolerance)
    files = [tmp_path / folder / "adapter_model.safetensors" for folder in ("adapter", "again")]
    assert_same(load_file(files[1]), load_file(files[0]))
    stored = load_file(tmp_path / "all.safetensors")
    assert files[0].stat().st_size < 0.05 * (tmp_path / "all.safetensors").stat().st_size
    base = {name: value for name, value in adapted().state_dict().items() if "lora" not in name}
    if "precision" in layout:
        base = {name: value.bfloat16().float() for name, value in base.items()}
    assert_same({name: stored[name] for name in base}, base)


@pytest.mark.parametrize(
    "settings", [{"modules_to_save": ["lm_head"]}, {"use_dora": True}, {"target_modules": ["embed_tokens", "k_proj"]}]
)
def test_the_files_hold_what_peft_writes(settings, tmp_path):
    adapted(**settings).save_pretrained(tmp_path / "plain")

    def run():
        booster, model, optimizer = boosted_adapter(adapted(**settings), pp_size=2)
        booster.save_model(model, tmp_path / "ours")
        torch.manual_seed(5)
        booster, model, optimizer = boosted_adapter(adapted(**settings), pp_size=2)
        step(booster, model, optimizer)
        booster.load_model(model, tmp_path / "ours")
        booster.save_model(model, tmp_path / "again")

    Loopback(2).run(run)
    plain = load_file(tmp_path / "plain/adapter_model.safetensors")
    for folder in ("ours", "again"):
        assert_same(load_file(tmp_path / folder / "adapter_model.safetensors"), plain)
        assert {path.name for path in (tmp_path / folder).iterdir()} == {
            path.name for path in (tmp_path / "plain").iterdir()
        }
    config = "adapter_config.json"
    assert (tmp_path / "ours" / config).read_text() == (tmp_path / "plain" / config).read_text()


def test_two_adapters_have_a_folder_each(tmp_path):
    def model():
        torch.manual_seed(2)
        made = adapted()
        made.add_adapter("other", peft.LoraConfig(**LORA))
        return made

    def run():
        booster, boosted_model, _ = boosted_adapter(model(), pp_size=2)
        booster.save_model(boosted_model, tmp_path / "ours")
        booster.load_model(boosted_model, tmp_path / "ours")

    Loopback(2).run(run)
    model().save_pretrained(tmp_path / "plain")
    for file in ("adapter_model.safetensors", "other/adapter_model.safetensors"):
        assert_same(load_file(tmp_path / "ours" / file), load_file(tmp_path / "plain" / file))


def test_dropout_of_adapters_does_not_depend_on_the_layout():
    def run(**layout):
        def train():
            booster, model, optimizer = boosted_adapter(adapted(lora_dropout=0.3), **layout)
            return [step(booster, model, optimizer) for _ in range(3)]

        return Loopback(layout.get("pp_size", 1)).run(train)[0]

    assert run(pp_size=2) == pytest.approx(run(), rel=1e-6)


@pytest.mark.parametrize(
    ("make", "num_ranks"),
    [
        (TorchFSDPPlugin, 2),
        (partial(GeminiPlugin, precision="fp32"), 2),
        (partial(HybridParallelPlugin, pp_size=2, zero_stage=3, num_microbatches=1), 4),
        (partial(HybridParallelPlugin, pp_size=2, schedule="zb-h1", num_microbatches=2), 2),
    ],
    ids=["fsdp", "gemini", "pp2-zero3", "zb-h1"],
)
def test_adapters_on_the_last_layers_only(make, num_ranks, tmp_path):
    only_last = {"layers_to_transform": [1]}

    def run():
        booster, model = Booster(plugin=make(), device="cpu"), adapted(**only_last)
        optimizer = sgd([parameter for parameter in model.parameters() if parameter.requires_grad])
        sample = {name: value[:1] for name, value in tokens().items()}
        model, optimizer, *_ = booster.boost(model, optimizer, model_loss, sample=sample)
        for _ in range(2):
            step(booster, model, optimizer)
        booster.save_lora_as_pretrained(model, tmp_path)

    Loopback(num_ranks).run(run)
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path, is_trainable=True)
    assert_near(trainable(loaded), by_itself(adapted(**only_last)), 1e-6)


def test_a_run_with_an_adapter_goes_on_from_a_checkpoint(tmp_path):
    def run():
        booster, model, optimizer = boosted_adapter(adapted(), pp_size=2)
        step(booster, model, optimizer)
        booster.save(tmp_path, step=1)
        step(booster, model, optimizer)
        expected = trainable(model)
        booster, model, optimizer = boosted_adapter(adapted(), pp_size=2)
        assert booster.resume(tmp_path).step == 1
        step(booster, model, optimizer)
        assert_same(trainable(model), expected)

    Loopback(2).run(run)


def test_enable_lora_freezes_the_model_and_goes_on_with_a_saved_adapter(tmp_path):
    booster = Booster(device="cpu")
    torch.manual_seed(1)
    model = booster.enable_lora(llama(), lora_config=peft.LoraConfig(**LORA))
    assert set(trainable(model)) == set(trainable(adapted()))
    optimizer = sgd([parameter for parameter in model.parameters() if parameter.requires_grad])
    model, optimizer, *_ = booster.boost(model, optimizer)
    step(booster, model, optimizer)
    booster.save_lora_as_pretrained(model, tmp_path)
    going_on = booster.enable_lora(llama(), tmp_path)
    assert_same(trainable(going_on), trainable(model))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"enable_lora needs lora_config=peft.LoraConfig\(...\), or pretrained_dir: got neither"),
        ({"quantize": True, "lora_config": 1}, "quantized weights cannot be cut or sharded"),
        ({"pretrained_dir": "nowhere"}, "nowhere holds no adapter_config.json. Pass the folder of a saved adapter"),
        (
            {"lora_config": peft.LoraConfig(target_modules=["qq"])},
            "peft adds no adapter to this LlamaForCausalLM",
        ),
    ],
)
def test_enable_lora_says_what_is_missing(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Booster(device="cpu").enable_lora(llama(), **arguments)


def test_a_boosted_model_gets_no_adapter():
    booster = Booster(device="cpu")
    model = booster.boost(llama()).model
    with pytest.raises(ConfigError, match="an adapter is added before boost: this LlamaForCausalLM is boosted"):
        booster.enable_lora(model, lora_config=peft.LoraConfig(**LORA))


def test_folders_and_models_without_the_adapter_are_refused(tmp_path):
    booster, model, _ = boosted_adapter(adapted())
    booster.save_lora_as_pretrained(model, tmp_path / "adapter")
    other, wide, _ = boosted_adapter(adapted(target_modules=["q_proj"]))
    before = trainable(wide)
    with pytest.raises(CheckpointError, match=r"does not fit the adapter 'default' .*unexpected .*v_proj.lora_A"):
        other.load_model(wide, tmp_path / "adapter")
    assert_same(trainable(wide), before)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="adapters are saved to a folder"):
        booster.save_model(model, tmp_path / "file")
    with pytest.raises(ConfigError, match=r"adapters are saved to a folder: got 'a\.safetensors'"):
        booster.save_lora_as_pretrained(model, "a.safetensors")
    with pytest.raises(ConfigError, match="saved as safetensors only"):
        booster.save_lora_as_pretrained(model, tmp_path, use_safetensors=False)
    with pytest.raises(ConfigError, match="save_lora_as_pretrained saves adapters: got Linear without any"):
        booster.save_lora_as_pretrained(torch.nn.Linear(1, 1), tmp_path)


def test_prompts_are_saved_with_the_whole_model(tmp_path):
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    booster, model, _ = boosted_adapter(peft.get_peft_model(llama(), config))
    with pytest.raises(ConfigError, match=r"adapter 'default' \(PROMPT_TUNING\) is computed when peft saves it"):
        booster.save_model(model, tmp_path / "prompts")
    booster.save_model(model, tmp_path / "all.safetensors")
    assert "prompt_encoder.default.embedding.weight" in load_file(tmp_path / "all.safetensors")
