import re
from argparse import ArgumentTypeError

import pytest

from hybridpp.cli.argtypes import per_stage, positive


def test_a_count_is_an_integer_of_at_least_1():
    assert positive("12") == 12
    for text in ("0", "-1", "1.5", "two", ""):
        with pytest.raises(ArgumentTypeError, match=f"^{re.escape(repr(text))} is not an integer of at least 1$"):
            positive(text)


def test_one_number_is_for_all_stages_and_a_list_has_one_per_stage():
    assert per_stage("1.5") == 1.5
    assert per_stage("1,2.5") == (1.0, 2.5)
    with pytest.raises(ArgumentTypeError, match=r"^'1,x' is not a number, or one per stage as in 1,1,1,1\.5$"):
        per_stage("1,x")
