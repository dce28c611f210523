"""What a checkpoint holds of a run besides weights and moments, and which runs it does not fit."""

import functools
import re

import pytest
import torch
from run_checkpoints import on_layout, resumed, tensors_in
from support import IMAGE, assert_same, model_loss, small_vit
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR
from torch.utils.data import Dataset

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import Loopback, current_world
from hybridpp.errors import CheckpointError


class Images(Dataset):
    """Random images, which augmentation makes darker by a random factor."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        image = torch.randn(3, IMAGE, IMAGE, generator=torch.Generator().manual_seed(index))
        return {"pixel_values": image * torch.rand(()), "labels": index % 5, "index": index}


class WithBatchNorm(nn.Module):
    """A network with running statistics, and with a buffer that differs between replicas."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 5)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, pixel_values):
        self.seen += pixel_values.detach().mean((0, 2, 3))
        return self.head(self.norm(self.conv(pixel_values)).relu().mean((2, 3)))


class Training:
    """A script with a dataloader, mid-epoch, on any number of replicas."""

    def __init__(self, make_model=small_vit, batch_size=4, num_workers=0, scheduler=True, loader=True, **settings):
        self.plugin = HybridParallelPlugin(**settings)
        self.booster = Booster(plugin=self.plugin)
        context = {"multiprocessing_context": "fork"} if num_workers else {}
        self.loader = self.plugin.prepare_dataloader(
            Images(), batch_size=batch_size, shuffle=True, num_workers=num_workers, **context
        )
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = MultiStepLR(optimizer, [2, 5]) if scheduler else None
        criterion = model_loss if make_model is small_vit else self.criterion
        parts = self.booster.boost(model, optimizer, criterion, self.loader if loader else None, schedule)
        self.model, self.optimizer, self.loss, _, self.scheduler = parts
        self.epoch, self.batches, self.data = 0, 0, None
        self.indices = []

    @staticmethod
    def criterion(outputs, inputs):
        return nn.functional.cross_entropy(outputs, inputs["labels"])

    def run(self, num_steps):
        """Train for some steps, over epochs, as scripts do; returns the losses."""
        losses = []
        while len(losses) < num_steps:
            if self.data is None:
                self.data = iter(self.loader)
            self.indices += self.data.peek()["index"].tolist()
            result = self.booster.execute_pipeline(self.data, self.model, self.loss, self.optimizer)
            losses.append(result["loss"].item())
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
            self.batches += 1
            if self.batches == len(self.loader):
                self.epoch, self.batches, self.data = self.epoch + 1, 0, None
        return losses

    def resume(self, path):
        done = self.booster.resume(path)
        self.epoch, self.batches, self.data = done.epoch, done.batches, None
        return done


@pytest.mark.covering
@pytest.mark.parametrize(("num_workers", "later_workers"), [(0, 0), (2, 0), (0, 2)])
@pytest.mark.parametrize("make_model", [small_vit, WithBatchNorm])
def test_runs_go_on_in_the_middle_of_an_epoch_with_augmentation(tmp_path, make_model, num_workers, later_workers):
    def unbroken():
        job = Training(make_model, num_workers=num_workers)
        job.run(len(job.loader) + 1)
        job.booster.save(tmp_path, step=4)
        job.indices.clear()
        return (
            job.run(len(job.loader) - 1),
            job.indices,
            {name: tensor.clone() for name, tensor in job.model.state_dict().items()},
        )

    def in_two():
        job = Training(make_model, num_workers=later_workers)
        if not later_workers:
            job.run(1)
        job.indices.clear()
        done = job.resume(tmp_path)
        assert (done.step, done.epoch, done.batches) == (4, 1, 1)
        losses = job.run(len(job.loader) - 1)
        assert job.scheduler.milestones == MultiStepLR(torch.optim.SGD([torch.ones(1)], lr=1.0), [2, 5]).milestones
        return losses, job.indices, dict(job.model.state_dict())

    # Workers are forked, which threads do not survive.
    on_ranks = Loopback(2).run if num_workers == later_workers == 0 else lambda run: [run()]
    for (losses, indices, state), other in zip(on_ranks(unbroken), on_ranks(in_two), strict=True):
        assert other[:2] == (losses, indices)
        assert_same(other[2], state)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_replicas_sees_each_sample_once(tmp_path, before, after):
    def first():
        job = Training(batch_size=2)
        job.run(2)
        job.booster.save(tmp_path, step=2)
        return job.indices

    def second():
        job = Training(batch_size=2)
        done = job.resume(tmp_path)
        job.run(len(job.loader) - done.batches)
        return job.indices

    seen = [index for rank in (*Loopback(before).run(first), *Loopback(after).run(second)) for index in rank]
    assert sorted(seen) == list(range(20))


def test_buffers_of_every_replica_are_its_own_again(tmp_path):
    def first():
        job = Training(WithBatchNorm, broadcast_buffers=False)
        job.run(2)
        job.booster.save(tmp_path, step=2)
        return job.model.seen.tolist(), job.model.norm.running_mean.tolist()

    def second():
        job = Training(WithBatchNorm, broadcast_buffers=False)
        job.resume(tmp_path)
        return job.model.seen.tolist(), job.model.norm.running_mean.tolist()

    saved = Loopback(2).run(first)
    assert saved[0][0] != saved[1][0]
    assert saved[0][1] == saved[1][1]
    assert Loopback(2).run(second) == saved
    assert Loopback(1).run(second) == saved[:1]
    assert Loopback(3).run(second) == [*saved, saved[0]]
    keys = tensors_in(tmp_path, 2)
    assert [key for key in keys if "replica" in key] == ["model0/replica1/seen"]


def test_a_model_on_the_meta_device_is_filled(tmp_path):
    def first(make):
        run = make()
        run.steps([0])
        run.booster.save(tmp_path, step=1)
        return run.steps([1])

    def second(make):
        from plugins.zero_models import TiedModel

        def on_meta():
            with torch.device("meta"):
                return TiedModel()

        run = make(make_model=on_meta)
        with pytest.raises(Exception, match="its weights have no values yet"):
            run.steps([1])
        run.booster.resume(tmp_path)
        return run.steps([1])

    expected = on_layout(first, pp_size=2)
    assert on_layout(second, pp_size=2) == expected


class Counting(nn.Linear):
    """Has state that is no tensor."""

    def __init__(self):
        super().__init__(4, 4)
        self.calls = [0]

    def forward(self, x):
        self.calls[0] += 1
        return super().forward(x)

    def get_extra_state(self):
        return {"calls": tuple(self.calls)}

    def set_extra_state(self, state):
        self.calls = list(state["calls"])


@pytest.mark.parametrize("pp_size", [1, 2])
def test_what_modules_keep_beside_tensors_comes_back(tmp_path, pp_size):
    def rank(load):
        torch.manual_seed(0)
        booster = Booster(plugin=HybridParallelPlugin(pp_size=pp_size, num_microbatches=2))
        model = nn.Sequential(Counting(), Counting())
        parts = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), sample=torch.ones(2, 4))
        if load:
            booster.resume(tmp_path)
        else:
            data = iter([torch.ones(2, 4)])
            booster.execute_pipeline(data, parts.model, lambda out, _: out.square().mean(), parts.optimizer)
            parts.optimizer.step()
            booster.save(tmp_path, step=1)
        own = [name for name, _ in model.named_parameters()]
        return [module.calls for n, module in enumerate(model) if f"{n}.weight" in own]

    expected = Loopback(pp_size).run(lambda: rank(False))
    assert any(calls[0] for stage in expected for calls in stage)
    assert Loopback(pp_size).run(lambda: rank(True)) == expected


def test_several_models_are_saved_together_and_in_order(tmp_path):
    def make_two(seed):
        booster, models = Booster(plugin=HybridParallelPlugin()), []
        for width in (3, 4):
            torch.manual_seed(seed)
            model = nn.Linear(width, 2)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            models.append(booster.boost(model, optimizer))
        return booster, models

    booster, models = make_two(0)
    for model, optimizer, *_ in models:
        optimizer.backward(model(torch.ones(1, model.in_features)).sum())
        optimizer.step()
    booster.save(tmp_path, step=1)
    other, resumed_models = make_two(1)
    other.resume(tmp_path)
    for one, two in zip(models, resumed_models, strict=True):
        assert_same(dict(two.model.state_dict()), dict(one.model.state_dict()))
        assert two.optimizer.applied_steps == 1
    single = Booster(plugin=HybridParallelPlugin())
    kept = single.boost(nn.Linear(3, 2))
    with pytest.raises(CheckpointError, match=r"it has the models Linear, Linear, and boosted here are Linear\."):
        single.resume(tmp_path)
    assert kept.optimizer is None


def test_evaluation_needs_no_optimizer(tmp_path):
    job = Training()
    job.run(1)
    job.booster.save(tmp_path, step=1)
    booster, model = Booster(plugin=HybridParallelPlugin(precision="bf16")), small_vit(seed=3)
    model, *_ = booster.boost(model)
    with pytest.raises(CheckpointError, match="the run lacks an LR scheduler, and the checkpoint was saved with one"):
        booster.resume(tmp_path)
    plain = Training(scheduler=False)
    plain.run(1)
    plain.booster.save(tmp_path, step=2)
    assert booster.resume(tmp_path).step == 2
    masters = booster.plugin._engine(model).masters.masters
    assert_same({n: p.detach() for n, p in masters.items()}, {n: p.detach() for n, p in plain.model.named_parameters()})


def refused(path, text, layout, make_run):
    """On every rank, and nothing is changed."""

    def rank(make):
        run = make_run(make)
        before = run.everything()
        with pytest.raises(CheckpointError, match=text):
            run.booster.resume(path)
        after = run.everything()
        assert after[1] == before[1]
        assert_same(after[0], before[0])

    on_layout(rank, **layout)


def wider():
    from plugins.zero_models import TiedModel

    model = TiedModel()
    model.unused = nn.Parameter(torch.ones(6))
    return model


def deeper():
    from plugins.zero_models import TiedModel

    model = TiedModel()
    model.extra = nn.Linear(2, 2)
    return model


def one_group(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def regrouped(parameters):
    first, *others = parameters
    return torch.optim.AdamW([{"params": others}, {"params": [first]}], lr=0.01)


@pytest.mark.covering
@pytest.mark.parametrize("layout", [{}, {"pp_size": 2}, {"dp_size": 2, "zero_stage": 1}], ids=["one", "pp2", "zero"])
@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"make_model": wider}, r"weights/unused has shape \(5,\) in the checkpoint, and \(6,\) here"),
        ({"make_model": deeper}, r"missing \['extra\.bias', 'extra\.weight'\], unexpected \[\]"),
        ({"make_optimizer": torch.optim.SGD}, "the state of AdamW cannot be loaded into SGD"),
        ({"make_optimizer": one_group}, "the optimizer had 2 parameter groups, and has 1 here"),
        (
            {"make_optimizer": regrouped},
            "is in group 0 of the optimizer here only|is in group 0 of the optimizer there only",
        ),
    ],
)
def test_a_run_that_it_does_not_fit_is_refused_on_all_ranks_and_stays(tmp_path, layout, changed, text):
    on_layout(functools.partial(_save, path=tmp_path))
    refused(tmp_path, text, layout, lambda make: make(**changed))


def _save(make, path):
    run = make()
    run.steps([0])
    run.booster.save(path, step=1)


def test_other_data_is_refused_in_the_middle_of_an_epoch(tmp_path):
    job = Training()
    job.run(1)
    job.booster.save(tmp_path, step=1)
    other = Training(loader=False)
    assert other.booster.resume(tmp_path).epoch == 0
    job = Training()
    job.loader.batch_sampler.seed = 7
    with pytest.raises(
        CheckpointError, match=re.escape("20 samples, shuffled with seed 1024, and here are 20 samples")
    ):
        job.booster.resume(tmp_path)


def test_a_checkpoint_without_a_position_in_the_data_says_so(tmp_path, caplog):
    without = Training(loader=False)
    without.run(1)
    without.booster.save(tmp_path, step=1)
    job = Training()
    assert job.resume(tmp_path).epoch == 0
    (record,) = caplog.records
    assert "the checkpoint has no position in the data" in record.getMessage()
    job.run(1)


def test_ranks_that_took_different_numbers_of_batches_are_named(tmp_path):
    def rank():
        job = Training()
        if current_world().rank:
            next(iter(job.loader))
        with pytest.raises(CheckpointError, match=r"the ranks took different numbers of batches: .*on rank 1"):
            job.booster.save(tmp_path, step=1)

    Loopback(2).run(rank)


def test_generators_of_another_layout_are_those_of_the_replica(tmp_path):
    """In one process the ranks have one set of generators, so the states are told apart by hand."""
    from hybridpp_plugins.run_resume import _own_generators
    from hybridpp_plugins.training_state import RunParts

    from hybridpp.checkpoint.commit import open_step

    on_layout(functools.partial(_save, path=tmp_path), pp_size=2, dp_size=2)
    manifest = open_step(tmp_path, 1)
    assert manifest.state["replicas_of_ranks"] == [0, 0, 1, 1]
    manifest.state["generators"].update(states=["a", "b", "c", "d"], of_ranks=[0, 1, 2, 3])

    def rank(make):
        run = make()
        engine = run.booster.plugin._engine(run.model)
        return _own_generators(manifest, RunParts(engine, None, None))

    assert on_layout(rank, pp_size=2, dp_size=2) == ["a", "b", "c", "d"]
    assert on_layout(rank, dp_size=3) == ["a", "c", "a"]
    assert on_layout(rank, tp_size=2) == ["a", "a"]


def test_a_run_without_a_loader_starts_at_the_first_epoch(tmp_path):
    on_layout(functools.partial(_save, path=tmp_path))
    (done,) = on_layout(lambda make: resumed(make, tmp_path))
    assert (done.epoch, done.batches) == (0, 0)
