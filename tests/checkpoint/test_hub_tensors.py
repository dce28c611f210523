"""The tensors of a folder, made group by group, are those that save_pretrained writes."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from hybridpp.checkpoint import hub_tensors
from hybridpp.checkpoint.hub_tensors import hub_groups, plain_groups
from hybridpp.checkpoint.safetensors_file import StoredSpec
from hybridpp.checkpoint.single_file import tied_names

SIZES = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1}


def mixtral():
    config = MixtralConfig(**SIZES, vocab_size=16, num_hidden_layers=2, num_local_experts=3)
    return MixtralForCausalLM(config)


def tied_llama():
    return LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=16, num_hidden_layers=1, tie_word_embeddings=True))


def groups_of(model):
    state = model.state_dict()
    aliases = tied_names(state)
    specs = {name: StoredSpec.of(tensor) for name, tensor in state.items() if name not in aliases}
    with torch.device("meta"):
        shell = type(model)(model.config)
    return hub_groups(shell, specs, aliases)


def made(groups, state):
    return {
        name: tensor
        for group in groups
        for name, tensor in group.made({source: state[source] for source in group.sources}).items()
    }


def assert_as_saved(model, groups, folder):
    model.save_pretrained(folder)
    expected, found = load_file(folder / "model.safetensors"), made(groups, model.state_dict())
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert {n: spec for group in groups for n, spec in group.outputs.items()} == {
        name: StoredSpec.of(tensor) for name, tensor in expected.items()
    }


def test_converted_and_tied_tensors_are_as_save_pretrained_writes_them(tmp_path):
    for model in (mixtral(), tied_llama()):
        groups = groups_of(model)
        assert max(len(group.sources) for group in groups) == 1, "no group needs more than it must"
        assert_as_saved(model, groups, tmp_path / type(model).__name__)


@pytest.mark.parametrize("fails", ["with an error", "by other names"])
def test_a_conversion_that_needs_more_tensors_gets_all(tmp_path, monkeypatch, fails):
    """A function that wants to see every tensor that it converts."""
    model = mixtral()
    reverted, whole = hub_tensors._reverted, sum("experts" in name for name in model.state_dict())

    def wants_all(shell, tensors):
        if sum("experts" in name for name in tensors) < whole:
            if fails == "with an error":
                raise KeyError("the others")
            return {f"wrong.{name}": tensor for name, tensor in reverted(shell, tensors).items()}
        return reverted(shell, tensors)

    monkeypatch.setattr(hub_tensors, "_reverted", wants_all)
    groups = groups_of(model)
    assert sorted({len(group.sources) for group in groups}) == [1, whole]
    assert_as_saved(model, groups, tmp_path)


def test_plain_tensors_come_under_all_of_their_names():
    spec = StoredSpec(torch.float32, (2,))
    (one, two) = plain_groups({"a": spec, "b": spec}, {"also a": "a"})
    tensor = torch.ones(2)
    assert one.made({"a": tensor}) == {"a": tensor, "also a": tensor}
    assert (one.sources, list(two.outputs)) == (("a",), ["b"])
