"""Some of the cases of ``make fuzz``, and single ones that it found."""

import pytest
from cli.fuzz_command_lines import case, make_files, run

from hybridpp.cli import main
from hybridpp.errors import ConfigError, ScheduleError
from hybridpp.schedule import make_schedule
from hybridpp.simulate import Costs, simulate

NUM_CASES = 40


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz") / "files"
    make_files(folder)
    return folder


def test_command_lines_end_with_a_documented_code_and_two_lines(files):
    found = {number: run(case(0, number), files) for number in range(NUM_CASES)}
    assert [(case(0, number), why) for number, (what, why) in found.items() if what in ("raw", "endless")] == []
    assert {"done", "refused"} <= {what for what, _ in found.values()}


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            "schedule 1f1b --stages 2 --microbatches 999999999",
            "a schedule has at most 131072 forward passes, over all stages",
        ),
        ("schedule check /dev/zero", "/dev/zero cannot be read: it is a device."),
        ("schedule check nested.json", "nested.json holds no schedule: it is nested too deep"),
        ("schedule check long.json", "long.json holds no schedule: Exceeds the limit"),
        ("simulate 1f1b --stages 2 --microbatches 4 --costs long.json", "this text holds no costs: Exceeds the limit"),
        ("simulate 1f1b --stages 2 --microbatches 4 --steps 999999999", "at most 2097152 actions are simulated: got"),
        ("partition --model broken.py:made --pp-size 2", "broken.py cannot be imported: SyntaxError: invalid syntax"),
        ("run /dev/zero", "/dev/zero is a device."),
        (f"simulate 1f1b --stages {'9' * 5000}", "invalid value for '--stages': a text of 5000 characters is not an"),
        (
            "checkpoint reshard run out --ranks 99999999",
            "a checkpoint is divided among at most 65,536 ranks: got 99999999.",
        ),
    ],
    ids=lambda text: text[:50],
)
def test_what_random_lines_found_is_refused(files, monkeypatch, capsys, line, told):
    monkeypatch.chdir(files)
    assert main(line.split()) == 2
    assert capsys.readouterr().err.startswith(f"hybridpp: {told}")


def test_sizes_that_never_end_are_refused():
    with pytest.raises(
        ScheduleError, match=r"a schedule has at most 131072 forward passes, over all stages .*: got num_"
    ):
        make_schedule("zb-v", 2, 10**30)
    with pytest.raises(ConfigError, match=r"at most 2097152 actions are simulated: got num_steps=10+ of 8 actions "):
        simulate(make_schedule("1f1b", 2, 2), Costs(num_stages=2), 10**30)
