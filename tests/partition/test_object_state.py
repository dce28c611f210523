import torch
from torch import nn

from hybridpp.partition.object_state import replace_tensors


class Thing:
    def __init__(self, **attributes):
        vars(self).update(attributes)


def test_tensors_in_objects_are_replaced_but_not_those_of_modules():
    thing = Thing(layers=[{"keys": torch.ones(1)}, torch.ones(2)], module=nn.Linear(1, 1))
    weight = thing.module.weight
    replace_tensors([thing], lambda tensor: tensor * 2)
    assert thing.layers[0]["keys"].item() == 2
    assert thing.layers[1].tolist() == [2, 2]
    assert thing.module.weight is weight
