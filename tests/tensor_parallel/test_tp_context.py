"""Dropout on divided layers: whole activations draw alike on all ranks, divided ones apart, and both reproducibly."""

import functools

import numpy as np
import pytest
import torch
from copies import copied
from divided_models import token_batch
from sequence_models import Block, Net, squares
from support import assert_near, assert_same, image_batch, train
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    StableLmConfig,
    StableLmForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

PLAN = {"*.up": "column", "*.down": "row"}


BATCHES = [torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]


def run(outside, inside, **layout):
    plan = {} if layout.get("tp_size", 1) == 1 else {"tensor_parallel_plan": PLAN}
    options = {"criterion": squares, "num_microbatches": 2, **plan, **layout}
    return train(lambda: Net(lambda: Block(outside, inside)), BATCHES, **options)


def test_whole_activations_draw_the_mask_of_one_process():
    whole = run(0.5, 0.0)
    for layout in ({"tp_size": 2}, {"tp_size": 4}, {"tp_size": 2, "pp_size": 2}):
        divided = run(0.5, 0.0, **layout)
        assert_near(divided["gradients"], whole["gradients"])
        assert_near(divided["weights"], whole["weights"])


LAYOUTS = [
    {"pp_size": 2},
    {"pp_size": 4},
    {"pp_size": 2, "schedule": "zb-h1"},
    {"pp_size": 2, "schedule": "interleaved", "num_model_chunks": 2},
    {"gradient_checkpoint_config": {}},
    {"pp_size": 2, "gradient_checkpoint_config": {}},
]


@functools.cache
def on_one_stage():
    return run(0.3, 0.3, tp_size=2)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_masks_of_divided_activations_do_not_depend_on_stages_and_schedule(layout):
    expected = on_one_stage()
    divided = run(0.3, 0.3, tp_size=2, **layout)
    assert divided["losses"][0] == expected["losses"][0]
    assert_same(divided["gradients"], expected["gradients"])


def test_divided_activations_draw_masks_of_their_own():
    class Seen(Block):
        def forward(self, x):
            ones = functional.dropout(self.up(x) * 0 + 1, 0.5, self.training)
            masks.append((self.up.weight.shape[0], (ones > 0).flatten().tolist()))
            return self.down(ones) + x

    masks = []
    train(
        lambda: Net(Seen, num_blocks=1),
        BATCHES[:1],
        criterion=squares,
        tp_size=2,
        num_microbatches=1,
        tensor_parallel_plan=PLAN,
    )
    (width, first), (_, second) = masks[-2:]  # the plan was tried before
    assert width == 8
    assert first != second


SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


@copied
def vit(hidden, attention):
    torch.manual_seed(0)
    dropout = {"hidden_dropout_prob": hidden, "attention_probs_dropout_prob": attention}
    config = ViTConfig(**SIZES, **dropout, image_size=8, patch_size=4, num_labels=5)
    return ViTForImageClassification(config).train()


@copied
def bert(hidden, attention):
    torch.manual_seed(0)
    dropout = {"hidden_dropout_prob": hidden, "attention_probs_dropout_prob": attention}
    return BertForMaskedLM(BertConfig(**SIZES, **dropout, vocab_size=37, max_position_embeddings=8)).train()


@copied
def gpt2(hidden, attention):
    torch.manual_seed(0)
    dropout = {"resid_pdrop": hidden, "embd_pdrop": hidden, "attn_pdrop": attention}
    config = GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=37, n_positions=8, use_cache=False, **dropout)
    return GPT2LMHeadModel(config).train()


@copied
def stablelm(hidden, attention):
    """Llama's blocks, and dropout behind each."""
    torch.manual_seed(0)
    dropout = {"hidden_dropout": hidden, "attention_dropout": attention, "use_cache": False}
    return StableLmForCausalLM(StableLmConfig(**SIZES, **dropout, num_key_value_heads=2, vocab_size=37)).train()


KNOWN = {"vit": (vit, image_batch(4)), "bert": (bert, token_batch()), "gpt2": (gpt2, token_batch())}
KNOWN["stablelm"] = (stablelm, token_batch())


@pytest.mark.parametrize("name", KNOWN)
def test_dropout_of_whole_activations_trains_as_in_one_process(name):
    make_model, batch = KNOWN[name]
    model = functools.partial(make_model, 0.3, 0.0)
    whole, divided = (train(model, [batch, batch], num_microbatches=2, tp_size=size) for size in (1, 2))
    still = train(functools.partial(make_model, 0.0, 0.0), [batch], num_microbatches=2)
    assert divided["losses"][0] == pytest.approx(whole["losses"][0], abs=1e-5)
    assert any((still["gradients"][key] - found).abs().max() > 1e-3 for key, found in whole["gradients"].items())
    assert_near(divided["gradients"], whole["gradients"], 1e-5)
    assert_near(divided["weights"], whole["weights"], 1e-5)


class Masks:
    """What dropout modules make of ones that are as wide as whole activations."""

    def __init__(self, model):
        self.found = []
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                # Values may be zero already, where attention dropped all that a token looks at.
                module.register_forward_pre_hook(lambda _, args: (args[0] * 0 + 1,))
                module.register_forward_hook(self.note)

    def note(self, module, args, output):
        if output.shape[-1] == SIZES["hidden_size"]:
            # As an array: tensors of parts of a block are refused to hooks.
            self.found.append(output.detach().clone().numpy())


@pytest.mark.covering
@pytest.mark.parametrize("layout", [{}, {"gradient_checkpoint_config": {}}], ids=str)
@pytest.mark.parametrize("name", KNOWN)
def test_masks_behind_divided_activations_are_those_of_one_process(name, layout):
    make_model, batch = KNOWN[name]

    def masks(tp_size):
        noted = []

        def make():
            model = make_model(0.3, 0.3)
            noted.append(Masks(model))
            return model

        train(make, [batch], num_microbatches=2, tp_size=tp_size, **layout)
        return [one.found for one in noted]

    (whole,) = masks(1)
    assert any((mask == 0).any() for mask in whole)
    for rank in masks(2):
        # The run that finds the plan is not the step.
        assert all(map(np.array_equal, rank[-len(whole) :], whole))


class Checkpointing(Block):
    """A block that checkpoints what it does."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_what_a_block_checkpoints_itself_draws_the_same_numbers_again(tp_size):
    def run_of(kind):
        def make():
            model = Net(lambda: Block(0.3, 0.3))
            for block in model.blocks:
                block.__class__ = kind
            return model

        plan = {"tensor_parallel_plan": PLAN} if tp_size > 1 else {}
        return train(make, BATCHES[:1], criterion=squares, num_microbatches=2, tp_size=tp_size, **plan)

    expected, found = run_of(Block), run_of(Checkpointing)
    assert found["losses"] == expected["losses"]
    assert_same(found["gradients"], expected["gradients"])
