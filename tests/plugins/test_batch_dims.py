"""Batches whose samples are not in dimension 0."""

import re

import pytest
import torch
from support import assert_near, boosted, train
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from hybridpp import HybridParallelPlugin
from hybridpp.cluster import Loopback
from hybridpp.errors import ConfigError, DataError

LENGTH, WIDTH = 6, 8


class SequenceFirst(nn.Module):
    """torch's encoder as it is by default: [S, B, width], with a mask [S, S] that all samples share."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(WIDTH, nhead=2, dim_feedforward=8, dropout=0.0) for _ in range(4)]
        )

    def forward(self, src, mask):
        for layer in self.layers:
            src = layer(src, src_mask=mask)
        return {"states": src, "pooled": src.mean(0)}


def sequences(size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.full((LENGTH, LENGTH), float("-inf")).triu(1)
    return {"src": torch.randn(LENGTH, size, WIDTH, generator=generator), "mask": mask}


def squares(outputs, inputs):
    return F.mse_loss(outputs["states"], inputs["src"].flip(0))


DIMS = {"batch_dims": {"src": 1, "mask": None}, "output_dims": {"states": 1}}


@pytest.mark.covering
@pytest.mark.parametrize("settings", [{}, {"pp_size": 2}, {"pp_size": 2, "schedule": "zb-h1"}], ids=str)
@pytest.mark.parametrize("size", [LENGTH, 4, 5])
def test_a_sequence_first_model_gives_the_result_of_one_microbatch(size, settings):
    model = SequenceFirst()
    squares(model(**sequences(size)), sequences(size)).backward()
    result = train(SequenceFirst, [sequences(size)], criterion=squares, num_microbatches=4, **DIMS, **settings)
    assert_near(result["gradients"], {name: p.grad for name, p in model.named_parameters()})


@pytest.mark.parametrize("pp_size", [1, 2])
def test_its_outputs_are_put_together_along_the_same_dimension(pp_size):
    def run():
        booster, model, _ = boosted(SequenceFirst(), None, sequences(2), pp_size=pp_size, num_microbatches=2, **DIMS)
        with torch.no_grad():
            return booster.execute_pipeline(iter([sequences(4)]), model, return_loss=False, return_outputs=True)[
                "outputs"
            ]

    with torch.no_grad():
        expected = SequenceFirst()(**sequences(4))
    assert_near(Loopback(pp_size).run(run)[-1], expected)


@pytest.mark.parametrize(
    ("given", "expected"), [({}, 0), ({"batch_dims": 1}, 1), ({"batch_dims": 1, "output_dims": (0, 1)}, (0, 1))]
)
def test_outputs_follow_the_batch_unless_they_have_their_own(given, expected):
    plugin = HybridParallelPlugin(tp_size=1, pp_size=1, num_microbatches=1, **given)
    assert plugin.settings.pipeline.dims_of_outputs == expected


@pytest.mark.parametrize("name", ["batch_dims", "output_dims"])
@pytest.mark.parametrize("value", [-1, "src", True, {"src": "1"}, [0, 1.0]])
def test_what_is_no_dimension_is_refused(name, value):
    text = f"{name} must be a dimension of at least 0 for all tensors, or a dict or list of these and None: got {name}="
    with pytest.raises(ConfigError, match=re.escape(text)):
        HybridParallelPlugin(tp_size=1, pp_size=1, num_microbatches=1, **{name: value})


@pytest.mark.parametrize("pp_size", [1, 2])
@pytest.mark.parametrize(("said", "warnings"), [(None, 1), (0, 0)])
def test_attention_along_the_samples_is_told_once(pp_size, said, warnings, caplog):
    class Alone(SequenceFirst):
        def forward(self, src):
            return super().forward(src, None)

    batches = [{"src": sequences(5, seed)["src"]} for seed in range(2)]
    dims = {} if said is None else {"batch_dims": said}

    def criterion(outputs, inputs):  # one that fits either split
        return F.mse_loss(outputs["states"], inputs["src"])

    train(Alone, batches, criterion=criterion, num_microbatches=3, pp_size=pp_size, **dims)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == warnings * pp_size
    assert all("uses dimension 0, along which the batch was split" in text for text in told)


def test_a_mask_that_all_samples_share_is_refused_before_anything_runs():
    def run():
        booster, model, _ = boosted(SequenceFirst(), None, sequences(2), pp_size=2, num_microbatches=2)
        with (
            torch.no_grad(),
            pytest.raises(DataError, match=re.escape("['mask'] is a triangular mask of shape (6, 6)")),
        ):
            booster.execute_pipeline(iter([sequences(4)]), model, return_loss=False)
        return True

    assert all(Loopback(2).run(run))


def test_a_loaders_batch_size_tells_sequences_from_samples():
    def run():
        samples = [torch.zeros(LENGTH, WIDTH)] * 4
        loader = DataLoader(samples, batch_size=4, collate_fn=lambda given: {"x": torch.stack(given, 1)})
        booster, model, _ = boosted(nn.Linear(WIDTH, 2), None, None, num_microbatches=2)
        model.forward = lambda x: x
        with (
            torch.no_grad(),
            pytest.raises(DataError, match="batches of 4 samples, but the batch's tensors have size 6"),
        ):
            booster.execute_pipeline(iter(loader), model, return_loss=False)
        return True

    assert Loopback(1).run(run) == [True]
