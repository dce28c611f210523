"""The language model's example: packed texts, an adapter or all weights, and a text at the end."""

import re

import pytest
import torch
from processes import run_script
from support import ROOT
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SCRIPT = ROOT / "examples/lm/train.py"
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "then", "it", "slept", "until", "dawn", "while", "rain", "fell"]


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """A small model with a tokenizer of whole words, and a folder of texts."""
    import datasets  # noqa: F401  # here, and not in each rank

    folder = tmp_path_factory.mktemp("lm")
    vocabulary = {word: number for number, word in enumerate(["<end>", "<unknown>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="<unknown>").save_pretrained(
        folder / "model"
    )
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(vocabulary), **sizes, num_key_value_heads=2, eos_token_id=0, bos_token_id=0)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    (folder / "texts").mkdir()
    (folder / "texts/a.txt").write_text("\n\n".join(" ".join(WORDS[n % 9 :]) for n in range(60)))
    return folder, ("--model", str(folder / "model"), "--dataset", str(folder / "texts"), "--length", "12")


def run(flags, *more):
    job = run_script(2, SCRIPT, *flags, *more, "--batch-size", "4", "--prompt", "the cat")
    assert job.returncode == 0, job.stderr
    (loss,) = re.findall(r"Epoch \[1\]: held-out loss ([\d.]+) per token", job.stdout)
    (text,) = re.findall(r"The model writes: '(.*)'", job.stdout)
    assert text.startswith("the cat")
    assert "Warning" not in job.stderr
    return job.stdout, float(loss)


def test_an_adapter_is_trained_in_two_stages_and_loads_into_peft(flags, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    folder, given = flags
    out, _ = run(given, "--lora", "--output", str(tmp_path / "adapter"), "--lr", "0.01")
    assert "Layout: tp=1 x pp=2 x dp=1; 1,024 parameters to train" in out
    loaded = peft.PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(folder / "model"), tmp_path / "adapter")
    assert any(parameter.any() for name, parameter in loaded.named_parameters() if "lora_B" in name)


def test_all_weights_are_trained_on_two_replicas_and_reload(flags, tmp_path):
    _, given = flags
    _, loss = run(given, "--pp-size", "1", "--zero-stage", "1", "--output", str(tmp_path / "all"), "--lr", "0.02")
    assert loss < 2.5  # of 17 words, 2.83 at first
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "all").lm_head.weight.shape == (17, 16)
