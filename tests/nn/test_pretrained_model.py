from support import tiny_vit
from torch import nn

from hybridpp.nn.pretrained_model import is_pretrained_model


def test_models_of_transformers_are_told_from_others():
    model = tiny_vit()
    assert is_pretrained_model(model)
    assert is_pretrained_model(model.vit)
    assert not is_pretrained_model(model.classifier)
    assert not is_pretrained_model(nn.Sequential(model))
