"""``hybridpp partition --model module:function``: models that are not Hugging Face's."""

import pytest
import torch
from torch import nn

from hybridpp.cli.own_model import is_own_model, load_own_model
from hybridpp.errors import ConfigError

SOURCE = """
import torch
from torch import nn

class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def make():
    return Chain(), (torch.randn(8, 64), torch.zeros(8))

def by_name():
    return Chain(), {"x": torch.randn(2, 64), "labels": torch.zeros(2)}

def without_sample():
    return Chain()

def broken():
    raise RuntimeError("no weights here")

def wrong():
    return Chain(), (torch.randn(8, 63),)

def nothing():
    return 3
"""


@pytest.fixture
def command():
    return "partition"


@pytest.fixture
def source(tmp_path, monkeypatch):
    (tmp_path / "own_chain.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    return "own_chain.py"


def test_the_stages_of_a_function_in_a_module_and_in_a_file(printed, source, monkeypatch):
    monkeypatch.syspath_prepend(".")
    text = printed("--model", "own_chain:make", "--pp-size", "2", "--precision", "bf16")
    assert text.startswith("Chain, balanced by flops")
    first, second = (line.split("|") for line in text.splitlines() if line.strip().startswith(("0 |", "1 |")))
    assert (first[1].strip(), second[1].strip()) == ("blocks.0-1", "blocks.2-3")
    # Of one sample: 64 numbers of two bytes, in KiB.
    assert first[4].strip() == "0.1"
    by_name = printed("--model", f"{source}:by_name", "--pp-size", "2", "--precision", "bf16")
    assert by_name.splitlines()[4:6] == text.splitlines()[4:6]


@pytest.mark.parametrize(
    ("model", "more", "text"),
    [
        ("own_chain.py:missing", (), "own_chain.py has no function 'missing'"),
        ("no_such_module:make", (), "no_such_module cannot be imported: No module named 'no_such_module'"),
        ("nowhere.py:make", (), "nowhere.py cannot be imported:"),
        ("own_chain.py:broken", (), "own_chain.py:broken raised RuntimeError: no weights here"),
        ("own_chain.py:nothing", (), "must return a torch.nn.Module, or one and a sample batch: got int"),
        ("own_chain.py:without_sample", (), "a sample of the inputs of Chain is needed"),
        ("own_chain.py:wrong", (), "unit 'blocks.0' (Sequential) of Chain failed while the model was traced"),
        ("own_chain.py:make", ("--tp-size", "2"), "--tp-size is for models of Hugging Face"),
        ("own_chain.py:make", ("--task", "CausalLM"), "--task is for models of Hugging Face"),
    ],
)
def test_what_cannot_be_described_is_said(refused, source, model, more, text):
    assert text in refused("--model", model, "--pp-size", "2", *more)


def test_names_of_folders_and_of_the_hub_are_none_of_functions(tmp_path):
    assert is_own_model("package.module:make")
    assert not is_own_model("google/vit-base-patch16-224")
    assert not is_own_model("C:")
    folder = tmp_path / "a:b"
    folder.mkdir()
    assert not is_own_model(str(folder))


def test_weights_take_no_memory_and_samples_have_no_values(source):
    own = load_own_model("own_chain.py:make")
    assert all(parameter.is_meta for parameter in own.model.parameters())
    (x,), named = own.sample  # labels are no argument of the model
    assert torch.equal(x, torch.zeros(8, 64))
    assert (named, own.batch_size) == ({}, 8)
    assert isinstance(own.model, nn.Module)
    with pytest.raises(ConfigError, match="has no function"):
        load_own_model("own_chain.py:none")
