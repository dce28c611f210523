"""Copies of weights on several ranks: one flipped bit is named on all ranks, and training raises no alarm."""

import re
from functools import partial

import pytest
import torch
from hybridpp_plugins.weight_check import WeightCheck, as_number
from plugins.test_host_reads import places
from plugins.zero_models import batches, on_layout, step

from hybridpp import HybridParallelPlugin
from hybridpp.cluster import current_world
from hybridpp.errors import ConfigError, UnequalWeightsError

EVERY, STEPS = 3, 6
SGD = partial(torch.optim.SGD, lr=0.05)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
NORM, LAST, MASTER = "blocks.0.norm.weight", "blocks.3.down.weight", "the fp32 master of "


@torch.no_grad()
def flip(tensor, element=0, bit=0):
    """Flip one bit of one element."""
    bits = tensor.detach().view(-1).view(INTEGERS[tensor.element_size()])
    bits[element] ^= torch.bitwise_left_shift(torch.ones((), dtype=bits.dtype), bit)


def in_weight(name):
    return lambda model, optimizer: flip(model.get_parameter(name), 3, 1)


def in_master(name):
    # Through numpy: what torch counts, the script may have written on purpose.
    return lambda model, optimizer: flip(torch.from_numpy(optimizer.target.tensors[name].detach().numpy()), 3, 1)


def trained(booster, model, optimizer, corrupt, rank, before):
    """Train; at the start of step ``before``, corrupt a rank. The step that raises, and its error."""
    for number, batch in enumerate(batches(STEPS, 2 * booster.plugin.dp_size), 1):
        if corrupt and number == before and current_world().rank == rank:
            corrupt(model, optimizer)
        try:
            step(booster, model, optimizer, batch)
        except UnequalWeightsError as error:
            return number, str(error)
        optimizer.step()
    return None


def found(layout, corrupt=None, rank=1, before=EVERY + 1):
    """What all ranks raise."""
    settings = {"check_weights_every": EVERY, "max_norm": 0.0, "num_microbatches": 2, "make_optimizer": SGD, **layout}
    first, *others = on_layout(partial(trained, corrupt=corrupt, rank=rank, before=before), **settings)
    assert others == [first] * len(others)
    return first


FP16 = {"precision": "fp16", "initial_scale": 8.0, "dp_size": 2}
LAYOUTS = {
    "dp2": {"dp_size": 2},
    "dp3 with a norm": {"dp_size": 3, "max_norm": 0.5},
    "tp2": {"dp_size": 1, "tp_size": 2},
    "pp2 dp2 fp16": {"pp_size": 2, **FP16},
    "zero 1": {"dp_size": 2, "zero_stage": 1},
    "zero 2 fp16": {"zero_stage": 2, **FP16},
    "zero 3 in sets": {"dp_size": 4, "zero_stage": 3, "zero_size": 2, "precision": "bf16"},
    "zero 3": {"dp_size": 2, "tp_size": 2, "zero_stage": 3},
    "offloaded": {"dp_size": 2, "precision": "bf16", "offload_optimizer": 1.0},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_training_raises_no_alarm(layout):
    assert found({**layout, "check_weights_every": 1}) is None


@pytest.mark.parametrize(
    ("layout", "corrupt", "rank", "before", "clause"),
    [
        ("dp2", in_weight(NORM), 1, 4, rf"{NORM} \(bucket 0\) differs between rank 0 and rank 1[. ]"),
        ("dp2", in_weight("blocks.1.up.bias"), 1, 4, r"blocks.1.up.bias \(frozen\) differs between rank 0 and rank 1"),
        ("dp3 with a norm", in_weight(LAST), 1, 6, rf"{LAST} \(bucket 0\) on rank 1 is not what it is on ranks 0, 2\."),
        ("dp3 with a norm", in_weight(LAST), 0, 6, rf"{LAST} \(bucket 0\) on rank 0 is not what it is on ranks 1, 2\."),
        ("tp2", in_weight(NORM), 1, 6, rf"{NORM} \(bucket \d\) differs between rank 0 and rank 1\."),
        ("pp2 dp2 fp16", in_weight(LAST), 3, 6, rf"{LAST} \(bucket \d\) differs between rank 1 and rank 3\."),
        ("pp2 dp2 fp16", in_master(NORM), 2, 6, rf"{MASTER}{NORM} \(bucket \d\) differs between rank 0 and rank 2\."),
        ("zero 1", in_weight(NORM), 0, 6, rf"{NORM} \(bucket 0\) differs between rank 0 and rank 1\."),
        ("zero 2 fp16", in_weight(NORM), 1, 6, rf"{NORM} \(bucket 0\) differs between rank 0 and rank 1\."),
        ("offloaded", in_master(LAST), 1, 4, rf"{MASTER}{LAST} \(bucket \d\) differs between rank 0 and rank 1[. ]"),
    ],
)  # fmt: skip
def test_a_flipped_bit_is_named_at_the_next_check(layout, corrupt, rank, before, clause):
    number, message = found(LAYOUTS[layout], corrupt, rank, before)
    assert number == 6
    assert re.search(f"in training step 6, before its update, {clause}", message), message
    assert "Resume from a checkpoint that was saved before step 3, where the last check was. If it comes" in message


def test_pieces_are_compared_between_the_sets_that_have_copies_of_them():
    def corrupt(model, optimizer):
        flip(next(iter(optimizer.target.tensors.values())))

    _, message = found(LAYOUTS["zero 3 in sets"], corrupt, 1, 6)
    assert re.search(r"the fp32 master of \S+ \(bucket \d\) differs between rank 1 and rank 3\.", message), message


def test_several_weights_are_counted_and_a_first_check_has_none_before():
    def corrupt(model, optimizer):
        in_weight(NORM)(model, optimizer)
        in_weight(LAST)(model, optimizer)

    number, message = found(LAYOUTS["dp3 with a norm"], corrupt, 2, 2)
    assert number == 3
    clause = rf"{NORM} \(bucket 0\) on rank 2 is not what it is on ranks 0, 1 \(and 1 more\)\. Start again, as"
    assert re.search(clause, message), message


def test_a_hash_that_was_wrong_once_is_an_error_too(monkeypatch):
    computed = WeightCheck.hashes

    def hashes(self, device):
        return computed(self, device) + float(current_world().rank == 1)

    monkeypatch.setattr(WeightCheck, "hashes", hashes)
    number, message = found(LAYOUTS["dp2"])
    assert number == 3
    assert "hashes of ranks 0, 1 differed, and do not when they are computed again" in message


def test_the_host_waits_for_the_device_no_more_often():
    for settings in ({"max_norm": 1.0, "tp_size": 1}, {"pp_size": 2}):
        assert places(check_weights_every=1, **settings) == [["host_copy.py:read"]] * settings.get("pp_size", 1)


def test_a_number_differs_wherever_one_bit_of_a_hash_does():
    hashes = torch.tensor([3, -(2**62) + 12345, 2**61])
    expected = as_number(hashes)
    for bit in range(64):
        changed = hashes.clone()
        flip(changed, 1, bit)
        number = as_number(changed)
        assert number != expected
        assert 0 <= number == int(number) < 2**52


def test_a_number_of_steps_below_zero_is_refused():
    with pytest.raises(ConfigError, match="check_weights_every must be at least 0: got check_weights_every=-1"):
        HybridParallelPlugin(check_weights_every=-1)
    with pytest.raises(ConfigError, match="must be an integer"):
        HybridParallelPlugin(check_weights_every=True)
