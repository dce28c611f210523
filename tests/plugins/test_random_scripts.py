"""Some of the scripts of ``make scripts``, and what their comparison finds."""

from dataclasses import replace

import pytest
import torch
from plugins.random_scripts import NUM_STEPS, Found, Script, drawn, faults, in_plain_torch, verdict

PAIRS = Script(
    style="two inputs", loss="torch's", optimizer="adamw", precision="fp32", dp=2, tp=1, pp=2,
    settings={"schedule": "zb-v", "num_microbatches": 4, "zero_stage": 1}, between=("evaluate", "set lr"),
)  # fmt: skip
# Together they cover what a script may consist of, with the quickest models.
PROGRAMS = [
    PAIRS,
    replace(
        PAIRS, style="regression", loss="masked", pp=1, form="list or mapping", between=("swap", "skip"),
        settings={"zero_stage": 3, "microbatch_size": 2, "max_norm": 0.3},
    ),
    replace(
        PAIRS, style="classifier, labels missing", loss="smoothed", optimizer="momentum", precision="bf16",
        dp=2, tp=2, pp=1, settings={"num_microbatches": 4, "zero_stage": 3}, between=("averaged",),
    ),
    replace(
        PAIRS, style="gpt with loss", loss="its own", optimizer="lookahead", precision="fp16", pp=1,
        settings={"num_microbatches": 2, "zero_stage": 2, "offload_optimizer": 1.0}, between=("resume", "freeze"),
    ),
]  # fmt: skip


def test_a_number_gives_the_same_script_again():
    assert [str(drawn(number)) for number in range(50)] == [str(drawn(number)) for number in range(50)]
    assert len({str(drawn(number)) for number in range(50)}) == 50


@pytest.mark.parametrize("script", PROGRAMS, ids=lambda script: script.style)
def test_a_script_is_that_of_plain_torch(script):
    assert verdict(script) == "equal"


def test_what_cannot_be_right_is_refused_by_name():
    refused = verdict(replace(PAIRS, optimizer="adafactor", tp=2, dp=1))
    assert refused.startswith("refused ConfigError: Adafactor")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_wrong_weight_a_wrong_loss_and_a_missing_weight_are_found(precision):
    script = replace(PAIRS, precision=precision, dp=1, pp=1, settings={}, between=())
    plain = in_plain_torch(script)
    right = Found(weights=plain.weights, losses=[losses[0] for losses in plain.losses])
    assert faults(script, [right], plain, plain) == []
    wrong = {**plain.weights, "head.bias": plain.weights["head.bias"] + 0.05}
    [fault] = faults(script, [replace(right, weights=wrong)], plain, plain)
    assert "head.bias is off by" in fault
    assert faults(script, [replace(right, losses=[2.0] * NUM_STEPS)], plain, plain)[0].startswith("loss 0: 2.0")
    del wrong["head.bias"]
    assert faults(script, [replace(right, weights=wrong)], plain, plain) == ["weights head.bias is missing"]


def test_ranks_that_hold_different_copies_are_found():
    script = replace(PAIRS, pp=1, settings={}, between=())
    plain = in_plain_torch(script)
    ranks = [
        Found(weights=dict(plain.weights), losses=[losses[rank] for losses in plain.losses], replica=rank)
        for rank in range(2)
    ]
    ranks[1].weights["head.bias"] = plain.weights["head.bias"] + torch.finfo(torch.float32).eps
    assert faults(script, ranks, plain, plain) == ["weights head.bias differ between ranks"]
