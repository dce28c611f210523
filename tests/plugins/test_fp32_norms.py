"""Norms compute in fp32 in a half-precision model, unless told otherwise."""

import functools
import re

import pytest
import torch
from divided_models import LLAMA, VIT, llama, qwen3, t5, token_batch
from hybridpp_plugins import setup
from support import (
    assert_near,
    assert_same,
    boosted,
    image_batch,
    model_loss,
    sgd,
    small_vit,
    tiny_vit,
    train,
    trained_alone,
)
from torch import nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from hybridpp import HybridParallelPlugin
from hybridpp.cluster import Loopback
from hybridpp.errors import ConfigError
from hybridpp.precision import fp32_norms

HALF, FULL = torch.bfloat16, torch.float32
MODELS = {
    "llama": (llama, token_batch(), "model.layers.0.input_layernorm", "LlamaRMSNorm"),
    "t5": (t5, token_batch(), "encoder.block.0.layer.0.layer_norm", "T5LayerNorm"),
    "vit": (small_vit, image_batch(4), "vit.layers.0.layernorm_before", "LayerNorm"),
}


def run_one(make_model, batch, **settings):
    """What every module of a boosted model holds and returns in a step, by name; and the table."""

    def run():
        booster, model, optimizer = boosted(make_model(), sgd, batch, **{"precision": "bf16", **settings})
        seen = {}

        def note(name, module, args, output):
            seen[name] = ({p.dtype for p in module.parameters(recurse=False)}, getattr(output, "dtype", None))

        for name, module in model.named_modules():
            module.register_forward_hook(functools.partial(note, name))
        booster.execute_pipeline(iter([batch]), model, model_loss, optimizer)
        optimizer.step()
        return seen, booster.plugin.describe_precision(model)

    return Loopback(1).run(run)[0]


@pytest.mark.parametrize(("make", "batch", "norm", "kind"), MODELS.values(), ids=MODELS)
def test_norms_hold_fp32_weights_and_return_half(make, batch, norm, kind):
    seen, table = run_one(make, batch)
    assert seen[norm] == ({FULL}, HALF)
    assert re.search(rf"\d+ {kind} +\| float32 +\| float32\n", table)
    assert re.search(r"\d+ Linear +\| bfloat16 +\| bfloat16\n", table)
    half = {name for name, (held, _) in seen.items() if held == {HALF}}
    assert half
    assert not any("norm" in name.rpartition(".")[2] for name in half)


@pytest.mark.parametrize("by", ["switch", "name", "class"])
@pytest.mark.parametrize(("make", "batch", "norm", "kind"), MODELS.values(), ids=MODELS)
def test_told_otherwise_norms_are_in_half_precision(make, batch, norm, kind, by):
    settings = (
        {"fp32_norms": False} if by == "switch" else {"fp32_modules": ["!*norm*" if by == "name" else f"!{kind}"]}
    )
    seen, table = run_one(make, batch, **settings)
    assert seen[norm] == ({HALF}, HALF)
    inside = "bfloat16, mean and variance float32" if make is small_vit else "bfloat16"
    assert re.search(rf"\d+ {kind} +\| bfloat16 +\| {inside}\n", table)


def test_single_norms_are_told_otherwise_both_ways():
    seen, _ = run_one(qwen3, token_batch(), fp32_modules=["!*.q_norm"])
    assert seen["model.layers.1.self_attn.q_norm"] == ({HALF}, HALF)
    assert seen["model.layers.1.self_attn.k_norm"] == seen["model.norm"] == ({FULL}, HALF)
    seen, _ = run_one(qwen3, token_batch(), fp32_modules=["*.q_norm"], fp32_norms=False)
    assert seen["model.layers.1.self_attn.q_norm"] == ({FULL}, HALF)
    assert seen["model.norm"] == ({HALF}, HALF)
    seen, _ = run_one(qwen3, token_batch(), fp32_modules=["!model.layers.0"])
    assert seen["model.layers.0.self_attn.q_norm"] == ({HALF}, HALF)
    assert seen["model.layers.1.self_attn.q_norm"] == ({FULL}, HALF)


WIDTH, SCALE = 16, 1024.0
NORMS = {
    "LayerNorm": lambda: nn.LayerNorm(WIDTH),
    "RMSNorm": lambda: nn.RMSNorm(WIDTH),
    "GroupNorm": lambda: nn.GroupNorm(4, WIDTH),
    "LlamaRMSNorm": lambda: LlamaRMSNorm(WIDTH),
    "T5LayerNorm": lambda: T5LayerNorm(WIDTH),
}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("make_norm", NORMS.values(), ids=NORMS)
def test_all_of_a_norm_is_computed_in_fp32_and_rounded_behind(make_norm, precision):
    """Forwards and backwards: torch's own LayerNorm adds up gradients in bf16 on the CPU, 5 % off over 2000 rows."""
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]

    def make_model():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, WIDTH), make_norm(), nn.Linear(WIDTH, 2))
        with torch.no_grad():
            for parameter in model[1].parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        return model

    batch = (torch.randn(2000, 4, generator=torch.Generator().manual_seed(0)),)

    def squares(outputs, _):
        return outputs.square().mean()

    first, norm, last = model = make_model()
    first.to(half), last.to(half)
    scale = SCALE if precision == "fp16" else 1.0
    squares(last(norm(first(batch[0].to(half)).float()).to(half)).float(), None).mul(scale).backward()
    settings = {"precision": precision, "criterion": squares, "initial_scale": SCALE}
    gradients = train(make_model, [batch], **settings)["gradients"]
    assert_same(gradients, {name: parameter.grad.float() for name, parameter in model.named_parameters()})


class Halves(nn.Module):
    """A norm with weights returns half whatever it is given; one without follows what it is given."""

    def __init__(self):
        super().__init__()
        self.norm, self.plain_norm = nn.LayerNorm(4), nn.LayerNorm(4, elementwise_affine=False)
        self.last = nn.Linear(4, 4)

    def forward(self, x):
        assert self.norm(x).dtype is self.norm(x.to(self.norm.weight.dtype)).dtype is x.dtype is HALF
        assert self.plain_norm(x).dtype is HALF
        assert self.plain_norm(x.float()).dtype is FULL
        return self.last(self.norm(x.float()))


def test_norms_of_what_is_fp32_already():
    def squares(outputs, _):
        return outputs.square().mean()

    train(Halves, [(torch.randn(4, 4),)], precision="bf16", criterion=squares)


@pytest.mark.parametrize("made_in", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("make", [small_vit, lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))])
def test_norms_of_a_model_made_in_another_format_are_fp32(make, made_in):
    def run():
        model = make().to(made_in)
        batch = image_batch(2) if make is small_vit else (torch.randn(2, 4),)
        booster, model, optimizer = boosted(model, sgd, batch, precision="bf16")
        criterion = model_loss if make is small_vit else lambda outputs, _: outputs.square().mean()
        booster.execute_pipeline(iter([batch]), model, criterion, optimizer)
        optimizer.step()
        return {name: tensor.dtype for name, tensor in model.state_dict().items() if tensor.is_floating_point()}

    (dtypes,) = Loopback(1).run(run)
    for name, dtype in dtypes.items():
        assert dtype is (FULL if "norm" in name or name.startswith("1.") else HALF), name


@pytest.mark.covering
@pytest.mark.parametrize(
    "layout",
    [
        {"pp_size": 2},
        {"pp_size": 2, "schedule": "zb-v"},
        {"pp_size": 2, "gradient_checkpoint_config": {"gradient_checkpointing_ratio": 1.0}},
    ],
    ids=str,
)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("make", "batch"),
    [(functools.partial(llama, tied=False, num_layers=4), token_batch()), (tiny_vit, image_batch(4))],
    ids=["llama", "vit"],
)
def test_stages_give_the_bits_of_one_process(make, batch, precision, layout):
    settings = {"precision": precision, "num_microbatches": 2}
    whole = trained_alone(make, [batch] * 2, **settings)
    cut = train(make, [batch] * 2, **settings, **layout)
    assert_same(cut["weights"], whole["weights"])
    assert_same(cut["gradients"], whole["gradients"])
    assert whole["weights"][next(name for name in whole["weights"] if "norm" in name)].dtype is FULL


@pytest.mark.covering
@pytest.mark.parametrize("more", [{}, {"enable_sequence_parallelism": True}], ids=["layers", "sequences"])
@pytest.mark.parametrize(("make", "batch", "plan"), [(llama, token_batch(), LLAMA), (small_vit, image_batch(4), VIT)])
def test_shared_layers_and_sequences_agree_with_one_process(make, batch, plan, more):
    settings = {"precision": "bf16", "num_microbatches": 2}
    whole = trained_alone(make, [batch], **settings)
    parts = train(make, [batch], **settings, tp_size=2, pp_size=2, tensor_parallel_plan=plan, **more)
    assert_near(parts["gradients"], whole["gradients"], 2e-2)


@pytest.mark.parametrize("made_in", [torch.float32, torch.bfloat16])
def test_a_folder_has_the_format_that_the_model_was_made_in(tmp_path, made_in):
    def run():
        model = llama(tied=False).to(made_in)
        booster, model, optimizer = boosted(model, sgd, token_batch(), precision="bf16", pp_size=2)
        booster.execute_pipeline(iter([token_batch()]), model, model_loss, optimizer)
        optimizer.step()
        booster.save_model(model, tmp_path)
        with torch.device("meta"):
            fresh = llama(tied=False).to(made_in)
        fresh_booster, fresh, _ = boosted(fresh, sgd, token_batch(), precision="bf16", pp_size=2)
        fresh_booster.load_model(fresh, tmp_path)
        kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        norms = {name: t.to(made_in).to(FULL) for name, t in kept.items() if "norm" in name}
        assert norms
        assert_same(fresh.state_dict(), kept | norms)

    Loopback(2).run(run)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert {parameter.dtype for parameter in loaded.parameters()} == {made_in}


def test_an_overflow_in_a_norm_is_named_with_what_it_returned():
    def run():
        model = llama(tied=False)
        with torch.no_grad():
            model.model.layers[1].input_layernorm.weight.fill_(1e5)  # fp32 holds that, fp16 does not
        booster, model, optimizer = boosted(model, sgd, token_batch(), precision="fp16", pp_size=2)
        booster.execute_pipeline(iter([token_batch()]), model, model_loss, optimizer)

    with pytest.raises(Exception, match=r"the output of 'model\.layers\.1\.input_layernorm' holds (inf|NaN)"):
        Loopback(2).run(run)


def test_in_fp32_the_switch_changes_nothing():
    plain = train(small_vit, [image_batch(4)])
    assert_same(train(small_vit, [image_batch(4)], fp32_norms=False)["weights"], plain["weights"])


def test_what_is_no_switch_is_refused():
    with pytest.raises(ConfigError, match=r"^fp32_norms must be True or False: got fp32_norms='no'\."):
        HybridParallelPlugin(tp_size=1, pp_size=1, num_microbatches=2, precision="fp16", fp32_norms="no")


class OwnForward(nn.LayerNorm):
    """May compute anything."""

    def forward(self, x):
        return super().forward(x)


class Renamed(nn.RMSNorm):
    """Runs torch's forward."""


def mixed_norms():
    return nn.ModuleDict(
        {
            "layer": nn.LayerNorm(4),
            "rms": nn.RMSNorm(4),
            "renamed": Renamed(4),
            "own": OwnForward(4),
            "group": nn.GroupNorm(2, 4),
            "instance": nn.InstanceNorm1d(4, affine=True),
            "llama": LlamaRMSNorm(4),
        }
    )


@pytest.mark.parametrize(
    ("wanted", "device", "kept"),
    [
        (None, "cpu", "layer rms renamed own group instance llama"),
        (None, "cuda", "own group instance llama"),
        (True, "cuda", "layer rms renamed own group instance llama"),
        (True, "cpu", "layer rms renamed own group instance llama"),
        (False, "cuda", ""),
        (False, "cpu", ""),
    ],
)
def test_which_norms_need_fp32_depends_on_the_device(wanted, device, kept):
    model = mixed_norms()
    found = fp32_norms(model, wanted, device)
    assert [name for name, norm in model.items() if norm in found] == kept.split()


def test_a_forward_that_was_put_on_a_norm_may_compute_anything():
    model = mixed_norms()
    model["layer"].forward = lambda x: x
    assert model["layer"] in fp32_norms(model, None, "cuda")


@pytest.fixture
def as_on_cuda(monkeypatch):
    """Choose norms as on CUDA; they run on the CPU nevertheless."""
    monkeypatch.setattr(setup, "fp32_norms", lambda model, wanted, device_type: fp32_norms(model, wanted, "cuda"))


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_on_cuda_layer_norms_run_in_half_precision_with_fp32_masters(precision):
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    batch = image_batch(4)
    booster, model, optimizer = boosted(small_vit(), sgd, batch, precision=precision)
    seen = []
    norm = model.vit.layers[0].layernorm_before
    norm.register_forward_hook(lambda module, args, out: seen.append((args[0].dtype, module.weight.dtype, out.dtype)))
    assert "dtype boundary" not in booster.plugin.describe(model)
    booster.execute_pipeline(iter([batch]), model, model_loss, optimizer)
    optimizer.step()
    assert seen == [(half, half, half)]
    assert optimizer.target.tensors["vit.layers.0.layernorm_before.weight"].dtype is FULL
    assert "LayerNorm" in booster.plugin.describe_precision(model)


@pytest.mark.usefixtures("as_on_cuda")
def test_on_cuda_the_switch_and_patterns_put_layer_norms_in_fp32():
    name = "vit.layers.0.layernorm_before"
    for settings in ({"fp32_norms": True}, {"fp32_modules": ["LayerNorm"]}):
        seen, _ = run_one(small_vit, image_batch(4), **settings)
        assert seen[name] == ({FULL}, HALF)
    seen, _ = run_one(small_vit, image_batch(4))
    assert seen[name] == ({HALF}, HALF)


@pytest.mark.usefixtures("as_on_cuda")
def test_on_cuda_norms_written_by_hand_stay_in_fp32():
    seen, _ = run_one(llama, token_batch())
    assert seen["model.norm"] == ({FULL}, HALF)


def test_the_switch_is_true_false_or_none():
    with pytest.raises(ConfigError, match=r"^fp32_norms must be True or False: got fp32_norms='no'"):
        HybridParallelPlugin(fp32_norms="no")
