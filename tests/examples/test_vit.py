"""The main job, small: train, save, reload; then fine-tune from what was saved, with another head."""

import importlib
import io
import re
from contextlib import redirect_stderr, redirect_stdout
from functools import partial

import pytest
from PIL.Image import fromarray
from processes import run_ranks, run_script
from support import ROOT

from hybridpp import Booster, DistCoordinator, HybridAdam
from hybridpp.cli import main
from hybridpp.cluster import set_seed
from hybridpp.optim import CosineAnnealingWarmupLR
from hybridpp.report import load_recording
from hybridpp.trainer import Trainer

SCRIPT = ROOT / "examples/vit/train.py"


@pytest.fixture(scope="module", autouse=True)
def digits():
    """Handwritten digits, fewer than there are: every rank makes pictures of all and takes some."""
    # Here, and not in each of the ranks that are forked from this process.
    import datasets  # noqa: F401
    import PIL.Image
    import sklearn.datasets

    PIL.Image.init()
    few = sklearn.datasets.load_digits()
    few.images, few.target = few.images[:150], few.target[:150]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sklearn.datasets, "load_digits", lambda: few)
        yield few


@pytest.fixture(scope="module")
def trained(digits, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    # Forked: four interpreters would take 20 s to start. `make vit` starts as users start theirs.
    output = ("--output", str(folder), "--timeline", str(folder / "step.svg"), "--record", str(folder / "recorded"))
    job = run_script(4, SCRIPT, "--epochs", "2", "--max-samples", "50", *output)
    assert job.returncode == 0, job.stderr
    return folder, job


@pytest.fixture(scope="module")
def tuned(digits, trained, tmp_path_factory):
    """On a folder of images, with another head, on two replicas."""
    images, folder = tmp_path_factory.mktemp("images"), tmp_path_factory.mktemp("tuned")
    for number, (pixels, digit) in enumerate(zip(digits.images[:120], digits.target[:120], strict=True)):
        parity = images / ("odd" if digit % 2 else "even")
        parity.mkdir(exist_ok=True)
        fromarray((pixels * 255 / 16).astype("uint8")).save(parity / f"{number}.png")
    job = run_script(
        2,
        SCRIPT,
        *("--model", str(trained[0]), "--dataset", str(images), "--output", str(folder)),
        *("--epochs", "1", "--microbatch-size", "5", "--batch-size", "12", "--precision", "bf16", "--pp-size", "1"),
        *("--zero-stage", "3"),
    )
    assert job.returncode == 0, job.stderr
    return folder, job


def test_it_trains_with_pp2_dp2_and_reloads_with_the_same_accuracy(trained):
    folder, job = trained
    assert "Layout: tp=2 x pp=2 x dp=1, zero_stage=0, fp32" in job.stdout
    assert len(re.findall(r"Epoch \[\d\]: held-out accuracy", job.stdout)) == 2
    assert re.search(r"reloaded from .* by plain transformers: the same\.", job.stdout)
    assert {"config.json", "model.safetensors", "preprocessor_config.json"} <= {file.name for file in folder.iterdir()}


def test_it_resumes_in_another_layout_where_it_was_stopped(tmp_path):
    flags = ("--max-samples", "60", "--batch-size", "20", "--output", str(tmp_path), "--save-every", "2")
    first = run_script(2, SCRIPT, "--epochs", "1", *flags, "--resume")
    assert first.returncode == 0, first.stderr
    assert "Resumed at step 0: epoch 1, batch 1" in first.stdout
    assert [folder.name for folder in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
    second = run_script(1, SCRIPT, "--epochs", "2", *flags, "--resume", "--precision", "bf16")
    assert second.returncode == 0, second.stderr
    assert "Resumed at step 2: epoch 1, batch 3" in second.stdout
    assert sorted(folder.name for folder in (tmp_path / "checkpoints").iterdir()) == ["step-00000004", "step-00000006"]


def test_it_draws_a_row_for_each_stage(trained):
    picture = (trained[0] / "step.svg").read_text()
    assert "rank 0" in picture
    assert "rank 1" in picture
    assert "% idle" in picture


def test_it_records_the_last_epoch_for_a_report(trained):
    folder, _ = trained
    recording = load_recording(folder / "recorded")
    # 50 samples in batches of 64.
    assert recording.num_steps == 1
    assert [(rank.tp, rank.pp) for rank in recording.ranks] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert all(rank.memory_kind == "allocated" for rank in recording.ranks)
    assert main(["report", str(folder / "recorded")]) == 0
    assert "ViTForImageClassification on 4 ranks" in (folder / "recorded" / "report.html").read_text()


@pytest.mark.parametrize(("name", "num_epochs"), [("trained", 2), ("tuned", 1)])
def test_one_progress_bar_and_no_warnings(request, name, num_epochs):
    _, job = request.getfixturevalue(name)
    assert "loss=" in job.stderr
    for epoch in range(1, num_epochs + 1):
        assert job.stderr.count(f"Epoch [{epoch}]:   0%") == 1
        assert f"Epoch [{epoch}]: 100%" in job.stderr
    assert "Warning" not in job.stderr
    assert "WARNING" not in job.stderr


def test_it_fine_tunes_a_saved_folder_with_another_head_on_two_replicas(tuned):
    folder, job = tuned
    assert "2 classes" in job.stdout
    assert "Layout: tp=1 x pp=1 x dp=2, zero_stage=3, bf16" in job.stdout
    assert '"even"' in (folder / "config.json").read_text()


@pytest.mark.parametrize(
    ("tp_size", "pp_size", "world_size", "chosen"),
    [
        (None, None, 4, (2, 2)),
        (None, None, 8, (2, 2)),
        (None, None, 6, (1, 2)),
        (None, None, 2, (1, 2)),
        (None, None, 3, (1, 1)),
        (None, None, 1, (1, 1)),
        (1, None, 4, (1, 2)),
        (4, None, 4, (4, 1)),
        (None, 4, 4, (1, 4)),
        (None, 1, 2, (1, 1)),
        (3, 5, 4, (3, 5)),
    ],
)
def test_sizes_left_out_follow_the_number_of_processes(monkeypatch, tp_size, pp_size, world_size, chosen):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    assert importlib.import_module("train").choose_sizes(tp_size, pp_size, world_size) == chosen


# The other presets are these with another stage of ZeRO or precision: tests/plugins/test_preset.py.
PLUGINS = {"torch_ddp_fp16": "zero_stage=0, fp16", "gemini": "zero_stage=3, fp16"}


def _with_presets(folder):
    """What each prints; in one job, because starting one takes longer."""
    train, options = importlib.import_module("train"), importlib.import_module("options")
    printed = {}
    for name in PLUGINS:
        set_seed(42)  # as the start of the script does
        flags = ("--epochs", "1", "--max-samples", "20", "--batch-size", "10", "--output", str(folder / name))
        with redirect_stdout(io.StringIO()) as stdout, redirect_stderr(io.StringIO()):
            train.train(options.parse_args([*flags, "--plugin", name]), DistCoordinator())
        printed[name] = stdout.getvalue()
    return printed


def test_it_trains_with_presets_by_name(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    printed, _ = run_ranks(partial(_with_presets, tmp_path), 2)
    for name, how in PLUGINS.items():
        assert f"Layout: tp=1 x pp=1 x dp=2, {how}\n" in printed[name]
        assert re.search(r"Epoch \[1\]: held-out accuracy", printed[name])
        assert "by plain transformers:" in printed[name]


def _by_loop_and_by_trainer(folder):
    """The losses of every step of the script's own loop, and of the Trainer on the same parts."""
    script, options = importlib.import_module("train"), importlib.import_module("options")
    flags = ("--epochs", "1", "--max-samples", "60", "--batch-size", "15", "--num-microbatches", "2")
    args, losses = options.parse_args([*flags, "--output", str(folder)]), []
    execute = Booster.execute_pipeline

    def noted(self, data_iter, model, criterion=None, optimizer=None, *more, **options):
        result = execute(self, data_iter, model, criterion, optimizer, *more, **options)
        if optimizer is not None:
            losses.append(result["loss"].item())
        return result

    Booster.execute_pipeline = noted
    set_seed(42)
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        script.train(args, DistCoordinator())
    by_loop = losses.copy()
    losses.clear()
    set_seed(42)
    splits = script.load_splits(args.dataset, args.max_samples)
    model, processor = script.build_model(args.model, splits.label_names)
    train_set, _ = splits.with_processor(processor)
    plugin = script.make_plugin(args, 2)
    loader = plugin.prepare_dataloader(train_set, batch_size=args.batch_size, shuffle=True, seed=args.seed)
    optimizer = HybridAdam(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    steps = args.epochs * len(loader)
    schedule = CosineAnnealingWarmupLR(optimizer, total_steps=steps, warmup_steps=int(args.warmup_ratio * steps))
    booster = Booster(plugin=plugin)
    Trainer(booster, booster.boost(model, optimizer, script.model_loss, loader, schedule)).fit(epochs=args.epochs)
    return by_loop, losses


def test_the_trainers_loss_curve_is_that_of_the_loop(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    for by_loop, by_trainer in run_ranks(partial(_by_loop_and_by_trainer, tmp_path), 2):
        assert len(by_loop) == 4
        assert by_trainer == by_loop


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            ["--plugin", "gemini", "--pp-size", "2"],
            "--pp-size is of --plugin hybrid_parallel: leave it out with gemini",
        ),
        (
            ["--plugin", "torch_ddp_fp16", "--precision", "bf16"],
            "is torch_ddp with --precision fp16: leave --precision",
        ),
    ],
)
def test_flags_of_another_plugin_are_refused(monkeypatch, capsys, flags, text):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    with pytest.raises(SystemExit):
        importlib.import_module("options").parse_args(flags)
    assert text in capsys.readouterr().err


def test_an_unknown_plugin_and_an_impossible_layout_give_one_message(tmp_path):
    job = run_script(2, SCRIPT, "--plugin", "magic", "--max-samples", "20")
    assert job.returncode != 0
    assert "plugin is one of gemini, hybrid_parallel" in job.stderr
    job = run_script(1, SCRIPT, "--pp-size", "2", "--max-samples", "20")
    assert "world size must be a multiple of tp_size * pp_size: got world_size=1" in job.stderr
