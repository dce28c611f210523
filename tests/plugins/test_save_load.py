"""Weights to disk and back, through the folder that Hugging Face reads."""

import functools
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import assert_near, assert_same, boosted, image_batch, model_loss, sgd, tiny_vit
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, ViTForImageClassification

from hybridpp.cluster import Loopback, current_world
from hybridpp.errors import CheckpointError, PeerError


def train_and_save(folder, make_model, batch, *, num_ranks, criterion=model_loss, shard=True, size=1024, **settings):
    """Two steps, then save; the weights that the ranks held, whole."""

    def run():
        booster, model, optimizer = boosted(make_model(), sgd, batch, **settings)
        for _ in range(2):
            booster.execute_pipeline(iter([batch]), model, criterion, optimizer)
            optimizer.step()
        booster.save_model(model, folder, shard=shard, size_per_shard=size)
        masters = booster.plugin._engine(model).masters.masters
        return {name: masters.get(name, p).detach().clone() for name, p in model.named_parameters()}

    whole = {}
    for weights in Loopback(num_ranks).run(run):
        whole.update(weights)
    return whole


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("pp_size", "num_ranks"), [(1, 1), (2, 2), (4, 4), (2, 4)])
def test_from_pretrained_reads_what_was_saved(tmp_path, pp_size, num_ranks, precision):
    weights = train_and_save(
        tmp_path, tiny_vit, image_batch(4), num_ranks=num_ranks, pp_size=pp_size, precision=precision
    )
    model, info = ViTForImageClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.float32, "the dtype it had before boost, not the one it was trained in"
    assert_same(dict(model.named_parameters()), weights)


def test_the_folder_has_the_names_that_the_hub_knows(tmp_path):
    train_and_save(tmp_path, tiny_vit, image_batch(4), num_ranks=2, pp_size=2)
    tiny_vit().save_pretrained(tmp_path / "plain")
    ours, plain = (load_file(path / "model.safetensors") for path in (tmp_path, tmp_path / "plain"))
    assert set(ours) == set(plain)


def tiny_llama(tied):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=32, num_hidden_layers=4, tie_word_embeddings=tied, **sizes)
    return LlamaForCausalLM(config).train()


@pytest.mark.parametrize("tied", [False, True])
def test_a_language_model_with_tied_embeddings_goes_through_the_folder(tmp_path, tied):
    ids = torch.arange(24).reshape(4, 6)
    batch = {"input_ids": ids, "labels": ids}
    weights = train_and_save(tmp_path, functools.partial(tiny_llama, tied), batch, num_ranks=2, pp_size=2)
    model = LlamaForCausalLM.from_pretrained(tmp_path)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert_same(dict(model.named_parameters()), {n: w for n, w in weights.items() if n != "lm_head.weight" or not tied})


def plain_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


def squares(outputs, inputs):
    return outputs.square().mean()


@pytest.mark.parametrize("load_pp_size", [1, 2, 4])
@pytest.mark.parametrize("save_pp_size", [1, 2])
def test_any_layout_loads_what_any_other_saved_buffers_included(tmp_path, save_pp_size, load_pp_size):
    data = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    options = {"num_ranks": save_pp_size, "pp_size": save_pp_size, "criterion": squares}
    weights = train_and_save(tmp_path, plain_model, data, **options)
    assert load_file(tmp_path / "model.safetensors")["1.running_mean"].abs().sum() > 0

    def run():
        booster, model, _ = boosted(plain_model(), sgd, data, pp_size=load_pp_size)
        booster.load_model(model, tmp_path)
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    state = {}
    for part in Loopback(load_pp_size).run(run):
        state.update(part)
    assert_same({name: state[name] for name in weights}, weights)
    assert_same(state, load_file(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_load_model_reads_a_hugging_face_folder_into_masters_too(tmp_path, precision):
    expected = tiny_vit(seed=1)
    expected.save_pretrained(tmp_path)

    def run():
        booster, model, optimizer = boosted(tiny_vit(), sgd, image_batch(2), pp_size=2, precision=precision)
        booster.load_model(model, tmp_path)
        booster.execute_pipeline(iter([image_batch(4)]), model, model_loss, optimizer)
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.step()
        return {name: p.detach().float() for name, p in model.named_parameters()}

    weights = {}
    for part in Loopback(2).run(run):
        weights.update(part)
    named = {name: p.detach() for name, p in expected.named_parameters()}
    assert_near(weights, named, 0 if precision == "fp32" else 1e-3)


def test_large_models_are_saved_in_several_files(tmp_path):
    def wide():
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Linear(400, 400) for _ in range(4)])  # 0.64 MB each

    data = torch.randn(2, 400)
    weights = train_and_save(tmp_path, wide, data, num_ranks=2, pp_size=2, criterion=squares, size=1)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) == 4
    assert (tmp_path / "model.safetensors.index.json").exists()
    one = tmp_path / "one"
    train_and_save(one, wide, data, num_ranks=1, criterion=squares, size=1, shard=False)
    assert [path.name for path in one.glob("*.safetensors")] == ["model.safetensors"]

    def run():
        booster, model, _ = boosted(wide(), sgd, data, pp_size=2)
        booster.load_model(model, tmp_path)
        return model.state_dict()

    loaded = {}
    for part in Loopback(2).run(run):
        loaded.update(part)
    assert_same(loaded, weights)


def failing(folder, error, text, make_model=tiny_vit, strict=True, sample=None):
    def run():
        booster, model, _ = boosted(make_model(), sgd, image_batch(2) if sample is None else sample, pp_size=2)
        with pytest.raises((error, PeerError)) as raised:
            booster.load_model(model, folder, strict=strict)
        return str(raised.value)

    messages = Loopback(2).run(run)
    assert any(re.search(text, message) for message in messages), messages


def test_folders_that_do_not_fit(tmp_path):
    failing(tmp_path / "nowhere", CheckpointError, "there is no folder .*nowhere. Give the folder that save_model")
    failing(tmp_path, CheckpointError, "does not hold weights for ViTForImageClassification")
    data = torch.randn(2, 4)
    failing(tmp_path, CheckpointError, r"holds no \*.safetensors file", plain_model, sample=data)
    plain = tmp_path / "plain"
    train_and_save(plain, plain_model, data, num_ranks=1, criterion=squares)

    def larger():
        torch.manual_seed(0)
        return nn.Sequential(*plain_model(), nn.Linear(2, 2))

    failing(
        tmp_path / "plain", CheckpointError, r"missing \['4.bias', '4.weight'\], unexpected \[\]", larger, sample=data
    )

    def wider():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 2))

    failing(
        tmp_path / "plain", CheckpointError, r"0.weight has shape \(8, 4\) there, \(9, 4\) here", wider, sample=data
    )


@pytest.mark.parametrize("make_model", [plain_model, tiny_vit])
def test_broken_files_are_named(tmp_path, make_model):
    data = torch.randn(2, 4) if make_model is plain_model else image_batch(2)
    criterion = squares if make_model is plain_model else model_loss
    train_and_save(tmp_path, make_model, data, num_ranks=1, criterion=criterion)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    advice = re.escape("Copy it again, or save the model again.")
    for broken in (whole[: len(whole) // 2], b"", b"x" * 100):
        file.write_bytes(broken)
        failing(
            tmp_path,
            CheckpointError,
            f"{file} cannot be read as a safetensors file: .*{advice}",
            make_model,
            sample=data,
        )
    file.unlink()
    index = tmp_path / "model.safetensors.index.json"
    for listed in ("{", "{}", "[]"):
        index.write_text(listed)
        failing(tmp_path, CheckpointError, f"{index} does not say which file holds which", make_model, sample=data)
    index.write_text('{"weight_map": {"0.weight": "gone.safetensors"}}')
    gone = tmp_path / "gone.safetensors"
    failing(tmp_path, CheckpointError, f"{gone} cannot be read as a safetensors file", make_model, sample=data)


def test_what_fits_is_loaded_if_not_strict(tmp_path):
    data = torch.randn(2, 4)
    weights = train_and_save(tmp_path, plain_model, data, num_ranks=1, criterion=squares)

    def run():
        torch.manual_seed(0)
        larger = nn.Sequential(*plain_model(), nn.Linear(2, 2))
        booster, model, _ = boosted(larger, sgd, data, pp_size=2)
        booster.load_model(model, tmp_path, strict=False)
        return model.state_dict()

    loaded = {}
    for part in Loopback(2).run(run):
        loaded.update(part)
    assert_same({name: loaded[name] for name in weights}, weights)


def test_a_file_in_the_way_is_an_error_on_every_rank(tmp_path):
    file = tmp_path / "file"
    file.write_text("here")

    def run():
        booster, model, _ = boosted(tiny_vit(), sgd, image_batch(2), pp_size=2)
        with pytest.raises(PeerError if current_world().rank else CheckpointError) as raised:
            booster.save_model(model, str(file))
        return str(raised.value)

    first, second = Loopback(2).run(run)
    assert first == f"a model is saved to a folder: {Path(file)} is a file. Give another path."
    assert second == "writing the model failed on rank 0. See the error printed there."
