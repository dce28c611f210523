"""Weights to disk and back, through the folder that Hugging Face reads."""

import functools
import logging
import re
from pathlib import Path

import pytest
import torch
from copies import copied
from safetensors.torch import load_file, save_file
from support import assert_near, assert_same, boosted, image_batch, model_loss, sgd, small_vit, tiny_vit
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, ViTForImageClassification

from hybridpp.cluster import Loopback, disable_existing_loggers
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


@pytest.mark.covering
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
    train_and_save(tmp_path, small_vit, image_batch(4), num_ranks=2, pp_size=2)
    small_vit().save_pretrained(tmp_path / "plain")
    ours, plain = (load_file(path / "model.safetensors") for path in (tmp_path, tmp_path / "plain"))
    assert set(ours) == set(plain)


@copied
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
    expected = small_vit(seed=1)
    expected.save_pretrained(tmp_path)

    def run():
        booster, model, optimizer = boosted(small_vit(), sgd, image_batch(2), pp_size=2, precision=precision)
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


def failing(folder, error, text, make_model=small_vit, strict=True, sample=None):
    def run():
        booster, model, _ = boosted(make_model(), sgd, image_batch(2) if sample is None else sample, pp_size=2)
        with pytest.raises((error, PeerError)) as raised:
            booster.load_model(model, folder, strict=strict)
        return str(raised.value)

    messages = Loopback(2).run(run)
    assert any(re.search(text, message) for message in messages), messages


def test_folders_that_do_not_fit(tmp_path):
    failing(tmp_path / "nowhere", CheckpointError, "there is no folder .*nowhere. Pass the folder that save_model")
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
        tmp_path / "plain",
        CheckpointError,
        r"0.weight has shape \(8, 4\) in the folder and \(9, 4\) in the model",
        wider,
        sample=data,
    )


@pytest.mark.parametrize("make_model", [plain_model, small_vit])
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
        booster, model, _ = boosted(small_vit(), sgd, image_batch(2), pp_size=2)
        with pytest.raises(CheckpointError) as raised:
            booster.save_model(model, str(file))
        return str(raised.value)

    first, second = Loopback(2).run(run)
    advice = "Pass another path, or one that ends with .safetensors or .pt, for a single file."
    assert first == f"a model is saved to a folder: {Path(file)} is a file. {advice}"
    assert second == f"writing the model failed on rank 0: {first}"


def test_a_sharded_save_over_a_single_file_is_what_is_loaded(tmp_path):
    def run():
        first, second = small_vit(seed=1), small_vit(seed=2)
        booster, model, _ = boosted(first, sgd, image_batch(2), pp_size=2)
        booster.save_model(model, tmp_path, shard=False)
        booster, model, _ = boosted(second, sgd, image_batch(2), pp_size=2)
        booster.save_model(model, tmp_path, size_per_shard=0.01)

    Loopback(2).run(run)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    loaded = ViTForImageClassification.from_pretrained(tmp_path)
    assert_same(dict(loaded.named_parameters()), dict(small_vit(seed=2).named_parameters()))


@pytest.mark.parametrize("name", ["folder", "x.pt"])
def test_a_full_disk_is_one_error_on_every_rank_and_the_old_save_stays(tmp_path, monkeypatch, name):
    def save(seed):
        booster, model, _ = boosted(small_vit(seed=seed), sgd, image_batch(2), pp_size=2)
        booster.save_model(model, tmp_path / name)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    def fail():
        text = r"No space left on device. Free disk space, check permissions"
        with pytest.raises(CheckpointError, match=text) as raised:
            save(2)
        return str(raised.value)

    Loopback(2).run(lambda: save(1))
    with monkeypatch.context() as context:
        context.setattr("hybridpp.checkpoint.staging_folder.os.fsync", full)
        first, second = Loopback(2).run(fail)
    assert second == f"writing the model failed on rank 0: {first}"
    assert [path.name for path in tmp_path.iterdir()] == [name], "nothing that was begun is left"

    def load():
        booster, model, _ = boosted(small_vit(), sgd, image_batch(2), pp_size=2)
        booster.load_model(model, tmp_path / name)
        return dict(model.named_parameters())

    loaded = {name: tensor for weights in Loopback(2).run(load) for name, tensor in weights.items()}
    assert_same(loaded, dict(small_vit(seed=1).named_parameters()))


class Tied(nn.Module):
    """No Hugging Face model; its head is tied to its embedding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("name", ["folder", "x.safetensors", "x.pt"])
def test_what_was_saved_of_a_module_with_a_tied_head_loads_in_plain_torch(tmp_path, name):
    ids = torch.arange(8).reshape(2, 4)
    path = tmp_path / name
    weights = train_and_save(path, Tied, ids, num_ranks=2, pp_size=2, criterion=squares)
    file = path / "model.safetensors" if name == "folder" else path
    model = Tied()
    model.load_state_dict(load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True))
    assert_same({name: weights[name] for name, _ in model.named_parameters()}, dict(model.named_parameters()))

    def load():
        booster, model, _ = boosted(Tied(), sgd, ids, pp_size=2)
        booster.load_model(model, path)
        return model.state_dict()

    loaded = {name: tensor for state in Loopback(2).run(load) for name, tensor in state.items()}
    assert_same(loaded, dict(model.state_dict()))


def test_a_file_of_a_hugging_face_model_has_the_names_that_the_model_has(tmp_path):
    file = tmp_path / "x.safetensors"
    weights = train_and_save(file, small_vit, image_batch(4), num_ranks=2, pp_size=2)
    assert_same(load_file(file), weights)
    small_vit().save_pretrained(tmp_path)
    text = "model.safetensors does not fit .*Hub names are converted only when a folder is loaded: pass the folder."
    failing(tmp_path / "model.safetensors", CheckpointError, text)


def test_weights_written_by_hand_are_saved(tmp_path):
    booster, model, _ = boosted(plain_model(), sgd, torch.randn(2, 4), precision="bf16")
    model.load_state_dict({name: torch.ones_like(tensor) for name, tensor in model.state_dict().items()})
    booster.save_model(model, tmp_path)
    assert all((tensor == 1).all() for tensor in load_file(tmp_path / "model.safetensors").values())


@pytest.fixture
def levels():
    """Afterwards, every logger has the level it had."""
    before = {name: logging.getLogger(name).level for name in list(logging.root.manager.loggerDict)}
    yield
    for name in list(logging.root.manager.loggerDict):
        logging.getLogger(name).setLevel(before.get(name, logging.NOTSET))


@pytest.mark.usefixtures("levels")
def test_a_load_says_nothing_of_a_tensor_parallelism_that_is_not_asked_for(tmp_path, caplog, monkeypatch):
    small_vit().save_pretrained(tmp_path)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    disable_existing_loggers()
    booster, model, _ = boosted(small_vit(), sgd, image_batch(2))
    booster.load_model(model, tmp_path)
    assert not [record for record in caplog.records if record.name.startswith("transformers")]


@pytest.mark.parametrize(
    ("place", "text"),
    [
        (
            "hybridpp.checkpoint.find_tensors.unfinished",
            "cannot be read: .*Permission denied. Check permissions, or pass",
        ),
        ("hybridpp.checkpoint.read.InFile.full", "cannot be read: .*Permission denied. Copy it again, or save"),
        (
            "hybridpp.checkpoint.folder.stage",
            "cannot be written: .*Permission denied. Free disk space, check permissions",
        ),
    ],
)
def test_a_file_system_error_is_a_checkpoint_error_on_every_rank(tmp_path, monkeypatch, place, text):
    save_file(plain_model().state_dict(), tmp_path / "weights.safetensors")

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    def run():
        booster, model, _ = boosted(plain_model(), sgd, torch.randn(2, 4), pp_size=2)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        call = booster.save_model if place.endswith("stage") else booster.load_model
        with pytest.raises(CheckpointError, match=f"{tmp_path} {text}"):
            call(model, tmp_path)
        assert_same(model.state_dict(), before)

    monkeypatch.setattr(place, refuse)
    Loopback(2).run(run)
