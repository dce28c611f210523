"""What a manifest says beside tensors is checked as a whole: one wrong entry anywhere is found, and named."""

import copy
import re

import pytest

from hybridpp.checkpoint.schema import BrokenRuleError
from hybridpp.checkpoint.state_schema import check_state

LAYOUT = {"dp_size": 2, "pp_size": 1, "tp_size": 1, "zero_stage": 1}
OPTIMIZER = {
    "class": "AdamW",
    "settings": [{"lr": 0.1, "betas": {"$tuple": [0.9, 0.95]}}],
    "groups": [{"names": ["weight"]}],
    "state": {"weight": {"exp_avg": ["like"], "rows": ["full"], "step": ["value", 3]}},
    "counts": {"applied": 3, "skipped": 0, "last_skipped": False},
    "loss_scale": {"scale": 2.0**16, "clean_steps": 3, "overflows": 0, "settled": True},
}
PROGRESS = {"seed": 0, "num_steps": 3, "num_evaluations": 0}
MODEL = {
    "class": "Linear",
    "progress": PROGRESS,
    "extra_state": {"head._extra_state": {"$bytes": "AAAA"}},
    "optimizer": OPTIMIZER,
    "lr_scheduler": {"last_epoch": 3},
    "data": [0, 12, 1, 60, None],
    "origin": {"aliases": {}, "dtype": "float32", "other_dtypes": {}, "config": {"model_type": "vit"}},
}
RUN = {
    "models": [MODEL],
    "extras": {"best": 1.5},
    "generators": {"states": [{"python": 1}], "of_ranks": [0, 0]},
    "replicas_of_ranks": [0, 1],
}
KEYS = ["model0/weights/weight", "model0/optimizer/weight/exp_avg", "model0/optimizer/weight/rows"]
SPECIAL = "a value that this version cannot read"
WRONG = {
    "models.0.class": (3, "state.models[0].class is 3, and must be text"),
    "models.0.progress.seed": (2**64, "state.models[0].progress.seed is 18446744073709551616, and must be a whole"),
    "models.0.progress.more": (1, "state.models[0].progress has 'more', and may have seed, num_steps"),
    "models.0.extra_state.x": (1, "a name in state.models[0].extra_state is 'x', and must be one that ends in"),
    "models.0.extra_state.x_extra_state": ({"$bytes": "A"}, SPECIAL),
    "models.0.optimizer.settings": ([], "the optimizer's settings is 0, and must be those of 1 groups"),
    "models.0.optimizer.groups": ([{"names": ["a", "a"]}], "must be disjoint"),
    "models.0.optimizer.state.weight.rows": (["value", 1], "'model0/optimizer/weight/rows' is none that the optimizer"),
    "models.0.optimizer.state.weight.step": (["other"], "must be ['like'], ['full'] or ['value', a value]"),
    "models.0.optimizer.counts.applied": (-1, "counts.applied is -1, and must be a whole number from 0"),
    "models.0.optimizer.loss_scale.scale": (0, "loss_scale.scale is 0, and must be a number above 0"),
    "models.0.lr_scheduler": ([], "lr_scheduler is [], and must be a dict"),
    "models.0.data": (
        [0, 0, 2**40, None, None],
        "data[2] is 1099511627776, and must be a whole number from 0 to 10000000",
    ),
    "models.0.origin.dtype": ("nn", "origin.dtype is 'nn', and must be one of"),
    "extras": ({"$tensor": ["float32", [4], ""]}, "the shape [4] takes 16 bytes, and there are 0"),
    "generators.of_ranks": ([0, 1], "must be a number of one of the 1 states for each rank"),
    "replicas_of_ranks": ([0, 0], "must be the replicas of all ranks of the layout"),
    "optimizer": (OPTIMIZER, "and must have one of models, optimizer, lr_scheduler"),
}


def test_what_saves_write_is_right():
    check_state(RUN, LAYOUT, KEYS)
    check_state({"optimizer": OPTIMIZER, "model": "Linear", "progress": PROGRESS}, LAYOUT, KEYS)
    check_state({"lr_scheduler": {"class": "StepLR", "state": {"last_epoch": 1}}}, {}, [])


@pytest.mark.parametrize("path", WRONG)
def test_a_wrong_entry_is_named(path):
    state = copy.deepcopy(RUN)
    value, text = WRONG[path]
    *outer, last = [int(name) if name.isdigit() else name for name in path.split(".")]
    place = state
    for name in outer:
        place = place[name]
    place[last] = value
    with pytest.raises(BrokenRuleError, match=re.escape(text)):
        check_state(state, LAYOUT, KEYS)


def test_a_layout_is_one_of_ranks():
    with pytest.raises(BrokenRuleError, match=r"layout\.dp_size is 'x', and must be a whole number from 1"):
        check_state(RUN, {**LAYOUT, "dp_size": "x"}, KEYS)
    with pytest.raises(BrokenRuleError, match=r"state is .., and must be an object"):
        check_state([], LAYOUT, KEYS)
