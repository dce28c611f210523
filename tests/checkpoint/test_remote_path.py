"""Checkpoints on remote file systems: the same protocol, one request per file, the manifest last."""

import re
import secrets

import fsspec
import pytest
import torch
from checkpoint_folders import full_holding, save, tensors_of
from run_checkpoints import on_layout, tensors_in
from support import assert_same
from torch import nn

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.checkpoint.commit import committed_steps, open_step, remove_old, step_folder
from hybridpp.checkpoint.manifest import MANIFEST
from hybridpp.checkpoint.reader import fill, plan_reads, verify_file
from hybridpp.checkpoint.remote_path import RemotePath, as_path
from hybridpp.checkpoint.writer import Holding
from hybridpp.cli import main
from hybridpp.errors import CheckpointError, ConfigError

MEMORY = fsspec.filesystem("memory")


@pytest.fixture
def url():
    name = f"memory://runs-{secrets.token_hex(4)}/run"
    yield name
    MEMORY.rm(name, recursive=True)


def files(url):
    return sorted(name.rpartition("/")[2] for name in MEMORY.find(url))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_saved_to_a_url_goes_on_in_another_layout(url, tmp_path, asynchronous):
    def first(make):
        run = make()
        run.steps([0])
        run.booster.save(url, step=1, asynchronous=asynchronous)
        run.booster.save(tmp_path, step=1)
        run.booster.save(url, step=2, keep_last=1)

    on_layout(first, pp_size=2, dp_size=2, zero_stage=1)
    assert {name.split(".")[0] for name in files(url)} == {"manifest", *(f"rank-0000{rank}" for rank in range(4))}
    assert committed_steps(as_path(url)) == [2], "the older one was removed"

    def go_on(path):
        def run(make):
            one = make()
            return one.booster.resume(path).step, one.steps([1])

        return on_layout(run, tp_size=2)

    assert_same(tensors_in(as_path(url), 2), tensors_in(tmp_path, 1))
    assert [losses for _, losses in go_on(url)] == [losses for _, losses in go_on(tmp_path)]


def test_the_manifest_is_written_last_and_removed_first(url, monkeypatch):
    calls = []
    for name in ("pipe_file", "put_file", "rm_file"):
        real = getattr(type(MEMORY), name)

        def noted(self, *arguments, real=real, name=name, **options):
            calls.append((name, next(a for a in arguments if "runs-" in str(a)).rpartition("/")[2]))
            return real(self, *arguments, **options)

        monkeypatch.setattr(type(MEMORY), name, noted)
    path = as_path(url)
    manifests = [save(path, step) for step in (1, 2)]
    written = [name for kind, name in calls if kind != "rm_file"]
    for manifest in manifests:
        begin, *data, end = written[: len(manifest.files) + 2]
        assert begin == f".saving-{manifest.save_id}"
        assert (sorted(data), end) == (sorted(manifest.files), MANIFEST)
        del written[: len(manifest.files) + 2]
    calls.clear()
    assert remove_old(path, manifests[1], 1) == []
    assert calls[0] == ("rm_file", MANIFEST)
    assert {name for _, name in calls[1:]} == set(manifests[0].files)
    assert committed_steps(path) == [2]
    assert not as_path(f"{url}/step-00000001").exists()


def test_parts_are_read_by_their_ranges(url, monkeypatch):
    tensor = torch.randn(64, 48, 600)
    flags, empty, number = torch.randint(0, 2, (7,)).bool(), torch.empty(0, 3), torch.tensor(2.5)
    holdings = [full_holding(name, t) for name, t in zip("abcd", (tensor, flags, empty, number), strict=True)]
    manifest = save(as_path(url), 1, holdings=holdings, file_bytes=2**30)
    read = []
    real = RemotePath.read_ranges

    def noted(path, ranges):
        read.append(sum(end - start for start, end in ranges))
        return real(path, ranges)

    monkeypatch.setattr(RemotePath, "read_ranges", noted)
    for index in ((slice(8, 16),), (slice(None), slice(6, 48)), (slice(3, 5), slice(7, 9), slice(100, 200)), ()):
        part = tensor[index]
        offsets = [s.indices(n)[0] for s, n in zip(index, tensor.shape, strict=False)] + [0] * (3 - len(index))
        box = type(Holding.of_all("x", part).parts[0][0])(tuple(offsets), tuple(part.shape))
        target = torch.zeros(part.shape)
        read.clear()
        wanted = Holding("a", torch.float32, tuple(tensor.shape), [(box, target)])
        fill(step_folder(as_path(url), 1), plan_reads(manifest.tensors, [wanted]))
        assert torch.equal(target, part)
        assert sum(read[2:]) <= max(1.05 * target.nbytes, 2 * 48 * 600 * 4)
    targets = [torch.zeros_like(flags), torch.empty_like(empty), torch.zeros_like(number)]
    wanted = [full_holding(name, target) for name, target in zip("bcd", targets, strict=True)]
    fill(step_folder(as_path(url), 1), plan_reads(manifest.tensors, wanted))
    assert torch.equal(targets[0], flags)
    assert targets[2] == number


def test_damage_is_found_and_named(url):
    manifest = save(as_path(url), 1)
    folder, name = step_folder(as_path(url), 1), next(iter(manifest.files))
    data = bytearray((folder / name).read_bytes())
    data[-1] ^= 1
    (folder / name).write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match=f"{name} is damaged"):
        verify_file(folder, manifest, name)
    (folder / name).write_bytes(b"\xff" * len(data))
    targets = [full_holding(key, torch.zeros_like(tensor)) for key, tensor in tensors_of(0).items()]
    with pytest.raises(CheckpointError, match=r"memory:.* cannot be read as a safetensors file: it has no header"):
        fill(folder, plan_reads(manifest.tensors, targets))
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        open_step(as_path(url), 1)


def test_a_backend_that_fails_is_one_error_and_costs_nothing(url, monkeypatch):
    class BackendError(Exception):
        """Of a library that has no OSError."""

    def save_twice(make):
        run = make()
        run.booster.save(url, step=1)
        if run.booster.plugin.layout.world.rank == 1:
            monkeypatch.setattr(RemotePath, "upload", lambda *_: RemotePath._try(as_path(url), fail))
        with pytest.raises(CheckpointError, match=r"cannot be written: BackendError: slow down"):
            run.booster.save(url, step=2)
        return run.booster.resume(url).step

    def fail():
        raise BackendError("slow down")

    assert on_layout(save_twice, dp_size=2, zero_stage=1) == [1, 1]


def test_the_command_takes_urls(url, capsys, tmp_path):
    booster = Booster(plugin=HybridParallelPlugin())
    booster.boost(nn.Linear(2, 3))
    booster.save(url, step=4)
    torch.save(nn.Linear(2, 3).state_dict(), tmp_path / "x.pt")
    for arguments, text in (
        (("list", url), r"^ +4 \| .* \| complete$"),
        (("verify", url), "intact"),
        (("show", url), r"step 4 in memory:.*/run/step-00000004"),
        (("export", url, str(tmp_path / "hf"), "--to", "hf"), "Linear"),
        (("reshard", url, f"{url}/again", "--ranks", "2"), "step 4"),
        (("import", str(tmp_path / "x.pt"), f"{url}/other"), "2 tensors"),
        (("list", f"{url}/other"), r"^ +0 \| "),
    ):
        assert main(["checkpoint", *arguments]) == 0
        assert re.search(text, capsys.readouterr().out, re.M)
    assert main(["checkpoint", "list", f"{url}/none"]) == 2
    assert "there is no folder " in capsys.readouterr().err
    assert main(["checkpoint", "export", url, f"{url}/out", "--to", "hf"]) == 2
    assert "exports are written to local paths: got memory://" in capsys.readouterr().err


def test_local_urls_are_local_paths_which_are_synced(tmp_path):
    for prefix in ("file://", "local://"):
        booster = Booster(plugin=HybridParallelPlugin())
        booster.boost(nn.Linear(2, 3))
        booster.save(f"{prefix}{tmp_path}", step=1)
        assert as_path(f"{prefix}{tmp_path}") == tmp_path
        assert booster.resume(f"{prefix}{tmp_path}").step == 1
    assert committed_steps(tmp_path) == [1]


def test_what_is_not_installed_or_not_known_is_named(monkeypatch):
    def missing(url):
        raise ImportError("Install s3fs to access S3")

    booster = Booster(plugin=HybridParallelPlugin())
    model = booster.boost(nn.Linear(2, 3)).model
    with pytest.raises(ConfigError, match=r"no-such://x cannot be used: .*no-such.* Pass a local path, or a protocol"):
        booster.save("no-such://x", step=1)
    with pytest.raises(ConfigError, match=r"from local paths: got s3://bucket/x. Pass one, or use booster.save and"):
        booster.save_model(model, "s3://bucket/x")
    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(ConfigError, match=r"s3://bucket/x needs a package that is not installed: Install s3fs"):
        booster.resume("s3://bucket/x")
