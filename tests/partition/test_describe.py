import pytest
import torch
from container_code_models import Again, Blocks, LongSkip
from support import image_batch, tiny_vit

from hybridpp.config import PartitionConfig
from hybridpp.module_adapter import ModuleAdapter
from hybridpp.partition import StagedModel, describe_cut, shared_parameters

ROWS = torch.ones(2, 4)


def describe(model, num_stages, **settings):
    return describe_cut(model, num_stages, ((ROWS,), {}), PartitionConfig(**settings))


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_it_describes_the_cut_that_is_made(num_stages):
    summaries = describe_cut(tiny_vit(), num_stages, ((), image_batch(2)))
    staged = StagedModel(
        ModuleAdapter(tiny_vit()), num_stages, [0], device=torch.device("cpu"), samples=[((), image_batch(2))]
    )
    for name, at in staged.owners.items():
        assert tuple(summary.stage for summary in summaries if name in summary.parameters) == at


def test_flops_are_those_of_the_forward():
    first, last = describe(Blocks(), 2)
    # Two samples; 4 x 4 weights, two operations each.
    assert first.flops == 3 * 2 * 16 * 2
    assert last.flops == 2 * 2 * 16 * 2 + 2 * 4 * 2


def test_what_is_sent_is_what_crosses():
    assert [summary.sent_bytes for summary in describe(Blocks(), 2)] == [2 * 4 * 4, 0]
    assert [summary.sent_bytes for summary in describe(LongSkip(), 3)] == [2 * 2 * 4 * 4, 2 * 2 * 4 * 4, 0]


def test_a_unit_called_on_several_stages_is_held_by_all_of_them():
    stages = describe(Again(), 2)
    assert [summary.calls for summary in stages] == [
        ("embed", "blocks.0", "blocks.0"),
        ("blocks.0", "blocks.0", "head"),
    ]
    assert shared_parameters(stages) == {"blocks.0.weight": (0, 1), "blocks.0.bias": (0, 1)}


def test_one_stage_is_the_whole_model():
    (whole,) = describe(Blocks(), 1)
    assert whole.num_parameters == sum(parameter.numel() for parameter in Blocks().parameters())
    assert whole.sent == ()


@pytest.mark.parametrize("balance", ["flops", "parameters", "time"])
def test_the_model_is_left_as_it_was(balance):
    model = Blocks()
    before = [dict(vars(module)) for module in model.modules()]
    describe(model, 2, balance=balance)
    assert [dict(vars(module)) for module in model.modules()] == before
    model(ROWS).sum().backward()


def test_casting_halves_what_is_sent():
    model = Blocks()
    half = {id(parameter): torch.float16 for parameter in model.parameters()}
    first, _ = describe_cut(model, 2, ((ROWS.half(),), {}), dtypes=half)
    assert first.sent_bytes == 2 * 4 * 2
