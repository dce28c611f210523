"""Optimizers and LR schedules are saved by themselves, and any layout loads what any other saved."""

import errno
import functools
import json
import re
import shutil

import pytest
import torch
from checkpoint.test_manifest import signed_text
from run_checkpoints import on_layout
from support import assert_same
from torch import nn
from torch.optim.lr_scheduler import StepLR

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.checkpoint import file_images
from hybridpp.checkpoint.manifest import MANIFEST
from hybridpp.checkpoint.reader import fill, plan_reads, read_manifest
from hybridpp.checkpoint.writer import Holding
from hybridpp.cluster import Loopback, current_world
from hybridpp.errors import CheckpointError, ConfigError
from hybridpp.plugin import Plugin

FP16 = {"precision": "fp16", "initial_scale": 2.0**24}  # the first steps overflow
LAYOUTS = {
    "one fp16": FP16,
    "pp2 zb-h1 bf16": {"pp_size": 2, "schedule": "zb-h1", "precision": "bf16"},
    "tp2 pp2 fp32": {"tp_size": 2, "pp_size": 2},
    "dp2 zero 1 fp16": {"dp_size": 2, "zero_stage": 1, "ddp_bucket_cap_mb": 0.01, **FP16},
    "dp2 zero 3 bf16": {"dp_size": 2, "zero_stage": 3, "precision": "bf16"},
    "offloaded fp32": {"offload_optimizer": 0.5},
}


def save(run, folder):
    run.booster.save_model(run.model, folder / "model.pt")
    run.booster.save_optimizer(run.optimizer, folder / "optimizer.pth")
    run.booster.save_lr_scheduler(run.scheduler, folder / "schedule")


def load(run, folder):
    run.booster.load_model(run.model, folder / "model.pt")
    run.booster.load_optimizer(run.optimizer, folder / "optimizer.pth")
    run.booster.load_lr_scheduler(run.scheduler, folder / "schedule")


def stored(folder):
    """Every tensor of a folder, complete."""
    manifest = read_manifest(folder)
    full = {key: torch.zeros(entry.shape, dtype=getattr(torch, entry.dtype)) for key, entry in manifest.tensors.items()}
    fill(folder, plan_reads(manifest.tensors, [Holding.of_all(*item) for item in full.items()]))
    return full


@pytest.mark.parametrize("name", LAYOUTS)
def test_three_steps_and_three_more_from_the_parts_are_six(tmp_path, name):
    def unbroken(make):
        run = make()
        run.steps(range(3))
        save(run, tmp_path)
        return run.steps(range(3, 6)), run.everything()

    def in_two(make):
        torch.manual_seed(7)  # another seed of dropout
        run = make()
        run.steps([9])
        load(run, tmp_path)
        return run.steps(range(3, 6)), run.everything()

    expected, actual = (on_layout(rank, **LAYOUTS[name]) for rank in (unbroken, in_two))
    for (losses, (tensors, counts)), (other_losses, (other_tensors, other_counts)) in zip(
        expected, actual, strict=True
    ):
        assert (other_losses, other_counts) == (losses, counts)
        assert_same(other_tensors, tensors)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    path = tmp_path_factory.mktemp("sources")

    def rank(make, name):
        run = make()
        run.steps(range(2))
        save(run, path / name)

    for name in ("tp2 pp2 fp32", "dp2 zero 3 bf16"):
        on_layout(functools.partial(rank, name=name), **LAYOUTS[name])
    return path


@pytest.mark.parametrize("target", ["one fp16", "tp2 pp2 fp32", "dp2 zero 1 fp16", "dp2 zero 3 bf16"])
def test_any_layout_and_precision_loads_the_state_of_any_other(sources, tmp_path, target):
    folders = sorted(sources.iterdir())

    def rank(make):
        run = make()
        rates = []
        for folder in folders:
            load(run, folder)
            run.booster.save_optimizer(run.optimizer, tmp_path / folder.name)
            rates.append([group["lr"] for group in run.optimizer.param_groups])
            run.steps([2])
        return rates

    ranks = on_layout(rank, **LAYOUTS[target])
    assert ranks == [ranks[0]] * len(ranks)
    for folder in folders:
        then, now = stored(folder / "optimizer.pth"), stored(tmp_path / folder.name)
        for name, tensors in ((folder.name, then), (target, now)):
            assert any("/weights/" in key for key in tensors) == ("fp32" not in name), "masters"
        common = [key for key in then if key in now or "/optimizer/" in key]
        assert len(common) >= 20
        assert_same({key: now[key] for key in common}, {key: then[key] for key in common})


def test_files_are_as_large_as_asked_and_the_newest_save_replaces_others(tmp_path):
    def rank(make):
        run = make()
        barrier = functools.partial(run.booster.plugin.layout.control.all_gather, torch.zeros(1))
        run.steps([0])
        counts = []
        for options in ({}, {"size_per_shard": 0.002}, {"size_per_shard": 0.002, "shard": False}):
            run.booster.save_optimizer(run.optimizer, tmp_path, **options)
            barrier()
            counts.append(len(list(tmp_path.iterdir())))
            barrier()
        return counts

    for counts in on_layout(rank, pp_size=2):
        assert counts[0] == counts[2] == 3
        assert counts[1] > 10


def test_a_save_in_the_background_has_its_moment_or_fails_on_all_ranks(tmp_path, monkeypatch):
    full = []

    def fail(path, image, after_block):
        if full and path.name.startswith("rank-00001"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, image, after_block)

    write = file_images._write_image
    monkeypatch.setattr(file_images, "_write_image", fail)

    def rank(make):
        run = make()
        barrier = functools.partial(run.booster.plugin.layout.control.all_gather, torch.zeros(1))
        run.steps([0])
        run.booster.save_optimizer(run.optimizer, tmp_path / "at once", prefix="a")
        run.booster.save_optimizer(run.optimizer, tmp_path, prefix="b", use_async=True)
        run.steps([1])
        run.booster.wait_for_save()
        barrier()
        full.append(True)
        run.booster.save_optimizer(run.optimizer, tmp_path, prefix="b", use_async=True)
        with pytest.raises(CheckpointError, match="No space left on device"):
            run.booster.wait_for_save()
        barrier()
        full.clear()
        run.booster.load_optimizer(run.optimizer, tmp_path, prefix="b")
        return run.optimizer.applied_steps

    assert on_layout(rank, dp_size=2, zero_stage=1) == [1, 1]
    assert_same(stored(tmp_path / "b"), stored(tmp_path / "at once/a"))
    assert not list((tmp_path / "b").glob("part-*"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("parts")

    def rank(make):
        run = make()
        run.steps([0])
        save(run, path)
        run.booster.save_optimizer(run.optimizer, path, prefix="ema")
        run.booster.save(path / "run", step=1)

    on_layout(rank)
    return path


def one_layer(parameters):
    return torch.optim.AdamW([{"params": list(parameters)}], lr=0.1)


@pytest.mark.parametrize(
    ("folder", "text"),
    [
        (
            "nothing",
            r"nothing holds no intact save of the state of an optimizer: manifest\.json cannot be read: ",
        ),
        ("", r"There are saves in \['ema', 'optimizer\.pth', 'schedule'\] below it: use prefix= to load one of them"),
        (
            "run",
            r"It holds checkpoints of a run, for booster\.resume; hybridpp checkpoint export .* Pass the folder that",
        ),
        ("run/step-00000001", r"holds a checkpoint of a run, not the state of an optimizer\. Call booster\.resume, or"),
        ("schedule", r"holds the state of an LR schedule, not the state of an optimizer\. Call booster\.load_lr_sched"),
        ("model.pt", r"model.pt holds no intact save of the state of an optimizer: manifest\.json cannot be read"),
    ],
)
def test_a_wrong_path_is_refused_on_every_rank_with_what_is_there(saved, folder, text):
    def rank(make):
        run = make()
        before = run.everything()
        with pytest.raises(CheckpointError, match=text):
            run.booster.load_optimizer(run.optimizer, saved / folder)
        assert_same(run.everything()[0], before[0])

    on_layout(rank, pp_size=2)


def sgd_in_groups(parameters):
    parameters = list(parameters)
    groups = [[p for p in parameters if (p.dim() > 1) == is_matrix] for is_matrix in (True, False)]
    return torch.optim.SGD([{"params": group} for group in groups], lr=0.1)


@pytest.mark.parametrize(
    ("make_optimizer", "text"),
    [
        (one_layer, "the optimizer had 2 parameter groups, and has 1 here. Make the same groups. Nothing was changed."),
        (sgd_in_groups, "the state of AdamW cannot be loaded into SGD. Use the same one. Nothing was changed."),
    ],
)
def test_the_state_of_another_optimizer_is_refused(saved, make_optimizer, text):
    def rank(make):
        run = make(make_optimizer=make_optimizer)
        with pytest.raises(CheckpointError, match=re.escape(text)) as raised:
            run.booster.load_optimizer(run.optimizer, saved / "ema")
        assert "does not fit this optimizer of a TiedModel: it was saved with a TiedModel, and" in str(raised.value)

    on_layout(rank, dp_size=2)


def edited(folder, change):
    """Edit the optimizer in a manifest, which gets the digest of it, as whoever edits on purpose would give it."""
    content = json.loads(b"{" + (folder / MANIFEST).read_bytes().partition(b"\n")[2])
    change(content["state"]["optimizer"])
    (folder / MANIFEST).write_bytes(signed_text(json.dumps(content)))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda saved: saved["settings"][1].update(lr=-5), "group 1 of the optimizer has 'lr' = -5 there, which AdamW"),
        (
            lambda saved: saved["state"]["embed.weight"].update(step=["value", "x"]),
            "the state of 'embed.weight' has 'step' = 'x', which is no number of steps.",
        ),
    ],
)
def test_edited_settings_and_counts_are_refused_on_every_rank(saved, tmp_path, change, text):
    folder = shutil.copytree(saved / "optimizer.pth", tmp_path / "edited")
    edited(folder, change)

    def rank(make):
        run = make()
        before = run.everything()
        with pytest.raises(CheckpointError, match=re.escape(text)):
            run.booster.load_optimizer(run.optimizer, folder)
        assert_same(run.everything()[0], before[0])

    on_layout(rank, dp_size=2)


def test_the_kernels_of_an_edited_manifest_are_not_taken(saved, tmp_path):
    folder = shutil.copytree(saved / "optimizer.pth", tmp_path / "edited")
    edited(folder, lambda saved: saved["settings"][0].update(fused="x"))

    def rank(make):
        run = make()
        before = [group["fused"] for group in run.optimizer.param_groups]
        run.booster.load_optimizer(run.optimizer, folder)
        assert [group["fused"] for group in run.optimizer.param_groups] == before

    on_layout(rank)


def trained(widths, names="abc"):
    booster = Booster(plugin=HybridParallelPlugin(precision="bf16"))
    model = nn.Sequential()
    for name, width in zip(names, widths, strict=False):
        model.add_module(name, nn.Linear(2, width))
        model.add_module(f"{name}_back", nn.Linear(width, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = StepLR(optimizer, 2)
    parts = booster.boost(model, optimizer, lr_scheduler=schedule)
    parts.optimizer.backward(model(torch.ones(1, 2)).float().sum())
    parts.optimizer.step()
    return booster, parts


class Gan:
    """Two models of one booster, which train against each other."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.booster = Booster(plugin=HybridParallelPlugin(zero_stage=1))
        self.parts = {}
        for name, widths in {"generator": (3, 8, 4), "critic": (4, 8, 1)}.items():
            model = nn.Sequential(nn.Linear(*widths[:2]), nn.Tanh(), nn.Linear(*widths[1:]))
            self.parts[name] = self.booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.05))

    def steps(self, numbers):
        generator, critic = self.parts.values()
        losses = []
        for number in numbers:
            numbers_of_step = torch.Generator().manual_seed(2 * number + current_world().rank)
            noise, real = (torch.randn(6, width, generator=numbers_of_step) for width in (3, 4))
            for player in (critic, generator):
                made = generator.model(noise)
                if player is critic:
                    loss = critic.model(made.detach()).exp().mean() - critic.model(real).mean()
                else:
                    loss = -critic.model(made).mean()
                player.optimizer.backward(loss)
                player.optimizer.step()
                for part in (critic, generator):
                    part.optimizer.zero_grad()
                losses.append(loss.item().hex())
        return losses

    def everything(self):
        tensors = {}
        for name, (model, optimizer, *_) in self.parts.items():
            tensors |= {f"{name} {key}": tensor.clone() for key, tensor in model.state_dict().items()}
            for index, state in enumerate(optimizer.unwrap().state.values()):
                tensors |= {f"{name} {index} {key}": tensor.clone() for key, tensor in state.items()}
        return tensors


def test_two_models_of_a_job_are_saved_in_parts_by_prefix(tmp_path):
    def unbroken():
        gan = Gan(0)
        gan.steps(range(3))
        for name, (model, optimizer, *_) in gan.parts.items():
            gan.booster.save_model(model, tmp_path / "models", prefix=name)
            gan.booster.save_optimizer(optimizer, tmp_path / "optimizers", prefix=name)
        return gan.steps(range(3, 6)), gan.everything()

    def in_two():
        gan = Gan(1)
        gan.steps([9])
        for name, (model, optimizer, *_) in reversed(gan.parts.items()):
            gan.booster.load_model(model, tmp_path / "models", prefix=name)
            gan.booster.load_optimizer(optimizer, tmp_path / "optimizers", prefix=name)
        generator = gan.parts["generator"].optimizer
        with pytest.raises(CheckpointError, match="has shape"):
            gan.booster.load_optimizer(generator, tmp_path / "optimizers", prefix="critic")
        return gan.steps(range(3, 6)), gan.everything()

    expected, actual = (Loopback(2).run(rank) for rank in (unbroken, in_two))
    for (losses, tensors), (other_losses, other_tensors) in zip(expected, actual, strict=True):
        assert other_losses == losses
        assert_same(other_tensors, tensors)


def test_other_names_and_shapes_are_named(tmp_path):
    booster, parts = trained([3, 4])
    booster.save_optimizer(parts.optimizer, tmp_path)
    for widths, names, text in (
        ([3, 4], "ax", "b.bias is in group 0 of the optimizer there only"),
        ([3], "a", "b.bias is in group 0 of the optimizer there only"),
        ([3, 4, 5], "abc", "c.bias is in group 0 of the optimizer here only"),
        ([3, 5], "ab", "model0/weights/b.weight has shape (4, 2) in the checkpoint, and (5, 2) here"),
    ):
        other, made = trained(widths, names)
        with pytest.raises(CheckpointError, match=re.escape(text)):
            other.load_optimizer(made.optimizer, tmp_path)


def test_a_flipped_bit_is_named(tmp_path):
    booster, parts = trained([3])
    booster.save_optimizer(parts.optimizer, tmp_path)
    booster.save_lr_scheduler(parts.lr_scheduler, tmp_path / "schedule")
    for load, name in (
        (lambda path: booster.load_optimizer(parts.optimizer, path), "rank-00000"),
        (lambda path: booster.load_optimizer(parts.optimizer, path), MANIFEST),
        (lambda path: booster.load_lr_scheduler(parts.lr_scheduler, path / "schedule"), f"schedule/{MANIFEST}"),
    ):
        (file,) = tmp_path.glob(f"{name}*")
        data = file.read_bytes()
        file.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
        with pytest.raises(CheckpointError, match=f"{file.name} is damaged: it does not have the digest") as raised:
            load(tmp_path)
        assert re.search(r"(Restore the files from a copy, or p|P)ass (another|the) folder that", str(raised.value))
        assert "for booster.load" not in str(raised.value)  # which was called
        file.write_bytes(data)
        load(tmp_path)


def test_what_was_not_boosted_and_what_has_no_state_is_refused(tmp_path):
    booster, parts = trained([3])
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    for optimizer, kind in ((other, "SGD"), (parts.optimizer.unwrap(), "SGD"), (None, "NoneType")):
        for call in (booster.save_optimizer, booster.load_optimizer):
            with pytest.raises(ConfigError, match=f"this {kind} was not boosted by this booster. Pass the optimizer"):
                call(optimizer, tmp_path / "folder")
    for call in (booster.save_lr_scheduler, booster.load_lr_scheduler):
        with pytest.raises(ConfigError, match="an LR schedule has state_dict and load_state_dict: got int"):
            call(3, tmp_path / "folder")
    with pytest.raises(ConfigError, match="size_per_shard must be a number of MB above 0: got 0"):
        booster.save_optimizer(parts.optimizer, tmp_path / "folder", size_per_shard=0)
    parts.optimizer.backward(parts.model(torch.ones(1, 2)).float().sum())
    with pytest.raises(ConfigError, match=r"booster\.save_optimizer was called between backward and step"):
        booster.save_optimizer(parts.optimizer, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()
    (tmp_path / "file").touch()
    for save in (booster.save_optimizer, booster.save_lr_scheduler):
        parts.optimizer.zero_grad()
        with pytest.raises(CheckpointError, match="file cannot be written: File exists"):
            save(parts.optimizer if save == booster.save_optimizer else parts.lr_scheduler, tmp_path / "file")
    booster.save_lr_scheduler(parts.lr_scheduler, tmp_path / "schedule")
    text = "holds the state of a StepLR, which does not fit a MultiStepLR. Use the same class of schedule"
    with pytest.raises(CheckpointError, match=text):
        booster.load_lr_scheduler(torch.optim.lr_scheduler.MultiStepLR(other, [1]), tmp_path / "schedule")
    with pytest.raises(ConfigError, match=r"Plugin saves no optimizers and schedules\. Use torch\.save"):
        Booster(plugin=Plugin()).save_lr_scheduler(parts.lr_scheduler, tmp_path / "schedule")
