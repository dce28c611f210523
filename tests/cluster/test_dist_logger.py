import io
import logging
import re
import sys

import pytest
from tqdm import tqdm

from hybridpp.cluster import Loopback, disable_existing_loggers, get_dist_logger


@pytest.fixture
def loggers():
    """Makes loggers at level INFO; afterwards every logger has the level it had."""
    before = {name: logging.getLogger(name).level for name in list(logging.root.manager.loggerDict)}

    def make(*names):
        for name in names:
            logging.getLogger(name).setLevel(logging.INFO)

    yield make
    for name in list(logging.root.manager.loggerDict):
        logging.getLogger(name).setLevel(before.get(name, logging.NOTSET))


def quiet(*names):
    return [name for name in names if logging.getLogger(name).level == logging.WARNING]


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (None, ["[rank 0] loss 0.50", "[rank 1] loss 0.50", "[rank 2] loss 0.50"]),
        ([0], ["[rank 0] loss 0.50"]),
        ((1, 2), ["[rank 1] loss 0.50", "[rank 2] loss 0.50"]),
        ([], []),
    ],
)
def test_the_ranks_asked_for_speak_and_say_who_they_are(caplog, ranks, expected):
    caplog.set_level(logging.INFO, logger="hybridpp")
    Loopback(3).run(lambda: get_dist_logger().info("loss %.2f", 0.5, ranks=ranks))
    assert caplog.messages == expected


def unconfigure(monkeypatch):
    """As in a script that never heard of logging: pytest gives each test handlers of its own."""
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.WARNING)


def test_without_configuration_info_goes_to_standard_error(monkeypatch, capsys):
    unconfigure(monkeypatch)
    logger = get_dist_logger("hybridpp_script")
    logger.debug("hidden")
    logger.info("loss %.2f", 0.5)
    logger.warning("late", ranks=[1])
    assert not logger.isEnabledFor(logging.DEBUG)
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"\d\d:\d\d:\d\d INFO hybridpp_script: \[rank 0\] loss 0\.50\n", err)
    # Nothing was configured behind the script's back.
    assert not logging.root.handlers
    assert logging.getLogger("hybridpp_script").level == logging.NOTSET
    assert not logging.getLogger("hybridpp_script").handlers


def test_a_level_of_the_scripts_own_counts_without_handlers(monkeypatch, capsys):
    unconfigure(monkeypatch)
    logger = get_dist_logger("hybridpp_script.part")
    monkeypatch.setattr(logging.getLogger("hybridpp_script"), "level", logging.ERROR)
    logger.warning("hidden")
    logger.error("shown")
    assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setattr(logging.getLogger("hybridpp_script"), "level", logging.NOTSET)
    monkeypatch.setattr(logging.root, "level", logging.DEBUG)
    logger.debug("shown")
    assert "DEBUG hybridpp_script.part: [rank 0] shown" in capsys.readouterr().err


@pytest.mark.parametrize("early", [True, False])
def test_the_scripts_own_configuration_is_the_only_one(monkeypatch, capsys, early):
    unconfigure(monkeypatch)
    logger = get_dist_logger("hybridpp_script") if early else None
    stream = io.StringIO()
    logging.basicConfig(stream=stream, level=logging.WARNING, format="%(message)s")
    logger = logger or get_dist_logger("hybridpp_script")
    logger.info("hidden")
    logger.warning("shown")
    assert stream.getvalue() == "[rank 0] shown\n"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error", "critical"])
def test_every_level_takes_ranks_and_names_the_line_that_logs(caplog, level):
    caplog.set_level(logging.DEBUG, logger="hybridpp.x")
    getattr(get_dist_logger("hybridpp.x"), level)("here", ranks=[0])
    get_dist_logger("hybridpp.x").log(logging.INFO, "there")
    for record in caplog.records:
        assert (record.filename, record.funcName) == (
            "test_dist_logger.py",
            "test_every_level_takes_ranks_and_names_the_line_that_logs",
        )
    assert [record.name for record in caplog.records] == ["hybridpp.x"] * 2
    assert caplog.records[0].levelname == level.upper()


def test_silencing_spares_our_own_loggers(loggers):
    names = ("hybridpp", "hybridpp.cluster", "hybridpp_like", "noisy", "noisy.inner")
    loggers(*names)
    disable_existing_loggers()
    assert quiet(*names) == ["hybridpp_like", "noisy", "noisy.inner"]


def test_silencing_spares_a_logger_with_those_below_it(loggers):
    names = ("hybridpp", "kept.part", "kept.part.inner", "kept.partial", "kept")
    loggers(*names)
    disable_existing_loggers(exclude=["kept.part"])
    assert quiet(*names) == ["hybridpp", "kept.partial", "kept"]


def test_silencing_what_is_named_only(loggers):
    names = ("hybridpp", "one", "two")
    loggers(*names)
    disable_existing_loggers(include=["one", "hybridpp"])
    assert quiet(*names) == ["one"]


def test_silencing_writes_no_level_that_a_logger_has_anyway(loggers):
    loggers("above")
    logging.getLogger("above.below").setLevel(logging.NOTSET)
    logging.getLogger("quieter").setLevel(logging.ERROR)
    disable_existing_loggers()
    levels = {name: logging.getLogger(name).level for name in ("above", "above.below", "quieter")}
    assert levels == {"above": logging.WARNING, "above.below": logging.NOTSET, "quieter": logging.ERROR}
    assert logging.getLogger("transformers.modeling_utils").level == logging.NOTSET


def test_a_line_is_written_above_a_progress_bar(capsys, monkeypatch):
    monkeypatch.setattr(logging.root, "handlers", [])
    with tqdm(total=2, file=sys.stderr, miniters=1, mininterval=0) as bar:
        bar.update()
        get_dist_logger().info("loss 0.5")
        bar.update()
    lines = re.split(r"[\r\n]+", capsys.readouterr().err)
    assert [re.sub(r"^\S+ ", "", line) for line in lines if "loss" in line] == ["INFO hybridpp: [rank 0] loss 0.5"]
