"""One mistake is one message, however many ranks make it; and it shows the user's own code."""

import re
from datetime import timedelta
from pathlib import Path

import hybridpp_plugins
import pytest
from processes import run_script
from support import ROOT
from torch.distributed import TCPStore

import hybridpp

SCRIPT = ROOT / "tests/scripts/mistaken.py"


def printed(mistake, monkeypatch, tmp_path, num_ranks=8):
    """What the ranks print to standard error, without what they only warn of."""
    # As under torchrun: before the ranks have met, a folder of the host tells them who was the first.
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0" / "error.json"))
    # Its store outlives the ranks.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("AGENT_PORT", str(store.port))
    job = run_script(num_ranks, SCRIPT, mistake, until_all_end=True)
    assert job.returncode != 0
    lines = job.stderr.splitlines(keepends=True)
    return "".join(line for line in lines if "WARNING" not in line)


@pytest.mark.parametrize(
    ("mistake", "num_ranks", "last"),
    [
        ("backend", 2, "ConfigError: backend is one of nccl, gloo: got 'glow'."),
        ("setting", 4, "ConfigError: world size must be a multiple of tp_size * pp_size: got world_size=4, "),
        ("data", 4, "StopIteration: the data ended, and the script did not catch it. "),
        ("path", 4, "FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/part-"),
    ],
)
def test_a_mistake_of_all_ranks_is_one_message_of_a_few_lines(mistake, num_ranks, last, monkeypatch, tmp_path):
    text = printed(mistake, monkeypatch, tmp_path, num_ranks)
    assert re.match(rf"hybridpp: rank \d of {num_ranks} failed.\n", text)
    lines = text.splitlines()
    assert lines[-1].startswith(last)
    assert len(lines) <= 9
    assert text.count("mistaken.py") == 1


def test_a_bug_in_the_users_model_shows_their_part_of_the_traceback_once(monkeypatch, tmp_path):
    text = printed("model", monkeypatch, tmp_path, num_ranks=4)
    assert text.count("Traceback") == text.count("mat1 and mat2 shapes cannot be multiplied") == 1
    assert re.match(r"hybridpp: rank [13] of 4 failed.\n", text), "a rank of the second stage"
    assert "return super().forward(torch.cat([x, x], dim=1))" in text
    assert text.splitlines()[-2:] == [
        "hybridpp: in model(*(Tensor[1, 8],), **{})",
        "hybridpp: in action 1F0 (stage, kind, micro-batch)",
    ]
    library = [str(Path(module.__file__).parent) for module in (hybridpp, hybridpp_plugins)]
    assert not any(f"{folder}/" in text for folder in library), "none of this library's frames"


def test_a_killed_rank_is_named_by_one_line_of_another(monkeypatch, tmp_path):
    text = printed("killed", monkeypatch, tmp_path)
    assert re.fullmatch(r"hybridpp: rank \d of 8 ends: PeerError: .*rank 5 \(group [\w ]+\) is gone: [^\n]*\n", text)
