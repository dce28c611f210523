import pytest
import torch
from container_code_models import Blocks
from networks import Convolutions, wide_images
from support import sgd, train
from torch import nn
from torch.nn import functional

from hybridpp.config import PartitionConfig
from hybridpp.errors import PartitionError
from hybridpp.partition import MemoryBudget, TrainingStateSpec, describe_cut
from hybridpp.partition.memory import imbalance
from hybridpp.sizes import parse_bytes

KEPT_BY_ADAM = TrainingStateSpec(2)


class Tied(Blocks):
    """The last block uses the first one's weights."""

    def __init__(self):
        super().__init__()
        self.blocks[3].weight = self.blocks[0].weight


def held_by(model, num_stages, limit=None, ranks=None, state_spec=KEPT_BY_ADAM):
    sizes = {name: state_spec.bytes_of(parameter, parameter.dtype) for name, parameter in model.named_parameters()}
    return MemoryBudget(sizes=sizes, ranks=ranks or range(num_stages), limit=limit)


def stages_of(model, num_stages, sample=None, limit=None, ranks=None, **settings):
    held = held_by(model, num_stages, limit, ranks)
    sample = wide_images() if sample is None else sample
    return describe_cut(model, num_stages, ((sample,), {}), PartitionConfig(**settings), held=held)


@pytest.mark.parametrize("num_stages", [2, 4])
def test_a_convolutional_network_gets_the_cheapest_stages_within_the_limit(num_stages):
    free = stages_of(Convolutions(), num_stages)
    largest = max(stage.state_bytes for stage in free)
    limited = stages_of(Convolutions(), num_stages, limit=largest - 1)
    assert max(stage.state_bytes for stage in limited) < largest
    assert max(stage.flops for stage in limited) > max(stage.flops for stage in free)


def test_a_limit_that_is_kept_anyway_changes_nothing():
    assert stages_of(Convolutions(), 4, limit=2**40) == stages_of(Convolutions(), 4)


@pytest.mark.parametrize("num_stages", [2, 4])
def test_the_least_limit_that_works_is_told_and_works(num_stages):
    with pytest.raises(PartitionError, match="no cut within the memory limit was found: got") as raised:
        stages_of(Convolutions(), num_stages, limit=1000)
    text = str(raised.value)
    assert f"stage {num_stages - 1} (rank {num_stages - 1} of the pipeline) needs" in text
    told = text.partition("Use memory_limit='")[2].partition("'")[0]
    least = parse_bytes("memory_limit", told)
    assert max(stage.state_bytes for stage in stages_of(Convolutions(), num_stages, limit=least)) <= least
    with pytest.raises(PartitionError):
        stages_of(Convolutions(), num_stages, limit=int(0.98 * least))


def test_tied_weights_count_on_each_rank_that_holds_them_once():
    model = Tied()
    sample = torch.ones(2, 4)
    first, last = stages_of(model, 2, sample)
    both = stages_of(model, 2, sample, ranks=(0, 0))
    held = held_by(model, 2, ranks=(0, 0))
    together = held.by_rank([set(stage.parameters) for stage in both])
    assert first.state_bytes + last.state_bytes == together[0] + 16 * 4 * 4


def test_a_cut_that_is_told_is_held_to_the_limit_too():
    with pytest.raises(PartitionError, match=r"the parameters of stage 1 \(rank 1 of the pipeline\) take .* KiB"):
        stages_of(Convolutions(), 2, limit=300_000, layers_per_stage=[7, 1])


def test_what_training_keeps_of_a_weight():
    weight, frozen = nn.Parameter(torch.ones(10)), nn.Parameter(torch.ones(10), requires_grad=False)
    half, full = torch.bfloat16, torch.float32
    assert TrainingStateSpec(2, masters=True).bytes_of(weight, half) == 10 * (2 + 4 + 4 + 8)
    assert TrainingStateSpec(2).bytes_of(weight, full) == 10 * (4 + 4 + 8)
    assert TrainingStateSpec(0).bytes_of(weight, torch.float64) == 10 * (8 + 8)
    assert TrainingStateSpec(None, masters=True).bytes_of(weight, half) == 10 * (2 + 4)
    assert TrainingStateSpec(2, masters=True).bytes_of(frozen, half) == 10 * 2
    assert TrainingStateSpec(2).bytes_of(weight, full, num_elements=5) == 5 * 16
    assert TrainingStateSpec(2, masters=True, num_shards=4).bytes_of(weight, half) == 10 * (2 + 4) + 3 * (4 + 8)
    assert TrainingStateSpec(2, num_shards=4).bytes_of(frozen, half) == 10 * 2
    assert TrainingStateSpec(2, weight_copies=0.5).bytes_of(frozen, half) == 5 * 2
    assert TrainingStateSpec(2, weight_copies=1.5).bytes_of(weight, full) == 15 * 4 + 10 * (4 + 8)


def loss(outputs, inputs):
    return functional.cross_entropy(outputs.float(), torch.arange(len(outputs)))


loss.reduction = "mean"  # of what micro-batches give: labels count the samples of one


@pytest.mark.parametrize(
    "layout", [{"pp_size": 2}, {"pp_size": 4}, {"pp_size": 2, "schedule": "zb-v"}, {"pp_size": 2, "precision": "bf16"}]
)
def test_boost_keeps_to_the_limit_and_trains_as_ever(layout):
    options = {"num_microbatches": 2, "criterion": loss, "precision": "fp32", **layout}
    per_weight = 8 if options["precision"] == "fp32" else 2 + 4 + 4
    numbers = {name: p.numel() for name, p in Convolutions().named_parameters()}
    # Plain SGD keeps nothing; the last block alone has most of the parameters.
    limit = int(per_weight * 0.8 * sum(numbers.values()))
    runs = [
        train(Convolutions, [wide_images()], memory_limit=size, make_optimizer=sgd, **options) for size in (None, limit)
    ]
    held = [[per_weight * sum(numbers[name] for name in names) for names in run["names"]] for run in runs]
    assert max(held[0]) > limit >= max(held[1])
    assert runs[0]["losses"] == runs[1]["losses"]


def test_three_times_the_mean_is_no_more_than_that():
    assert imbalance([{"a"}, {"b"}, {"b"}, {"b"}], {"a": 9, "b": 1}) is None
    assert imbalance([{"b"}, {"a"}, {"b"}, {"b"}], {"a": 91, "b": 10}) == (1, pytest.approx(91 * 4 / 121))
