"""A recording has what every rank did, held and sent, and is written once."""

from functools import partial

import pytest
import torch
from processes import run_ranks
from support import boosted, image_batch, model_loss, sgd, tiny_vit

from hybridpp.cluster import Loopback
from hybridpp.errors import ConfigError
from hybridpp.report import load_recording
from hybridpp.report.page import render_page
from hybridpp.schedule import one_f_one_b

NUM_TOKENS, WIDTH, FP32 = 5, 16, 4
SIZES = {"pp_size": 2, "tp_size": 2, "num_microbatches": 2}


def recording_of(folder=None, num_steps=2, samples=8, **settings):
    booster, model, optimizer = boosted(tiny_vit(), sgd, image_batch(4), **settings)
    replica = booster.plugin.layout.here.dp
    batches = [image_batch(samples, seed=10 * replica + step) for step in range(num_steps)]
    with booster.record_timeline(model) as recorded:
        for batch in batches:
            booster.execute_pipeline(iter([batch]), model, model_loss, optimizer)
            optimizer.step()
    if folder is not None:
        recorded.save(folder)
    assert booster.plugin.layout.world.progress.observer is None
    return recorded.recording


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Of eight in-process ranks: two replicas, two stages, two shards."""
    folder = tmp_path_factory.mktemp("recorded")
    recordings = Loopback(8).run(partial(recording_of, folder, **SIZES))
    assert all(recording == recordings[0] for recording in recordings)
    return folder, recordings[0]


def test_all_ranks_have_the_same_recording_and_one_file_holds_it(recorded):
    folder, recording = recorded
    assert load_recording(folder) == recording
    assert [path.name for path in folder.iterdir()] == ["recording.json"]
    assert recording.model == "ViTForImageClassification"
    assert recording.settings["schedule"] == "1f1b"
    assert (recording.settings["tp_size"], recording.settings["pp_size"], recording.settings["dp_size"]) == (2, 2, 2)
    assert [stage.modules for stage in recording.stages] == [
        "vit.embeddings, vit.layers.0-1",
        "vit.layers.2-3, vit.layernorm, classifier",
    ]
    assert sum(stage.parameters for stage in recording.stages) == sum(p.numel() for p in tiny_vit().parameters())


def test_ranks_ran_their_programs_in_phases(recorded):
    _, recording = recorded
    for rank in recording.ranks:
        for step in range(2):
            done = [
                f"{one.stage}{one.kind}{one.microbatch}" for one in rank.actions if one.step == step and one.computes
            ]
            assert done == [str(action) for action in one_f_one_b(2, 2)[rank.pp]]
            phases = [phase for phase in rank.phases if phase.step == step]
            assert [phase.name for phase in phases] == ["read", "actions", "end", "update"]
            times = [time for phase in phases for time in (phase.start_ms, phase.end_ms)]
            assert times == sorted(times)
            actions = phases[1]
            inside = [one for one in rank.actions if one.step == step]
            assert all(
                actions.start_ms <= one.ready_ms <= one.start_ms <= one.end_ms <= actions.end_ms for one in inside
            )


def test_messages_and_sums_have_their_bytes(recorded):
    _, recording = recorded
    # Half of a replica's four samples in a micro-batch, in each direction.
    boundary = 4 * NUM_TOKENS * WIDTH * FP32
    for rank in recording.ranks:
        peers = {(one.kind, one.peer, one.message_bytes) for one in rank.actions if one.peer is not None}
        other = next(one.rank for one in recording.pipelines()[rank.dp, rank.tp] if one.pp != rank.pp)
        kinds = ("SEND_F", "RECV_B") if rank.pp == 0 else ("RECV_F", "SEND_B")
        assert peers == {(kind, other, boundary) for kind in kinds}
        sent = {(row.group, row.kind): row for row in rank.traffic if row.step == 1}
        assert sent["pp", "send"].num_bytes == 2 * boundary
        # Buckets, and a flag for each parameter.
        assert 0 < sent["dp", "all_reduce"].num_bytes - rank.held["gradients"] < 500
        assert sent["tp", "all_reduce"].num_calls >= 2 * 2 * 2 * 2, "layers, micro-batches, passes, sums of a layer"


def test_in_process_ranks_say_that_they_share_their_memory(recorded):
    _, recording = recorded
    assert {rank.memory_kind for rank in recording.ranks} == {"shared"}
    assert all(action.memory is None for rank in recording.ranks for action in rank.actions)
    assert "share its memory" in render_page(recording)[0]


def test_processes_tell_memory_and_waits_on_one_clock(tmp_path):
    settings = {"pp_size": 2, "num_microbatches": 4, "max_norm": 1.0}
    run_ranks(partial(recording_of, tmp_path, num_steps=3, **settings), 2)
    recording = load_recording(tmp_path)
    assert [rank.memory_kind for rank in recording.ranks] == ["allocated"] * 2
    first, last = recording.ranks
    for rank in recording.ranks:
        assert all((action.memory is not None) is action.computes for action in rank.actions)
    by_name = {
        f"{one.stage}{one.kind}{one.microbatch}": one for rank in (first, last) for one in rank.actions if one.step == 2
    }
    for microbatch in range(4):
        assert by_name[f"0F{microbatch}"].end_ms <= by_name[f"1F{microbatch}"].start_ms
        assert by_name[f"1B{microbatch}"].end_ms <= by_name[f"0B{microbatch}"].start_ms
    # A second micro-batch adds to what the first stage holds.
    assert by_name["0F1"].memory > by_name["0F0"].memory
    assert {wait.group for rank in recording.ranks for wait in rank.waits} <= {"all ranks", "pp", "dp", "tp"}
    page, summary = render_page(recording)
    assert "Most memory" in [tile.label for tile in summary.tiles]
    assert "There is no simulation" not in page


def test_an_error_in_the_block_leaves_nothing_on_and_is_raised():
    booster, model, optimizer = boosted(tiny_vit(), sgd, image_batch(2))
    before = optimizer.while_updating
    recordings = []

    def fails():
        with booster.record_timeline(model) as recording:
            recordings.append(recording)
            booster.execute_pipeline(iter([image_batch(2)]), model, model_loss, optimizer)
            assert booster.plugin.layout.world.progress.observer is recording.recorder
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert booster.plugin.layout.world.progress.observer is None
    assert optimizer.while_updating is before
    with pytest.raises(ConfigError, match="complete when its `with` block has ended"):
        recordings[0].save("nowhere")


def test_a_loader_that_ends_and_an_evaluation_are_no_reason_to_fail():
    booster, model, optimizer = boosted(tiny_vit(), sgd, image_batch(2))
    with booster.record_timeline(model) as recorded:
        booster.execute_pipeline(iter([image_batch(2)]), model, model_loss, optimizer)
        with pytest.raises(StopIteration):
            booster.execute_pipeline(iter([]), model, model_loss, optimizer)
        with torch.no_grad():
            booster.execute_pipeline(iter([image_batch(2)]), model, model_loss)
    assert recorded.recording.num_steps == 2
    kinds = [[one.kind for one in recorded.recording.ranks[0].actions if one.step == step] for step in range(2)]
    assert kinds[1] == ["F"]
    assert kinds[0][:2] == ["F", "B"]
    assert render_page(recorded.recording)[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"zero_stage": 3},
        {"precision": "fp16", "initial_scale": 2.0**24},
        {"pp_size": 2, "schedule": "zb-v", "num_microbatches": 2},
    ],
    ids=["zero 3", "an overflow", "two stages per rank"],
)
def test_other_steps_are_recorded_too(settings):
    recording, _ = Loopback(2).run(partial(recording_of, **settings))
    assert recording.num_steps == 2
    assert render_page(recording)[0]
