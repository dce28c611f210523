"""A request to stop, told in the messages of steps: every rank sees it after the same call."""

import json
import signal

import pytest
import torch
from run_checkpoints import on_layout
from torch import nn
from trainer_job import samples

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.checkpoint.commit import committed_steps
from hybridpp.cluster import LauncherNotes, Loopback, current_world
from hybridpp.cluster.launcher_notes import has_saved


def seen_after(number_of_calls, asked_before, *, rank=1, training=True, ahead=False, losses=True, **layout):
    """By rank, ``interrupted`` after each call, where a signal came to ``rank`` before a call of that number."""

    def run():
        world = current_world()
        torch.manual_seed(0)
        plugin = HybridParallelPlugin(num_microbatches=2, **layout)
        booster, model = Booster(plugin=plugin), nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = plugin.prepare_dataloader([row for row, _ in samples(40)], batch_size=2)
        criterion = lambda outputs, inputs: outputs.square().mean()  # noqa: E731
        model, optimizer, criterion, loader, _ = booster.boost(model, optimizer, criterion, loader)
        data = iter(loader) if ahead else iter(list(loader))
        seen = []
        for call in range(number_of_calls):
            if call == asked_before and world.rank == rank:
                world.stop.own = signal.SIGTERM
            if training:
                booster.execute_pipeline(data, model, criterion, optimizer)
                optimizer.step()
            else:
                with torch.no_grad():
                    booster.execute_pipeline(data, model, criterion if losses else None, return_loss=losses)
            seen.append(booster.interrupted)
        return seen

    size = layout.get("tp_size", 1) * layout.get("pp_size", 1) * layout.pop("dp_size", 1)
    return Loopback(size).run(run)


@pytest.mark.covering
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("layout", [{"pp_size": 2}, {"dp_size": 2}, {"pp_size": 2, "dp_size": 2}])
def test_all_ranks_see_it_after_the_training_step_that_it_came_before(layout, ahead):
    ranks = seen_after(4, asked_before=2, ahead=ahead, **layout)
    assert {tuple(rank) for rank in ranks} == {(False, False, True, True)}


@pytest.mark.covering
@pytest.mark.parametrize("losses", [True, False])
@pytest.mark.parametrize("ahead", [False, True])
def test_evaluations_learn_of_it_with_a_batch(ahead, losses):
    ranks = seen_after(6, asked_before=2, training=False, ahead=ahead, losses=losses, pp_size=2, dp_size=2)
    # A batch that was read ahead was announced in the call before the one before.
    assert {tuple(rank) for rank in ranks} == {(*2 * [False], *ahead * [False], *(4 - ahead) * [True])}


def test_it_is_never_true_without_a_signal():
    assert seen_after(3, asked_before=None, pp_size=2) == [[False] * 3] * 2


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_of_a_stopped_run_has_a_marker_beside_it(tmp_path, asynchronous):
    marker = tmp_path / "interrupted.json"

    def run(make):
        run = make()
        run.steps([0])
        run.booster.save(tmp_path, step=1)
        before = marker.exists()
        if current_world().rank == 1:
            current_world().stop.own = signal.SIGTERM
        run.steps([1])
        assert run.booster.interrupted
        run.booster.save(tmp_path, step=2, asynchronous=asynchronous)
        run.booster.wait_for_save()
        return before

    assert on_layout(run, pp_size=2) == [False, False]
    assert json.loads(marker.read_text()) == {"step": 2, "signal": "SIGTERM"}
    assert sorted(committed_steps(tmp_path)) == [1, 2]

    def go_on(make):
        run = make()
        step = run.booster.resume(tmp_path, missing="fresh").step
        return step, marker.exists()

    assert on_layout(go_on, pp_size=2) == [(2, False), (2, False)]


def test_a_save_of_a_run_that_goes_on_removes_the_marker(tmp_path):
    marker = tmp_path / "interrupted.json"
    marker.write_text("{}")

    def run(make):
        make().booster.save(tmp_path, step=1)

    on_layout(run, pp_size=1)
    assert not marker.exists()


def test_a_marker_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "interrupted.json").mkdir()
    notes = LauncherNotes(tmp_path / "notes")
    (tmp_path / "notes").mkdir()

    def run(make):
        run = make()
        current_world().stop.notes = notes
        current_world().stop.own = signal.SIGTERM
        run.steps([0])
        run.booster.save(tmp_path, step=1)

    on_layout(run, pp_size=1)
    assert committed_steps(tmp_path) == [1]
    assert "beside the checkpoint, something could not be written or removed" in caplog.text
    assert has_saved(tmp_path / "notes")  # so hybridpp run does not say that nothing was saved
