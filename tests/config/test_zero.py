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
    ("stage", "reduce", "each"),
    [(0, None, False), (1, None, False), (2, None, True), (2, "microbatch", True), (2, "step", False)],
)
def test_gradients_are_reduced_for_each_microbatch_from_stage_2_on(stage, reduce, each):
    assert ZeroConfig(zero_stage=stage, zero_reduce=reduce).reduces_each_microbatch is each
