"""What scripts also do: odd tensors, names, paths, extras, loaders, and several models; kept, or refused by name."""

import math
import os
import re

import numpy
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, CosineAnnealingLR, CyclicLR, LambdaLR, SequentialLR
from torch.utils.data import DataLoader, IterableDataset

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.checkpoint.commit import committed_steps, open_step, step_folder, steps
from hybridpp.cluster import Loopback
from hybridpp.errors import CheckpointError, ConfigError


def square(outputs, inputs):
    return outputs.float().square().mean()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.second(self.first(x).relu())


class Job:
    """A model that trains."""

    def __init__(self, make_model=Net, make_scheduler=None, make_loader=None):
        plugin = HybridParallelPlugin()
        self.booster, model = Booster(plugin=plugin), make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = make_scheduler and make_scheduler(optimizer)
        loader = make_loader and make_loader(plugin)
        self.model, self.optimizer, _, self.loader, self.scheduler = self.booster.boost(
            model, optimizer, square, loader, scheduler
        )
        self.data = iter(self.loader) if make_loader else None

    def steps(self, number):
        losses = []
        for _ in range(number):
            data = iter([torch.ones(4, 4)]) if self.data is None else self.data
            losses.append(self.booster.execute_pipeline(data, self.model, square, self.optimizer)["loss"].item())
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
        return losses

    def resume(self, path):
        resumed = self.booster.resume(path)
        self.data = None if self.data is None else iter(self.loader)
        return resumed


def goes_on(path, *arguments):
    """Whether three steps after a resume are those of the run that was not interrupted."""
    job = Job(*arguments)
    job.steps(3)
    job.booster.save(path, step=3)
    expected = job.steps(3)
    job = Job(*arguments)
    assert job.resume(path).step == 3
    return job.steps(3) == expected


class OddTensors(Net):
    """Parameters and buffers of every kind that can be kept."""

    def __init__(self):
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.turned = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
        self.small = nn.Parameter(torch.randn(4, 4).to(torch.float8_e4m3fn), requires_grad=False)
        self.second.weight = self.first.weight
        for dtype in (torch.int8, torch.uint16, torch.bool, torch.float64):
            self.register_buffer(f"of_{dtype}".replace(".", "_"), torch.ones(3, dtype=dtype))
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("derived", torch.ones(2), persistent=False)
        self.register_buffer("absent", None)

    def forward(self, x):
        return super().forward(x) * self.scalar + (self.turned @ x.to(torch.complex64)).abs() + self.empty.sum()


class OddNames(Net):
    NAMES = ("a/b#0", "x" * 5000, 'ü " \\', "__metadata__", "manifest.json")

    def __init__(self):
        super().__init__()
        for name in self.NAMES:
            self.register_parameter(name.replace(".", "_"), nn.Parameter(torch.ones(4)))

    def forward(self, x):
        for name in self.NAMES:
            x = x * self._parameters[name.replace(".", "_")]
        return super().forward(x)


@pytest.mark.parametrize("make_model", [OddTensors, OddNames])
def test_odd_tensors_and_names_are_kept(tmp_path, make_model):
    assert goes_on(tmp_path, make_model)


class WithoutElements(Net):
    """Parameters and buffers without elements, trained and frozen."""

    def __init__(self):
        super().__init__()
        self.prompt = nn.Parameter(torch.empty(0, 4))
        self.frozen = nn.Parameter(torch.empty(3, 0), requires_grad=False)
        self.register_buffer("nothing", torch.empty(2, 0, dtype=torch.long))

    def forward(self, x):
        return super().forward(torch.cat([x, self.prompt]))


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_has_no_elements_is_in_every_save_and_load(tmp_path, zero_stage, precision):
    def rank():
        model = WithoutElements()
        booster = Booster(plugin=HybridParallelPlugin(zero_stage=zero_stage, precision=precision))
        parts = booster.boost(model, torch.optim.AdamW(model.parameters()), sample=torch.randn(2, 4))
        model, optimizer = parts[:2]
        booster.save(tmp_path / "run", step=1)
        booster.resume(tmp_path / "run")
        booster.save_optimizer(optimizer, tmp_path / "optimizer")
        booster.load_optimizer(optimizer, tmp_path / "optimizer")
        for path in ("folder", "one.safetensors", "one.pt"):
            booster.save_model(model, tmp_path / path)
            booster.load_model(model, tmp_path / path)

    Loopback(2).run(rank)
    names = set(WithoutElements().state_dict())
    in_run = open_step(tmp_path / "run", 1).tensors
    assert names <= {key.removeprefix("model0/weights/") for key in in_run}
    assert set(load_file(tmp_path / "one.safetensors")) == names


@pytest.mark.parametrize(
    ("buffer", "text"),
    [
        (torch.eye(4).to_sparse(), "odd is a tensor of torch.sparse_coo, which safetensors files cannot hold. Make it"),
        (torch.ones(3, dtype=torch.complex128), "odd has dtype complex128, which safetensors files cannot hold."),
    ],
)
def test_tensors_that_no_file_holds_are_named_on_all_ranks(tmp_path, buffer, text):
    def make_model():
        model = Net()
        model.register_buffer("odd", buffer.clone())
        return model

    def rank():
        job = Job(make_model)
        for asynchronous in (False, True):
            with pytest.raises(CheckpointError, match=re.escape(text)):
                job.booster.save(tmp_path / "run", step=1, asynchronous=asynchronous)
        if buffer.is_sparse:
            with pytest.raises(CheckpointError, match=re.escape(text)):
                job.booster.save_model(job.model, tmp_path / "model")
        return len(job.steps(1))

    assert Loopback(2).run(rank) == [1, 1]
    assert not steps(tmp_path / "run")


@pytest.mark.parametrize("name", ["a b", "ünï 漢字", "with'quote\"", "x" * 200])
def test_paths_may_have_any_characters(tmp_path, name):
    assert goes_on(tmp_path / name)


def test_a_relative_path_is_that_of_the_call(tmp_path, monkeypatch):
    """Although the script goes elsewhere while a thread writes."""
    job = Job()
    (tmp_path / "elsewhere").mkdir()
    for number, save in enumerate(
        (
            lambda: job.booster.save("run", step=1, asynchronous=True),
            lambda: job.booster.save_optimizer(job.optimizer, "optimizer", use_async=True),
            lambda: job.booster.save_model(job.model, "model", use_async=True),
        )
    ):
        monkeypatch.chdir(tmp_path)
        save()
        monkeypatch.chdir(tmp_path / "elsewhere")
        job.booster.wait_for_save()
        assert len(list(tmp_path.iterdir())) == 2 + number
    assert Job().booster.resume(tmp_path / "run").step == 1


def test_folders_may_be_links(tmp_path, caplog):
    """To the run, and to a step that was moved to another disk: of that, retention removes the link alone."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    job = Job()
    job.booster.save(tmp_path / "link", step=1)
    assert job.booster.resume(tmp_path / "real").step == 1
    step_folder(tmp_path / "real", 1).rename(tmp_path / "moved")
    step_folder(tmp_path / "real", 1).symlink_to(tmp_path / "moved")
    assert job.booster.resume(tmp_path / "link").step == 1
    job.booster.save(tmp_path / "link", step=2, keep_last=1)
    assert steps(tmp_path / "real") == [2]
    assert not caplog.records
    assert not os.path.lexists(step_folder(tmp_path / "real", 1))
    step_folder(tmp_path / "real", 1).symlink_to(tmp_path / "moved")
    before = {file: file.read_bytes() for file in (tmp_path / "moved").iterdir()}
    with pytest.raises(CheckpointError, match=r"step-00000001 is a link, through which a save does not write\. Rem"):
        job.booster.save(tmp_path / "link", step=1)
    assert before == {file: file.read_bytes() for file in (tmp_path / "moved").iterdir()}
    (tmp_path / "moved" / "manifest.json").unlink()  # what is incomplete is not touched either
    job.booster.save(tmp_path / "link", step=3, keep_last=1)
    assert len(list((tmp_path / "moved").iterdir())) == len(before) - 1


def test_extras_keep_their_types(tmp_path):
    extras = {
        "numpy": [numpy.float32(1.5), numpy.int64(3), numpy.bool_(True)],
        "float8": torch.ones(2).to(torch.float8_e4m3fn),
        "uint16": torch.ones(2, dtype=torch.uint16),
        "not finite": [math.inf, -math.inf],
        "large": 10**40,
        "$x": {1: 2, (3, 4): b"5"},
        "many": list(range(10_000)),
        **{str(number): number for number in range(1000)},
    }
    job = Job()
    job.booster.save(tmp_path, step=numpy.int64(0), extras=extras)
    resumed = job.booster.resume(tmp_path)
    assert resumed.step == 0
    for name, value in extras.items():
        kept = resumed.extras[name]
        if isinstance(value, torch.Tensor):
            assert kept.dtype == value.dtype
            assert kept.float().equal(value.float())
        else:
            assert (kept, type(kept)) == (value, type(value))
    assert [type(value) for value in resumed.extras["numpy"]] == [numpy.float32, numpy.int64, numpy.bool_]


def test_extras_that_cannot_be_kept_are_named(tmp_path):
    endless = []
    endless.append(endless)
    job = Job()
    for value, text in (
        (torch.eye(2).to_sparse(), "extras['x'] is a Tensor of torch.sparse_coo, which a checkpoint cannot hold"),
        (numpy.array(["a"]), "extras['x'] is a ndarray of <U1, which a checkpoint cannot hold"),
        (range(3), "extras['x'] is a range, which a checkpoint cannot hold"),
        (endless, "extras is nested more than 64 deep, or holds itself: a checkpoint cannot hold it."),
    ):
        with pytest.raises(ConfigError, match=re.escape(text)):
            job.booster.save(tmp_path / "run", step=1, extras={"x": value})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("num_more", [0, 200])
def test_extras_that_differ_between_ranks_are_named_and_rank_0s_kept(tmp_path, caplog, num_more, asynchronous):
    def rank():
        job = Job()
        own = job.booster.plugin.layout.world.rank
        more = {str(number): number for number in range(num_more)}
        for step in (1, 2):
            extras = {"seen": own, "best": 0.5, **({"own": 1} if own else {}), **more}
            job.booster.save(tmp_path, step=step, extras=extras, asynchronous=asynchronous)
        job.booster.wait_for_save()
        kept = job.booster.resume(tmp_path).extras
        return {name: kept[name] for name in kept if name not in more}

    assert Loopback(2).run(rank) == [{"seen": 0, "best": 0.5}] * 2
    (record,) = caplog.records
    named = "all of them" if num_more else "own, seen"
    text = f"the ranks gave different extras to booster.save: {named}. The checkpoint keeps those of rank 0"
    assert record.getMessage().partition("] ")[2].startswith(text) or record.getMessage().startswith(text)


class Discriminator(Net):
    pass


def test_two_boosters_do_not_replace_each_others_checkpoints(tmp_path):
    generator, discriminator = Job(), Job(Discriminator)
    generator.booster.save(tmp_path, step=1)
    text = "is a checkpoint of Net, and this booster saves Discriminator: it is not replaced. Pass another path"
    with pytest.raises(CheckpointError, match=re.escape(text)):
        discriminator.booster.save(tmp_path, step=1)
    generator.booster.save(tmp_path, step=1)  # its own one is
    assert generator.booster.resume(tmp_path).step == 1
    with pytest.raises(CheckpointError, match=r"step-00000001 does not fit this run: .* Nothing was changed\."):
        Job(lambda: nn.Linear(4, 4)).booster.resume(tmp_path)


def test_another_number_of_models_is_named(tmp_path):
    booster = Booster(plugin=HybridParallelPlugin())
    models = [Net(), Discriminator()]
    boosted = [booster.boost(model, torch.optim.SGD(model.parameters())) for model in models]
    booster.save(tmp_path, step=1)
    assert booster.resume(tmp_path).step == len(boosted) - 1
    text = (
        "it has the models Net, Discriminator, and boosted here are Net. Boost those of the run that saved it, in its"
    )
    with pytest.raises(CheckpointError, match=re.escape(text)):
        Job().booster.resume(tmp_path)


def test_saves_follow_each_other_without_waiting(tmp_path):
    job = Job()
    for step in range(6):
        job.steps(1)
        job.booster.save(tmp_path, step=step, asynchronous=step != 5, keep_last=1)
    assert committed_steps(tmp_path) == steps(tmp_path) == [5]


class Decay:
    """A function of a schedule that is an object."""

    def __init__(self):
        self.rate = 0.9

    def __call__(self, step):
        return self.rate**step


SCHEDULERS = {
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 0.9**step),
    "object": lambda optimizer: LambdaLR(optimizer, Decay()),
    "sequence": lambda optimizer: SequentialLR(
        optimizer, [LambdaLR(optimizer, lambda step: 0.5), CosineAnnealingLR(optimizer, 5)], [4]
    ),
    "chain": lambda optimizer: ChainedScheduler([ConstantLR(optimizer), CosineAnnealingLR(optimizer, 5)]),
    "cycle": lambda optimizer: CyclicLR(
        optimizer, 0.01, 0.1, cycle_momentum=False, scale_fn=lambda cycle: 1 / (1 + cycle)
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedules_with_functions_go_on(tmp_path, name):
    assert goes_on(tmp_path, Net, SCHEDULERS[name])


class Stream(IterableDataset):
    """Samples in an order of their own."""

    def __iter__(self):
        return iter(torch.arange(80.0).reshape(20, 4) / 80)


def test_data_of_a_stream_go_on(tmp_path):
    assert goes_on(tmp_path, Net, None, lambda plugin: plugin.prepare_dataloader(Stream(), batch_size=2))


def test_other_loaders_are_the_scripts_to_place_and_it_is_told_so(tmp_path, caplog):
    def plain(plugin):
        return DataLoader(list(torch.ones(40, 4)), batch_size=2)

    job = Job(make_loader=plain)
    for step in (1, 2):
        job.booster.save(tmp_path / "plain", step=step)
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 1
    assert (
        "the checkpoint has no position in the data. Keep it in extras, or use plugin.prepare_dataloader." in texts[0]
    )
    caplog.clear()
    job = Job(make_loader=lambda plugin: plugin.prepare_dataloader(list(torch.ones(40, 4)), batch_size=2))
    job.steps(1)
    job.booster.save(tmp_path / "counted", step=1)
    assert not caplog.records
    job = Job(make_loader=plain)
    resumed = job.booster.resume(tmp_path / "counted")
    assert (resumed.epoch, resumed.batches) == (0, 0)
    (record,) = caplog.records
    assert "so it begins at the first epoch. Set its position from the extras of the checkpoint." in record.getMessage()
