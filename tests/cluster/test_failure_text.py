import re
from pathlib import Path

import pytest
import torch
from torch import nn

from hybridpp.cluster import Loopback
from hybridpp.cluster.failure_text import failure_line, failure_text
from hybridpp.errors import ConfigError, PartitionError

HERE = Path(__file__).name


def raised(function):
    """The error that ``function`` raises, as the interpreter would get it."""
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def through_hybridpp(function):
    """Calls ``function`` as hybridpp calls a user's model."""
    return raised(lambda: Loopback(1).run(function))


def shapes_that_do_not_fit():
    nn.Linear(3, 2)(torch.ones(2, 4))


def test_of_a_users_model_only_its_own_frames_are_shown():
    text = failure_text(through_hybridpp(shapes_that_do_not_fit), 3, 8)
    assert text.startswith("hybridpp: rank 3 of 8 failed.\nTraceback (most recent call last):\n")
    assert re.search(r"\[\d frames of hybridpp: HYBRIDPP_FULL_TRACEBACK=1 shows them\]", text)
    assert re.search(r"\[\d frames of torch: HYBRIDPP_FULL_TRACEBACK=1 shows them\]\nRuntimeError: mat1 and mat2", text)
    assert "nn.Linear(3, 2)(torch.ones(2, 4))" in text
    assert "loopback.py" not in text
    assert "/nn/modules/" not in text


def test_all_frames_are_shown_where_it_is_asked_for():
    text = failure_text(through_hybridpp(shapes_that_do_not_fit), 0, 1, full=True)
    assert text.startswith("Traceback (most recent call last):\n")
    assert "loopback.py" in text
    assert "/nn/modules/linear.py" in text


def test_an_error_of_hybridpp_is_its_text_and_where_it_was_called():
    def wrong_setting():
        raise ConfigError("pp_size is at least 1: got 0. Use 1.")

    error = through_hybridpp(wrong_setting)
    error.add_note("hybridpp: in action 1F0")
    lines = failure_text(error, 0, 2).splitlines()
    assert lines[0] == "hybridpp: rank 0 of 2 failed."
    assert lines[-2:] == ["ConfigError: pp_size is at least 1: got 0. Use 1.", "hybridpp: in action 1F0"]
    assert any(f'{HERE}", line' in line and line.endswith("in wrong_setting") for line in lines)
    assert "Traceback" not in "".join(lines)
    assert len(lines) <= 9


def test_an_internal_error_is_shown_completely():
    # As if hybridpp called torch with nonsense: no code of the user is below its own.
    error = raised(lambda: Loopback("many"))
    text = failure_text(error, 0, 1)
    assert "loopback.py" in text
    assert "shows them" not in text


def test_what_the_users_code_raised_before_is_shown_with_it():
    def traced():
        try:
            shapes_that_do_not_fit()
        except RuntimeError as error:
            raise PartitionError("the model cannot be traced") from error

    error = through_hybridpp(traced)
    # The cause has the frames of the model only where hybridpp called it.
    error.__cause__ = through_hybridpp(shapes_that_do_not_fit)
    text = failure_text(error, 0, 1)
    assert text.index("RuntimeError: mat1") < text.index("That is why:") < text.index("PartitionError: the model")


def test_chains_of_users_errors_stay():
    def chained():
        try:
            {}["missing"]
        except KeyError as error:
            raise ValueError("no such key") from error

    def while_handling():
        try:
            {}["missing"]
        except KeyError:
            raise ValueError("no such key")  # noqa: B904

    assert "direct cause" in failure_text(raised(chained), 0, 1)
    assert "During handling" in failure_text(raised(while_handling), 0, 1)


def test_the_end_of_the_data_says_what_to_do():
    text = failure_text(through_hybridpp(lambda: next(iter(()))), 0, 1)
    assert "StopIteration: the data ended, and the script did not catch it. Take at most len(dataloader) steps" in text
    assert failure_line(StopIteration()).startswith("StopIteration: the data ended")


@pytest.mark.parametrize(("error", "line"), [(OSError("a\n  b"), "OSError: a b"), (KeyError(), "KeyError")])
def test_a_line(error, line):
    assert failure_line(error) == line


def test_the_interpreters_own_format_is_kept_for_what_is_the_users_alone():
    error = raised(lambda: 1 / 0)
    text = failure_text(error, 0, 1)
    assert text.startswith("Traceback (most recent call last):\n")
    assert text.endswith("ZeroDivisionError: division by zero\n")
    assert "~~^~~" in text


class Broken(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        raise KeyError("image 1 is broken")


def test_of_a_dataloaders_worker_the_users_frames_are_shown():
    loader = torch.utils.data.DataLoader(Broken(), num_workers=1)
    text = failure_text(through_hybridpp(lambda: next(iter(loader))), 0, 2)
    assert "loader))), 0, 2)" in text
    assert "Caught KeyError in DataLoader worker process 0." in text
    assert 'raise KeyError("image 1 is broken")' in text
    assert text.splitlines()[-2] == "KeyError: 'image 1 is broken'"
    assert text.splitlines()[-1].startswith("hybridpp: with num_workers=0 the dataset runs in the rank itself")
    assert "_worker_loop" not in text
    assert len(text.splitlines()) < 20


def test_ctrl_c_is_one_line_that_says_where_the_script_was():
    def interrupted():
        raise KeyboardInterrupt

    try:
        Loopback(1).run(interrupted)
    except KeyboardInterrupt as error:
        text = failure_text(error, 1, 4)
    assert re.fullmatch(rf"hybridpp: rank 1 of 4 was interrupted \(Ctrl-C\), at .*{HERE}:\d+ in interrupted\n", text)


@pytest.mark.parametrize("is_caught_late", [False, True])
def test_of_a_killed_worker_its_process_and_signal_are_told(is_caught_late):
    def fail():
        try:
            raise RuntimeError("DataLoader worker (pid 4711) is killed by signal: Killed. ")
        except RuntimeError as error:
            if is_caught_late:
                raise RuntimeError("DataLoader worker (pid(s) 4711) exited unexpectedly") from error
            raise

    text = failure_text(through_hybridpp(fail), 1, 2)
    assert text.startswith("hybridpp: rank 1 of 2 failed.\n")
    assert "(process 4711) has ended: killed by signal: Killed. Where nobody killed it" in text
    assert "ran out of memory" in text
    assert "Traceback" not in text
    assert f'{HERE}", line' in text
