"""After unboost nothing of boost is left on a model but what it learned."""

import re
import weakref

import pytest
import torch
from support import assert_near, assert_same, boosted, image_batch, model_loss, replica_part, sgd, small_vit
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    CLIPConfig,
    CLIPModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from hybridpp.cluster import Loopback, current_world
from hybridpp.errors import ConfigError

IDS = torch.arange(8).reshape(2, 4) % 7
SIZES = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}


class Convolutions(nn.Module):
    """With running statistics, and a buffer that no state has."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 5)
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)

    def forward(self, x):
        return self.head((self.scale * self.norm(self.first(x))).relu().mean((2, 3)))


class Recurrent(nn.Module):
    """An LSTM."""

    def __init__(self):
        super().__init__()
        self.cells, self.head = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.cells(x)[0])


class Tied(nn.Module):
    """Blocks in a list, a head of the embedding's weight, a forward of its own instance and hooks of the script's."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(0.1)) for _ in range(2))
        self.head.weight = self.embed.weight
        self.head.forward = lambda x: nn.functional.linear(x, self.head.weight)
        self.blocks[0].register_forward_hook(lambda module, args, output: output * 2)
        self.embed.weight.register_post_accumulate_grad_hook(lambda parameter: None)
        self.embed.weight.mine = "an attribute"

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def of_tensors(outputs, inputs):
    return outputs.float().pow(2).mean()


def causal(kind, config):
    return lambda: kind(config), {"input_ids": IDS, "labels": IDS}, model_loss


def contrastive():
    small = {name: value for name, value in SIZES.items() if name != "vocab_size"}
    config = CLIPConfig(
        text_config={**SIZES, "max_position_embeddings": 8, "eos_token_id": 1, "bos_token_id": 0, "pad_token_id": 1},
        vision_config={**small, "image_size": 8, "patch_size": 4},
        projection_dim=4,
    )
    return CLIPModel(config)


MODELS = {
    "vit": (small_vit, image_batch(2), model_loss),
    "bert": (
        lambda: BertForSequenceClassification(BertConfig(**SIZES, max_position_embeddings=8)),
        {"input_ids": IDS, "labels": torch.tensor([0, 1])},
        model_loss,
    ),
    "gpt2": causal(GPT2LMHeadModel, GPT2Config(vocab_size=11, n_embd=8, n_layer=2, n_head=2, n_positions=8)),
    "llama": causal(LlamaForCausalLM, LlamaConfig(**SIZES, max_position_embeddings=8)),
    "mixtral": causal(
        MixtralForCausalLM,
        MixtralConfig(**SIZES, num_key_value_heads=1, num_local_experts=2, max_position_embeddings=8),
    ),
    "t5": causal(
        T5ForConditionalGeneration,
        T5Config(vocab_size=11, d_model=8, d_kv=4, d_ff=16, num_layers=2, num_heads=2, decoder_start_token_id=0),
    ),
    "clip": (
        contrastive,
        {"input_ids": IDS, "pixel_values": torch.randn(2, 3, 8, 8), "return_loss": True},
        model_loss,
    ),
    "convolutions": (Convolutions, (torch.randn(4, 3, 5, 5),), of_tensors),
    "lstm": (Recurrent, (torch.randn(2, 3, 4),), of_tensors),
    "encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
        (torch.randn(2, 3, 8),),
        of_tensors,
    ),
    "tied": (Tied, (IDS,), of_tensors),
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3)), (torch.randn(2, 4),), of_tensors),
}


def contents(value):
    """A dict, list or set as it is now, by the identity of what it holds; of anything else its identity."""
    if isinstance(value, dict):
        return type(value), {key: contents(held) for key, held in value.items()}
    if isinstance(value, list | tuple | set):
        # torch makes weak references to an LSTM's weights anew when it moves the model.
        return type(value), [id(held() if isinstance(held, weakref.ref) else held) for held in value]
    return id(value)


def everything(model):
    """What may be put on modules and tensors: attributes, hooks, dtypes."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        **{f"module {name}": contents(vars(module)) for name, module in model.named_modules()},
        **{
            f"tensor {name}": (
                contents(vars(tensor)),
                contents(tensor._backward_hooks),
                contents(tensor._post_accumulate_grad_hooks),
                id(tensor.grad),
                (tensor.dtype, tensor.requires_grad, tensor.shape, tensor.is_leaf),
            )
            for name, tensor in tensors.items()
        },
    }


def differences(before, after):
    assert before.keys() == after.keys()
    return [name for name in before if before[name] != after[name]]


@pytest.mark.covering
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", MODELS)
def test_a_trained_model_is_as_before_boost_but_for_its_weights(name, precision):
    make, batch, criterion = MODELS[name]
    torch.manual_seed(0)
    model = make().train()
    before, weights = everything(model), [parameter.detach().clone() for parameter in model.parameters()]
    scale = {"initial_scale": 16.0} if precision == "fp16" else {}
    booster, _, optimizer = boosted(model, sgd, batch, precision=precision, **scale)
    booster.execute_pipeline(iter([batch]), model, criterion, optimizer)
    optimizer.step()
    trained = [leaf.detach().clone() for leaf in optimizer.unwrap().param_groups[0]["params"]]
    assert booster.unboost(model) is model
    assert differences(before, everything(model)) == []
    assert all(map(torch.equal, trained, model.parameters()))
    assert not all(map(torch.equal, weights, model.parameters()))


def test_weights_after_unboost_are_those_of_plain_training():
    batch = image_batch(4)
    plain, model = small_vit(), small_vit()
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01)
    booster, _, optimizer = boosted(model, lambda p: torch.optim.AdamW(p, lr=0.01), batch)
    for step in range(4):
        reference.zero_grad()
        plain(**batch).loss.backward()
        reference.step()
        if step < 2:
            booster.execute_pipeline(iter([batch]), model, model_loss, optimizer)
            optimizer.step()
            continue
        if step == 2:
            booster.unboost(model)
            optimizer = optimizer.unwrap()
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    assert_same(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_unboosted_model_is_boosted_again_with_its_optimizer(precision):
    batch, losses = image_batch(4), []
    for unboosts in (False, True):
        model = small_vit()
        booster, _, optimizer = boosted(model, lambda p: torch.optim.AdamW(p, lr=0.01), batch, precision=precision)
        losses.append([])
        for step in range(4):
            if unboosts and step == 2:
                booster.unboost(model)
                optimizer = booster.boost(model, optimizer.unwrap()).optimizer
            losses[-1].append(float(booster.execute_pipeline(iter([batch]), model, model_loss, optimizer)["loss"]))
            optimizer.step()
    assert losses[0] == losses[1]


@pytest.mark.parametrize("settings", [{"pp_size": 2}, {"tp_size": 2}], ids=str)
def test_unboost_of_a_part_of_a_model_is_refused(settings):
    def run():
        booster, model, _ = boosted(small_vit(), sgd, image_batch(2), num_microbatches=2, **settings)
        sizes = {"tp_size": 1, "pp_size": 1, **settings}
        text = (
            f"unboost needs the unsharded model on one rank: got tp_size={sizes['tp_size']}, pp_size="
            f"{sizes['pp_size']}. Call booster.save_model, and load the folder into a new model."
        )
        with pytest.raises(ConfigError, match=f"^{re.escape(text)}$"):
            booster.unboost(model)

    Loopback(2).run(run)


def test_the_boosted_optimizer_is_refused_after_unboost():
    booster, model, optimizer = boosted(small_vit(), sgd, image_batch(2))
    booster.unboost(model)
    for use in (optimizer.step, lambda: booster.backward(model(**image_batch(2)).loss, optimizer)):
        with pytest.raises(ConfigError, match=r"^the model of this optimizer was unboosted. Call optimizer.unwrap\(\)"):
            use()
    with pytest.raises(ConfigError, match=r"was not boosted by this booster"):
        booster.unboost(model)


def test_unboost_is_refused_where_the_script_has_set_a_forward():
    booster, model, _ = boosted(small_vit(), sgd, image_batch(2))
    put = model.vit.layers[0].forward
    model.vit.layers[0].forward = lambda *args, **kwargs: put(*args, **kwargs)
    with pytest.raises(ConfigError, match=r"^'forward' of module 'vit.layers.0' was set after boost"):
        booster.unboost(model)
    model.vit.layers[0].forward = put
    booster.unboost(model)


def test_describe_names_layers_hooks_and_attributes():
    recomputes = {"gradient_checkpoint_config": {"gradient_checkpointing_ratio": 1}}
    booster, model, _ = boosted(small_vit(), sgd, image_batch(2), precision="bf16", **recomputes)
    table = [[cell.strip() for cell in line.split("|")] for line in booster.plugin.describe(model).splitlines()]
    rows = {row[0]: row[-1] for row in table}
    assert rows["(the model)"].startswith("calls of the model, dtypes of torch functions, ")
    assert rows["vit.layers.*"] == (
        "stage, recomputation, RNG stream of a unit, dtypes of torch functions, refusal of compile()"
    )
    assert rows["vit.layers.*.mlp.fc1"] == "RNG stream of a layer, deferred weight gradients"
    assert rows["vit.layers.*.layernorm_before"] == "dtype boundary"
    assert rows["vit.layers.*.mlp.fc1.weight"] == "cast to bfloat16, hook on its gradient"


def hooked(model):
    """The model with hooks of the script's, and attributes, on modules and weights."""
    model.vit.layers[0].register_forward_hook(lambda module, args, output: None)
    for parameter in (model.classifier.weight, model.vit.layernorm.weight):
        parameter.register_post_accumulate_grad_hook(lambda parameter: None)
        parameter.mine = "an attribute"
    return model


@pytest.mark.covering
@pytest.mark.parametrize("is_meta", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_unboosted_replicas_have_the_weights_of_one_process(precision, is_meta, tmp_path):
    batch = image_batch(4)
    small_vit().save_pretrained(tmp_path)

    def run():
        with torch.device("meta" if is_meta else "cpu"):
            model = hooked(small_vit())
        before = everything(model)
        num_microbatches = 2 // current_world().size  # so that bf16 rounds the same sums
        booster, _, optimizer = boosted(model, sgd, batch, precision=precision, num_microbatches=num_microbatches)
        if is_meta:
            booster.load_model(model, tmp_path)
        part = replica_part(batch, booster.plugin.layout.here.dp, booster.plugin.dp_size)
        for _ in range(2):
            booster.execute_pipeline(iter([part]), model, model_loss, optimizer)
            optimizer.step()
        booster.unboost(model)
        assert differences(before, everything(model)) == []
        return dict(model.state_dict())

    (one,), (first, second) = Loopback(1).run(run), Loopback(2).run(run)
    assert_same(first, second)
    assert_near(first, one, 1e-6)
