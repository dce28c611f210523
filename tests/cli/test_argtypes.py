import re

import pytest
import typer

from hybridpp.cli.argtypes import counts, integer, number, per_stage, positive
from hybridpp.errors import ConfigError


def refusal(parser, *arguments):
    with pytest.raises(typer.BadParameter) as raised:
        parser(*arguments)
    return str(raised.value)


def test_a_count_is_an_integer_of_at_least_1():
    assert positive("12") == 12
    assert positive(3) == 3  # typer passes defaults, too
    for text in ("0", "-1", "1.5", "two", ""):
        assert refusal(positive, text) == f"{text!r} is not an integer of at least 1."


def test_an_index_may_be_0():
    assert integer("0") == 0
    assert refusal(integer, "-1") == "'-1' is not an integer of at least 0."


def test_a_number_may_have_a_fraction():
    assert number("0.5") == 0.5
    assert refusal(number, "half") == "'half' is not a number."


def test_one_number_is_for_all_stages_and_a_list_has_one_per_stage():
    assert per_stage("--send-ms", "1.5") == 1.5
    assert per_stage("--send-ms", "1,2.5") == (1.0, 2.5)
    message = re.escape("'1,x' is not a number, or one per stage as in 1,1,1,1.5.")
    with pytest.raises(typer.BadParameter, match=f"^{message}$") as raised:
        per_stage("--send-ms", "1,x")
    assert raised.value.param_hint == "'--send-ms'"


def test_counts_are_integers_of_at_least_1_between_commas():
    assert counts("--tp-sizes", None) is None
    assert counts("--tp-sizes", "1, 2,4") == [1, 2, 4]
    for text, part in (("1,0", "0"), ("1,,2", ""), ("1,b", "b"), ("-1", "-1")):
        message = f"--tp-sizes takes integers of at least 1, separated by commas: got {part!r}. Write them as in 1,2,4."
        with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
            counts("--tp-sizes", text)
