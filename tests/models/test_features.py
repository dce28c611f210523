"""A few models with images, router losses and packed rows at every run of the tests; all: ``make models-features``."""

import pytest
from models.features import CASES, compare, expected_step, part

SOME = {
    "qwen3_vl, none to three images": "pp2",
    "jetmoe, router losses": "pp2",
    "llama, packed rows": "tp2pp2",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "layout"), SOME.items(), ids=list(SOME))
def test_images_router_losses_and_packed_rows_train_right(name, layout):
    made = next(case for case in CASES if case.name == name).build()
    result = compare(made, expected_step(made), layout)
    assert result["right"], f"{layout}: {result['error']}"


def test_the_page_counts_cases_that_are_right():
    right, wrong = {"right": True}, {"right": False, "error": "DataError: no | here"}
    one = {"name": "a, videos", "builds": True, "class": "A", "pp2": right, "zb-v": right, "tp2": wrong}
    text = part([one | {"tp2pp2": right, "zero3": right}, {"name": "b", "builds": False, "reason": "no"}])
    assert "| right, of 1 cases | 1 | 1 | 0 | 1 | 1 |" in text
    assert "| a, videos | tp2 | DataError: no \\| here |" in text
