"""Jobs of in-process ranks take the plans that an earlier job searched for an equal model, and no others."""

import pytest
import torch
from hybridpp_plugins import apply_sp, find_tp_plan
from support import boosted, image_batch, sgd, tiny_vit
from torch import nn

from hybridpp.cluster import Loopback

ATTENTION = {"*.q_proj": "column", "*.k_proj": "column", "*.v_proj": "column", "*.o_proj": "row"}
SAMPLE = {"pixel_values": image_batch(2)["pixel_values"]}


class Counts:
    """What a forward counts, in an object."""

    def __init__(self) -> None:
        self.calls = 0


class Keeps(Counts):
    """It keeps inputs, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[torch.Tensor] = []


class Net(nn.Module):
    """Two blocks, of equal weights in any case, which may be tied; the forward may count its calls."""

    def __init__(self, tied: bool = False, counts: Counts | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(2))
        self.blocks[1].load_state_dict(self.blocks[0].state_dict())
        if tied:
            self.blocks[1][0].weight = self.blocks[0][0].weight
        self.counts = counts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counts is not None:
            self.counts.calls += 1
        if isinstance(self.counts, Keeps):
            self.counts.inputs.append(x)
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.fixture
def searches(monkeypatch):
    """The searches for layers and for sequences that were made."""
    made = []

    def recording(module, name):
        search = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: (made.append(name), search(*args))[1])

    recording(find_tp_plan, "infer_plan")
    recording(apply_sp, "infer_sequence")
    monkeypatch.setattr(Loopback, "results_of_any_run", {})
    return made


def shapes(make=tiny_vit, sample=SAMPLE, size=2, **settings):
    """The shapes of the parameters that each rank holds."""

    def run():
        model = boosted(make(), sgd, sample, tp_size=size, **settings)[1]
        return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}

    return Loopback(size).run(run)


def test_an_equal_model_is_searched_once(searches):
    first, again = shapes(enable_sequence_parallelism=True), shapes(enable_sequence_parallelism=True)
    assert searches == ["infer_plan", "infer_sequence"]
    assert first == again
    assert shapes() == shapes()
    assert searches == ["infer_plan", "infer_sequence"]


def test_ranks_do_not_share_the_plan_that_they_are_given(searches):
    shapes(enable_sequence_parallelism=True)
    kept = [*Loopback.results_of_any_run.values()]
    before = repr(kept)
    shapes(enable_sequence_parallelism=True)
    assert repr(kept) == before


@pytest.mark.parametrize(
    "other",
    [
        {"make": lambda: tiny_vit(seed=1)},
        {"make": lambda: tiny_vit().eval()},
        {"make": lambda: tiny_vit(dropout=0.5)},
        {"make": lambda: tiny_vit().double()},
        {"sample": {"pixel_values": image_batch(2, seed=1)["pixel_values"]}},
        {"sample": {"pixel_values": image_batch(3)["pixel_values"]}},
        {"size": 4},
        {"precision": "bf16"},
    ],
    ids=["weights", "mode", "settings", "dtype", "values of the sample", "size of the sample", "ranks", "precision"],
)
def test_whatever_a_search_sees_may_change_the_plan(searches, other):
    shapes()
    shapes(**other)
    assert searches == ["infer_plan"] * 2


def test_equal_weights_that_are_not_tied_make_another_model(searches):
    x = torch.ones(2, 3, 8)
    shapes(Net, x)
    shapes(lambda: Net(tied=True), x)
    assert searches == ["infer_plan"] * 2


def test_a_plan_that_the_user_gave_makes_another_search_for_sequences(searches):
    settings = {"enable_sequence_parallelism": True}
    shapes(**settings)
    shapes(tensor_parallel_plan=ATTENTION, **settings)
    assert searches == ["infer_plan", "infer_sequence", "infer_sequence"]


def test_what_a_forward_sets_in_an_object_is_set_where_the_plan_is_given(searches):
    counted = [Counts(), Counts()]
    for counts in counted:
        shapes(lambda counts=counts: Net(counts=counts), torch.ones(2, 3, 8))
    assert searches == ["infer_plan"]
    assert [counts.calls for counts in counted] == [1, 1]


def test_a_forward_that_puts_tensors_into_an_object_is_run_by_each_job(searches):
    kept = [Keeps(), Keeps()]
    for counts in kept:
        shapes(lambda counts=counts: Net(counts=counts), torch.ones(2, 3, 8))
    assert searches == ["infer_plan"] * 2
    assert all(len(counts.inputs) == 1 for counts in kept)


def test_models_of_a_class_of_one_test_are_searched_in_each_job(searches):
    class Local(Net):
        pass

    for _ in range(2):
        shapes(Local, torch.ones(2, 3, 8))
    assert searches == ["infer_plan"] * 2
