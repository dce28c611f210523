"""Runs go on in new processes as they would have in the old ones, bit for bit, twice in a row."""

import pytest
from plugins.resume_matrix import cases, outcomes

# Of each layout, schedule, precision, stage of ZeRO and model one; all of them together are `make resume`.
CHOSEN = (
    "pp2 zb-h1 bf16",
    "pp2 interleaved fp32",
    "tp2 bf16",
    "dp2 zero 1 fp16",
    "dp2 zero 3 fp32",
    "dp2 batch norm workers (0, 2, 0)",
)


@pytest.mark.timeout(280)
def test_new_processes_go_on_as_the_old_ones_would():
    chosen = [case for case in cases() if case.name in CHOSEN]
    assert outcomes(chosen, timeout_s=100) == dict.fromkeys(CHOSEN, "")
