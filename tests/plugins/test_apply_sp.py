"""Blocks on shards of sequences train as in one process: losses, every gradient, weights after steps."""

import functools
import logging
import re

import pytest
import torch
from attention_blocks import Shaped
from divided_models import MODELS, VIT, falcon, mixtral, t5, token_batch
from processes import run_ranks
from sequence_models import SHARDS, Block, Net, assert_equal, images, sequences, squares, vit
from support import (
    assert_near,
    assert_same,
    boosted,
    first_microbatch,
    gradients_of,
    image_batch,
    model_loss,
    sgd,
    tiny_vit,
    train,
    trained_alone,
    whole_over_tp,
)
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import (
    BertConfig,
    BertForMaskedLM,
    OPTConfig,
    OPTForCausalLM,
    ViTForImageClassification,
)

from hybridpp.cluster import Loopback, current_world
from hybridpp.cluster.loopback_group import LoopbackGroup
from hybridpp.errors import ConfigError, PartitionError
from hybridpp.sharded_activations.deferred_sequence_gather import DeferredSequenceTensor

BATCHES = [images(seed=seed) for seed in range(2)]


def bert():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**sizes, **dropout, vocab_size=37, max_position_embeddings=8)).train()


def opt():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 37}
    config = OPTConfig(**sizes, word_embed_proj_dim=32, dropout=0.0, max_position_embeddings=8, use_cache=False)
    return OPTForCausalLM(config).train()


@functools.cache
def one_process(num_layers=2):
    return train(functools.partial(vit, num_layers=num_layers), BATCHES, num_microbatches=2)


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor_parallel_plan": None},
        {"pp_size": 2, "gradient_checkpoint_config": {}},
        pytest.param({"gradient_checkpoint_config": {}}, marks=pytest.mark.matrix),
        # Stages: on processes, below; two of them on a rank: test_zb_v_changes_no_bit.
        pytest.param({"pp_size": 2}, marks=pytest.mark.matrix),
        pytest.param({"pp_size": 2, "schedule": "zb-v", "num_layers": 4}, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_65_tokens_on_two_ranks_train_as_in_one_process(layout):
    layout = {"tensor_parallel_plan": VIT, **layout}
    num_layers = layout.pop("num_layers", 2)
    run = train(functools.partial(vit, num_layers=num_layers), BATCHES, num_microbatches=2, **SHARDS, **layout)
    assert_equal(run, one_process(num_layers))


def test_replicas_of_ranks_that_share_sequences():
    run = train(vit, BATCHES, num_microbatches=2, dp_size=2, tensor_parallel_plan=VIT, **SHARDS)
    assert_near(run["gradients"], one_process()["gradients"])
    assert_near(run["weights"], one_process()["weights"])


def test_every_parameter_counts_once_in_the_norm():
    options = {"num_microbatches": 1, "max_norm": 0.05}
    expected = train(vit, BATCHES, **options)
    assert_equal(train(vit, BATCHES, tensor_parallel_plan=VIT, **options, **SHARDS), expected)


@pytest.mark.parametrize("make", [opt, falcon, mixtral, t5])
def test_blocks_without_separate_norms_before_attention_and_mlp(make):
    """Activations of all samples in one list, one norm for both, experts on whole sequences, tables by head."""
    expected = train(make, [token_batch()], num_microbatches=2)
    assert_equal(train(make, [token_batch()], num_microbatches=2, **SHARDS), expected, 2e-6)


def test_197_tokens_train_as_in_one_process():
    make, batches = functools.partial(vit, 56, 4), [images(2, 56)]
    expected = train(make, batches, num_microbatches=1)
    assert_equal(train(make, batches, num_microbatches=1, **SHARDS), expected)


@pytest.mark.parametrize(("name", "pp_size"), [("llama-tied", 2), ("llama-one-kv-head", 1), ("gpt2", 2), ("bloom", 1)])
def test_models_of_all_kinds_of_blocks(name, pp_size):
    make, plan = MODELS[name]
    batches = [token_batch(seed=seed) for seed in range(2)]
    # Bloom's plan leaves its attention whole; what is found out does not.
    layout = {"pp_size": pp_size, "tensor_parallel_plan": None if name == "bloom" else plan}
    expected = train(make, batches, num_microbatches=2)
    assert_equal(train(make, batches, num_microbatches=2, **layout, **SHARDS), expected)


def test_blocks_whose_layers_are_apart():
    """BERT's attention and its output are different modules, with the norm and the residual in the second."""
    expected = train(bert, [token_batch()], num_microbatches=2)
    assert_equal(train(bert, [token_batch()], num_microbatches=2, **SHARDS), expected)


def test_zb_v_changes_no_bit():
    options = {"num_microbatches": 3, "tensor_parallel_plan": VIT, **SHARDS}
    make, batches = functools.partial(tiny_vit, 0.1), [image_batch(6)]
    expected = train(make, batches, **options)
    run = train(make, batches, pp_size=2, schedule="zb-v", **options)
    assert run["losses"][0] == expected["losses"][0]
    assert_same(run["gradients"], expected["gradients"])
    assert_same(run["weights"], expected["weights"])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision(precision):
    batches, options = [image_batch(4, seed) for seed in range(2)], {"num_microbatches": 2, "precision": precision}
    make = functools.partial(tiny_vit, num_layers=2)
    expected = train(make, batches, **options)
    run = train(make, batches, pp_size=2, tensor_parallel_plan=VIT, **options, **SHARDS)
    assert_near(run["weights"], expected["weights"], 2e-2)


class Looking(Block):
    """Looks at values, so that fakes cannot run it and made-up numbers have to."""

    def forward(self, x):
        return super().forward(x) if x.abs().max().item() < 1e9 else x


LOOKING = {
    "looks at values": (functools.partial(Net, Looking, 2), sequences(5), squares),
    "experts": (mixtral, token_batch(), model_loss),
}


def loss_of_looking(name):
    make_model, batch, criterion = LOOKING[name]
    settings = {"num_microbatches": 2, "pp_size": 2, **SHARDS}
    booster, model, optimizer = boosted(make_model(), sgd, first_microbatch(batch, settings), **settings)
    return booster.execute_pipeline(iter([batch]), model, criterion, optimizer)["loss"].item()


def on_processes():
    booster, model, optimizer = boosted(
        vit(), sgd, images(2), num_microbatches=2, pp_size=2, tensor_parallel_plan=VIT, **SHARDS
    )
    losses = []
    for batch in BATCHES:
        losses.append(booster.execute_pipeline(iter([batch]), model, model_loss, optimizer)["loss"].item())
        optimizer.step()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return losses, whole_over_tp(booster, model, weights), {name: loss_of_looking(name) for name in LOOKING}


def test_processes_that_share_sequences():
    """Of a ViT, and of blocks that fakes cannot run: start and warm-up of processes take longer than a model."""
    expected = one_process()
    looking = {
        name: train(make_model, [batch], num_microbatches=2, criterion=criterion)["losses"][0][0]
        for name, (make_model, batch, criterion) in LOOKING.items()
    }
    weights = {}
    for losses, own, of_looking in run_ranks(on_processes, 4):
        assert losses == pytest.approx(expected["losses"][0], abs=1e-6)
        assert of_looking == pytest.approx(looking, abs=1e-6)
        weights |= own
    assert_near(weights, expected["weights"])


def test_cutting_such_blocks_gathers_nothing_that_they_return(monkeypatch):
    gathered = []
    whole = DeferredSequenceTensor.full_tensor
    noted = lambda lazy: (gathered.append((current_world().size, lazy.dtype)), whole(lazy))[1]  # noqa: E731
    monkeypatch.setattr(DeferredSequenceTensor, "full_tensor", noted)
    options = {"num_microbatches": 2, "pp_size": 2, **SHARDS}
    Loopback(4).run(lambda: boosted(Net(Looking), sgd, sequences(5), **options))
    # Divisions are looked for in double precision, and tried in single on two ranks.
    assert gathered
    assert (4, torch.float32) not in gathered
    # Made-up numbers are summed over ranks, which take turns inside of their traces.
    assert not logging.getLogger("torch._subclasses.fake_tensor").filters


def test_between_sharded_layers_there_are_shards_and_no_all_reduces(monkeypatch):
    reduced = []
    all_reduce = LoopbackGroup.all_reduce

    def noted(group, tensor):
        reduced.append(tuple(tensor.shape))
        return all_reduce(group, tensor)

    monkeypatch.setattr(LoopbackGroup, "all_reduce", noted)

    def rank():
        _, model, _ = boosted(vit(), sgd, images(2), tensor_parallel_plan=VIT, **SHARDS)
        shapes = []
        for name, module in model.named_modules():
            if re.search(r"layers\.\d\.(layernorm|dropout)", name):
                module.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
            if name.endswith("attention.q_proj"):
                module.register_forward_pre_hook(lambda _, args: joined.append(tuple(args[0].shape)))
        del reduced[:]
        joined = []
        model(**images(2))
        assert joined == [(2, 65, 16)] * 2
        return shapes

    # Two norms and two dropouts in each of two blocks.
    assert Loopback(2).run(rank) == [[(2, 33, 16)] * 8, [(2, 32, 16)] * 8]
    assert reduced == []


def test_saved_folders_are_whole(tmp_path):
    def rank():
        booster, model, optimizer = boosted(vit(), sgd, images(2), tensor_parallel_plan=VIT, **SHARDS)
        booster.execute_pipeline(iter([BATCHES[0]]), model, model_loss, optimizer)
        optimizer.step()
        booster.save_model(model, tmp_path)
        booster.load_model(model, tmp_path)
        return booster.execute_pipeline(iter([BATCHES[1]]), model, model_loss, optimizer)["loss"].item()

    expected = one_process()["losses"][0][1]
    assert Loopback(2).run(rank) == [pytest.approx(expected, abs=1e-6)] * 2
    loaded = ViTForImageClassification.from_pretrained(tmp_path).train()
    assert model_loss(loaded(**BATCHES[1]), None).item() == pytest.approx(expected, abs=1e-6)


def test_a_model_on_the_meta_device(tmp_path):
    def rank():
        with torch.device("meta"):
            model = vit()
        booster, model, optimizer = boosted(model, sgd, images(2), **SHARDS)
        booster.load_model(model, tmp_path)
        return booster.execute_pipeline(iter([BATCHES[0]]), model, model_loss, optimizer)["loss"].item()

    vit().save_pretrained(tmp_path)
    assert Loopback(2).run(rank) == [pytest.approx(one_process()["losses"][0][0], abs=1e-6)] * 2


SEQUENCES = [sequences(5, seed) for seed in range(2)]
DROPPING = {"criterion": squares, "num_microbatches": 2, "tensor_parallel_plan": {"*.up": "column", "*.down": "row"}}


@pytest.mark.parametrize(("tp_size", "num_places"), [(4, 6), (4, 3), (2, 1)])
def test_any_length_after_the_sample(tp_size, num_places):
    def make():
        return Net(Block, 2)

    batches = [SEQUENCES[0], sequences(num_places, 2)]
    expected = train(make, batches, criterion=squares, num_microbatches=2)
    assert_equal(train(make, batches, **DROPPING, **SHARDS | {"tp_size": tp_size}), expected)


def dropping_net():
    return Net(lambda: Block(0.3, 0.3))


@pytest.mark.parametrize(
    "layout",
    [
        {"pp_size": 4},
        {"pp_size": 2, "schedule": "zb-v"},
        {"pp_size": 2, "schedule": "interleaved", "num_model_chunks": 2},
        {"gradient_checkpoint_config": {}},
        {"pp_size": 2, "gradient_checkpoint_config": {}},
    ],
    ids=str,
)
def test_masks_of_shards_are_drawn_again_whatever_the_stages_and_schedule(layout):
    expected = trained_alone(dropping_net, SEQUENCES, **DROPPING, **SHARDS)
    run = train(dropping_net, SEQUENCES, **DROPPING, **SHARDS, **layout)
    assert run["losses"][0] == expected["losses"][0]
    assert_same(run["gradients"], expected["gradients"])


def test_shards_draw_masks_of_their_own():
    class Seen(Block):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(8, 8)

        def ones(self, x):
            ones = functional.dropout(torch.ones_like(x), 0.5, self.training)
            masks.append(ones.flatten().tolist())
            return x * ones

        def forward(self, x):
            y = self.ones(self.down(self.up(self.ones(self.norm(x)))))
            return self.ones(self.last(y)) + x

    masks = []
    even = SEQUENCES[0][:, :4]  # shards of one size, on which equal states would draw equal numbers
    train(lambda: Net(Seen, 1), [even], **DROPPING | {"num_microbatches": 1}, **SHARDS)
    seen = masks[-6:]  # before, between and behind the layers, on both ranks
    assert {len(mask) for mask in seen} == {4 * 2 * 8}
    assert len(set(map(tuple, seen))) == 6


class Mixing(Block):
    """Every place reads the mean of all: no shard has it."""

    def forward(self, x):
        return super().forward(x - x.mean(1, keepdim=True))


class DroppingSamples(Block):
    def forward(self, x):
        kept = torch.rand(len(x), 1, 1) > 0.2 if self.training else 1.0
        return x + kept * self.down(self.up(self.norm(x)))


class Batchwise(Block):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x.transpose(1, 2)).transpose(1, 2)))


class Leaving(Block):
    """Leaves a loss on itself, of the places it has."""

    def forward(self, x):
        y = super().forward(x)
        self.penalty = y.detach().square().mean()
        return y


class Limited(Block):
    """Has a limit on all places together, which its first numbers do not reach."""

    def forward(self, x):
        return super().forward(x) * (100 / x.norm(dim=(1, 2), keepdim=True).clamp(min=100))


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (Mixing, "on sequence shards, it gives different results"),
        (Limited, "on sequence shards, it gives different results"),
        (DroppingSamples, "it draws random numbers per sample, not per position"),
        (Batchwise, "'norm' may read all positions at once, and no module around it takes hidden states"),
        (Leaving, "on sequence shards, it gives different results"),
    ],
)
def test_blocks_that_need_whole_sequences_keep_them_and_are_named(block, reason, caplog):
    class Both(Net):
        def __init__(self):
            super().__init__(Block, 2)
            self.blocks.append(block())

    batches = [SEQUENCES[0]]
    with caplog.at_level("WARNING", logger="hybridpp"):
        run = train(Both, batches, **DROPPING, **SHARDS)
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"blocks.*: full sequences, {reason}" in line
    if block is not DroppingSamples:
        assert_equal(run, train(Both, batches, criterion=squares, num_microbatches=2))


class Averaging(nn.Module):
    """Whole layers that read all places, with dropout."""

    def __init__(self):
        super().__init__()
        self.linear, self.rate = nn.Linear(8, 8), 0.0

    def forward(self, x):
        ones = functional.dropout(torch.ones_like(x), self.rate, self.training)
        masks.append(ones.flatten().tolist())
        return self.linear(x * ones).mean(1, keepdim=True).expand(x.shape)


masks = []


class Averaged(Block):
    def __init__(self):
        super().__init__()
        self.average, self.behind = Averaging(), nn.LayerNorm(8)

    def forward(self, x):
        return super().forward(self.behind(x + self.average(x)))


def test_modules_that_need_whole_sequences_have_them_between_shards():
    expected = train(lambda: Net(Averaged), SEQUENCES, criterion=squares, num_microbatches=2)
    seen = []

    def make():
        model = Net(Averaged)
        for block in model.blocks:
            block.behind.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
        return model

    assert_equal(train(make, SEQUENCES, **DROPPING, **SHARDS), expected)
    assert {3, 2} <= set(seen)


class Routed(nn.Module):
    """Two experts, who are given places of all samples in one list."""

    def __init__(self, flat):
        super().__init__()
        self.ups, self.downs = (nn.ModuleList([nn.Linear(*sizes) for _ in range(2)]) for sizes in ((8, 16), (16, 8)))
        self.flat = flat

    def forward(self, x):
        rows = x.reshape(-1, 8)
        output = torch.zeros_like(rows)
        for number in range(2):
            mine = (rows[:, 0] > 0) == bool(number)
            output[mine] = self.downs[number](functional.relu(self.ups[number](rows[mine])))
        return output if self.flat else output.view(x.shape)


class Experts(Block):
    def __init__(self, flat):
        super().__init__()
        self.experts, self.behind = Routed(flat), nn.LayerNorm(8)

    def forward(self, x):
        x = super().forward(x)
        return x + self.behind(self.experts(x).view(x.shape))


class Enclosed(nn.Module):
    """Views what its layer makes by the shape of its input, and adds to that input itself, as ALBERT's attention."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, x):
        inner = self.up(x).view(*x.shape[:-1], -1, 4).flatten(2)
        return self.norm(x + self.down(functional.relu(inner + inner.mean(1, keepdim=True))))


class Enclosing(Block):
    def __init__(self):
        super().__init__()
        self.enclosed, self.behind = Enclosed(), nn.LayerNorm(8)

    def forward(self, x):
        return super().forward(self.behind(self.enclosed(x)))


ROUTED = {"*.ups.*": "column", "*.downs.*": "row"}


@pytest.mark.parametrize(
    ("make_block", "more"),
    [(functools.partial(Experts, False), ROUTED), (functools.partial(Experts, True), ROUTED), (Enclosing, {})],
)
def test_modules_whose_row_layers_give_no_shards_run_on_whole_sequences(make_block, more):
    seen = []

    def make():
        model = Net(make_block, 2)
        for block in model.blocks:
            block.behind.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
        return model

    expected = train(make, SEQUENCES, criterion=squares, num_microbatches=2)
    del seen[:]
    plan = DROPPING["tensor_parallel_plan"] | more
    assert_equal(train(make, SEQUENCES, **DROPPING | {"tensor_parallel_plan": plan}, **SHARDS), expected)
    assert {3, 2} <= set(seen)


def test_whole_sequences_draw_the_same_mask_on_all_ranks():
    def make():
        model = Net(Averaged, 1)
        model.blocks[0].average.rate = 0.5
        return model

    del masks[:]
    train(make, SEQUENCES[:1], **DROPPING | {"num_microbatches": 1}, **SHARDS)
    one, other = masks[-2:]
    assert one == other
    assert len(set(one)) == 2


class Fading(Net):
    """Its blocks are given nearly constant numbers, until ``scale`` has grown."""

    def __init__(self, scale):
        super().__init__(Block)
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, x):
        return super().forward(x * self.scale + 1)


def test_norms_with_almost_zero_gradients_on_the_sample_are_summed():
    def rank():
        plan = DROPPING["tensor_parallel_plan"]
        booster, model, optimizer = boosted(Fading(1e-9), sgd, SEQUENCES[0], tensor_parallel_plan=plan, **SHARDS)
        model.scale.data.fill_(1.0)
        booster.execute_pipeline(iter([SEQUENCES[0]]), model, squares, optimizer)
        return gradients_of(booster, model)["blocks.0.norm.weight"]

    expected = train(lambda: Fading(1.0), SEQUENCES[:1], criterion=squares)["gradients"]["blocks.0.norm.weight"]
    for gradient in Loopback(2).run(rank):
        torch.testing.assert_close(gradient, expected)


class Skipping(Block):
    def forward(self, x):
        return x if self.is_skipped else super().forward(x)

    is_skipped = False


@pytest.mark.parametrize("dp_size", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_a_step_skips_is_moved_neither_by_momentum_nor_by_decay(precision, dp_size):
    """Of a block that is skipped, the norm and a bias have gradients on no rank, though their ranks sum them."""

    def make_optimizer(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)

    def rank():
        plan = DROPPING["tensor_parallel_plan"]
        settings = {"tensor_parallel_plan": plan, "precision": precision, **SHARDS}
        booster, model, optimizer = boosted(Net(Skipping), make_optimizer, SEQUENCES[0][:2], **settings)
        weights = []
        for is_skipped in (False, True, True):
            model.blocks[1].is_skipped = is_skipped
            part = SEQUENCES[0].chunk(dp_size)[booster.plugin.layout.here.dp]
            booster.execute_pipeline(iter([part]), model, squares, optimizer)
            optimizer.step()
            weights.append({name: one.detach().clone() for name, one in model.named_parameters()})
        return weights

    for before, *after in Loopback(2 * dp_size).run(rank):
        for weights in after:
            moved = {name.split(".")[1] for name, one in weights.items() if not torch.equal(one, before[name])}
            assert moved == {"0", "2", "3"}


def refused(error, text, run):
    with pytest.raises(error, match=re.escape(text)):
        Loopback(2).run(run)


class Attentive(nn.Module):
    """Attention and two layers, of which several blocks may hold one; both read the same norm."""

    def __init__(self, shared: "Attentive | None" = None, part: str = ""):
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(8), Shaped(8), Block()
        if shared is not None:
            setattr(self, part, getattr(shared, part))

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return self.mlp(self.norm(x))


class Sharing(nn.Module):
    """Blocks that share a part; or two blocks, each called twice; or a part that container code calls, too."""

    def __init__(self, part: str):
        super().__init__()
        torch.manual_seed(0)
        first = Attentive()
        others = [Attentive(first, part) if part in first._modules else Attentive() for _ in range(2)]
        self.blocks = nn.ModuleList([first, others[0]] * 2 if part == "block" else [first, *others])
        self.last = first.mlp if part == "called outside" else nn.Identity()

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.last(x)


BY_HAND = {"*.up": "column", "*.down": "row"}
OF_SHARING = {"num_microbatches": 2, "criterion": squares}
PLACES = [sequences(4, seed=seed) for seed in range(2)]


@functools.cache
def sharing_alone(part):
    return train(functools.partial(Sharing, part), PLACES, **OF_SHARING)


@pytest.mark.parametrize(
    ("part", "plan", "pp_size"),
    [
        ("block", None, 2),
        ("attention", None, 1),
        ("mlp", None, 2),
        ("attention", BY_HAND, 1),
        ("called outside", BY_HAND, 1),
        pytest.param("norm", BY_HAND, 2, marks=pytest.mark.matrix),
        pytest.param("called outside", None, 2, marks=pytest.mark.matrix),
    ],
)
def test_parts_that_several_blocks_share_run_on_shards(part, plan, pp_size, caplog):
    layout = {**SHARDS, "pp_size": pp_size, "tensor_parallel_plan": plan}
    run = train(functools.partial(Sharing, part), PLACES, **OF_SHARING, **layout)
    assert_equal(run, sharing_alone(part))
    assert ("full sequences" in caplog.text) is (part == "called outside")


def test_a_model_without_such_blocks_is_refused():
    text = (
        "no block of Net can run on sequence shards: blocks.0: on "
        "sequence shards, it gives different results. Leave enable_sequence_parallelism out."
    )
    refused(ConfigError, text, lambda: boosted(Net(Mixing), sgd, SEQUENCES[0], **SHARDS))


def test_activations_without_places_are_named():
    text = "its activations must be [batch, sequence, hidden], with two positions or more: got (4, 8)"
    refused(ConfigError, text, lambda: boosted(Net(Block), sgd, SEQUENCES[0][:, 0], **SHARDS))


def checkpointing(model, settings=None):
    new_name = hasattr(model, "activation_checkpointing_enable")
    (model.activation_checkpointing_enable if new_name else model.gradient_checkpointing_enable)(settings)
    return model


dropping_vit = functools.partial(vit, dropout=0.2)


@pytest.mark.parametrize(
    ("layout", "use_reentrant"), [({}, True), ({"pp_size": 2, "schedule": "zb-h1"}, False)], ids=str
)
def test_what_transformers_checkpoints_in_blocks_is_run_again_on_shards(layout, use_reentrant):
    def make():
        return checkpointing(dropping_vit(), {"use_reentrant": use_reentrant})

    options = {"num_microbatches": 2, "tensor_parallel_plan": VIT, **SHARDS}
    expected = trained_alone(dropping_vit, BATCHES, **options)
    run = train(make, BATCHES, **options, **layout)
    assert run["losses"][0] == expected["losses"][0]
    assert_same(run["gradients"], expected["gradients"])


def test_checkpointing_inside_blocks_enabled_after_boost_gives_advice():
    def rank():
        booster, model, optimizer = boosted(vit(), sgd, images(2), tensor_parallel_plan=VIT, **SHARDS)
        checkpointing(model)
        booster.execute_pipeline(iter([images(2)]), model, model_loss, optimizer)

    text = (
        "sequence parallelism must know at boost which parts of a block the backward pass recomputes: the model checkp"
    )
    refused(PartitionError, text, rank)


class Repeating(Block):
    """Checkpoints its wide activations."""

    def forward(self, x):
        if not self.training:
            return super().forward(x)
        return x + checkpoint(lambda y: self.down(self.up(y)), self.norm(x), use_reentrant=False)


def test_blocks_that_checkpoint_their_layers_are_refused_at_boost():
    text = (
        "no block of Net can run on sequence shards: blocks.0: it checkpoints "
        "activations of its layers itself (use gradient_checkpoint_config instead). Leave "
    )
    refused(ConfigError, text, lambda: boosted(Net(Repeating), sgd, SEQUENCES[0], **SHARDS))


def test_recomputed_parts_of_sequence_blocks_are_refused_at_boost():
    layout = {"pp_size": 2, "split_points": {"blocks.1.up": "after"}, "gradient_checkpoint_config": {}}

    def rank():
        plan = DROPPING["tensor_parallel_plan"]
        with pytest.raises(PartitionError) as refused:
            boosted(Net(Block, 2), sgd, SEQUENCES[0], **SHARDS, **layout, tensor_parallel_plan=plan)
        return str(refused.value)

    (text,) = set(Loopback(4).run(rank))
    assert text == (
        "a part of a sequence-parallel block cannot be recomputed alone: the cut is inside 'blocks.1', and "
        "gradient_checkpoint_config recomputes 'blocks.1.up'. Cut before or after 'blocks.1', or leave out "
        "gradient_checkpoint_config or enable_sequence_parallelism."
    )


def three_blocks():
    return Net(Block, 3)


@pytest.mark.parametrize(("point", "counts"), [("blocks.0.up", [0, 1]), ("blocks.0.norm", [1, 1])])
def test_recomputation_beside_a_cut_inside_a_sequence_block(point, counts):
    """Only units that need nothing of the block around them are recomputed."""
    layout = {"split_points": {point: "after"}, "gradient_checkpoint_config": {"num_ckpt_layers_per_stage": counts}}
    layout |= {"pp_size": 2}
    expected = trained_alone(three_blocks, SEQUENCES, criterion=squares, num_microbatches=2)
    assert_equal(train(three_blocks, SEQUENCES, **DROPPING, **SHARDS, **layout), expected)


def test_another_call_than_on_the_sample_says_so():
    class Named(Net):
        def forward(self, x):
            for block in self.blocks:
                x = block(x) if x.shape[1] == 5 else block(x=x)
            return x

    def rank():
        booster, model, optimizer = boosted(Named(Block), sgd, SEQUENCES[0], **SHARDS)
        booster.execute_pipeline(iter([SEQUENCES[0][:, :4]]), model, squares, optimizer)

    text = "expects the activations of 'blocks.0' in argument 0, as on the sample: the call has 0"
    refused(PartitionError, text, rank)


def test_the_first_rank_finds_the_blocks_for_all():
    def rank():
        sample = SEQUENCES[0] if current_world().rank == 0 else SEQUENCES[0][:, :1]
        booster, model, optimizer = boosted(
            Net(Block), sgd, sample, tensor_parallel_plan=DROPPING["tensor_parallel_plan"], **SHARDS
        )
        return booster.execute_pipeline(iter([SEQUENCES[0]]), model, squares, optimizer)["loss"].item()

    expected = train(lambda: Net(Block), SEQUENCES[:1], criterion=squares)["losses"][0][0]
    assert Loopback(2).run(rank) == [pytest.approx(expected)] * 2
