import pytest
from refusals import refused

from hybridpp.config import ZeroConfig


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        *(
            (
                {"offload_optimizer": share},
                f"offload_optimizer must be from 0 to 1: got offload_optimizer={share}. Use 1.0 to keep all of the "
                "optimizer's state in host memory.",
            )
            for share in (-0.1, 1.5)
        ),
        *(
            (
                {"offload_optimizer": share},
                f"offload_optimizer must be a number: got offload_optimizer={share!r}. Pass a number, or leave it out.",
            )
            for share in (True, "all", float("nan"))
        ),
        ({"zero_stage": 4}, "zero_stage must be 0, 1, 2 or 3: got zero_stage=4."),
        (
            {"zero_stage": 2, "zero_reduce": "batch"},
            "zero_reduce must be 'microbatch' or 'step': got zero_reduce='batch'.",
        ),
        (
            {"zero_stage": 3, "max_gathered_stages": 1},
            "max_gathered_stages must be an integer of at least 2, as forward passes of one stage follow backward "
            "passes of another: got max_gathered_stages=1.",
        ),
        (
            {"zero_stage": 2, "max_gathered_stages": 2},
            "max_gathered_stages=2 has no effect below stage 3, where weights are not sharded: got zero_stage=2. Leave "
            "max_gathered_stages out, or use zero_stage=3.",
        ),
        (
            {"zero_stage": 1, "zero_reduce": "step"},
            "zero_reduce='step' has no effect below stage 2, where every replica holds complete gradients: got "
            "zero_stage=1. Leave zero_reduce out, or use zero_stage=2.",
        ),
    ],
)
def test_refused_settings(settings, text):
    with refused(text):
        ZeroConfig(**settings)


@pytest.mark.parametrize(
    ("num_stages", "most", "gathered"), [(1, None, 1), (2, None, 2), (3, None, 2), (8, None, 4), (8, 3, 3), (2, 5, 2)]
)
def test_weights_of_how_many_stages_are_gathered(num_stages, most, gathered):
    assert ZeroConfig(zero_stage=3, max_gathered_stages=most).num_gathered_stages(num_stages) == gathered


def test_how_often_a_rank_holds_its_weights():
    assert [ZeroConfig(zero_stage=stage).weight_copies(4, 1) for stage in range(4)] == [1, 1, 1, 0.25]
    assert ZeroConfig(zero_stage=3).weight_copies(4, 2) == 1.25
    assert ZeroConfig(zero_stage=3).weight_copies(1, 2) == 1


@pytest.mark.parametrize(
    ("stage", "reduce", "each"),
    [(0, None, False), (1, None, False), (2, None, True), (2, "microbatch", True), (2, "step", False)],
)
def test_gradients_are_reduced_for_each_microbatch_from_stage_2_on(stage, reduce, each):
    assert ZeroConfig(zero_stage=stage, zero_reduce=reduce).reduces_each_microbatch is each
