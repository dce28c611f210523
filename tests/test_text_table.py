from textwrap import dedent

from hybridpp.text_table import text_table


def test_columns_are_aligned_and_totals_stand_below_a_rule():
    rows = [("a", "10", "x"), ("long name", "5", "")]
    assert text_table(("name", "size", "note"), rows, totals=("sum", "15"), left=(0, 2)) + "\n" == dedent("""\
        name      | size | note
        ----------+------+-----
        a         |   10 | x
        long name |    5 |
        ----------+------+-----
        sum       |   15 |
    """)


def test_without_totals_the_last_line_is_a_row():
    assert text_table(("a", "b"), [("1", "2")]).splitlines() == ["a | b", "--+--", "1 | 2"]
