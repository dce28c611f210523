from support import tiny_vit
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from hybridpp.nn.pretrained_model import has_cache_switch, is_pretrained_model


def test_models_of_transformers_are_told_from_others():
    model = tiny_vit()
    assert is_pretrained_model(model)
    assert is_pretrained_model(model.vit)
    assert not is_pretrained_model(model.classifier)
    assert not is_pretrained_model(nn.Sequential(model))


def test_models_that_may_cache_keys_and_values():
    assert has_cache_switch(GPT2LMHeadModel(GPT2Config(n_embd=4, n_layer=1, n_head=1, vocab_size=8)))
    assert not has_cache_switch(tiny_vit())
    assert not has_cache_switch(nn.Linear(2, 2))
