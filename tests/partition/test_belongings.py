import torch
from torch import nn

from hybridpp.partition.belongings import Belongings


class Thing:
    def __init__(self, **attributes):
        vars(self).update(attributes)


def test_what_objects_hold_is_put_back():
    inner = Thing(tensor=torch.ones(1))
    thing = Thing(items=[1, inner], names={"a": (inner,)}, module=nn.Linear(1, 1))
    thing.itself = thing
    belongings = Belongings(((thing,), {"x": torch.ones(1)}))
    module, tensor = thing.module, inner.tensor
    thing.items.append(3)
    thing.names.clear()
    thing.module = inner.tensor = None
    inner.new = 1
    belongings.restore()
    assert (thing.items, thing.names, thing.module) == ([1, inner], {"a": (inner,)}, module)
    assert vars(inner) == {"tensor": tensor}


def test_tensors_in_objects_are_replaced_but_not_those_of_modules():
    thing = Thing(layers=[{"keys": torch.ones(1)}, torch.ones(2)], module=nn.Linear(1, 1))
    weight = thing.module.weight
    Belongings([thing]).replace(lambda tensor: tensor * 2)
    assert thing.layers[0]["keys"].item() == 2
    assert thing.layers[1].tolist() == [2, 2]
    assert thing.module.weight is weight
