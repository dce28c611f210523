"""What a step returns beside the loss, on the ranks that ask for it."""

import dataclasses

import pytest
import torch
from support import assert_near, boosted, image_batch, model_loss, sgd, tiny_vit
from torch import nn

from hybridpp.cluster import Loopback
from hybridpp.errors import ConfigError, DataError, HybridppError, UnlikeCallsError

BATCH = image_batch(5)


def step(
    pp_size=2, tp_size=1, training=True, model=tiny_vit, criterion=model_loss, batch=BATCH, settings=None, **options
):
    def run():
        given = {"num_microbatches": 2, "pp_size": pp_size, "tp_size": tp_size, **(settings or {})}
        booster, boosted_model, optimizer = boosted(model(), sgd, batch, **given)
        with torch.set_grad_enabled(training):
            return booster.execute_pipeline(
                iter([batch]), boosted_model, criterion, optimizer if training else None, **options
            )

    return Loopback(pp_size * tp_size).run(run)


def expected_losses(num_microbatches):
    model = tiny_vit()
    parts = [{name: part[n] for name, part in split(num_microbatches).items()} for n in range(num_microbatches)]
    with torch.no_grad():
        return torch.stack([model(**part).loss for part in parts])


def split(num_microbatches):
    return {name: torch.tensor_split(value, num_microbatches) for name, value in BATCH.items()}


@pytest.mark.parametrize(
    ("pp_size", "training", "schedule"), [(1, True, "1f1b"), (2, False, "1f1b"), (2, True, "zb-v")]
)
def test_every_rank_gets_the_loss_of_each_microbatch(pp_size, training, schedule):
    results = step(pp_size, training=training, settings={"schedule": schedule}, return_losses=True, return_loss=False)
    for result in results:
        assert_near({"losses": result["losses"]}, {"losses": expected_losses(2)})
        assert (result["loss"], result["outputs"]) == (None, None)


def test_a_microbatch_without_items_has_the_loss_nan():
    class TokenLoss:
        def num_items(self, inputs):
            return (inputs["labels"] >= 0).sum()

        def __call__(self, outputs, inputs):
            return nn.functional.cross_entropy(outputs.logits, inputs["labels"], ignore_index=-100)

    batch = {**BATCH, "labels": torch.tensor([0, 1, 2, -100, -100])}
    for result in step(criterion=TokenLoss(), batch=batch, return_losses=True, num_microbatches=2):
        assert result["losses"].isnan().tolist() == [False, True]
        assert result["losses"][0] == pytest.approx(result["loss"].item())


@pytest.mark.parametrize(("where", "receivers"), [("last", {2}), ("first", {0}), ("all", {0, 1, 2})])
def test_outputs_go_to_the_ranks_that_are_asked_for(where, receivers):
    results = step(3, training=False, return_outputs=True, outputs_on=where)
    with torch.no_grad():
        logits = tiny_vit()(**BATCH).logits
    assert {rank for rank, result in enumerate(results) if result["outputs"] is not None} == receivers
    for rank in receivers:
        outputs = results[rank]["outputs"]
        assert type(outputs).__name__ == "ImageClassifierOutput"
        assert_near({"logits": outputs.logits}, {"logits": logits})


@pytest.mark.parametrize(("pp_size", "tp_size", "schedule"), [(1, 1, "1f1b"), (2, 2, "1f1b"), (2, 1, "zb-v")])
def test_outputs_on_all_ranks_are_equal_in_every_layout(pp_size, tp_size, schedule):
    results = step(pp_size, tp_size, settings={"schedule": schedule}, return_outputs=True, outputs_on="all")
    logits = [result["outputs"].logits for result in results]
    assert all(torch.equal(one, logits[0]) for one in logits)
    assert logits[0].shape == (5, 5)
    assert not logits[0].requires_grad


def test_outputs_of_every_dtype_and_kind_are_sent():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            some = x.detach()
            return {
                "x": x,
                "parts": [some.bfloat16(), some > 0, some[:, :0], some.t()],
                "small": some.to(torch.int16),
                "text": "text",
            }

    results = step(
        model=Model,
        criterion=lambda outputs, inputs: outputs["x"].square().mean(),
        batch={"x": torch.randn(4, 3)},
        return_outputs=True,
        outputs_on="first",
    )
    outputs = results[0]["outputs"]
    assert outputs["text"] == "text"
    assert outputs["small"].dtype == torch.int16
    assert [part.dtype for part in outputs["parts"][:3]] == [torch.float32, torch.bool, torch.float32]
    assert outputs["parts"][2].shape == (4, 0)
    assert results[1]["outputs"] is None


def test_outputs_that_cannot_be_sent_are_refused_on_every_rank():
    @dataclasses.dataclass
    class Local:
        logits: torch.Tensor

    class Model(nn.Sequential):
        def forward(self, x):
            return Local(super().forward(x))

    def run():
        torch.manual_seed(0)
        batch = torch.ones(2, 2)
        booster, model, optimizer = boosted(Model(nn.Linear(2, 2), nn.Linear(2, 2)), sgd, batch, pp_size=2)

        def loss(outputs, inputs):
            return outputs.logits.mean()

        with pytest.raises(ConfigError, match=r"outputs of Model cannot be sent .*Local.* Leave out outputs_on"):
            booster.execute_pipeline(iter([batch]), model, loss, optimizer, return_outputs=True, outputs_on="first")

    Loopback(2).run(run)


@pytest.mark.parametrize("settings", [{"num_microbatches": 2}, {"microbatch_size": 4}])
def test_one_call_may_have_another_number_of_microbatches(settings):
    def run():
        booster, model, optimizer = boosted(tiny_vit(), sgd, BATCH, pp_size=2, **settings)
        losses = []
        for count in (None, 5, 1):
            result = booster.execute_pipeline(
                iter([BATCH]), model, model_loss, optimizer, return_losses=True, num_microbatches=count
            )
            losses.append(result["losses"])
            optimizer.zero_grad()
        return losses

    for losses in Loopback(2).run(run):
        assert [len(one) for one in losses] == [2, 5, 1]
        assert_near({"5": losses[1], "1": losses[2]}, {"5": expected_losses(5), "1": expected_losses(1)})


def test_ranks_that_split_a_batch_differently_are_refused():
    def run():
        booster, model, optimizer = boosted(tiny_vit(), sgd, BATCH, pp_size=2)
        count = 2 + booster.plugin.layout.pp.rank
        with pytest.raises(DataError, match=r"ranks 0, 1 split it into 2 and 3 micro-batches. Pass the same"):
            booster.execute_pipeline(iter([BATCH]), model, model_loss, optimizer, num_microbatches=count)

    Loopback(2).run(run)


def test_ranks_with_different_options_are_refused():
    def run():
        booster, model, optimizer = boosted(tiny_vit(), sgd, BATCH, pp_size=2)
        where = ("first", "all")[booster.plugin.layout.pp.rank]
        with pytest.raises(UnlikeCallsError, match=r"outputs_on='first'.*outputs_on='all'"):
            booster.execute_pipeline(iter([BATCH]), model, model_loss, optimizer, return_outputs=True, outputs_on=where)

    Loopback(2).run(run)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"outputs_on": "middle", "return_outputs": True}, "outputs_on is one of last, first, all: got 'middle'"),
        ({"outputs_on": "all"}, "got return_outputs=False. Pass return_outputs=True"),
        ({"num_microbatches": 0}, "num_microbatches must be an integer of at least 1, or None: got 0"),
        ({"num_microbatches": True}, "num_microbatches must be an integer"),
        ({"return_losses": 1}, "return_losses must be True or False: got return_losses=1"),
        ({"return_losses": True, "return_loss": False, "criterion": None, "training": False}, "to compute a loss"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(HybridppError, match=message):
        step(pp_size=1, **options)
