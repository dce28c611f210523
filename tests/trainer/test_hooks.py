"""What each hook does, on the ranks of two replicas or of a pipeline."""

import logging
import re
import struct

import pytest
import torch
from tensorboardX.proto.event_pb2 import Event
from trainer_job import job, on_ranks

from hybridpp.errors import ConfigError, DataError
from hybridpp.report import load_recording
from hybridpp.trainer import Hook, Trainer
from hybridpp.trainer.hooks import (
    AccuracyHook,
    EarlyStoppingHook,
    LogMetricByEpochHook,
    LogMetricByStepHook,
    LogTimingByEpochHook,
    LRSchedulerHook,
    RecordStepsHook,
    SaveCheckpointHook,
    TrackerHook,
)


def fit(hooks, epochs=2, max_steps=None, evaluates=True, count=4, resume_from=None, **settings):
    booster, parts, test_loader = job(count=count, **settings)
    trainer = Trainer(booster, parts)
    options = {"max_steps": max_steps, "resume_from": resume_from}
    trainer.fit(epochs=epochs, test_dataloader=test_loader if evaluates else None, hooks=hooks, **options)
    return trainer


def test_logs_have_one_line_per_epoch_and_step_from_one_rank(caplog, capsys):
    caplog.set_level(logging.INFO)

    def run(**settings):
        logger = logging.getLogger("own")
        hooks = [LogTimingByEpochHook(), LogMetricByEpochHook(logger), LogMetricByStepHook(interval=2), AccuracyHook()]
        booster, parts, test_loader = job(count=8, **settings)
        trainer = Trainer(booster, parts)
        trainer.fit(epochs=1, test_dataloader=test_loader, hooks=hooks, display_progress=True)
        return trainer.metrics

    metrics, _ = on_ranks(run, dp_size=2)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3
    assert re.fullmatch(r"\[rank 0\] Step 2: loss 1\.\d+, lr 0\.06", lines[0])
    epoch = next(line for line in lines if "accuracy" in line)
    assert epoch.startswith(
        f"Epoch [1]: test/loss {metrics['test/loss']:.6g}, test/accuracy {metrics['test/accuracy']:.6g}"
    )
    assert "time" not in epoch
    assert any("s per step" in line and line.endswith("samples/s") for line in lines)
    assert metrics["time/samples_per_second"] == pytest.approx(8 / metrics["time/epoch"])
    bar = capsys.readouterr().err  # drawn again after every tenth of a second
    assert bar.count("Epoch [1/1]:   0%") == bar.count("\n") == 1
    assert "Epoch [1/1]: 100%" in bar


def test_a_trackers_file_holds_losses_rates_and_metrics(tmp_path):
    def run(**settings):
        fit([TrackerHook("tensorboard", "name", tmp_path, config={"width": 6})], **settings)

    on_ranks(run, dp_size=2)
    values = {}
    for path in (tmp_path / "name").glob("events.*"):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event, data = Event.FromString(data[12 : 12 + length]), data[16 + length :]
            for value in event.summary.value:
                values.setdefault(value.tag, []).append((event.step, value.simple_value))
    assert [step for step, _ in values["step/loss"]] == [1, 2]
    assert [rate for _, rate in values["step/lr"]] == pytest.approx([0.04, 0.06])
    assert [step for step, _ in values["test/loss"]] == [1, 2]
    assert len(list((tmp_path / "name").glob("events.*"))) == 1, "one rank writes"


def test_trackers_of_ones_own_are_taken_and_unknown_ones_refused():
    class Own:
        def __init__(self):
            self.logs = []

        def start(self):
            self.logs.append("start")

        def log(self, values, step):
            self.logs.append((step, sorted(values)))

        def finish(self):
            self.logs.append("finish")

    tracker = Own()
    fit([TrackerHook(tracker, interval=2)], epochs=1, evaluates=False)
    assert tracker.logs == ["start", (2, ["step/loss", "step/lr"]), (2, ["epoch", "train/loss"]), "finish"]
    with pytest.raises(ConfigError, match=r"tracker is one of .*tensorboard.*: got 'tensorbord'"):
        TrackerHook("tensorbord")
    with pytest.raises(
        ConfigError, match=r"tracker 'wandb' needs a package that is not installed. Run: pip install wandb"
    ):
        TrackerHook("wandb")


def test_a_run_that_no_longer_improves_ends_on_every_rank():
    class Metric(Hook):
        priority = 0
        values = (3.0, 2.0, 2.5, 1.95, 2.0, 0.0)

        def after_epoch(self, trainer):
            trainer.metrics["own"] = self.values[trainer.epoch]

    def run(**settings):
        stopping = EarlyStoppingHook("own", patience=2, min_delta=0.1)
        return fit([stopping, Metric()], epochs=6, **settings).epoch, stopping.best

    assert on_ranks(run, dp_size=2) == [(3, 2.0)] * 2


def test_early_stopping_counts_evaluations_and_refuses_unknown_metrics():
    hook = EarlyStoppingHook("test/loss", mode="max")
    fit([hook], epochs=3)
    assert hook.best is not None
    with pytest.raises(ConfigError, match=r"there is no metric 'test/f1' yet. There are: .*test/loss"):
        fit([EarlyStoppingHook("test/f1")], epochs=1)
    with pytest.raises(ConfigError, match="mode is one of min, max: got 'lowest'"):
        EarlyStoppingHook(mode="lowest")
    with pytest.raises(ConfigError, match="patience must be an integer of at least 1"):
        EarlyStoppingHook(patience=0)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: LogMetricByStepHook(interval=0), "interval must be an integer of at least 1: got interval=0"),
        (lambda: LogMetricByEpochHook(interval=True), "interval must be an integer of at least 1: got interval=True"),
        (lambda: TrackerHook(interval=1.5), "interval must be an integer of at least 1: got interval=1.5"),
        (lambda: TrackerHook(3), r"tracker is a name or an object of a subclass of .*GeneralTracker: got 3"),
        (lambda: LRSchedulerHook(metric="test/loss"), "got metric='test/loss'. Pass by_epoch=True, too"),
    ],
)
def test_settings_of_hooks_that_are_wrong_are_refused(make, text):
    with pytest.raises(ConfigError, match=text):
        make()


def test_a_schedule_that_cannot_step_is_refused_before_the_first_step():
    booster, parts, _ = job()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(parts.optimizer)
    for scheduler, hooks, text in (
        (plateau, [], r"ReduceLROnPlateau steps by a metric. Add LRSchedulerHook\(by_epoch=True, metric='test/loss'\)"),
        (None, [LRSchedulerHook()], "LRSchedulerHook needs a learning-rate schedule: got None"),
    ):
        trainer = Trainer(booster, parts._replace(lr_scheduler=scheduler))
        with pytest.raises(ConfigError, match=text):
            trainer.fit(hooks=hooks)
        assert trainer.step == 0
    with pytest.raises(DataError, match=r"the function of AccuracyHook returns two numbers, \(right, all\): got int"):
        fit([AccuracyHook(lambda outputs, batch: 1)], epochs=1)


def test_checkpoints_come_at_their_interval_and_at_the_end(tmp_path):
    fit([SaveCheckpointHook(tmp_path / "epochs", 2)], epochs=3, evaluates=False)
    fit([SaveCheckpointHook(tmp_path / "steps", steps=3, keep_last=1, asynchronous=True)], epochs=4, evaluates=False)
    assert sorted(path.name for path in (tmp_path / "epochs").iterdir()) == ["step-00000004", "step-00000006"]
    assert sorted(path.name for path in (tmp_path / "steps").iterdir()) == ["step-00000006"]
    with pytest.raises(ConfigError, match="interval must be an integer of at least 1: got interval=0"):
        SaveCheckpointHook(tmp_path, 0)


def test_steps_are_recorded_once_where_they_were_asked_for(tmp_path):
    def run(**settings):
        hook = RecordStepsHook(tmp_path / "run", num_steps=2, first_step=2)
        trainer = fit([hook], epochs=2, count=10, **settings)
        assert trainer.step > 3

    on_ranks(run, pp_size=2)
    recording = load_recording(tmp_path / "run")
    assert recording.num_steps == 2
    phases = {phase.name for phase in recording.ranks[1].phases}
    assert phases == {"read", "actions", "end", "update"}


def test_a_fit_that_ends_before_the_first_recorded_step_says_so(tmp_path, caplog):
    fit([RecordStepsHook(tmp_path / "run", first_step=100)], epochs=1, count=10)
    assert "no step was recorded in" in caplog.text
    assert not (tmp_path / "run").exists()


def test_recorded_steps_count_from_where_the_process_began(tmp_path):
    fit([SaveCheckpointHook(tmp_path / "saves", steps=2)], epochs=1, count=10)
    hook, counted = RecordStepsHook(tmp_path / "run", num_steps=1, first_step=3), []

    class Counts(Hook):
        def after_step(self, trainer):
            counted.append((trainer.step, (tmp_path / "run").exists()))

    fit([hook, Counts()], epochs=3, count=10, resume_from=tmp_path / "saves")
    assert counted[0][0] > 3
    assert [is_there for _, is_there in counted[:3]] == [False, False, True]


def test_a_recording_ends_with_its_epoch_and_an_error_leaves_none(tmp_path):
    worlds = []

    class Fails(Hook):
        def after_step(self, trainer):
            worlds.append(trainer.booster.plugin.layout.world)
            assert worlds[0].progress.observer is not None
            raise ZeroDivisionError

    fit([RecordStepsHook(tmp_path / "run", num_steps=50, first_step=1)], epochs=2, count=10)
    assert load_recording(tmp_path / "run").num_steps == 5
    with pytest.raises(ZeroDivisionError):
        fit([RecordStepsHook(tmp_path / "none", first_step=1), Fails()])
    assert not (tmp_path / "none").exists()
    assert worlds[0].progress.observer is None
    with pytest.raises(ConfigError, match="first_step must be an integer of at least 1: got first_step=0"):
        RecordStepsHook(tmp_path, first_step=0)
