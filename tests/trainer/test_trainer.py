"""The training loop: the results of a script's own loop, and hooks at the same moments on every rank."""

import pytest
import torch
from support import ROOT, assert_same
from test_readme import blocks
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from trainer_job import WIDTH, classifier, job, on_ranks, samples

import hybridpp
from hybridpp.errors import ConfigError, DataError
from hybridpp.trainer import Hook, Trainer
from hybridpp.trainer.hooks import AccuracyHook, LRSchedulerHook, SaveCheckpointHook


def own_loop(parts, booster, epochs):
    model, optimizer, criterion, loader, scheduler = parts
    losses = []
    for _ in range(epochs):
        data = iter(loader)
        for _ in range(len(loader)):
            losses.append(booster.execute_pipeline(data, model, criterion, optimizer)["loss"].item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return losses


class Losses(Hook):
    def __init__(self):
        self.values = []

    def after_step(self, trainer):
        self.values.append(trainer.result["loss"].item())


def weights(parts):
    return {name: parameter.detach().clone() for name, parameter in parts.model.named_parameters()}


@pytest.mark.parametrize("layout", [{"pp_size": 2}, {"dp_size": 2}], ids=str)
def test_losses_and_weights_are_those_of_a_scripts_own_loop(layout):
    def run(**settings):
        booster, parts, test_loader = job(**settings)
        losses = Losses()
        Trainer(booster, parts).fit(epochs=2, test_dataloader=test_loader, hooks=[losses, AccuracyHook()])
        found = weights(parts)
        booster, parts, _ = job(**settings)
        assert losses.values == own_loop(parts, booster, 2)
        assert_same(found, weights(parts))

    on_ranks(run, **layout)


MOMENTS = [name for name in vars(Hook) if name.startswith(("before", "after"))]


def test_hooks_are_called_in_order_on_every_rank():
    class Notes(Hook):
        def __init__(self, calls):
            for moment in MOMENTS:
                setattr(self, moment, lambda trainer, moment=moment: calls.append(moment))

    def run(**settings):
        calls = []
        booster, parts, test_loader = job(count=4, **settings)
        Trainer(booster, parts).fit(epochs=3, test_dataloader=test_loader, test_interval=2, hooks=[Notes(calls)])
        return calls

    step = ["before_step", "after_step"]
    tests = ["before_evaluation"] + ["before_evaluation_step", "after_evaluation_step"] * 4 + ["after_evaluation"]
    first = ["before_epoch", *step, *step, "after_epoch"]
    others = ["before_epoch", *step, *step, *tests, "after_epoch"]
    for calls in on_ranks(run, pp_size=2):
        assert calls == ["before_fit", *first, *others, *others, "after_fit"]


@pytest.mark.parametrize("layout", [{}, {"dp_size": 3}, {"pp_size": 2}], ids=str)
def test_metrics_count_each_sample_once(layout):
    def run(**settings):
        booster, parts, loader = job(**settings)
        trainer = Trainer(booster, parts)
        mode = trainer.model.training
        found = trainer.evaluate(loader, [AccuracyHook()])
        assert trainer.model.training is mode
        return found

    rows, labels = map(torch.stack, zip(*samples(7), strict=True))
    with torch.no_grad():
        logits = classifier()(rows)
    right = (logits.argmax(-1) == labels).sum().item()
    for found in on_ranks(run, **layout):
        assert found == {
            "test/loss": pytest.approx(nn.functional.cross_entropy(logits, labels).item(), rel=1e-6),
            "test/accuracy": pytest.approx(right / 7),
        }


def test_streams_and_predictions_leave_out_what_only_fills_up_a_step():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(samples(7))

    def run(**settings):
        booster, parts, loader = job(**settings)
        trainer = Trainer(booster, parts)
        streamed = booster.plugin.prepare_dataloader(Stream(), batch_size=2)
        found = [trainer.evaluate(one, [AccuracyHook()]) for one in (loader, streamed)]
        assert found[0] == found[1]
        outputs = [trainer.predict(one) for one in (loader, streamed)]
        assert [len(one) for one in outputs[0]] == [len(one) for one in outputs[1]]
        return sum(len(one) for one in outputs[0])

    assert sum(on_ranks(run, dp_size=3)) == 7


def test_an_evaluation_returns_its_own_metrics_only():
    booster, parts, loader = job()
    trainer = Trainer(booster, parts)
    assert set(trainer.evaluate(loader, [AccuracyHook()])) == {"test/loss", "test/accuracy"}
    assert set(trainer.evaluate(loader)) == {"test/loss"}
    without = Trainer(booster, parts._replace(criterion=None))
    assert set(without.evaluate(loader, [AccuracyHook()])) == {"test/accuracy"}
    with pytest.raises(ConfigError, match=r"hooks must be instances of hybridpp\.trainer\.Hook: got <class"):
        trainer.evaluate(loader, [AccuracyHook])


def test_a_dataloader_without_batches_is_refused_on_every_rank():
    def run(**settings):
        booster, parts, _ = job(**settings)
        trainer = Trainer(booster, parts)
        for call in (trainer.fit, trainer.evaluate, trainer.predict):
            with pytest.raises(DataError, match=r"the dataloader has no batch: got list\. Check its data and filters"):
                call([])

    on_ranks(run, pp_size=2)


def test_an_interrupted_run_closes_its_hooks_and_can_go_on():
    class Stop(Hook):
        closed = 0

        def after_step(self, trainer):
            if trainer.step == 2:
                raise KeyboardInterrupt

        def close(self):
            self.closed += 1

    def run(**settings):
        booster, parts, _ = job(**settings)
        trainer, hook = Trainer(booster, parts), Stop()
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(hooks=[hook], display_progress=True)
        assert hook.closed == 1
        trainer.fit(hooks=[], display_progress=True)
        return trainer.step

    assert on_ranks(run, pp_size=2) == [7, 7]


def test_a_run_ends_on_all_ranks_when_a_hook_of_one_ends_it():
    class Stop(Hook):
        def after_epoch(self, trainer):
            trainer.should_stop = trainer.epoch == 1 and trainer.coordinator.rank == 1

    def run(**settings):
        booster, parts, _ = job(count=4, **settings)
        trainer = Trainer(booster, parts)
        trainer.fit(epochs=5, hooks=[Stop()])
        return trainer.epoch

    assert on_ranks(run, dp_size=2) == [1, 1]


@pytest.mark.parametrize("where", ["last", "all"])
def test_predictions_are_those_of_the_model(where):
    def run(**settings):
        booster, parts, loader = job(**settings)
        return Trainer(booster, parts).predict(loader, outputs_on=where)

    with torch.no_grad():
        expected = classifier()(torch.stack([row for row, _ in samples(7)]))
    first, last = on_ranks(run, pp_size=2)
    assert (first == [None] * 4) == (where == "last")
    for outputs in [last] if where == "last" else [first, last]:
        torch.testing.assert_close(torch.cat(outputs), expected)


@pytest.mark.covering
@pytest.mark.parametrize("layout", [{}, {"dp_size": 2}], ids=str)
@pytest.mark.parametrize("steps", [None, 3])
def test_a_resumed_run_is_the_run_without_a_break(layout, steps, tmp_path):
    def run(**settings):
        def fit(resumed_at=None, **arguments):
            booster, parts, test_loader = job(**settings)
            trainer, losses = Trainer(booster, parts), Losses()
            hooks = [AccuracyHook(training=True), losses]
            if resumed_at or "max_steps" in arguments:
                hooks.append(SaveCheckpointHook(tmp_path / str(settings), steps=steps))
                arguments["resume_from"] = tmp_path / str(settings)
            trainer.fit(epochs=2, test_dataloader=test_loader, hooks=hooks, **arguments)
            return losses.values, trainer.metrics, weights(parts)

        losses, metrics, expected = fit()
        length = len(losses) // 2
        # Steps of 3, or the end of the first epoch.
        stop = 3 if steps else length
        before, _, _ = fit(max_steps=stop)
        after, found, resumed = fit(resumed_at=stop)
        assert before + after == losses
        assert found == metrics
        assert_same(resumed, expected)

    on_ranks(run, **layout)


def test_a_run_that_is_complete_only_reads_its_metrics(tmp_path):
    def run(**settings):
        for _ in range(2):
            booster, parts, _ = job(**settings)
            trainer, losses = Trainer(booster, parts), Losses()
            trainer.fit(epochs=1, hooks=[losses, SaveCheckpointHook(tmp_path)], resume_from=tmp_path)
            trainer.fit(epochs=2, hooks=[losses], resume_from=tmp_path, max_steps=3)
        assert losses.values == []
        assert trainer.step == 5
        assert "train/loss" in trainer.metrics

    on_ranks(run)


def test_any_iterable_may_be_trained_on():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(samples(5))

    def run(**settings):
        losses = []
        for loader in (DataLoader(Stream(), 2), [*DataLoader(samples(5), 2)], DataLoader(samples(5), 2)):
            booster, parts, _ = job(**settings)
            hook = Losses()
            Trainer(booster, parts).fit(loader, epochs=2, hooks=[hook])
            losses.append(hook.values)
        assert len(losses[0]) == 6
        assert losses[0] == losses[1] == losses[2]

    on_ranks(run, pp_size=2)


def test_a_batch_that_cannot_be_read_is_raised_on_every_rank():
    def run(**settings):
        booster, parts, _ = job(**settings)
        broken = [(torch.ones(2, WIDTH), torch.tensor([0, 1])), (torch.ones(2, WIDTH), torch.tensor([0]))]
        trainer = Trainer(booster, parts)
        with pytest.raises(DataError, match="all tensors of a batch must agree in dimension 0"):
            trainer.fit(broken)
        assert trainer.step == 1

    on_ranks(run, pp_size=2)


def test_the_learning_rate_steps_by_step_unless_a_hook_says_otherwise():
    def run(**settings):
        numbers = []
        for hooks in ([], [LRSchedulerHook()], [LRSchedulerHook(by_epoch=True)]):
            booster, parts, _ = job(count=4, **settings)
            Trainer(booster, parts).fit(epochs=3, hooks=hooks)
            numbers.append(parts.lr_scheduler.last_epoch)
        assert numbers == [6, 6, 3]

    on_ranks(run)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epochs": 0}, "epochs must be an integer of at least 1: got epochs=0"),
        ({"max_steps": 1.5}, "max_steps must be an integer"),
        ({"test_interval": True}, "test_interval must be an integer"),
        ({"hooks": [AccuracyHook]}, "hooks must be instances of hybridpp.trainer.Hook: got <class"),
    ],
)
def test_arguments_of_fit_that_are_wrong_are_refused(arguments, message):
    booster, parts, _ = job()
    with pytest.raises(ConfigError, match=message):
        Trainer(booster, parts).fit(**arguments)


def test_parts_that_are_missing_are_refused():
    booster, parts, _ = job()
    with pytest.raises(ConfigError, match=r"fit needs optimizer, dataloader: got None. Pass them to booster.boost, or"):
        Trainer(booster, parts._replace(optimizer=None, dataloader=None)).fit()
    with pytest.raises(ConfigError, match="Trainer takes a booster and what its boost returned: got Booster and tuple"):
        Trainer(booster, tuple(parts))


def test_the_loop_is_small_and_hooks_are_apart():
    folder = ROOT / "hybridpp/trainer"
    lines = {path: len(path.read_text().splitlines()) for path in folder.rglob("*.py")}
    assert sum(count for path, count in lines.items() if path.parent == folder) < 620
    assert max(count for path, count in lines.items() if path.parent != folder) <= 110


def test_the_page_runs_and_goes_on_where_it_ended(tmp_path, monkeypatch, capsys):
    script, hook = blocks("docs/trainer.md", "python")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hybridpp, "launch_from_torch", lambda seed: torch.manual_seed(seed))
    namespace = {}
    exec(script.replace("Booster(plugin=plugin)", 'Booster(plugin=plugin, device="cpu")'), namespace)
    exec(hook, namespace)
    trainer = namespace["trainer"]
    assert trainer.step == 16
    trainer.fit(
        epochs=3, hooks=[namespace["PrintNorm"](), SaveCheckpointHook("outputs/trainer")], resume_from="outputs/trainer"
    )
    assert trainer.step == 24
    assert "step 20: loss 1." in capsys.readouterr().out


def test_a_dataset_in_the_place_of_a_dataloader_is_refused():
    booster, parts, _ = job()
    trainer, data = Trainer(booster, parts), TensorDataset(torch.ones(4, WIDTH))
    text = r" takes a dataloader: got a dataset, TensorDataset, as {}\. Pass plugin\.prepare_dataloader\(dataset"
    with pytest.raises(ConfigError, match="fit" + text.format("train_dataloader")):
        trainer.fit(data)
    with pytest.raises(ConfigError, match="fit" + text.format("test_dataloader")):
        trainer.fit(test_dataloader=data)
    with pytest.raises(ConfigError, match="evaluate" + text.format("dataloader")):
        trainer.evaluate(data)
    with pytest.raises(ConfigError, match=r"or another iterable of batches: got int as train_dataloader\."):
        trainer.fit(3)
    with pytest.raises(ConfigError, match=r"the target of CrossEntropyLoss is a tensor, .* got int\. If what is"):
        trainer.fit([(row, int(label)) for row, label in samples(4)])
