import csv
import re
import warnings
from types import SimpleNamespace

import pytest
from schedule.oracle import every_schedule

from hybridpp.errors import ScheduleError
from hybridpp.schedule import check_program, load_schedule, lower, one_f_one_b, render, save_schedule, zb_h1


def torch_schedules():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.pipelining import schedules
    return schedules


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("suffix", [".csv", ".json", ".CSV"])
def test_what_is_saved_is_loaded(tmp_path, suffix):
    path = tmp_path / f"plan{suffix}"
    for name, programs in every_schedule(ranks=(1, 3), microbatches=(1, 5), chunks=(1, 2)):
        save_schedule(programs, str(path))
        assert load_schedule(str(path)) == programs, name


def test_a_csv_has_a_row_per_rank_and_an_action_per_cell(tmp_path):
    save_schedule(one_f_one_b(2, 2), tmp_path / "plan.csv")
    assert (tmp_path / "plan.csv").read_bytes() == b"0F0,0F1,0B0,0B1\r\n1F0,1B0,1F1,1B1\r\n"
    save_schedule(one_f_one_b(2, 2), tmp_path / "plan.json")
    assert (tmp_path / "plan.json").read_text() == (
        '{\n  "ranks": [\n    ["0F0", "0F1", "0B0", "0B1"],\n    ["1F0", "1B0", "1F1", "1B1"]\n  ]\n}\n'
    )


def test_idle_time_and_communication_are_left_out(tmp_path):
    programs = zb_h1(3, 4)
    save_schedule(lower(programs), tmp_path / "lowered.csv")
    assert load_schedule(tmp_path / "lowered.csv") == programs
    path = write(
        tmp_path / "plan.csv", "0UNSHARD,0F0,,0SEND_F0, ,0RECV_B0, 0B0,0REDUCE_GRAD,0RESHARD\n,1F0,1B0,,\n,,\n\n"
    )
    assert render(load_schedule(path)) == "rank 0 | 0F0 0B0\nrank 1 | 1F0 1B0\n"


def test_a_file_from_a_spreadsheet_begins_with_a_mark(tmp_path):
    path = tmp_path / "plan.csv"
    path.write_bytes(b"\xef\xbb\xbf0F0,0B0\r\n")
    assert render(load_schedule(path)) == "rank 0 | 0F0 0B0\n"


def test_a_forward_and_a_backward_that_torch_runs_together_become_two(tmp_path):
    path = write(tmp_path / "plan.csv", "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n")
    assert render(load_schedule(path)) == "rank 0 | 0F0 0F1 0B0 0B1\n"


def test_torch_reads_our_csv_and_writes_the_same(tmp_path):
    torchs = torch_schedules()
    for name, programs in every_schedule(ranks=(2, 3), microbatches=(1, 5), chunks=(1, 2)):
        save_schedule(programs, tmp_path / "ours.csv")
        reader = SimpleNamespace(pipeline_order={}, _validate_and_set_stage_mapping=lambda order: None)
        torchs.PipelineScheduleMulti._load_csv(reader, str(tmp_path / "ours.csv"))
        stages = 1 + max(action.stage for row in programs for action in row)
        torchs._validate_schedule(reader.pipeline_order, len(programs), stages, 1 + max(a[2] for a in programs[0]))
        torchs.PipelineScheduleMulti._dump_csv(reader, str(tmp_path / "theirs.csv"))
        assert load_schedule(tmp_path / "theirs.csv") == programs, name


@pytest.mark.parametrize(
    ("name", "p", "m", "settings"),
    [
        ("ScheduleLoopedBFS", 4, 6, {"_stages": [None, None]}),
        ("ScheduleInterleaved1F1B", 2, 6, {"microbatches_per_round": 2}),
        ("ScheduleInterleavedZeroBubble", 2, 6, {"microbatches_per_round": 2}),
        ("ScheduleZBVZeroBubble", 3, 7, {"num_stages": 6}),
        ("ScheduleDualPipeV", 2, 5, {}),
    ],
)
def test_torchs_schedules_with_two_stages_per_rank_can_be_loaded_and_run(tmp_path, name, p, m, settings):
    schedule = getattr(torch_schedules(), name)
    self = SimpleNamespace(n_local_stages=2, _n_local_stages=2, pp_group_size=p, _n_microbatches=m, **settings)
    with (tmp_path / "plan.csv").open("w", newline="") as file:
        csv.writer(file).writerows(schedule._calculate_single_rank_operations(self, rank) for rank in range(p))
    programs = load_schedule(tmp_path / "plan.csv")
    check_program(programs, num_stages=2 * p, num_microbatches=m)


@pytest.mark.parametrize(
    ("file", "content", "text"),
    [
        (
            "plan.csv",
            "0F0,0F1\n1F0,,1X1\n",
            "plan.csv, rank 1, cell 2: an action is written like 2F0 (stage, one of F, B, I, W, ",
        ),
        ("plan.csv", "(0F0;zz)OVERLAP_F_B\n", "plan.csv, rank 0, cell 0: an action is written like 2F0"),
        ("plan.json", '{"ranks": [["0F0"], ["1F0", "B"]]}', "plan.json, rank 1, cell 1: an action is written like"),
        (
            "plan.json",
            "[",
            'plan.json holds no schedule: it is no JSON: Expecting value: line 1 column 2 (char 1). Write it as {"ra',
        ),
        (
            "plan.json",
            '{"ranks": [], "ranks": []}',
            "plan.json holds no schedule: the key 'ranks' is there twice",
        ),
        ("plan.json", '[["0F0"]]', 'plan.json has no list of cells for each rank. Write it as {"ranks": [["0F0", "0B0'),
        ("plan.json", '{"ranks": ["0F0"]}', "plan.json has no list of cells for each rank."),
        ("plan.json", '{"ranks": [["0F0", 1]]}', "plan.json has cells that are not strings."),
        ("plan.yaml", "", "a schedule's file is .csv or .json: got "),
    ],
)
def test_what_cannot_be_read(tmp_path, file, content, text):
    with pytest.raises(ScheduleError, match=re.escape(text)):
        load_schedule(write(tmp_path / file, content))


def test_a_csv_that_is_no_text(tmp_path):
    (tmp_path / "plan.csv").write_bytes(b"\xff\xfe0F0")
    with pytest.raises(ScheduleError, match=re.escape("plan.csv is not a CSV file: 'utf-8' codec can't decode")):
        load_schedule(tmp_path / "plan.csv")


def test_a_name_that_cannot_be_saved_to(tmp_path):
    with pytest.raises(ScheduleError, match=re.escape("a schedule's file is .csv or .json: got ")):
        save_schedule(one_f_one_b(1, 1), tmp_path / "plan")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_schedule(tmp_path / "plan.csv")
