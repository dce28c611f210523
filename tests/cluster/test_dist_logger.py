import logging

import pytest

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
