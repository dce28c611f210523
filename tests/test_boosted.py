"""The parts of a run are told apart by what they are."""

import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hybridpp import Booster
from hybridpp.errors import ConfigError

DATA = TensorDataset(torch.ones(4, 2))
LOADER, MODEL, LOSS = DataLoader(DATA, batch_size=2), nn.Linear(2, 1), nn.MSELoss()
SGD = torch.optim.SGD(MODEL.parameters(), lr=0.1)
SCHEDULE = torch.optim.lr_scheduler.StepLR(SGD, 1)


class OwnSchedule:
    """Of a package that does not derive from torch's."""

    def __init__(self):
        self.optimizer = SGD

    def step(self, epoch):
        pass


@pytest.mark.parametrize(
    ("positional", "named", "text"),
    [
        (
            (MODEL, SGD, LOADER, SCHEDULE),
            {},
            "got DataLoader as criterion, StepLR as dataloader. Pass them in this order, None for what there is "
            "not, or by name, for example boost(model, optimizer, dataloader=..., lr_scheduler=...).",
        ),
        ((SGD, MODEL), {}, "got SGD as model, Linear as optimizer."),
        ((MODEL, LOSS, SGD), {}, "got MSELoss as optimizer, SGD as criterion."),
        ((MODEL, LOADER), {}, "got DataLoader as optimizer. Pass them"),
        ((MODEL, SGD), {"lr_scheduler": LOADER}, "got DataLoader as lr_scheduler."),
        ((MODEL, SGD), {"lr_scheduler": SGD}, "got SGD as lr_scheduler."),
        ((MODEL, SGD), {"lr_scheduler": [SGD]}, "got list of SGD as lr_scheduler."),
        ((MODEL, SGD), {"criterion": OwnSchedule()}, "got OwnSchedule as criterion."),
        ((MODEL, SGD), {"criterion": "mse"}, "got str as criterion. Pass them"),
        ((MODEL, SGD), {"dataloader": LOSS}, "got MSELoss as dataloader."),
        ((MODEL, SGD), {"dataloader": 3}, "got int as dataloader."),
        ((MODEL, SGD, nn.MSELoss), {}, "got the class MSELoss as criterion. Pass an object: MSELoss(...)."),
        ((MODEL, torch.optim.SGD), {}, "got the class SGD as optimizer. Pass an object"),
        ((MODEL, SGD, LOSS, DATA), {}, "got a dataset, TensorDataset, as dataloader. Pass plugin.prepare_dataloader("),
    ],
)
def test_a_part_in_the_place_of_another_is_refused_by_name(positional, named, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        Booster().boost(*positional, **named)


def test_batches_may_come_from_anything_that_is_iterated_over():
    batches = [(torch.ones(2, 2), torch.ones(2, 1))]
    assert Booster().boost(nn.Linear(2, 1), dataloader=batches).dataloader is batches
