"""Layers divided over ranks train as in one process: losses, every gradient, weights after steps."""

import copy
import functools
from typing import ClassVar

import pytest
import torch
from divided_models import LLAMA, MODELS, VIT, llama, qwen3, token_batch
from partition.tracing import compare_traces
from processes import run_ranks
from support import assert_near, boosted, image_batch, model_loss, sgd, small_vit, tiny_vit, train, whole_over_tp
from torch import nn

from hybridpp.cluster import Loopback, current_world
from hybridpp.tensor_parallel import sharding_of

BATCHES = [image_batch(6, seed) for seed in range(2)]


@functools.cache
def one_process(make_model=small_vit):
    return train(make_model, BATCHES, num_microbatches=2)


def assert_equal(run, expected, tolerance=1e-6):
    for losses in run["losses"]:
        assert losses == pytest.approx(expected["losses"][0], abs=10 * tolerance)
    assert_near(run["gradients"], expected["gradients"], tolerance)
    assert_near(run["weights"], expected["weights"], 10 * tolerance)


@pytest.mark.parametrize(
    "layout",
    [
        {"tp_size": 2},
        {"tp_size": 2, "pp_size": 2},
        # Split backward passes and chunks: FULL, and where nothing is said, below.
        pytest.param({"tp_size": 2, "pp_size": 2, "schedule": "zb-h1"}, marks=pytest.mark.matrix),
        pytest.param({"tp_size": 2, "pp_size": 2, "schedule": "zb-v"}, marks=pytest.mark.matrix),
        pytest.param(
            {"tp_size": 2, "pp_size": 2, "schedule": "interleaved", "num_model_chunks": 2}, marks=pytest.mark.matrix
        ),
        {"tp_size": 2, "pp_size": 2, "gradient_checkpoint_config": {"gradient_checkpointing_ratio": 1.0}},
    ],
    ids=str,
)
def test_divided_layers_train_as_in_one_process(layout):
    # A rank with two chunks needs two blocks of each.
    make_model = tiny_vit if layout.get("schedule") in {"zb-v", "interleaved"} else small_vit
    run = train(make_model, BATCHES, num_microbatches=2, tensor_parallel_plan=VIT, **layout)
    assert_equal(run, one_process(make_model))


@pytest.mark.parametrize("pp_size", [pytest.param(1, marks=pytest.mark.matrix), 2])
def test_replicas_of_divided_layers_train_as_in_one_process(pp_size):
    batches = [image_batch(8, seed) for seed in range(2)]
    expected = train(small_vit, batches, num_microbatches=2)
    run = train(small_vit, batches, dp_size=2, tp_size=2, pp_size=pp_size, num_microbatches=2, tensor_parallel_plan=VIT)
    assert_near(run["gradients"], expected["gradients"])
    assert_near(run["weights"], expected["weights"], 1e-5)


@functools.cache
def one_process_of(name):
    return train(MODELS[name][0], [token_batch(seed=seed) for seed in range(2)], num_microbatches=2)


# The untied llama differs in its head, of which test_divided_logits is.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.matrix if name == "llama" else ()) for name in MODELS]
)
def test_models_of_all_kinds_of_layers(name, monkeypatch):
    """In stages, every rank of which traces; those of one stage are further below."""
    traces = compare_traces(monkeypatch)
    make_model, plan = MODELS[name]
    batches = [token_batch(seed=seed) for seed in range(2)]
    options = {"pp_size": 2, "num_microbatches": 2, "schedule": "zb-h1"}
    run = train(make_model, batches, tp_size=2, tensor_parallel_plan=plan, **options)
    assert_equal(run, one_process_of(name), 2e-6)
    assert traces == {"made": 8, "compared": 4}, "at boost and in the first step, of either shard"


# Qwen3 has as many heads of keys and values as llama-tied; test_divided_logits divides a tied table by four.
@pytest.mark.parametrize("name", [pytest.param("llama-tied", marks=pytest.mark.matrix), "llama-one-kv-head", "qwen3"])
def test_four_ranks_share_layers(name):
    make_model, plan = MODELS[name]
    batches = [token_batch(seed=seed) for seed in range(2)]
    run = train(make_model, batches, tp_size=4, num_microbatches=2, tensor_parallel_plan=plan)
    assert_equal(run, one_process_of(name), 2e-6)


@pytest.mark.parametrize("name", ["llama-tied", "qwen3"])
def test_clipping_sees_the_norm_of_the_whole_model(name):
    make_model, plan = MODELS[name]
    batches = [token_batch(seed=seed) for seed in range(2)]
    expected = train(make_model, batches, num_microbatches=2, max_norm=0.1)
    run = train(make_model, batches, tp_size=2, pp_size=2, num_microbatches=2, max_norm=0.1, tensor_parallel_plan=plan)
    assert_near(run["weights"], expected["weights"], 1e-5)


def test_the_norm_counts_every_parameter_once():
    def run(**layout):
        def rank():
            booster, model, optimizer = boosted(qwen3(), sgd, token_batch(2), num_microbatches=2, **layout)
            booster.execute_pipeline(iter([token_batch()]), model, model_loss, optimizer)
            return optimizer.get_grad_norm()

        return Loopback(layout.get("tp_size", 1) * layout.get("pp_size", 1)).run(rank)

    (expected,) = run()
    for layout in ({"tp_size": 4}, {"tp_size": 2, "pp_size": 2}):
        norms = run(tensor_parallel_plan=MODELS["qwen3"][1], **layout)
        assert len(set(norms)) == 1
        assert norms[0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_keeps_the_masters_of_its_part(precision):
    batches, options = [image_batch(4, seed) for seed in range(2)], {"num_microbatches": 2, "precision": precision}
    expected = train(small_vit, batches, **options)
    run = train(small_vit, batches, tp_size=2, pp_size=2, tensor_parallel_plan=VIT, **options)
    assert_near(run["weights"], expected["weights"], 2e-2)


@functools.cache
def one_process_in(name, precision):
    make_model, _, batch = SWEPT[name]
    return train(make_model, [batch], num_microbatches=4, precision=precision, initial_scale=2.0**8)


SWEPT = {
    "vit": (small_vit, VIT, image_batch(8)),
    "vit of four blocks": (tiny_vit, VIT, image_batch(8)),
    "llama-tied": (*MODELS["llama-tied"], token_batch(8)),
    "llama of four blocks": (functools.partial(llama, num_layers=4), LLAMA, token_batch(8)),
}
FULL = [
    pytest.param("vit", "fp16", {"schedule": "1f1b", "dp_size": 2}, marks=pytest.mark.matrix),
    pytest.param("vit of four blocks", "fp16", {"schedule": "zb-v"}, marks=pytest.mark.matrix),
    ("llama of four blocks", "fp32", {"schedule": "interleaved", "num_model_chunks": 2}),
    ("llama of four blocks", "fp32", {"schedule": "zb-v", "dp_size": 2}),
    pytest.param("llama-tied", "fp16", {"schedule": "1f1b"}, marks=pytest.mark.matrix),
    ("llama of four blocks", "fp16", {"schedule": "zb-v"}),
]


@pytest.mark.parametrize(("name", "precision", "layout"), FULL, ids=str)
def test_gradients_under_every_kind_of_schedule_and_precision(name, layout, precision):
    make_model, plan, batch = SWEPT[name]
    # The same micro-batches, on one replica and on two.
    options = {"num_microbatches": 4 // layout.get("dp_size", 1), "precision": precision, "initial_scale": 2.0**8}
    run = train(make_model, [batch], tp_size=2, pp_size=2, tensor_parallel_plan=plan, **options, **layout)
    expected = one_process_in(name, precision)["gradients"]
    assert set(run["gradients"]) == set(expected)
    tolerance = 1e-5 if precision == "fp32" else 1e-2
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for key, gradient in expected.items():
        # A bias of keys has no gradient but rounding.
        limit = tolerance * max(float(gradient.abs().max()), 0.1 * largest)
        assert (run["gradients"][key] - gradient).abs().max() <= limit, key


def test_an_overflow_on_one_rank_skips_the_step_on_all():
    def rank():
        booster, model, optimizer = boosted(
            small_vit(),
            sgd,
            image_batch(2),
            tp_size=2,
            pp_size=2,
            precision="fp16",
            tensor_parallel_plan=VIT,
            num_microbatches=2,
            initial_scale=2.0**4,
        )
        buckets = booster.plugin._engine(model).buckets
        finish = buckets.finish_grad_sync

        def overflow():
            finish()
            next(gradient for name, gradient in buckets.gradients.items() if "fc1" in name).fill_(float("inf"))

        if booster.plugin.layout.world.rank == 1:
            buckets.finish_grad_sync = overflow
        booster.execute_pipeline(iter([image_batch(4)]), model, model_loss, optimizer)
        optimizer.step()
        return optimizer.skipped_steps, optimizer.applied_steps, optimizer.loss_scale

    assert Loopback(4).run(rank) == [(1, 0, 8.0)] * 4


def test_each_rank_holds_its_part_of_the_optimizer_state_too():
    def rank():
        adam = functools.partial(torch.optim.Adam, lr=0.1)
        booster, model, optimizer = boosted(small_vit(), adam, image_batch(2), tp_size=2, tensor_parallel_plan=VIT)
        booster.execute_pipeline(iter([image_batch(4)]), model, model_loss, optimizer)
        optimizer.step()
        divided = [p for p in model.parameters() if sharding_of(p) is not None]
        assert all(optimizer.state[p]["exp_avg"].shape == sharding_of(p).local_shape for p in divided)
        return sum(p.numel() for p in divided), sum(2 * p.numel() for p in divided)

    # Weights of 2 layers: 4 of 16 x 16, 2 of 16 x 32, biases of q, k, v and fc1.
    parameters = 2 * (4 * 256 + 2 * 512 + 3 * 16 + 32)
    assert Loopback(2).run(rank) == [(parameters // 2, parameters)] * 2


def test_state_from_before_boost_is_divided_like_its_parameter():
    def weights(**layout):
        def rank():
            model = small_vit()
            momentum = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            model_loss(model(**BATCHES[0]), None).backward()
            momentum.step()
            momentum.zero_grad()
            booster, model, optimizer = boosted(model, lambda _: momentum, image_batch(2), **layout)
            booster.execute_pipeline(iter([BATCHES[1]]), model, model_loss, optimizer)
            optimizer.step()
            return whole_over_tp(booster, model, dict(model.named_parameters()))

        return Loopback(layout.get("tp_size", 1)).run(rank)[0]

    assert_near(weights(tp_size=2, tensor_parallel_plan=VIT), weights(), 1e-5)


def test_a_loss_computed_by_the_script_goes_back_through_divided_layers():
    model = small_vit()
    model_loss(model(**BATCHES[0]), None).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}

    def rank():
        booster, model, optimizer = boosted(small_vit(), sgd, image_batch(2), tp_size=2, tensor_parallel_plan=VIT)
        booster.backward(model_loss(model(**BATCHES[0]), None), optimizer)
        return {name: (p.grad, sharding_of(p)) for name, p in model.named_parameters()}

    ranks = Loopback(2).run(rank)
    whole = {
        name: gradient if placement is None else placement.join([rank[name][0] for rank in ranks])
        for name, (gradient, placement) in ranks[0].items()
    }
    assert_near(whole, expected)


@pytest.mark.parametrize("with_sequences", [False, True])
def test_a_copy_of_a_divided_model_computes_the_same(with_sequences):
    def rank():
        settings = {"enable_sequence_parallelism": with_sequences, "tensor_parallel_plan": VIT}
        _, model, _ = boosted(small_vit(), sgd, image_batch(2), tp_size=2, **settings)
        average = copy.deepcopy(model)
        with torch.no_grad():
            return torch.equal(average(**BATCHES[0]).logits, model(**BATCHES[0]).logits)

    assert Loopback(2).run(rank) == [True, True]


def on_processes():
    booster, model, optimizer = boosted(
        small_vit(), sgd, image_batch(2), tp_size=2, pp_size=2, num_microbatches=3, tensor_parallel_plan=VIT
    )
    losses = []
    for batch in BATCHES:
        losses.append(booster.execute_pipeline(iter([batch]), model, model_loss, optimizer)["loss"].item())
        optimizer.step()
    return losses


@pytest.mark.matrix  # test_processes_that_share_a_head: they share layers, too
def test_processes_that_share_layers():
    expected = train(small_vit, BATCHES, num_microbatches=3)["losses"][0]
    for losses in run_ranks(on_processes, 4):
        assert losses == pytest.approx(expected, abs=1e-5)


def size_of_blocks(model):
    return sum(p.numel() for name, p in model.named_parameters() if ".layers." in name or ".h." in name)


def own_blocks(booster, model, optimizer):
    return size_of_blocks(model)


def assert_halved(run, make_model):
    assert sum(run["after"]) / 2 / size_of_blocks(make_model()) < 0.54


def test_a_vit_is_divided_without_being_described():
    run = train(tiny_vit, BATCHES, num_microbatches=2, tp_size=2, pp_size=2, schedule="zb-v", after=own_blocks)
    assert_equal(run, one_process(tiny_vit))
    assert_halved(run, tiny_vit)


@pytest.mark.parametrize("name", ["llama-tied", "llama-one-kv-head", "qwen3", "gpt2", "bloom"])
def test_models_are_divided_without_being_described(name):
    batches = [token_batch(seed=seed) for seed in range(2)]
    run = train(MODELS[name][0], batches, tp_size=2, num_microbatches=2, after=own_blocks)
    assert_equal(run, one_process_of(name), 2e-6)
    assert_halved(run, MODELS[name][0])


class Mixing(nn.Module):
    """Blocks whose middle is compared over its whole width: no rank can do that alone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        parts = (nn.Linear(8, 16), nn.Softmax(-1), nn.Linear(16, 8))
        self.blocks = nn.ModuleList([nn.Sequential(*copy.deepcopy(parts)) for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def squares(outputs, inputs):
    return outputs.square().mean()


def test_what_cannot_be_divided_stays_whole_and_is_named_once(caplog):
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    expected = train(Mixing, [batch], criterion=squares, num_microbatches=2)
    with caplog.at_level("WARNING", logger="hybridpp"):
        run = train(Mixing, [batch], criterion=squares, num_microbatches=2, tp_size=2)
    assert_equal(run, expected)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("[rank 0] these modules of Mixing stay replicated on all tensor-parallel ranks: ")
    assert "blocks.*" in line
    assert line.endswith(
        "To shard more layers, name them in tensor_parallel_plan, like {'*.q_proj': 'column', '*.o_proj': 'row'}."
    )


class WithOwnPlan(Mixing):
    """Says of itself that its layers can be divided, which is wrong."""

    _tp_plan: ClassVar = {"blocks.*.0": "colwise", "blocks.*.2": "rowwise"}


def test_where_the_models_own_plan_differs_is_logged(caplog):
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    with caplog.at_level("INFO", logger="hybridpp"):
        train(WithOwnPlan, [batch], criterion=squares, num_microbatches=2, tp_size=2)
    lines = [record.getMessage() for record in caplog.records]
    differs = "[rank 0] tensor parallelism differs from the model's own plan: blocks.*."
    assert [line for line in lines if line.startswith(differs)] == [
        f"{differs}*: colwise in the model's own plan, replicated here",
        f"{differs}*: rowwise in the model's own plan, replicated here",
    ]


def test_the_first_ranks_sample_decides_for_all():
    class Skipping(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            blocks = [nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2)]
            self.blocks = nn.ModuleList(blocks)

        def forward(self, x):
            return self.blocks[0](x) if x.dim() == 2 else self.blocks[1](x)

    def rank():
        samples = {0: torch.randn(2, 8), 1: torch.randn(2, 3, 8)}
        _, model, _ = boosted(Skipping(), sgd, samples[current_world().rank], tp_size=2)
        return [len(block[0].weight) for block in model.blocks]

    assert Loopback(2).run(rank) == [[8, 16], [8, 16]]


def test_what_the_first_rank_meets_is_raised_on_all():
    class Refusing(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, x):
            raise KeyError("no such thing")

    def rank():
        torch.manual_seed(0)
        with pytest.raises(KeyError, match="no such thing"):
            boosted(Refusing(), sgd, torch.randn(2, 8), tp_size=2)

    Loopback(2).run(rank)
