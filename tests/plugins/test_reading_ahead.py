"""Batches are read and checked during the step before; what a script sees stays as if they were not."""

import functools
from itertools import islice

import pytest
import torch
from support import IMAGE, assert_same, boosted, gradients_of, image_batch, model_loss, sgd, small_vit
from torch.utils.data import Dataset

from hybridpp.cluster import Loopback, current_world
from hybridpp.errors import ConfigError, DataError, DeadlockError, PeerError, RefusedByPeerError
from hybridpp.pipeline import BatchReader

SETTINGS = {"pp_size": 2, "num_microbatches": 2}


class Images(Dataset):
    def __init__(self, size=8, bad=()):
        self.images, self.bad = image_batch(size), bad

    def __len__(self):
        return len(self.images["labels"])

    def __getitem__(self, index):
        if index in self.bad and current_world().rank == 1:
            raise OSError(f"sample {index} is gone")
        return {name: value[index] for name, value in self.images.items()}


def made(model, dataset, make_optimizer=sgd, **settings):
    booster, model, optimizer = boosted(model, make_optimizer, image_batch(1), **{**SETTINGS, **settings})
    return booster, model, optimizer, booster.plugin.prepare_dataloader(dataset, batch_size=2)


def trained(read, steps=4, **settings):
    """Weights and losses after some steps with batches that ``read`` takes from the dataloader."""

    def run():
        booster, model, optimizer, loader = made(small_vit(0.1), Images(), **settings)
        data, losses = read(iter(loader)), []
        for _ in range(steps):
            losses.append(booster.execute_pipeline(data, model, model_loss, optimizer)["loss"].item())
            optimizer.step()
        return losses, {name: p.detach().clone() for name, p in model.named_parameters()}

    return Loopback(2).run(run)


@pytest.mark.parametrize("settings", [{}, {"max_norm": 1.0}, {"schedule": "zb-h2"}, {"precision": "bf16"}], ids=str)
def test_reading_ahead_changes_no_bit(settings):
    ahead, plain = trained(lambda data: data, **settings), trained(lambda data: islice(data, None), **settings)
    for (losses, weights), (other_losses, other_weights) in zip(ahead, plain, strict=True):
        assert losses == other_losses
        assert_same(weights, other_weights)


def overlapping(**settings):
    """Rank 1 ends its step when rank 0 is in the next one."""

    def run():
        rank, signal = current_world().rank, current_world().split([[0, 1]], "signal")
        booster, model, optimizer, loader = made(small_vit(), Images(), schedule="zb-h2", **settings)
        executor, data = booster.plugin._engine(model).executor, iter(loader)
        # The first step finds what the loss is a mean over before it reads on.
        booster.execute_pipeline(data, model, model_loss, optimizer)
        optimizer.step()
        weight_gradients, run_program = executor._weight_gradients, executor.run
        add, steps = weight_gradients.add, iter(range(3))

        def begin(*arguments):
            if next(steps):
                signal.send(torch.ones(1), 1)
            return run_program(*arguments)

        def end(tasks, final=False):
            if final and next(steps) < 2:
                signal.receive(torch.ones(1), 0).wait()
            add(tasks, final=final)

        if rank == 0:
            executor.run = begin
        else:
            weight_gradients.add = end
        for _ in range(3):
            booster.execute_pipeline(data, model, model_loss, optimizer)
            optimizer.step()

    Loopback(2).run(run)


def test_ranks_do_not_wait_for_each_other_between_steps():
    overlapping()


def test_they_do_where_all_need_the_norm():
    with pytest.raises(DeadlockError):
        overlapping(max_norm=1.0)


def evaluating(read):
    """Rank 1 computes the last loss of a batch when rank 0 is at the next one; what the losses are, by rank."""

    def run():
        rank, signal = current_world().rank, current_world().split([[0, 1]], "signal")
        booster, model, _, loader = made(small_vit().eval(), Images(), make_optimizer=None)
        executor = booster.plugin._engine(model).executor
        run_program, data, counted = executor.run, iter(loader), iter(range(1, 99))

        def begin(*arguments):
            # The first evaluation checks the criterion on all ranks.
            if next(counted) > 2:
                signal.send(torch.ones(1), 1)
            return run_program(*arguments)

        def loss(outputs, inputs):
            number, microbatch = divmod(next(counted) - 1, 2)
            if microbatch and 0 < number < 3:
                signal.receive(torch.ones(1), 0).wait()
            return outputs.loss.mean()

        loss.reduction = "mean"
        if rank == 0:
            executor.run = begin
        with torch.no_grad():
            losses = [read(booster.execute_pipeline(data, model, loss)["loss"]) for _ in range(4)]
        return [float(loss) for loss in losses]

    return Loopback(2).run(run)


def test_ranks_do_not_wait_for_the_last_stage_in_evaluation():
    model = small_vit().eval()
    with torch.no_grad():
        expected = [
            model(**{name: value[n : n + 2] for name, value in Images().images.items()}).loss.item()
            for n in range(0, 8, 2)
        ]
    first, second = evaluating(lambda loss: loss)
    assert first == second == pytest.approx(expected, abs=1e-6)


def test_they_do_where_they_read_the_loss():
    with pytest.raises(DeadlockError):
        evaluating(lambda loss: loss.item())


def messages(executed):
    """What each call of a step raises, by rank."""

    def run():
        booster, model, optimizer, loader = made(small_vit(), Images(bad=(3,)))
        return executed(booster, model, optimizer, iter(loader))

    return Loopback(2).run(run)


def test_a_sample_that_cannot_be_read_is_named_at_its_step():
    def executed(booster, model, optimizer, data):
        found = []
        for _ in range(5):
            try:
                booster.execute_pipeline(data, model, model_loss, optimizer)
                found.append("")
            except (OSError, PeerError, StopIteration) as error:
                found.append(f"{type(error).__name__}: {error}")
            optimizer.step()
        return found

    peer = "RefusedByPeerError: reading the batch failed on rank 1. See the error printed there."
    assert messages(executed) == [
        ["", peer, "", "", "StopIteration: "],
        ["", "OSError: sample 3 is gone", "", "", "StopIteration: "],
    ]


def losses_of(use):
    def run():
        booster, model, optimizer, loader = made(small_vit(), Images())
        execute = functools.partial(booster.execute_pipeline, model=model)

        def train(data, criterion=model_loss):
            loss = execute(data, criterion=criterion, optimizer=optimizer)["loss"].item()
            optimizer.zero_grad()
            return loss

        def evaluate(data):
            with torch.no_grad():
                return execute(data, criterion=model_loss)["loss"].item()

        return use(loader, train, evaluate)

    first, second = Loopback(2).run(run)
    assert first == second
    return first


def in_order():
    return losses_of(lambda loader, train, evaluate: [train(islice(iter(loader), n, None)) for n in range(4)])


def test_a_script_may_take_batches_itself():
    def use(loader, train, evaluate):
        data = iter(loader)
        first = train(data)
        next(data)
        return [first, train(data), train(data)]

    expected = in_order()
    assert losses_of(use) == [expected[0], expected[2], expected[3]]


def test_after_a_script_took_a_batch_itself_reading_ahead_goes_on(monkeypatch):
    ahead, read_ahead = [], BatchReader.read_ahead

    def noted(reader, *arguments):
        read_ahead(reader, *arguments)
        ahead.append(len(reader._ahead.values()))

    def use(loader, train, evaluate):
        data = iter(loader)
        next(data)
        train(data)
        next(data)
        return [train(data)]

    monkeypatch.setattr(BatchReader, "read_ahead", noted)
    assert losses_of(use) == in_order()[3:]
    assert ahead[:4] == [1] * 4, "in two steps of two ranks"


def test_training_evaluation_and_criteria_may_share_or_alternate_iterators():
    def other_loss(outputs, inputs):
        return 2 * outputs.loss

    def use(loader, train, evaluate):
        data, other = iter(loader), iter(loader)
        return [train(data), evaluate(other), train(data), evaluate(data), evaluate(other), train(data, other_loss)]

    a, b, c, d = in_order()
    assert losses_of(use) == pytest.approx([a, a, b, c, b, 2 * d])


def test_criteria_that_a_script_defines_at_each_step_are_one():
    def use(loader, train, evaluate):
        data = iter(loader)
        return [train(data, lambda outputs, inputs: outputs.loss) for _ in range(4)]

    assert losses_of(use) == in_order()


def test_every_epoch_is_a_new_iterator():
    def use(loader, train, evaluate):
        losses = []
        for _ in range(2):
            data = iter(loader)
            losses += [train(data) for _ in range(len(loader))]
        return losses

    assert losses_of(use) == in_order() * 2


def test_two_models_may_share_an_iterator():
    def run():
        loader = None
        models = []
        for _ in range(2):
            booster, model, optimizer, loader = made(small_vit(), Images())
            models.append((booster, model, optimizer))
        data = iter(loader)
        return [
            booster.execute_pipeline(data, model, model_loss, optimizer)["loss"].item()
            for _ in range(2)
            for booster, model, optimizer in models
        ]

    expected = in_order()
    assert Loopback(2).run(run) == [expected] * 2


def test_a_parameter_that_one_rank_unfroze_is_refused_on_all():
    def frozen():
        model = small_vit()
        model.classifier.bias.requires_grad_(False)
        return model

    def run():
        booster, model, optimizer, loader = made(frozen(), Images())
        data = iter(loader)
        booster.execute_pipeline(data, model, model_loss, optimizer)
        optimizer.step()
        for name, parameter in model.named_parameters():
            if name == "classifier.bias":
                parameter.requires_grad_(True)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        with pytest.raises((ConfigError, PeerError)) as caught:
            booster.execute_pipeline(data, model, model_loss, optimizer)
        optimizer.step()
        assert_same({name: p.detach() for name, p in model.named_parameters()}, before)
        return type(caught.value), str(caught.value)

    first, second = Loopback(2).run(run)
    assert first == (RefusedByPeerError, "the step was refused on rank 1. See the error printed there.")
    assert second[0] is ConfigError
    assert second[1].startswith("classifier.bias was frozen when the model was boosted")


def test_batches_that_differ_between_ranks_are_refused_at_their_step():
    class Differing(Images):
        def __getitem__(self, index):
            sample = super().__getitem__(index)
            if index >= 4 and current_world().rank == 1:
                sample["pixel_values"] = torch.zeros(3, IMAGE, IMAGE)
            return sample

    def run():
        booster, model, optimizer, loader = made(small_vit(), Differing())
        data = iter(loader)
        for _ in range(2):
            booster.execute_pipeline(data, model, model_loss, optimizer)
            optimizer.step()
        with pytest.raises(DataError, match=r"^the ranks of one pipeline must hold the same batch: ranks 0, 1"):
            booster.execute_pipeline(data, model, model_loss, optimizer)

    Loopback(2).run(run)


def test_gradients_accumulate_over_calls_as_without_reading_ahead():
    def use(read):
        def run():
            booster, model, optimizer, loader = made(small_vit(), Images())
            data = read(iter(loader))
            for _ in range(3):
                booster.execute_pipeline(data, model, model_loss, optimizer)
            return gradients_of(booster, model)

        return Loopback(2).run(run)

    for ahead, plain in zip(use(iter), use(lambda data: islice(data, None)), strict=True):
        assert_same(ahead, plain)
