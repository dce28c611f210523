"""What styles of layers cannot say is divided too, where it is found: tables by head, experts, shared heads."""

import functools
import logging
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from copies import copied
from divided_models import SIZES, deepseek, falcon, gpt_oss, llama4, mixtral, mpnet, olmo2, t5, token_batch
from hybridpp_plugins.apply_sp import sequence_plan
from hybridpp_plugins.find_tp_plan import default_formats, find_tp_plan
from hybridpp_plugins.preview_tp import preview_tensor_parallel
from hybridpp_plugins.sample import Samples, find_samples
from processes import run_forked
from support import assert_near, assert_same, boosted, sgd, train, whole_over_tp
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from hybridpp.cluster import Loopback, current_world
from hybridpp.config import ParallelConfig, Precision
from hybridpp.tensor_parallel import sharding_of

BATCHES = [token_batch(seed=seed) for seed in range(2)]


# A rank with two chunks needs two blocks of each.
DEEP = {"falcon": functools.partial(falcon, num_layers=4), "mpnet": functools.partial(mpnet, num_layers=4)}


def norm_of(booster, model, optimizer):
    return optimizer.get_grad_norm()


@functools.cache
def one_process_of(make_model):
    return train(make_model, BATCHES, num_microbatches=2, after=norm_of)


def assert_equal(run, expected):
    for losses in run["losses"]:
        assert losses == pytest.approx(expected["losses"][0], abs=1e-5)
    largest = max(gradient.abs().max() for gradient in expected["gradients"].values())
    for name, gradient in expected["gradients"].items():
        # Some are zero but for rounding: biases of keys, which a softmax does not see.
        limit = 1e-5 * max(gradient.abs().max(), 1e-3 * largest)
        assert (run["gradients"][name] - gradient).abs().max() <= limit, name
    assert_near(run["weights"], expected["weights"], 1e-5)


class Case(NamedTuple):
    """How a model is trained, and what a rank has at most of the blocks' weights."""

    make_model: Callable[[], nn.Module]
    share: float
    layout: dict[str, Any]


RECOMPUTED = {"gradient_checkpoint_config": {"gradient_checkpointing_ratio": 1.0}}
# Norms and routers are whole, and of deepseek the narrow layers; four ranks have olmo2's two heads of keys and values.
CASES = {
    "t5": Case(t5, 0.53, {"pp_size": 2, "schedule": "zb-h1"}),
    "falcon": Case(DEEP["falcon"], 0.55, {"pp_size": 2, "schedule": "interleaved", "num_model_chunks": 2}),
    "mpnet": Case(DEEP["mpnet"], 0.54, {"pp_size": 2, "schedule": "zb-v"}),
    "mixtral": Case(mixtral, 0.52, {"pp_size": 2, **RECOMPUTED}),
    "deepseek": Case(deepseek, 0.63, {}),
    "gpt_oss": Case(gpt_oss, 0.55, {}),
    "llama4": Case(llama4, 0.52, {}),
    "olmo2": Case(olmo2, 0.3, {"tp_size": 4}),
    "olmo2 in stages": Case(olmo2, 0.52, {"pp_size": 2, **RECOMPUTED}),
}


def is_in_block(key):
    return any(part in key for part in (".layers.", ".layer.", ".h.", ".block."))


def size_of_blocks(model):
    return sum(parameter.numel() for key, parameter in model.named_parameters() if is_in_block(key))


@contextmanager
def warnings_logged():
    """What is logged meanwhile. With caplog, no other test would take the plans that are searched here."""
    messages = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("hybridpp")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.matrix if "stages" in name else ()) for name in CASES]
)
def test_models_train_as_in_one_process_and_write_whole_folders(name, tmp_path):
    """Their blocks are divided, the norm counts every weight once, and a folder holds what was trained."""
    make_model, share, layout = CASES[name]
    layout = {"tp_size": 2, **layout}

    def look(booster, model, optimizer):
        norm = optimizer.get_grad_norm()
        booster.save_model(model, tmp_path)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        booster.load_model(model, tmp_path)
        weights = whole_over_tp(booster, model, {key: p.detach() for key, p in model.named_parameters()})
        return norm, size_of_blocks(model), weights

    with warnings_logged() as logged:
        run = train(make_model, BATCHES, num_microbatches=2, after=look, **layout)
    expected = one_process_of(make_model)
    assert_equal(run, expected)
    norms, sizes, loaded = zip(*run["after"], strict=True)
    assert len(set(norms)) == 1
    assert norms[0] == pytest.approx(expected["after"][0], rel=1e-6)
    assert sum(sizes) / layout["tp_size"] / size_of_blocks(make_model()) < share
    assert_same({key: weight for weights in loaded for key, weight in weights.items()}, run["weights"])
    folder, info = type(make_model()).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_same(dict(folder.named_parameters()), run["weights"])
    listed = " ".join(logged)
    assert "experts" not in listed
    assert "relative_attention_bias" not in listed
    assert ("stay replicated on all tensor-parallel ranks" in listed) == (name in {"deepseek", "llama4"})


def test_four_ranks_share_a_head_of_keys_and_values():
    assert_equal(train(falcon, BATCHES, num_microbatches=2, tp_size=4), one_process_of(falcon))


def test_clipping_and_half_precision():
    options = {"num_microbatches": 2, "precision": "bf16", "max_norm": 0.1}
    for make_model in (falcon, mixtral):
        run = train(make_model, BATCHES, tp_size=2, **options)
        assert_near(run["weights"], train(make_model, BATCHES, **options)["weights"], 2e-2)


def test_dropout_does_not_depend_on_stages_and_schedule():
    make_model = functools.partial(mpnet, dropout=0.2)
    expected = train(make_model, BATCHES, num_microbatches=2, tp_size=2)
    run = train(make_model, BATCHES, num_microbatches=2, tp_size=2, pp_size=2, schedule="zb-h1")
    assert run["losses"][0] == expected["losses"][0]
    assert_near(run["gradients"], expected["gradients"])


def test_copied_parts_of_a_fused_layer_say_so():
    def rank():
        _, model, _ = boosted(falcon(), sgd, token_batch(), tp_size=2)
        return sharding_of(model.transformer.h[0].self_attention.query_key_value.weight)

    for place in Loopback(2).run(rank):
        assert (place.full_shape, place.shard.widths, place.shard.copies) == ((48, 32), (32, 8, 8), (1, 2, 2))


@copied
def large(config_class, model_class, **settings):
    """With a vocabulary that outweighs a block."""
    torch.manual_seed(0)
    sizes = SIZES | {"num_hidden_layers": 2, "vocab_size": 301, **settings}
    model = model_class(config_class(**sizes)).train()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    return model


LLAMA = (LlamaConfig, LlamaForCausalLM)
LARGE = {
    "tied": functools.partial(large, *LLAMA, tie_word_embeddings=True, use_cache=False),
    "untied": functools.partial(large, *LLAMA, tie_word_embeddings=False, use_cache=False),
    # A head with a bias; embeddings of places.
    "bert": functools.partial(
        large, BertConfig, BertForMaskedLM, hidden_dropout_prob=0, attention_probs_dropout_prob=0
    ),
    # An embedding that scales what it looks up.
    "gemma3": functools.partial(large, Gemma3TextConfig, Gemma3ForCausalLM, head_dim=8, use_cache=False),
}


@functools.cache
def one_process_of_large(name):
    return train(LARGE[name], BATCHES, num_microbatches=2)


@pytest.mark.parametrize(
    ("name", "pp_size", "schedule"), [("tied", 1, "1f1b"), *((name, 2, "zb-h1") for name in LARGE)]
)
def test_large_vocabularies_are_divided_with_what_surrounds_them(name, pp_size, schedule):
    run = train(LARGE[name], BATCHES, num_microbatches=2, tp_size=2, pp_size=pp_size, schedule=schedule)
    assert_equal(run, one_process_of_large(name))


def empty(make_model):
    with torch.device("meta"):
        return make_model()


@pytest.mark.parametrize(("name", "on_meta"), [("tied", False), *((name, True) for name in LARGE)])
def test_so_all_of_a_model_is_nearly_halved(name, on_meta):
    def rank():
        model = empty(LARGE[name]) if on_meta else LARGE[name]()
        _, model, _ = boosted(model, sgd, token_batch(), tp_size=2)
        return sum(p.numel() for p in model.parameters())

    whole = sum(p.numel() for p in LARGE[name]().parameters())
    for size in Loopback(2).run(rank):
        assert size / whole < 0.53


class Tied(nn.Module):
    """Its container code uses the embedding's weight as a head, if asked to, always or in training: that must be
    whole."""

    def __init__(self, by_hand):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.by_hand = nn.Embedding(200, 8), by_hand
        blocks = [nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2)]
        self.blocks = nn.ModuleList(blocks)

    def forward(self, ids):
        x = self.embedding(ids).to(self.embedding.weight.dtype)
        for block in self.blocks:
            x = x + block(x)
        by_hand = self.training if self.by_hand == "in training" else self.by_hand
        return x @ self.embedding.weight.T if by_hand else x


@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize("by_hand", [False, True, "in training"])
def test_tables_that_are_used_by_hand_stay_whole(by_hand, on_meta, caplog):
    ids = torch.randint(0, 200, (4, 3), generator=torch.Generator().manual_seed(0))
    make_model = functools.partial(Tied, by_hand)

    def squares(outputs, inputs):
        return outputs.square().mean()

    def rank():
        model = empty(make_model) if on_meta else make_model()
        _, model, _ = boosted(model, sgd, ids, tp_size=2)
        return model.embedding.weight.shape[0]

    with caplog.at_level("WARNING", logger="hybridpp"):
        assert Loopback(2).run(rank) == [200 if by_hand else 100] * 2
    listed = " ".join(record.getMessage() for record in caplog.records)
    assert ("embedding: its weight is used in another way than by calling the module" in listed) == bool(by_hand)
    options = {"criterion": squares, "num_microbatches": 2}
    assert_equal(train(make_model, [ids], tp_size=2, **options), train(make_model, [ids], **options))


class Positions(nn.Embedding):
    """Rows by place, whatever the ids are."""

    def forward(self, ids):
        return self.weight[: ids.shape[1]]


class Sized(nn.Module):
    """Its container code asks layers for their sizes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.places, self.all_places = nn.Embedding(70, 8), Positions(90, 8), nn.Embedding(30, 8)
        blocks = [nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2)]
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(8, 70)

    def forward(self, ids):
        x = self.embedding(ids % self.embedding.num_embeddings) + self.places(ids)
        x = x + self.all_places(torch.arange(self.all_places.num_embeddings))[: ids.shape[1]]
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).view(-1, self.head.out_features)


@pytest.mark.parametrize("pp_size", [1, 2])
def test_container_code_finds_the_sizes_of_what_looks_whole(pp_size):
    ids = torch.randint(0, 200, (4, 3), generator=torch.Generator().manual_seed(0))

    def loss(logits, ids):
        return nn.functional.cross_entropy(logits, ids.flatten() % 70)

    def rank():
        _, model, _ = boosted(Sized(), sgd, ids, tp_size=2)
        return [part.weight.shape[0] for part in (model.embedding, model.places, model.all_places, model.head)]

    assert Loopback(2).run(rank) == [[35, 90, 15, 35]] * 2
    options = {"criterion": loss, "num_microbatches": 2}
    assert_equal(train(Sized, [ids], tp_size=2, pp_size=pp_size, **options), train(Sized, [ids], **options))


class Block(nn.Module):
    """A gate that is shared by all blocks; evaluating it leaves something behind."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.factor = 1.0

    def forward(self, x, gate):
        if not self.training:
            self.factor = 0.5
        return x + self.factor * self.down((self.up(x) * (1 + gate)).tanh())


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.gate = nn.Parameter(torch.zeros(16))

    def forward(self, x):
        for block in self.blocks:
            x = block(x, self.gate)
        return x


def test_looking_at_a_model_changes_nothing_and_sees_what_is_trained():
    batches = [torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    options = {"num_microbatches": 2, "criterion": lambda outputs, inputs: outputs.square().mean()}
    expected = train(Gated, batches, **options)
    assert expected["gradients"]["gate"].abs().max() > 1e-3
    assert_equal(train(Gated, batches, tp_size=2, **options), expected)


class Conditioned(nn.Module):
    """Its container code calls what the first block makes conditions with, too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(self.block() for _ in range(3))
        self.out = nn.Linear(8, 8)

    @staticmethod
    def block():
        block = Block()
        block.condition = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
        block.forward = functools.partial(Conditioned.run, block)
        return block

    @staticmethod
    def run(block, x):
        return x + block.down(block.up(x).tanh() * block.condition(x))

    def forward(self, x):
        condition = self.blocks[0].condition(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x) * condition[..., :8]


def test_blocks_of_which_container_code_calls_a_part_stay_whole(caplog):
    batches = [torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    options = {"num_microbatches": 2, "criterion": lambda outputs, inputs: outputs.square().mean()}
    assert_equal(train(Conditioned, batches, tp_size=2, **options), train(Conditioned, batches, **options))
    assert (
        "stay replicated on all tensor-parallel ranks: blocks.*: 'condition' is also called from outside of the block"
        in caplog.text
    )

    def widths():
        _, model, _ = boosted(Conditioned(), sgd, batches[0], tp_size=2)
        return [block.up.weight.shape[0] for block in model.blocks]

    assert Loopback(2).run(widths) == [[16, 8, 8]] * 2


class UpDown(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.up(x).tanh())


class NormOf(nn.Module):
    """Reads a weight that another module holds."""

    def __init__(self, layer):
        super().__init__()
        self.layers = [layer]

    def forward(self):
        return self.layers[0].weight.norm()


class Penalised(nn.Module):
    """Its container code, and another module, read weights of its blocks; one of them while it is trained."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(UpDown() for _ in range(4))
        self.norm = NormOf(self.blocks[1].down)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        weight = self.blocks[0].up.weight
        penalty = (weight @ weight.T - torch.eye(len(weight))).square().sum() + self.norm()
        return x, penalty + self.blocks[2].down.weight.norm() if self.training else penalty


@pytest.mark.parametrize("on_meta", [False, True])
def test_blocks_whose_weights_container_code_reads_stay_whole(on_meta):
    def search():
        with torch.device("meta" if on_meta else "cpu"):
            model = Penalised()
        return find_tp_plan(model, lambda: Samples((torch.randn(4, 8),)), 2, current_world().control())

    plan, _ = Loopback(2).run(search)
    assert plan.styles == {"blocks.3.up": "column", "blocks.3.down": "row"}
    weights = ("up.weight", "down.weight", "down.weight")
    assert plan.reasons == {
        f"blocks.{number}": f"{weight!r} is also read by code outside of the block"
        for number, weight in enumerate(weights)
    }


def test_penalties_that_a_model_returns_are_those_of_one_process():
    batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    options = {"num_microbatches": 2, "criterion": lambda outputs, inputs: outputs[0].square().mean() + outputs[1]}
    assert_equal(train(Penalised, batches, tp_size=2, pp_size=2, **options), train(Penalised, batches, **options))


class Ensemble(nn.Module):
    """Some of its blocks run in a transform of torch.func, with weights of all of them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.members = nn.ModuleList(Conditioned.block() for _ in range(3))
        self.blocks = nn.ModuleList(Conditioned.block() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        named = [dict(member.named_parameters()) for member in self.members]
        weights = {name: torch.stack([one[name] for one in named]) for name in named[0]}
        call = functools.partial(torch.func.functional_call, self.members[0])
        return torch.func.vmap(lambda one: call(one, (x,)))(weights).mean(0)


def test_blocks_that_run_in_a_transform_of_torch_func_stay_whole(caplog):
    batches = [torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    options = {"num_microbatches": 2, "criterion": lambda outputs, inputs: outputs.square().mean()}
    assert_equal(train(Ensemble, batches, tp_size=2, **options), train(Ensemble, batches, **options))
    assert "members.*: it is called inside a transform of torch.func" in caplog.text


class Strict(nn.Module):
    """Runs in training alone, counts that, and draws."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        if not self.training:
            raise NotImplementedError
        self.count += 1
        return x + self.down(self.up(x).tanh()) + 0 * torch.rand(())


@pytest.mark.parametrize("on_meta", [False, True])
def test_a_model_that_runs_in_training_alone_is_looked_at_there(on_meta):
    def run():
        with torch.device("meta" if on_meta else "cpu"):
            model = nn.Sequential(*(Strict() for _ in range(2)))
        for block in model:
            block.count = torch.zeros(())
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
        before = torch.get_rng_state()
        plan = find_tp_plan(model, lambda: Samples((x,)), 2, current_world().control())
        assert torch.equal(torch.get_rng_state(), before)
        assert [block.count.item() for block in model] == [0, 0]
        return plan

    plan, other = Loopback(2).run(run)
    assert plan == other
    assert plan.styles == {
        f"{block}.{layer}": s for block in (0, 1) for layer, s in (("up", "column"), ("down", "row"))
    }


def resident_mib(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))


def peak_of_search(is_previewed):
    """MiB that a search for a plan, and for one of sequence shards, takes at most, and those of a block."""

    def search(hidden):
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_attention_heads=8,
            num_key_value_heads=8,
            num_hidden_layers=1,
        )
        with torch.device("meta" if is_previewed else "cpu"):
            model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
        before = resident_mib("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        if is_previewed:
            settings = ParallelConfig(tp_size=2, enable_sequence_parallelism=True)
            assert preview_tensor_parallel(model, settings, Precision.BF16).sequence_parallel
        else:
            control, formats = current_world().control(), default_formats(model, Precision.BF16, "cpu")
            samples = find_samples(model, None, None, torch.device("cpu"))
            plan = find_tp_plan(model, lambda: samples, 2, control, formats=formats)
            assert sequence_plan(model, plan, lambda: samples, 2, control, formats=formats).blocks
        return resident_mib("VmHWM") - before, sum(one.nbytes for one in model.model.layers.parameters()) / 2**20

    search(64)  # whatever is imported for it
    return search(1536)


@pytest.mark.parametrize("is_previewed", [True, False], ids=["previewed", "boosted"])
def test_a_search_takes_at_most_twice_a_block_in_its_own_dtype(is_previewed):
    peak, block = run_forked(lambda: peak_of_search(is_previewed))
    assert 40 < block < 60
    assert peak <= 2 * block
