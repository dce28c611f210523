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
        *(
            (
                {"zero_stage": 1, "zero_size": size},
                f"zero_size must be an integer of at least 1, or 'host': got zero_size={size!r}. Leave it out for all "
                "replicas.",
            )
            for size in (0, True, 2.0, "2")
        ),
        (
            {"zero_size": 2},
            "zero_size=2 has no effect at stage 0, where replicas divide nothing: got zero_stage=0. Leave zero_size "
            "out, or use zero_stage=1.",
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


def test_what_a_number_of_replicas_divides():
    config = ZeroConfig(zero_stage=3, zero_reduce="step", offload_optimizer=0.5, zero_size=2)
    assert (config.among(4), config.among(4).num_shards(4)) == (config, 2)
    all_four = ZeroConfig(zero_stage=1).among(4)
    assert (all_four.zero_size, all_four.num_shards(4)) == (4, 4)
    nothing = ZeroConfig(offload_optimizer=0.5)
    assert ZeroConfig(zero_stage=2, zero_size=1, offload_optimizer=0.5).among(4) == nothing
    assert ZeroConfig(zero_stage=3, max_gathered_stages=2, offload_optimizer=0.5).among(1) == nothing
    assert nothing.num_shards(4) == 1
    text = "zero_size must divide the number of replicas: got zero_size=4 with 6 replicas. Use 1, 2, 3 or 6, or leave"
    with refused(f"{text} it out for all."):
        ZeroConfig(zero_stage=1, zero_size=4).among(6)


def test_the_replicas_of_a_host():
    config = ZeroConfig(zero_stage=3, zero_size="host")
    assert config.within_host(8, 2) == ZeroConfig(zero_stage=3, zero_size=4)
    with refused(
        "zero_size='host' needs hosts of complete replicas: got 8 ranks per host, and tp_size * pp_size=16 per "
        "replica. Leave zero_size out to divide over all replicas."
    ):
        config.within_host(8, 16)
