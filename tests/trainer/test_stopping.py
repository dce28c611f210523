"""A Trainer whose job is told to stop saves and ends; the run that goes on is the one that was not stopped."""

import json
import signal

import pytest
from support import assert_same
from trainer_job import job, on_ranks

from hybridpp.cluster import current_world
from hybridpp.trainer import Hook, Trainer
from hybridpp.trainer.hooks import AccuracyHook, SaveCheckpointHook


class Record(Hook):
    """What happened, and a signal to the last rank at a moment of the loop."""

    def __init__(self, moment=None, number=0):
        self.losses, self.moments = [], []
        for name in ("after_step", "after_evaluation_step", "after_evaluation", "after_epoch", "on_stop", "after_fit"):
            setattr(self, name, lambda trainer, name=name: self.happens(trainer, name, moment, number))

    def happens(self, trainer, name, moment, number):
        self.moments.append(name)
        if name == "after_step":
            self.losses.append(trainer.result["loss"].item())
        world = current_world()
        if name == moment and self.moments.count(moment) == number and world.rank == world.size - 1:
            world.stop.own = signal.SIGTERM


def fit(path, moment=None, number=0, *, settings, **arguments):
    booster, parts, test_loader = job(**settings)
    trainer, record = Trainer(booster, parts), Record(moment, number)
    hooks = [AccuracyHook(), record]
    if path is not None:
        hooks.append(SaveCheckpointHook(path, steps=2))
    current_world().stop.own = current_world().stop.agreed = 0
    trainer.fit(epochs=2, test_dataloader=test_loader, hooks=hooks, resume_from=path, **arguments)
    weights = {name: parameter.detach().clone() for name, parameter in parts.model.named_parameters()}
    return record, trainer.metrics, weights


# An epoch has five steps on one replica, three on two.
@pytest.mark.covering
@pytest.mark.parametrize("layout", [{"pp_size": 2}, {"dp_size": 2}], ids=str)
@pytest.mark.parametrize(
    ("moment", "number"),
    [("after_step", 1), ("after_step", 4), ("after_step", 7), ("after_evaluation_step", 1), ("after_evaluation", 1)],
)
def test_a_run_that_was_stopped_goes_on_bit_for_bit(tmp_path, layout, moment, number):
    def run(**settings):
        expected, metrics, weights = fit(None, settings=settings)
        stopped, *_ = fit(tmp_path, moment, number, settings=settings)
        if "on_stop" in stopped.moments:  # else the signal came with the last step
            assert stopped.moments[-2:] == ["on_stop", "after_fit"]
            assert len(stopped.losses) < len(expected.losses) or "after_evaluation" not in stopped.moments[-4:]
            if current_world().rank == 0:  # which writes it, while others go on
                assert (tmp_path / "interrupted.json").exists()
        resumed, found, resumed_weights = fit(tmp_path, settings=settings)
        assert stopped.losses + resumed.losses == expected.losses
        of_test = [{name: value for name, value in one.items() if "test/" in name} for one in (found, metrics)]
        assert of_test[0] == of_test[1]
        # Means of training to rounding: sums until the checkpoint are added over the replicas before the later ones.
        assert found == pytest.approx(metrics, rel=1e-12)
        assert_same(resumed_weights, weights)
        return stopped.moments, resumed.moments

    first, *others = on_ranks(run, **layout)
    assert others == [first], "all ranks stop at the same moment"


def test_a_stopped_run_ends_after_the_next_step():
    def run(**settings):
        record, *_ = fit(None, "after_step", 2, settings=settings)
        assert len(record.losses) == 3
        assert record.moments == [*["after_step"] * 3, "on_stop", "after_fit"]

    on_ranks(run, pp_size=2)


def test_a_stop_that_no_hook_saves_is_a_warning(caplog):
    on_ranks(lambda **settings: fit(None, "after_step", 2, settings=settings))
    assert "the job was told to stop, and no hook saves it: what was trained is lost" in caplog.text


def test_the_marker_is_of_the_step_that_was_saved(tmp_path):
    on_ranks(lambda **settings: fit(tmp_path, "after_step", 2, settings=settings), pp_size=2)
    assert json.loads((tmp_path / "interrupted.json").read_text()) == {"step": 3, "signal": "SIGTERM"}


def test_evaluate_and_predict_by_themselves_go_to_the_end():
    def run(**settings):
        booster, parts, test_loader = job(**settings)
        trainer = Trainer(booster, parts)
        expected = trainer.evaluate(test_loader)
        current_world().stop.own = signal.SIGTERM
        assert trainer.evaluate(test_loader) == expected
        assert booster.interrupted
        assert len(trainer.predict(test_loader)) == len(test_loader)

    on_ranks(run, pp_size=2)
