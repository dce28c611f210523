"""JSON that anyone may have written."""

import re

import pytest

from hybridpp.strict_json import parse_strictly

REFUSED = {
    '{"a": 1, "b": 2, "a": 3}': "the key 'a' is there twice",
    '{"a": [NaN]}': "NaN is there, which is no number of JSON",
    "[-Infinity]": "-Infinity is there",
    "[1e999]": "1e999 is there, which is too large for a number",
    "[" * 100_000: "it is nested too deep",
    '{"a": ': "it is no JSON: Expecting value",
    "": "it is no JSON",
    "1" * 5000: "integer string conversion",
}


@pytest.mark.parametrize("text", REFUSED, ids=[text[:12] for text in REFUSED])
def test_what_is_no_strict_json_is_refused_in_words(text):
    with pytest.raises(ValueError, match=re.escape(REFUSED[text])):
        parse_strictly(text)
    with pytest.raises(ValueError, match=re.escape(REFUSED[text])):
        parse_strictly(text.encode())


def test_all_else_is_read_as_json_has_it():
    assert parse_strictly(b'{"a": [1, -2.5e3, null, true, "\\u00e4"], "": {}}') == {
        "a": [1, -2500.0, None, True, "ä"],
        "": {},
    }
    with pytest.raises(ValueError, match="it is no JSON"):
        parse_strictly(b'"\xff"')
