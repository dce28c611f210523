"""Every schedule gives the same training run, whoever made it."""

import functools
import re

import pytest
import torch
from hybridpp_plugins import engine
from support import assert_same, boosted, image_batch, model_loss, sgd, tiny_vit, train
from torch import nn

from hybridpp import HybridParallelPlugin
from hybridpp.cluster import Loopback
from hybridpp.errors import ConfigError, ScheduleError
from hybridpp.schedule import SCHEDULES, one_f_one_b, save_schedule, zb_h1

NAMES = tuple(SCHEDULES)
# One of each placement of stages, with whole and with split backward passes; the others are left to the matrix.
KINDS = ("1f1b", "interleaved", "zb-h1", "interleaved-zb", "zb-v")
OF_EACH_KIND = [name if name in KINDS else pytest.param(name, marks=pytest.mark.matrix) for name in NAMES]
GOOD = {"tp_size": 1, "pp_size": 1, "precision": "fp32", "num_microbatches": 2}


def vit(num_layers=4):
    return tiny_vit(dropout=0.1, num_layers=num_layers)


BATCHES = [image_batch(7), image_batch(4, seed=1)]


@pytest.fixture(scope="module")
def one_process():
    return train(vit, BATCHES, num_microbatches=5)


@functools.cache
def eight_layers():
    """In one process."""
    return train(functools.partial(vit, 8), BATCHES, num_microbatches=5)


@pytest.mark.parametrize(
    ("schedule", "pp_size"),
    [("zb-h1", 1), ("interleaved", 1), *((name, 2) for name in NAMES), ("1f1b", 4), ("zb-h2", 4)],
)
def test_the_schedule_changes_no_bit(schedule, pp_size, one_process):
    """Batches of other sizes included: 5 micro-batches of uneven size, then 4."""
    run = train(vit, BATCHES, pp_size=pp_size, num_microbatches=5, schedule=schedule)
    assert_no_bit_changed(run, one_process)


@pytest.mark.parametrize("schedule", ["interleaved-zb", "zb-v"])
def test_nor_do_eight_stages_on_four_ranks(schedule):
    run = train(functools.partial(vit, 8), BATCHES, pp_size=4, num_microbatches=5, schedule=schedule)
    assert_no_bit_changed(run, eight_layers())


def assert_no_bit_changed(run, expected):
    assert all(losses == expected["losses"][0] for losses in run["losses"])
    assert_same(run["gradients"], expected["gradients"])
    assert_same(run["weights"], expected["weights"])


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_replicas_and_several_stages_per_rank_go_together(schedule):
    settings = {"num_microbatches": 2, "dp_size": 2}
    expected = train(vit, [image_batch(8)], **settings)
    run = train(vit, [image_batch(8)], pp_size=2, schedule=schedule, **settings)
    assert_same(run["weights"], expected["weights"])


@pytest.mark.parametrize("schedule", OF_EACH_KIND)
def test_every_schedule_evaluates_and_returns_outputs_on_the_last_stage(schedule):
    def run():
        settings = {"pp_size": 2, "num_microbatches": 3, "schedule": schedule}
        booster, model, _ = boosted(vit().eval(), sgd, image_batch(4), **settings)
        with torch.no_grad():
            found = [
                booster.execute_pipeline(iter([image_batch(size)]), model, model_loss, return_outputs=True)
                for size in (5, 2, 1)
            ]
        is_last = booster.plugin.stage_manager.is_last_stage()
        assert all((result["outputs"] is not None) == is_last for result in found)
        return [result["loss"].item() for result in found], [r["outputs"].logits for r in found] if is_last else None

    ranks = Loopback(2).run(run)
    whole = vit().eval()
    with torch.no_grad():
        expected = [whole(**image_batch(size)) for size in (5, 2, 1)]
    for losses, _ in ranks:
        assert losses == pytest.approx([float(output.loss) for output in expected], rel=1e-5)
    (outputs,) = [logits for _, logits in ranks if logits is not None]
    for logits, output in zip(outputs, expected, strict=True):
        torch.testing.assert_close(logits, output.logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("suffix", [".csv", ".json"])
def test_a_schedule_comes_from_a_file(tmp_path, suffix, one_process):
    path = tmp_path / f"plan{suffix}"
    save_schedule(zb_h1(2, 5), path)
    run = train(vit, BATCHES[:1], pp_size=2, num_microbatches=5, schedule=str(path))
    assert_same(run["gradients"], one_process["gradients"])


@pytest.mark.parametrize(
    "schedule",
    [
        lambda num_ranks, num_microbatches: one_f_one_b(num_ranks, num_microbatches),
        one_f_one_b(2, 5),
        ["0F0 0F1 0F2 0F3 0F4 0I0 0W0 0B1 0B2 0B3 0B4", "1F0 1F1 1F2 1I0 1F3 1W0 1B1 1B2 1F4 1B3 1B4"],
        # The second half of the model on the first rank, and two stages of it at that.
        [
            [
                *(f"1F{n}" for n in range(5)),
                *(f"2F{n}" for n in range(5)),
                *(f"{s}B{n}" for s in (2, 1) for n in range(5)),
            ],
            [*(f"0F{n}" for n in range(5)), *(f"0B{n}" for n in range(5))],
        ],
    ],
    ids=["function", "programs", "text", "backwards"],
)
def test_a_schedule_is_anything_that_gives_programs(schedule, one_process):
    run = train(vit, BATCHES[:1], pp_size=2, num_microbatches=5, schedule=schedule)
    assert_same(run["gradients"], one_process["gradients"])


def test_explicit_programs_set_num_microbatches_beside_a_microbatch_size():
    run = train(vit, [image_batch(4)], pp_size=2, microbatch_size=1, schedule=one_f_one_b(2, 4))
    assert_same(run["gradients"], train(vit, [image_batch(4)], microbatch_size=1)["gradients"])


@pytest.mark.parametrize("style", ["1f1b", "interleaved", "zbv"])
def test_pp_style_is_the_same_setting(style, one_process):
    chunks = {} if style == "1f1b" else {"num_model_chunks": 2}
    run = train(vit, BATCHES[:1], pp_size=2, num_microbatches=5, pp_style=style, **chunks)
    assert_same(run["gradients"], one_process["gradients"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "zb-h9"}, "unknown schedule 'zb-h9'. Use one of 'gpipe', '1f1b', 'eager-1f1b', 'interleaved',"),
        ({"schedule": "1f1b", "num_model_chunks": 2}, "schedule '1f1b' has 1 stage per rank: got num_model_chunks=2."),
        ({"schedule": [["0F0"], ["1F0"]]}, "is for 2 ranks and 1 micro-batches: got pp_size=1 and a batch of 2"),
        ({"schedule": [["0F0", "0B0", "0B1", "0F1"]]}, "0B1 (rank 0, position 2)"),
        ({"schedule": [["0F0", "0X0"]]}, "an action is written like 2F0"),
        ({"schedule": 7}, "must be one row of actions per rank"),
        ({"schedule": "nowhere.csv"}, "schedule 'nowhere.csv' cannot be read: No such file or directory."),
        ({"schedule": [["0F0", "0F1", "0B0", "0B1"]], "num_model_chunks": 2}, "has 1 stages on 1 ranks"),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused_when_the_plugin_is_made(settings, message):
    with pytest.raises((ConfigError, ScheduleError), match=re.escape(message)):
        HybridParallelPlugin(**{**GOOD, **settings})


def test_a_plan_for_another_num_microbatches_is_refused_on_every_rank():
    def run():
        options = {"pp_size": 2, "num_microbatches": 3, "schedule": one_f_one_b(2, 3)}
        booster, model, optimizer = boosted(tiny_vit(), sgd, image_batch(4), **options)
        with pytest.raises(ScheduleError, match="is for 2 ranks and 3 micro-batches: got pp_size=2 and a batch of 2"):
            booster.execute_pipeline(iter([image_batch(2)]), model, model_loss, optimizer)
        # Evaluation needs the placement alone.
        with torch.no_grad():
            return booster.execute_pipeline(iter([image_batch(2)]), model, model_loss)["loss"].item()

    first, second = Loopback(2).run(run)
    assert first == second


class Frozen(nn.Module):
    """Blocks of which the first half is frozen, tied at the ends, with weights that nothing can tell apart."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(6, 2, 8, 0.1, batch_first=True) for _ in range(4)])
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight
        for block in self.blocks[:2]:
            block.requires_grad_(False)

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("schedule", OF_EACH_KIND)
def test_frozen_and_tied_weights_under_every_schedule(schedule):
    def loss(outputs, inputs):
        return outputs.square().mean()

    data = torch.arange(12).reshape(4, 3) % 7
    options = {"num_microbatches": 4, "criterion": loss}
    expected = train(Frozen, [data], **options)
    run = train(Frozen, [data], pp_size=2, schedule=schedule, **options)
    assert set(run["gradients"]) == set(expected["gradients"])
    for name, gradient in expected["gradients"].items():
        torch.testing.assert_close(run["gradients"][name], gradient, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_split_backward_says_once_what_it_splits(schedule, caplog):
    def run():
        boosted(Frozen(), sgd, torch.zeros(2, 3, dtype=torch.long), pp_size=2, num_microbatches=2, schedule=schedule)

    with caplog.at_level("INFO", logger="hybridpp"):
        Loopback(2).run(run)
    said = [record.getMessage() for record in caplog.records if "trainable weights" in record.getMessage()]
    if schedule == "1f1b":
        assert said == []
    else:
        (line,) = said
        assert line.startswith("[rank 0] the schedule's W computes the gradients of")
        assert line.endswith("its I those of 4 LayerNorm, 2 MultiheadAttention.")


def test_a_timeline_says_when_every_rank_did_what():
    def run():
        booster, model, optimizer = boosted(vit(), sgd, image_batch(4), pp_size=2, num_microbatches=2, schedule="zb-h1")
        with booster.record_timeline(model) as recording:
            with pytest.raises(ConfigError, match="complete when its `with` block has ended"):
                _ = recording.timeline
            booster.execute_pipeline(iter([image_batch(4)]), model, model_loss, optimizer)
        booster.execute_pipeline(iter([image_batch(4)]), model, model_loss, optimizer)
        return recording.timeline

    first, second = Loopback(2).run(run)
    assert first == second
    done = [[span.name for span in first.of_rank(rank) if span.computes] for rank in range(2)]
    assert done == [[str(action) for action in program] for program in zb_h1(2, 2)]
    assert 0 < first.makespan_ms < 60_000


def test_programs_of_ever_other_numbers_of_microbatches_are_not_all_kept(monkeypatch):
    monkeypatch.setattr(engine, "_MAX_PROGRAMS", 2)
    batches = [image_batch(size, seed=size) for size in (1, 2, 3, 4, 2, 3, 1)]

    def run():
        booster, model, optimizer = boosted(vit(), sgd, image_batch(1), pp_size=2, microbatch_size=1)
        losses = []
        for batch in batches:
            losses.append(booster.execute_pipeline(iter([batch]), model, model_loss, optimizer)["loss"].item())
            optimizer.step()
        kept = booster.plugin._engine(model)
        assert [most for (_, most, _) in kept._programs] == [3, 1]
        assert kept.planner._training.cache_info().maxsize == 16
        return losses

    assert Loopback(2).run(run) == train(vit, batches, microbatch_size=1)["losses"] * 2
