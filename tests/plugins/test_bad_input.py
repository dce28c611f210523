"""Bad input: one clear message, before any collective, on every rank alike."""

import re

import pytest
import torch
from divided_models import llama
from support import boosted, image_batch, model_loss, sgd, tiny_vit
from torch import nn

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import Loopback, current_world
from hybridpp.errors import ConfigError, DataError, NonFiniteLossError, PartitionError, PeerError

GOOD = {"tp_size": 1, "pp_size": 1, "num_microbatches": 1, "precision": "fp32"}


def everyone_raises(num_ranks, function, error, text):
    """Every rank raises ``error`` with ``text`` in it; none is left waiting."""

    def run():
        with pytest.raises(error, match=re.escape(text)) as raised:
            function()
        return str(raised.value)

    messages = Loopback(num_ranks).run(run)
    assert len(messages) == num_ranks
    return messages


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"num_microbatches": None, "pp_size": 2},
            "give exactly one of num_microbatches and microbatch_size: "
            "got num_microbatches=None, microbatch_size=None.",
        ),
        ({"microbatch_size": 2}, "give exactly one of num_microbatches and microbatch_size"),
        ({"num_microbatches": 0}, "num_microbatches must be an integer of at least 1: got num_microbatches=0."),
        ({"precision": "fp8"}, "precision must be one of fp32, fp16, bf16: got 'fp8'."),
        (
            {"tensor_parallel_plan": "column"},
            "tensor_parallel_plan must be a dict from patterns of module names to styles",
        ),
        ({"tensor_parallel_plan": {"*": "colwise"}}, "a tensor-parallel style is one of column[:<heads>], gathered"),
        ({"pp_size": 0}, "pp_size must be an integer of at least 1: got pp_size=0."),
        ({"zero_stage": 4}, "zero_stage must be 0, 1, 2 or 3: got zero_stage=4."),
        ({"pp_style": "zbv", "schedule": "1f1b"}, "pp_style and schedule are one setting: got 'zbv' and '1f1b'."),
        (
            {"enable_sequence_parallelism": True},
            "sequence parallelism shards sequences over the tensor-parallel ranks: got tp_size=1. Use tp_size=2 or",
        ),
        (
            {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "ring"},
            "sequence_parallelism_mode='ring' is not supported yet. Use 'split_gather'.",
        ),
        ({"sequence_parallelism_mode": "all_to_all"}, "sequence_parallelism_mode='all_to_all' is not supported yet."),
        ({"sequence_parallelism_mode": "ulysses"}, "sequence_parallelism_mode='ulysses' is unknown."),
        ({"sequence_parallelism_mode": "split_gather"}, "has no effect without enable_sequence_parallelism=True."),
        ({"num_model_chunks": 0}, "num_model_chunks must be an integer of at least 1: got num_model_chunks=0."),
        ({"num_microbatch": 4}, "HybridParallelPlugin has no setting 'num_microbatch'. It takes: backoff_factor,"),
        ({"initial_scale": 0}, "loss scaling needs initial_scale > 0: got initial_scale=0."),
        ({"max_norm": -1}, "max_norm must be at least 0, where 0 means no clipping: got max_norm=-1."),
    ],
)
def test_wrong_settings_are_refused_by_name(settings, text):
    everyone_raises(2, lambda: HybridParallelPlugin(**{**GOOD, **settings}), ConfigError, text)


@pytest.mark.parametrize(
    "name",
    [
        "enable_all_optimization",
        "enable_sequence_parallelism",
        "fused_weight_gradients",
        "fp32_losses",
        "find_unused_parameters",
        "overlap_communication",
        "cpu_offload",
        "parallel_output",
    ],
)
@pytest.mark.parametrize("value", ["yes", 1, None])
def test_what_stands_for_true_or_false_is_refused(name, value):
    text = f"{name} must be True or False: got {name}={value!r}. Pass a bool."
    everyone_raises(2, lambda: HybridParallelPlugin(**{**GOOD, name: value}), ConfigError, text)


@pytest.mark.parametrize("name", ["shuffle", "drop_last", "pin_memory"])
def test_switches_of_a_dataloader_are_true_or_false(name):
    plugin = HybridParallelPlugin(**GOOD)
    with pytest.raises(ConfigError, match=f"^{name} must be True or False: got {name}='no'"):
        plugin.prepare_dataloader([0, 1], batch_size=1, **{name: "no"})


@pytest.mark.parametrize("given", [{}, {"num_microbatches": None}])
def test_one_stage_runs_a_batch_as_one_microbatch_unless_told_otherwise(given):
    assert HybridParallelPlugin(tp_size=1, pp_size=1, **given).settings.pipeline.num_microbatches == 1
    sized = HybridParallelPlugin(tp_size=1, pp_size=1, microbatch_size=2, **given).settings.pipeline
    assert (sized.num_microbatches, sized.microbatch_size) == (None, 2)


def test_settings_that_ask_for_nothing_are_accepted():
    plugin = HybridParallelPlugin(**GOOD, pp_style="1f1b", num_model_chunks=1, cpu_offload=False, zero_stage=0)
    assert plugin.pp_size == 1


@pytest.mark.parametrize(
    ("world_size", "pp_size", "way_out"), [(3, 2, "Start 2 or 4 processes"), (2, 4, "Start 4 processes")]
)
def test_a_world_that_does_not_divide(world_size, pp_size, way_out):
    messages = everyone_raises(
        world_size,
        lambda: HybridParallelPlugin(**{**GOOD, "pp_size": pp_size}),
        ConfigError,
        f"world size must be a multiple of tp_size * pp_size: got world_size={world_size}, tp_size=1, "
        f"pp_size={pp_size}.",
    )
    assert all(way_out in message for message in messages)


def test_fewer_blocks_than_stages():
    found = "ViTForImageClassification runs 2 (vit.layers.0, vit.layers.1)"
    text = f"{found}, for 4 stages (pp_size x num_model_chunks). Use 2 or fewer."
    everyone_raises(4, lambda: boosted(tiny_vit(num_layers=2), sgd, image_batch(2), pp_size=4), PartitionError, text)


def test_a_batch_whose_tensors_disagree_in_dim_0():
    def run():
        booster, model, optimizer = boosted(tiny_vit(), sgd, image_batch(2), pp_size=2, num_microbatches=2)
        batch = image_batch(4)
        batch["labels"] = batch["labels"][:3]
        booster.execute_pipeline(iter([batch]), model, model_loss, optimizer)

    everyone_raises(
        2,
        run,
        DataError,
        "all tensors of a batch must agree in dimension 0, the samples: got ['pixel_values']: 4, ['labels']: 3.",
    )


def test_one_ranks_bad_batch_is_told_to_all_ranks():
    def run():
        booster, model, optimizer = boosted(tiny_vit(), sgd, image_batch(2), pp_size=2)
        bad = current_world().rank == 1
        with pytest.raises(DataError if bad else PeerError) as raised:
            booster.execute_pipeline(iter([{} if bad else image_batch(4)]), model, model_loss, optimizer)
        return str(raised.value)

    messages = Loopback(4).run(run)
    assert messages[1].startswith("a batch needs at least one tensor")
    assert messages[0] == messages[2] == "reading the batch failed on rank 1. See the error printed there."


def test_ranks_of_one_pipeline_that_hold_different_batches():
    def run():
        booster, model, optimizer = boosted(tiny_vit(), sgd, image_batch(2), pp_size=2)
        booster.execute_pipeline(iter([image_batch(4, current_world().rank)]), model, model_loss, optimizer)

    everyone_raises(4, run, DataError, "the ranks of one pipeline must hold the same batch: ranks 0, 1 hold different")


def test_data_that_ends_on_some_ranks():
    def run():
        booster, model, optimizer = boosted(tiny_vit(), sgd, image_batch(2), pp_size=2)
        data = iter([image_batch(4)] * (1 if current_world().rank in (2, 3) else 0))
        booster.execute_pipeline(data, model, model_loss, optimizer)

    everyone_raises(4, run, DataError, "the data ended on ranks 0, 1 but not on the others.")


def test_data_that_ends_on_every_rank_is_stop_iteration():
    def run():
        booster, model, optimizer = boosted(tiny_vit(), sgd, image_batch(2), pp_size=2)
        with pytest.raises(StopIteration):
            booster.execute_pipeline(iter([]), model, model_loss, optimizer)
        return True

    assert Loopback(2).run(run) == [True, True]


def test_a_dataloader_instead_of_an_iterator():
    def run():
        booster, model, optimizer = boosted(tiny_vit(), sgd, image_batch(2))
        booster.execute_pipeline([image_batch(4)], model, model_loss, optimizer)

    everyone_raises(1, run, DataError, "execute_pipeline takes an iterator: got list. Pass iter(dataloader).")


@pytest.mark.parametrize(("value", "kind"), [(float("nan"), "NaN"), (float("inf"), "infinite")])
def test_a_loss_that_is_not_finite_is_reported_with_stage_and_microbatch(value, kind):
    def run():
        booster, model, optimizer = boosted(tiny_vit(), sgd, image_batch(2), pp_size=2, num_microbatches=4)
        model.forward = _without("index", model.forward)
        booster.execute_pipeline(iter([_numbered()]), model, _bad_at_one(value), optimizer)

    text = f"the loss of micro-batch 1 is {kind} (stage 1 of 2, rank 1)."
    everyone_raises(2, run, NonFiniteLossError, text)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_nonfinite_evaluation_loss_is_returned_with_one_warning(value, caplog):
    def run():
        booster, model, _ = boosted(tiny_vit(), None, image_batch(2), pp_size=2, num_microbatches=4)
        model.forward = _without("index", model.forward)
        with torch.no_grad():
            out = [
                booster.execute_pipeline(iter([_numbered()]), model, _bad_at_one(value), return_outputs=True)
                for _ in range(2)
            ]
        assert [part["outputs"] is None for part in out] == [current_world().rank == 0] * 2
        return [part["loss"].item() for part in out]

    for losses in Loopback(2).run(run):
        assert str(losses) == str([value] * 2)
    (record,) = caplog.records
    text = "in evaluation, the loss of micro-batch 1 is {} (stage 1 of 2, rank 1). Such losses are returned unchanged."
    assert text.format("NaN" if value != value else "infinite") in record.getMessage()


def test_infinities_of_both_signs_are_no_number_in_evaluation():
    def run():
        booster, model, _ = boosted(tiny_vit(), None, image_batch(2), num_microbatches=2)
        signs = iter([1, -1])
        with torch.no_grad():
            return booster.execute_pipeline(
                iter([image_batch(4)]), model, lambda outputs, inputs: outputs.loss * next(signs) * float("inf")
            )["loss"].item()

    assert str(Loopback(1).run(run)) == "[nan]"


def _numbered():
    return image_batch(8) | {"index": torch.arange(8) // 2}


def _bad_at_one(value):
    return lambda outputs, inputs: outputs.loss * (value if 1 in inputs["index"] else 1.0)


def _without(name, forward):
    return lambda **kwargs: forward(**{key: value for key, value in kwargs.items() if key != name})


@pytest.mark.parametrize(
    ("criterion", "text"),
    [
        (lambda o, i: 3.0, "criterion(outputs, inputs) must return a scalar tensor: got float."),
        (lambda o, i: o.logits, "must return a scalar tensor: got a tensor of shape (4, 5)."),
        (lambda o, i: o.loss.detach(), "the loss does not depend on any trainable parameter"),
        (None, "execute_pipeline needs criterion(outputs, inputs) to compute a loss."),
    ],
)
def test_a_criterion_that_gives_no_loss(criterion, text):
    def run():
        booster, model, optimizer = boosted(tiny_vit(), sgd, image_batch(2))
        booster.execute_pipeline(iter([image_batch(4)]), model, criterion, optimizer)

    everyone_raises(1, run, ConfigError, text)


class Masked(nn.Module):
    """Its second argument may be None."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x, mask):
        return self.layer(x) if mask is None else self.layer(x)[mask["rows"]]


def test_an_error_in_a_model_says_what_it_was_called_with():
    def run():
        booster, model, optimizer = boosted(Masked(), sgd, None)
        with pytest.raises(TypeError) as raised:
            booster.execute_pipeline(iter([(torch.ones(3, 2), None, 0)]), model, lambda o: o.mean() + None, optimizer)
        criterion = raised.value.__notes__
        with pytest.raises((IndexError, TypeError)) as raised:
            booster.execute_pipeline(iter([(torch.ones(3, 2), torch.ones(3))]), model, lambda o: o.mean(), optimizer)
        return criterion[0], raised.value.__notes__[0]

    ((criterion, model),) = Loopback(1).run(run)
    assert criterion == "hybridpp: in <lambda>(Tensor[3, 2])"
    assert model == "hybridpp: in model(*(Tensor[3, 2], Tensor[3]), **{})"


def test_training_without_the_boosted_optimizer():
    def without():
        booster, model, _ = boosted(tiny_vit(), sgd, image_batch(2))
        booster.execute_pipeline(iter([image_batch(4)]), model, model_loss)

    def another():
        booster, model, optimizer = boosted(tiny_vit(), sgd, image_batch(2))
        booster.execute_pipeline(iter([image_batch(4)]), model, model_loss, optimizer.unwrap())

    everyone_raises(1, without, ConfigError, "needs the boosted optimizer if gradients are enabled.")
    everyone_raises(1, another, ConfigError, "needs the optimizer that booster.boost returned for this model.")


def test_ranks_that_start_from_different_weights():
    text = ". Call launch_from_torch(seed=...) before building the model, or load the same weights everywhere."
    everyone_raises(
        2, lambda: boosted(tiny_vit(seed=current_world().rank), sgd, image_batch(2), pp_size=2), ConfigError, text
    )


def test_parts_that_do_not_fit_together():
    booster = Booster(plugin=HybridParallelPlugin(**GOOD))
    model = tiny_vit()
    with pytest.raises(ConfigError, match=r"holds a parameter of shape \(2, 2\) that is not in the model"):
        booster.boost(model, sgd([*model.parameters(), nn.Parameter(torch.ones(2, 2))]))
    with pytest.raises(ConfigError, match=r"boost needs a torch.optim optimizer: got dict\. Pass a list of"):
        booster.boost(model, {"all": sgd(model.parameters())})
    with pytest.raises(ConfigError, match=r"boost needs an LR scheduler with a step method: got list\."):
        booster.boost(model, sgd(model.parameters()), lr_scheduler=[])
    with pytest.raises(
        ConfigError, match=r"boost needs a torch.nn.Module: got function\. Pass the model, the optimizer, the"
    ):
        booster.boost(model_loss)
    boosted_model, optimizer, *_ = booster.boost(model, sgd(model.parameters()))
    with pytest.raises(ConfigError, match=r"this model is boosted already\. Call booster.boost once\."):
        booster.boost(boosted_model)
    with pytest.raises(ConfigError, match=r"got HybridOptimizer\. This one was boosted with another model: make a new"):
        booster.boost(tiny_vit(), optimizer)
    with pytest.raises(ConfigError, match=r"torch.optim optimizer: got function\. Pass the model, the optimizer,"):
        booster.boost(tiny_vit(), model_loss)
    with pytest.raises(ConfigError, match=r"this Linear was not boosted by this booster\."):
        booster.execute_pipeline(iter([image_batch(2)]), nn.Linear(1, 1), model_loss, optimizer)
    with pytest.raises(ConfigError, match=r"step accepts no closure"):
        optimizer.step(lambda: 0.0)


def test_backward_by_hand_needs_the_whole_model():
    def run():
        booster, _, optimizer = boosted(tiny_vit(), sgd, image_batch(2), pp_size=2)
        booster.backward(torch.ones((), requires_grad=True), optimizer)

    everyone_raises(2, run, ConfigError, "backward needs all stages on one rank: got pp_size=2.")


def test_cutting_a_model_without_any_sample():
    def run():
        torch.manual_seed(0)
        boosted(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), sgd, None, pp_size=2)

    everyone_raises(2, run, ConfigError, "cutting Sequential into stages needs a sample of its inputs.")


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            if x.sum() > 0:
                x = -x
        return x


def test_a_forward_that_branches_on_a_computed_value():
    text = "the forward of Branching branches on a computed value after unit 'layers.0'"
    everyone_raises(2, lambda: boosted(Branching(), sgd, torch.ones(2, 2), pp_size=2), PartitionError, text)


@pytest.mark.parametrize(
    ("plan", "tp_size", "text"),
    [
        (
            {"*.k_proy": "column"},
            2,
            "tensor_parallel_plan names modules: none of ViTForImageClassification matches '*.k_proy'. Use "
            "names of its linear layers, with * as a wildcard: vit.layers.*.attention.q_proj, "
            "vit.layers.*.attention.k_proj, vit.layers.*.attention.v_proj, vit.layers.*.attention.o_proj, "
            "vit.layers.*.mlp.fc1, vit.layers.*.mlp.fc2, classifier.",
        ),
        (
            {"*.layernorm_before": "column"},
            2,
            "tensor-parallel style column needs an nn.Linear or transformers' Conv1D: 'vit.layers.0.layernorm_before' "
            "is LayerNorm. Leave it out of tensor_parallel_plan, or name the layers in it.",
        ),
        (
            {"*.fc1": "vocab"},
            2,
            "tensor-parallel style vocab needs an nn.Embedding without max_norm, sparse, scale_grad_by_freq and "
            "parameters beside its weight: 'vit.layers.0.mlp.fc1' is Linear. Leave it out of tensor_parallel_plan, or "
            "name the layers in it.",
        ),
        (
            {"*.q_proj": "column"},
            3,
            "tensor parallelism divides the heads of attention: 'vit.layers.0.attention.q_proj' has 2, tp_size=3. "
            "Use tp_size=1 or 2, or leave it out of tensor_parallel_plan.",
        ),
        (
            {"*.q_proj": "column", "*.k_proj": "column", "*.v_proj": "column"},
            4,
            "tensor parallelism divides the heads of attention: 'vit.layers.0.attention.q_proj' has 2, tp_size=4. "
            "Use tp_size=1 or 2, or leave it out of tensor_parallel_plan.",
        ),
        (
            {"*.fc1": "column"},
            3,
            "tensor parallelism divides 'vit.layers.0.mlp.fc1' into equal shares: it has 32 columns or rows, "
            "tp_size=3. Use tp_size=1, 2, 4, 8, 16 or 32, or leave it out of tensor_parallel_plan.",
        ),
        (
            {"*.fc1": "fused_column:concatenated:3"},
            2,
            "a fused layer's parts make up its outputs: 'vit.layers.0.mlp.fc1' has 32, and tensor_parallel_plan says "
            "3. Give one number of equal parts, or widths with that sum.",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_on_every_rank(plan, tp_size, text):
    def boost():
        boosted(tiny_vit(), sgd, image_batch(2), tp_size=tp_size, tensor_parallel_plan=plan)

    everyone_raises(tp_size, boost, ConfigError, text)


def test_a_shared_parameter_is_divided_in_one_way():
    class Tied(nn.Module):
        def __init__(self, kind, sizes):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(4, 4), kind(*sizes)
            self.second.weight = self.first.weight

    def boost(kind, sizes, plan):
        return lambda: boosted(Tied(kind, sizes), sgd, torch.ones(2, 4), tp_size=2, tensor_parallel_plan=plan)

    text = (
        "'first.weight' is shared by several modules, and tensor_parallel_plan divides it in two ways: 'second' as row."
    )
    everyone_raises(2, boost(nn.Linear, (4, 4), {"first": "column", "second": "row"}), ConfigError, text)
    text = "'second' (Bilinear) holds 'weight', which tensor_parallel_plan divides for another module"
    everyone_raises(2, boost(nn.Bilinear, (4, 4, 4), {"first": "column"}), ConfigError, text)


def test_a_packed_row_whose_sequences_attend_to_each_other_is_not_cut():
    ends = torch.tensor([0, 3, 7], dtype=torch.int32)
    row = torch.arange(7)[None]
    labels = torch.tensor([[-100, 1, 2, -100, 4, 5, 6]])
    batch = {
        "input_ids": row,
        "labels": labels,
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3]]),
        "cu_seq_lens_q": ends,
    }

    def run(use_cache=True):
        model = llama()
        model.config.use_cache = use_cache
        sample = {
            "input_ids": row[:, :3],
            "labels": labels[:, :3],
            "position_ids": row[:, :3],
            "cu_seq_lens_q": ends[:2],
        }
        booster, model, optimizer = boosted(model, sgd, sample, num_microbatches=2)
        return booster.execute_pipeline(iter([batch]), model, model_loss, optimizer)["loss"]

    everyone_raises(2, run, DataError, "LlamaForCausalLM makes a cache of keys and values (config.use_cache=True)")
    assert len(Loopback(2).run(lambda: run(use_cache=False))) == 2
