"""What container code leaves for the next forward is found there by every stage that reads it, or refused by name."""

from collections import deque
from types import SimpleNamespace

import pytest
import torch
from partition.user_models import Base
from support import assert_near, boosted, sgd, train, trained_alone
from torch import nn

from hybridpp.cluster import Loopback
from hybridpp.errors import PartitionError

BATCHES = [torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]


def squares(outputs, inputs):
    return outputs.square().mean()


class Keeping(Base):
    """Starts from ``begin(x)``, and ends with ``end(x)``; between the second block and the third is ``middle(x)``."""

    def __init__(self):
        super().__init__(lambda width, _: nn.Linear(width, width))
        self.state = self.made()

    def made(self):
        return None

    def begin(self, x):
        return x

    def middle(self, x):
        return x

    def end(self, x):
        return x

    def forward(self, x):
        x = self.begin(x)
        for number, block in enumerate(self.blocks):
            x = self.middle(block(x)) if number == 1 else block(x)
        return self.head(self.end(x))


class Memory(Keeping):
    def begin(self, x):
        return x if self.state is None else x + self.state

    def end(self, x):
        self.state = x.detach() * 0.1
        return x


class RunningMean(Keeping):
    in_place = False

    def __init__(self):
        super().__init__()
        del self.state
        self.register_buffer("state", torch.zeros(4))

    def begin(self, x):
        return x - self.state

    def end(self, x):
        mean = 0.9 * self.state + 0.1 * x.detach().mean((0, 1))
        if self.in_place:
            self.state.copy_(mean)
        else:
            self.state = mean
        return x


class RunningMeanInPlace(RunningMean):
    in_place = True


class Scale(Keeping):
    def made(self):
        return 1.0

    def begin(self, x):
        return x * self.state

    def end(self, x):
        self.state = self.state * 0.5
        return x


class Last(Keeping):
    def made(self):
        return deque(maxlen=2)

    def begin(self, x):
        return x + sum(self.state)

    def end(self, x):
        self.state.append(x.detach() * 0.1)
        return x


class InObject(Keeping):
    def made(self):
        return SimpleNamespace(inner={"calls": 0})

    def begin(self, x):
        return x * (1 + self.state.inner["calls"])

    def end(self, x):
        self.state.inner["calls"] += 1
        return x


class Remembering(nn.Linear):
    last = None

    def forward(self, x):
        self.last = super().forward(x).detach()
        return self.last + super().forward(x)


class OfABlock(Keeping):
    def __init__(self):
        super().__init__()
        self.blocks[3] = Remembering(4, 4)

    def begin(self, x):
        last = self.blocks[3].last
        return x if last is None else x + last


@pytest.mark.parametrize(
    "make_model",
    [Memory, RunningMean, RunningMeanInPlace, Scale, Last, InObject, OfABlock],
    ids=lambda kind: kind.__name__,
)
def test_state_that_a_stage_would_read_too_old_is_refused_at_boost(make_model):
    def rank():
        with pytest.raises(
            PartitionError, match=r"^stage 0 reads the attribute '(state|last)' of .* the forward before"
        ):
            boosted(make_model(), sgd, BATCHES[0], pp_size=2, num_microbatches=2)

    Loopback(2).run(rank)


class CountedFirst(Keeping):
    """Counts where every stage does."""

    def made(self):
        return 0

    def begin(self, x):
        self.state += 1
        return x * self.state


class AtTheEnd(Memory):
    """Reads it where it sets it."""

    def begin(self, x):
        return x

    def end(self, x):
        x = super().begin(x)
        return super().end(x)


class FromAnEarlierStage(Keeping):
    """Sets it before the cut, and reads it behind."""

    def begin(self, x):
        self.before, self.first = self.state, self.blocks[0](x)
        self.state = self.first.detach() * 0.1
        return x

    def middle(self, x):
        return x

    def end(self, x):
        return x if self.before is None else x + self.before


class ClearedFirst(Keeping):
    """Hooks inside of blocks append to a list, which the next forward clears before it reads it."""

    def made(self):
        for block in self.blocks:
            block.register_forward_hook(lambda module, args, output: self.state.append(output))
        return []

    def begin(self, x):
        self.state.clear()
        return x

    def end(self, x):
        return x + sum(self.state)


class MeanAtTheEnd(RunningMean):
    def begin(self, x):
        return x

    def end(self, x):
        return super().end(super().begin(x))


@pytest.mark.parametrize(
    "make_model",
    [CountedFirst, AtTheEnd, FromAnEarlierStage, ClearedFirst, MeanAtTheEnd],
    ids=lambda kind: kind.__name__,
)
def test_state_that_its_readers_have_is_that_of_one_process(make_model, tmp_path):
    def saved(booster, model, optimizer):
        booster.save_model(model, tmp_path / "model.pt")
        return torch.load(tmp_path / "model.pt").get("state", torch.zeros(()))

    settings = {"criterion": squares, "num_microbatches": 2}
    expected = train(make_model, BATCHES, after=saved, **settings)
    actual = train(make_model, BATCHES, pp_size=2, after=saved, **settings)
    assert actual["losses"] == [pytest.approx(expected["losses"][0], rel=1e-5)] * 2
    assert_near(actual["gradients"], expected["gradients"])
    torch.testing.assert_close(actual["after"][0], expected["after"][0])


@pytest.mark.parametrize("make_model", [CountedFirst, AtTheEnd], ids=lambda kind: kind.__name__)
def test_each_stage_of_a_rank_finds_what_itself_has_left(make_model):
    settings = {"criterion": squares, "num_microbatches": 2}
    expected = train(make_model, BATCHES, **settings)
    actual = train(make_model, BATCHES, pp_size=2, schedule="zb-v", **settings)
    assert actual["losses"] == [pytest.approx(expected["losses"][0], rel=1e-5)] * 2
    assert_near(actual["gradients"], expected["gradients"])


def test_ranks_with_several_stages_refuse_a_buffer_that_they_share():
    def rank():
        with pytest.raises(PartitionError, match="each rank runs 2 stages: the code that changes it in place would do"):
            boosted(MeanAtTheEnd(), sgd, BATCHES[0], pp_size=2, num_microbatches=2, schedule="zb-v")

    Loopback(2).run(rank)


class GivenOnce(Keeping):
    """Takes what the script has given it for one call."""

    def begin(self, x):
        return x if self.state is None else x + self.state

    def end(self, x):
        self.state = None
        return x


def test_what_a_script_gives_for_one_forward_is_taken_on_every_stage():
    def given():
        model = GivenOnce()
        model.state = torch.ones(4)
        return model

    settings = {"criterion": squares, "num_microbatches": 2}
    actual = train(given, BATCHES[:1], pp_size=2, **settings)
    assert_near(actual["gradients"], trained_alone(given, BATCHES[:1], **settings)["gradients"])


def test_classes_of_modules_are_afterwards_as_they_were():
    before = {kind: dict(vars(kind)) for kind in (Memory, Keeping, Remembering, nn.Linear)}
    test_state_that_a_stage_would_read_too_old_is_refused_at_boost(OfABlock)
    assert before == {kind: dict(vars(kind)) for kind in before}
