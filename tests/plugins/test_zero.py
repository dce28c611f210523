"""ZeRO divides the update among replicas: the same bits as without, a part of the memory."""

import re
from collections import Counter
from contextlib import nullcontext
from functools import cache, partial
from itertools import product

import pytest
import torch
from plugins.normed_together import NormedTogether
from plugins.zero_models import (
    SAMPLE,
    VOCABULARY,
    TiedModel,
    Torn,
    assert_rounded,
    batches,
    cross_entropy,
    on_layout,
    step,
    two_groups,
    weights_of,
    without_dropout,
)
from processes import run_ranks
from safetensors.torch import load_file
from support import assert_near, assert_same
from torch import nn, optim
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.optimization import Adafactor as HuggingFaceAdafactor

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import Loopback, current_world
from hybridpp.data_parallel.bucket import Bucket
from hybridpp.errors import ConfigError

LAYOUTS = {
    "dp2": {"dp_size": 2},
    "dp3": {"dp_size": 3},
    "dp2 pp2": {"dp_size": 2, "pp_size": 2},
    "dp3 pp2 interleaved": {"dp_size": 3, "pp_size": 2, "schedule": "interleaved", "num_model_chunks": 2},
    "dp2 pp2 zb-h1": {"dp_size": 2, "pp_size": 2, "schedule": "zb-h1"},
    "dp2 pp2 zb-v": {"dp_size": 2, "pp_size": 2, "schedule": "zb-v"},
    "dp2 tp2": {"dp_size": 2, "tp_size": 2},
    "dp2 pp2 in bf16 messages": {"dp_size": 2, "pp_size": 2, "communication_dtype": "bf16"},
    "dp3 in fp16 messages": {"dp_size": 3, "communication_dtype": torch.float16},
    "dp2 pp2 tp2": {"dp_size": 2, "pp_size": 2, "tp_size": 2},
}


def trained(booster, model, optimizer, num_steps=2):
    # The last batch is ragged: replicas have different numbers of samples, and of micro-batches of 2.
    losses, ragged = [], 9 if booster.plugin.dp_size == 2 else 7
    for number, batch in enumerate(batches(num_steps, 12)):
        losses.append(step(booster, model, optimizer, batch[:ragged] if number == num_steps - 1 else batch))
        optimizer.step()
    with booster.unsharded(model):
        return losses, weights_of(model), optimizer.get_grad_norm()


EXACT = {
    "1": {"zero_stage": 1},
    "2 by step": {"zero_stage": 2, "zero_reduce": "step"},
    "3 by step": {"zero_stage": 3, "zero_reduce": "step"},
}
BY_MICROBATCH = {"2": {"zero_stage": 2}, "3": {"zero_stage": 3}}
# Further pairs are proved by the pieces: the reduction, the layout of buckets, the schedules.
CASES = [(layout, "fp32") for layout in LAYOUTS]
CASES += [
    ("dp2 tp2", "bf16"),
    ("dp2 pp2 zb-v", "bf16"),
    ("dp3", "fp16"),
    ("dp3 in fp16 messages", "bf16"),
    ("dp2 pp2", "fp16"),
]
# Stage 3 has the code of the others, and each of those comes with every second case.
EXACT_CASES = [(mode, *case) for mode, part in (("1", CASES[::2]), ("2 by step", CASES[1::2])) for case in part]
EXACT_CASES += [("3 by step", *case) for case in CASES]


# What each rank gets without ZeRO.
without_zero = cache(on_layout)


def both(run, zero=EXACT["1"], **layout):
    """What it gives without and with ZeRO, for each rank."""
    return list(zip(without_zero(run, **layout), on_layout(run, **zero, **layout), strict=True))


def plainly(layout, precision, make_model=TiedModel):
    return without_zero(trained, make_model=make_model, **_settings(layout, precision))


_to_rounding = partial(assert_near, tolerance=2e-6)


def _settings(layout, precision):
    return {"precision": precision, "microbatch_size": 2, "num_microbatches": None, **LAYOUTS[layout]}


@pytest.mark.covering("mode precision")
@pytest.mark.parametrize(("mode", "layout", "precision"), EXACT_CASES)
def test_weights_and_losses_have_the_bits_of_training_without_it(layout, precision, mode):
    # With one stage, replicas tear next to no parameter of the small model.
    make_model = TiedModel if "pp_size" in LAYOUTS[layout] else Torn
    results = on_layout(trained, make_model=make_model, **EXACT[mode], **_settings(layout, precision))
    for plain, (losses, weights, norm) in zip(plainly(layout, precision, make_model), results, strict=True):
        assert losses == plain[0]
        assert_same(weights, plain[1])
        assert norm == pytest.approx(plain[2], rel=1e-12)


@pytest.mark.covering
@pytest.mark.parametrize("dp_size", [2, 3])
@pytest.mark.parametrize("mode", EXACT)
def test_replicas_tear_a_parameter_of_the_model_of_these_cases(mode, dp_size):
    def pieces(booster, model, optimizer):
        return list(booster.plugin._engine(model).weights.layout.pieces)

    held = Counter(
        name for names in on_layout(pieces, dp_size=dp_size, make_model=Torn, **EXACT[mode]) for name in names
    )
    assert max(held.values()) > 1


# Formats that round are compared loosely, so three of them do.
MICROBATCH_CASES = [(layout, "fp32") for layout in LAYOUTS if layout != "dp3 in fp16 messages"]
MICROBATCH_CASES += [("dp2 pp2 zb-v", "bf16"), ("dp3", "fp16")]


@pytest.mark.covering("mode precision")
@pytest.mark.parametrize("mode", BY_MICROBATCH)
@pytest.mark.parametrize(("layout", "precision"), MICROBATCH_CASES)
def test_reduction_by_microbatch_differs_by_rounding(layout, precision, mode):
    # Gradients that are rounded before they are summed, once per micro-batch or once per step.
    rounded = "communication_dtype" in LAYOUTS[layout] or precision != "fp32"
    # Where rounding changes the sign of a gradient, AdamW goes the other way, by lr.
    tolerance = 0.06 if rounded else 2e-6
    results = on_layout(trained, **BY_MICROBATCH[mode], **_settings(layout, precision))
    for plain, (losses, weights, norm) in zip(plainly(layout, precision), results, strict=True):
        assert losses == pytest.approx(plain[0], rel=10 * tolerance)
        assert_near(weights, plain[1], tolerance)
        assert norm == pytest.approx(plain[2], rel=10 * tolerance)


@pytest.mark.parametrize("mode", BY_MICROBATCH)
@pytest.mark.parametrize("layout", ["dp3", "dp2 tp2"])
def test_so_it_does_where_replicas_tear_parameters(layout, mode):
    results = on_layout(trained, make_model=Torn, **BY_MICROBATCH[mode], **_settings(layout, "fp32"))
    for plain, (losses, weights, norm) in zip(plainly(layout, "fp32", Torn), results, strict=True):
        assert losses == pytest.approx(plain[0], rel=2e-5)
        assert norm == pytest.approx(plain[2], rel=2e-5)
        assert_rounded(weights, plain[1])
        assert any(not torch.equal(weights[name], plain[1][name]) for name in weights)


MOMENTUM = partial(optim.SGD, lr=0.05, momentum=0.9)


@pytest.mark.parametrize("mode", BY_MICROBATCH)
def test_with_sgd_reduction_by_microbatch_differs_by_single_roundings(mode):
    """AdamW divides a gradient by its own size, and its rounding with it; SGD shows what reductions differ by."""
    layout = {"dp_size": 2, "tp_size": 2, "make_model": Torn, "make_optimizer": MOMENTUM}
    for plain, zero in both(trained, BY_MICROBATCH[mode], **layout):
        assert_near(zero[1], plain[1], 1e-7)


def trained_and_frozen(booster, model, optimizer):
    trained(booster, model, optimizer, 1)
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(False)
    with booster.unsharded(model):
        before = weights_of(model.blocks[0])
    losses, weights, norm = trained(booster, model, optimizer, 2)
    assert_same({name: weights[f"blocks.0.{name}"] for name in before}, before)
    return losses, weights, norm


@pytest.mark.parametrize("mode", EXACT)
def test_parameters_that_are_frozen_between_steps_stay_as_they_are(mode):
    for plain, zero in both(trained_and_frozen, EXACT[mode], dp_size=2, make_model=Torn):
        assert zero[0] == plain[0]
        assert_same(zero[1], plain[1])


@pytest.mark.parametrize(("make_model", "compare"), [(TiedModel, _to_rounding), (Torn, assert_rounded)])
def test_replicas_without_a_microbatch_reduce_in_the_same_order(make_model, compare):
    """Under tensor parallelism, a pass leaves the gradients of some layers to its end; units have several buckets."""
    layout = {"microbatch_size": 2, "num_microbatches": None, "dp_size": 2, "tp_size": 2, "ddp_bucket_cap_mb": 0.002}
    for plain, zero in both(trained, BY_MICROBATCH["3"], make_model=make_model, **layout):
        compare(zero[1], plain[1])


def _accumulated(precision, synced, pp_size=2, make_optimizer=two_groups, **zero):
    """The last gradients and the weights of steps of several calls, by rank."""

    def run(booster, model, optimizer):
        for round_of_calls in (batches(3, 12), batches(2, 12)):
            for batch in round_of_calls[:-1]:
                with nullcontext() if synced else booster.no_sync(model):
                    step(booster, model, optimizer, batch)
            step(booster, model, optimizer, round_of_calls[-1])
            gradients = dict(optimizer.gradients())
            optimizer.step()
        with booster.unsharded(model):
            return gradients, weights_of(model)

    layout = {"dp_size": 3, "pp_size": pp_size, "precision": precision, "make_optimizer": make_optimizer}
    return on_layout(run, **layout, **zero)


accumulated_plainly = cache(_accumulated)


@pytest.mark.covering
@pytest.mark.parametrize(
    ("mode", "precision", "synced"),
    [
        *product([*EXACT, *BY_MICROBATCH], ["fp32"], [True, False]),
        *product(EXACT, ["bf16"], [False]),
    ],
)
def test_gradients_add_up_over_calls_to_the_same_bits(mode, precision, synced):
    same = assert_same if mode in EXACT else partial(assert_near, tolerance=2e-6)
    pairs = zip(
        accumulated_plainly(precision, synced),
        _accumulated(precision, synced, **(EXACT | BY_MICROBATCH)[mode]),
        strict=True,
    )
    for (gradients, weights), (zero_gradients, zero_weights) in pairs:
        same(zero_gradients, gradients)
        same(zero_weights, weights)


@pytest.mark.parametrize("mode", ["2 by step", "3 by step"])
def test_calls_add_up_to_the_same_bits_where_buckets_are_others(mode):
    """Those of units that gather, and those of whole parameters."""
    parts = {"pp_size": 1, "make_optimizer": WHOLE["Adafactor"]}
    pairs = zip(_accumulated("fp32", True, **parts), _accumulated("fp32", True, **parts, **EXACT[mode]), strict=True)
    for (gradients, weights), (zero_gradients, zero_weights) in pairs:
        assert_same(zero_gradients, gradients)
        assert_same(zero_weights, weights)


class GroupedQueries(nn.Module):
    """Its one key and value head is copied to all tensor-parallel ranks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
        self.model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=1))

    def forward(self, tokens):
        return self.model(tokens).logits


@pytest.mark.covering
@pytest.mark.parametrize("mode", ["1", "3 by step"])
@pytest.mark.parametrize("sequence", [False, True])
def test_copied_heads_have_the_bits_of_training_without_it(sequence, mode):
    settings = {"tp_size": 2, "make_model": GroupedQueries, "enable_sequence_parallelism": sequence}
    results = both(trained, EXACT[mode], dp_size=2, **settings)
    for (losses, weights, norm), (zero_losses, zero_weights, zero_norm) in results:
        assert zero_losses == losses
        assert_same(zero_weights, weights)
        assert zero_norm == pytest.approx(norm, rel=1e-12)


def one_dim(make):
    return lambda parameters: make([p for p in parameters if p.dim() == 2 and p.requires_grad])


WHOLE = {
    "Adafactor": partial(optim.Adafactor, lr=0.01),
    "Adafactor of transformers": HuggingFaceAdafactor,
    "Muon": one_dim(partial(optim.Muon, lr=0.01)),
}


def only_matrices():
    model = TiedModel()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.dim() == 2 and not name.startswith("blocks.1."))
    return model


def trained_with_shapes(booster, model, optimizer):
    shapes = {tuple(p.shape) for group in optimizer.param_groups for p in group["params"]}
    return trained(booster, model, optimizer)[1], shapes


@pytest.mark.covering
@pytest.mark.parametrize("mode", ["1", "3 by step"])
@pytest.mark.parametrize("name", WHOLE)
def test_optimizers_that_read_whole_parameters_get_whole_ones(name, mode):
    make = only_matrices if name == "Muon" else TiedModel
    results = both(trained_with_shapes, EXACT[mode], dp_size=2, make_optimizer=WHOLE[name], make_model=make)
    for (weights, shapes), (zero_weights, zero_shapes) in results:
        assert_same(zero_weights, weights)
        assert zero_shapes <= shapes


def test_an_optimizer_that_reads_all_parameters_is_refused_by_name():
    message = (
        "NormedTogether's update of a parameter depends on other parameters, of which a replica updates only a part: "
        "got zero_stage=1. Use zero_stage=0, or an elementwise optimizer (AdamW, HybridAdam, SGD)."
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        on_layout(trained, dp_size=2, zero_stage=1, make_optimizer=NormedTogether)


@pytest.mark.covering
@pytest.mark.parametrize(("precision", "per_element"), [("fp32", 8), ("bf16", 12)])
@pytest.mark.parametrize("dp_size", [2, 4])
def test_a_replica_has_its_part_of_masters_and_moments(dp_size, precision, per_element):
    def run(booster, model, optimizer):
        step(booster, model, optimizer, batches(1, 16)[0])
        optimizer.step()
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        state = [value for held in optimizer.state.values() for value in held.values() if value.dim()]
        masters = [p for group in optimizer.param_groups for p in group["params"]] if precision != "fp32" else []
        return sum(tensor.nbytes for tensor in state + masters), trainable

    def make_model():
        model = TiedModel()
        model.wide = nn.ParameterList([torch.zeros(300, 301), torch.zeros(77, 1000)])
        return model

    ranks = on_layout(run, dp_size=dp_size, zero_stage=1, precision=precision, make_model=make_model)
    held, trainable = sum(nbytes for nbytes, _ in ranks), ranks[0][1]
    assert held <= per_element * trainable
    assert max(nbytes for nbytes, _ in ranks) <= 1.02 * per_element * trainable / dp_size


@pytest.mark.covering
@pytest.mark.parametrize("mode", ["2 by step", "2", "3"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_gradients_take_the_memory_of_one_part(schedule, mode):
    """Between calls; within one, reduction by micro-batch also has no complete ones, but for the tied weight."""

    def run(booster, model, optimizer):
        buckets = booster.plugin._engine(model).buckets._accumulator.buckets
        seen, handle = [], optimizer._optimizer.register_step_pre_hook(lambda *_: seen.append(held()))

        def held():
            private = [bucket for bucket in buckets if not bucket.layout.is_shared]
            return sum(bucket.flat.untyped_storage().nbytes() for bucket in private)

        launch = Bucket.launch_reduce
        during = []

        def noted(bucket, *args, **options):
            during.append(held())
            launch(bucket, *args, **options)

        for bucket in buckets:
            bucket.launch_reduce = partial(noted, bucket)
        trained(booster, model, optimizer, 2)
        handle.remove()
        sizes = [4 * bucket.layout.size for bucket in buckets if not bucket.layout.is_shared]
        kept = sum(bucket.own.nbytes for bucket in buckets)
        return seen, max(during), sizes, kept, sum(4 * bucket.layout.size for bucket in buckets)

    layout = {"dp_size": 2, "pp_size": 2, "schedule": schedule, "ddp_bucket_cap_mb": 0.01}
    for seen, most, sizes, kept, complete in on_layout(run, **layout, **(EXACT | BY_MICROBATCH)[mode]):
        assert seen == [0, 0]
        assert kept == complete / 2
        assert most <= (sum(sizes) if mode in EXACT else sum(sorted(sizes)[-3:]))


def test_one_replica_does_nothing_else_than_without_and_says_so(caplog):
    with caplog.at_level("INFO", logger="hybridpp"):
        for plain, zero in both(partial(trained, num_steps=2), dp_size=1, pp_size=2):
            assert zero[0] == plain[0]
            assert_same(zero[1], plain[1])
    said = [record.getMessage() for record in caplog.records if "divides nothing" in record.getMessage()]
    assert said == ["[rank 0] zero_stage=1 divides nothing: there is one replica (dp_size=1), or zero_size=1."]


def test_gradients_from_outside_are_refused_by_name():
    def run(booster, model, optimizer):
        step(booster, model, optimizer, batches(1, 12)[0])
        model.blocks[0].up.bias.grad = torch.zeros(50)
        with pytest.raises(ConfigError) as error:
            optimizer.step()
        return str(error.value)

    assert on_layout(run, dp_size=2, zero_stage=1)[0] == (
        "blocks.0.up.bias.grad was set between the backward pass and optimizer.step(): in bf16, in fp16 and with ZeRO "
        "the gradients are not there, so it would not be used. Call optimizer.clip_grad_by_norm or clip_grad_by_value, "
        "or change the loss."
    )


def test_weights_that_were_moved_out_of_their_buffer_are_refused_by_name():
    def run(booster, model, optimizer):
        model.blocks[0].up.bias.data = torch.zeros(50)
        step(booster, model, optimizer, batches(1, 12)[0])
        with pytest.raises(ConfigError) as error:
            optimizer.step()
        return str(error.value)

    assert on_layout(run, dp_size=2, zero_stage=1)[0].startswith(
        "blocks.0.up.bias was given other memory after booster.boost"
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_that_the_script_writes_are_trained_on(precision):
    def run(booster, model, optimizer):
        for batch in batches(2, 12):
            step(booster, model, optimizer, batch)
            optimizer.step()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
        return trained(booster, model, optimizer, 2)[1]

    for plain, zero in both(run, dp_size=2, precision=precision):
        assert_same(zero, plain)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_resumes_from_folder_and_state(precision, tmp_path):
    copied = {}

    def first(booster, model, optimizer):
        rank = current_world().rank
        trained(booster, model, optimizer, 2)
        booster.save_model(model, tmp_path / "weights.safetensors")
        copied[rank] = torch.load(_saved(optimizer.state_dict(), tmp_path / f"{rank}.pt"))
        return trained(booster, model, optimizer, 2)[1]

    def second(booster, model, optimizer):
        booster.load_model(model, tmp_path / "weights.safetensors")
        optimizer.load_state_dict(copied[current_world().rank])
        return trained(booster, model, optimizer, 2)[1]

    layout = {"dp_size": 2, "pp_size": 2, "zero_stage": 1, "precision": precision}
    for expected, actual in zip(on_layout(first, **layout), on_layout(second, **layout), strict=True):
        assert_same(actual, expected)


def _saved(state, path):
    torch.save(state, path)
    return path


def test_a_state_of_another_replica_or_stage_is_refused():
    states = on_layout(lambda booster, model, optimizer: optimizer.state_dict(), dp_size=2, zero_stage=1)

    def run(state_of, booster, model, optimizer):
        with pytest.raises(ConfigError) as error:
            optimizer.load_state_dict(states[state_of(current_world().rank)])
        return str(error.value)

    swapped = on_layout(partial(run, lambda rank: 1 - rank), dp_size=2, zero_stage=1)
    assert "it was saved by replica 1 of 2 with ZeRO, and this is replica 0 of 2 with ZeRO" in swapped[0]
    plain = on_layout(partial(run, lambda rank: rank), dp_size=2)
    assert "replica 0 of 2 with ZeRO, and this is a replica that updates all of its parameters" in plain[0]


@pytest.mark.parametrize("zero", [1, 3])
def test_saved_weights_are_those_of_training_without_it(zero, tmp_path):
    def run(path, booster, model, optimizer):
        trained(booster, model, optimizer, 2)
        booster.save_model(model, path)

    for settings in ({}, EXACT["1"] if zero == 1 else EXACT["3 by step"]):
        path = tmp_path / f"{settings.get('zero_stage', 0)}.safetensors"
        on_layout(partial(run, path), dp_size=2, pp_size=2, precision="bf16", **settings)
    assert_same(load_file(tmp_path / f"{zero}.safetensors"), load_file(tmp_path / "0.safetensors"))


@pytest.mark.covering
@pytest.mark.parametrize("pp_size", [1, 2])
@pytest.mark.parametrize("mode", ["1", "3 by step"])
def test_a_model_from_the_meta_device_trains_to_the_same_bits(mode, pp_size, tmp_path):
    torch.save(TiedModel().state_dict(), tmp_path / "start.pt")

    def run(settings):
        plugin = HybridParallelPlugin(
            num_microbatches=4, max_norm=0.5, pp_size=pp_size, precision="bf16", microbatch_size=None, **settings
        )
        booster = Booster(plugin=plugin)
        with torch.device("meta"):
            model = TiedModel()
        parts = booster.boost(model, two_groups(model.parameters()), criterion=cross_entropy, sample=SAMPLE)
        booster.load_model(model, tmp_path / "start.pt")
        return trained(booster, parts.model, parts.optimizer, 3)[1]

    plain, zero = (Loopback(2 * pp_size).run(partial(run, settings)) for settings in ({}, EXACT[mode]))
    for expected, actual in zip(plain, zero, strict=True):
        assert_same(actual, expected)


def test_state_that_the_optimizer_had_before_boost_is_divided():
    def make_optimizer(parameters):
        optimizer = torch.optim.AdamW(parameters, lr=0.01)
        generator = torch.Generator().manual_seed(3)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                moments = torch.rand(2, *parameter.shape, generator=generator)
                optimizer.state[parameter] = {
                    "step": torch.tensor(3.0),
                    "exp_avg": moments[0],
                    "exp_avg_sq": moments[1],
                }
        return optimizer

    for plain, zero in both(partial(trained, num_steps=2), dp_size=2, make_optimizer=make_optimizer):
        assert_same(zero[1], plain[1])


def trained_with_an_inf(booster, model, optimizer):
    step(booster, model, optimizer, batches(1, 8)[0])
    optimizer.step()
    replica = booster.plugin.layout.here.dp
    data = iter([batches(1, 4)[0]])
    kept = optimizer.loss_scaler.state.scale

    def criterion(logits, tokens):
        loss = cross_entropy(logits, tokens)
        return loss * 1e30 if replica else loss

    criterion.reduction = "mean"  # else that replicas make it in unlike ways is refused
    booster.execute_pipeline(data, model, criterion, optimizer)
    optimizer.step()
    report, scale = optimizer.overflow_report, optimizer.loss_scaler.state.scale
    loss = step(booster, model, optimizer, batches(1, 8)[0])
    optimizer.step()
    with booster.unsharded(model):
        return report, scale < kept, loss, weights_of(model)


@pytest.mark.parametrize("mode", [*EXACT, *BY_MICROBATCH])
def test_the_search_for_an_inf_finds_its_source_and_training_goes_on(mode):
    layout = {"dp_size": 2, "pp_size": 2, "precision": "fp16"}
    for plain, zero in both(trained_with_an_inf, (EXACT | BY_MICROBATCH)[mode], **layout):
        assert "the gradient of" in plain[0]
        assert zero[:2] == plain[:2]
        assert_near(zero[3], plain[3], 1e-2)


@pytest.mark.parametrize("stage", [4, -1])
def test_stages_that_do_not_exist_are_refused(stage):
    with pytest.raises(ConfigError, match=re.escape(f"zero_stage must be 0, 1, 2 or 3: got zero_stage={stage!r}.")):
        HybridParallelPlugin(zero_stage=stage)


def _on_processes(settings):
    plugin = HybridParallelPlugin(
        **{"pp_size": 2, "num_microbatches": 4, "max_norm": 0.5, "precision": "bf16", **settings}
    )
    booster, model = Booster(plugin=plugin), TiedModel()
    parts = booster.boost(model, two_groups(model.parameters()), criterion=cross_entropy, sample=SAMPLE)
    return trained(booster, parts.model, parts.optimizer)[1]


def test_processes_give_the_bits_of_training_without_it():
    plain, zero = (run_ranks(partial(_on_processes, settings), 4) for settings in ({}, EXACT["3 by step"]))
    for expected, actual in zip(plain, zero, strict=True):
        assert_same(actual, expected)


@pytest.mark.parametrize("mode", BY_MICROBATCH)
def test_processes_without_pipelines_give_the_same_to_rounding(mode):
    settings = {"pp_size": 1, "precision": "fp32"}
    plain, zero = (run_ranks(partial(_on_processes, {**settings, **more}), 2) for more in ({}, BY_MICROBATCH[mode]))
    for expected, actual in zip(plain, zero, strict=True):
        assert_near(actual, expected, 2e-6)


def test_one_process_gives_the_same_to_rounding():
    def run(booster, model, optimizer):
        for batch in batches(4, 12):
            step(booster, model, optimizer, batch)
            optimizer.step()
        return weights_of(model)

    [alone] = on_layout(run, dp_size=1, num_microbatches=1, make_model=without_dropout)
    for weights in on_layout(run, dp_size=2, num_microbatches=1, zero_stage=1, make_model=without_dropout):
        assert_near(weights, alone, 1e-5)
