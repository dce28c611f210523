"""Models on the meta device: cut first, then every rank reads what it owns."""

import re

import pytest
import torch
from accelerate import init_empty_weights
from copies import copied
from safetensors.torch import save_file
from support import (
    assert_same,
    boosted,
    gradients_of,
    image_batch,
    model_loss,
    replica_part,
    sgd,
    tiny_vit,
    train,
)
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, ViTForImageClassification

from hybridpp.checkpoint import open_folder
from hybridpp.checkpoint.read import InFile
from hybridpp.cluster import Loopback, current_world
from hybridpp.errors import CheckpointError, ConfigError, PeerError

WAITS = "its weights have no values yet. Call booster.load_model(model, folder) first"


@copied
def tiny_llama(tied=False):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=32, num_hidden_layers=4, tie_word_embeddings=tied, **sizes)
    return LlamaForCausalLM(config).train()


def tied_llama():
    return tiny_llama(tied=True)


@copied
def tiny_mixtral():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    return MixtralForCausalLM(MixtralConfig(vocab_size=32, num_hidden_layers=4, num_local_experts=4, **sizes)).train()


def token_batch(num_samples):
    ids = torch.arange(6 * num_samples).reshape(num_samples, 6) % 32
    return {"input_ids": ids, "labels": ids}


def empty(make_model):
    with torch.device("meta"):
        return make_model()


def train_from_folder(folder, make_model, batches, *, dp_size=1, criterion=model_loss, make_optimizer=sgd, **settings):
    """As ``support.train``, of a model that is boosted on the meta device and loaded after that."""
    pp_size = settings["pp_size"]

    def run():
        model = empty(make_model)
        sample = replica_part(batches[0], 0, dp_size)
        booster, model, optimizer = boosted(model, make_optimizer, sample, **settings)
        booster.load_model(model, folder)
        replica = booster.plugin.layout.here.dp
        data = iter([replica_part(batch, replica, dp_size) for batch in batches])
        losses, gradients = [], {}
        for step in range(len(batches)):
            losses.append(booster.execute_pipeline(data, model, criterion, optimizer)["loss"].item())
            if step == 0:
                gradients = gradients_of(booster, model)
            optimizer.step()
        return losses, gradients, {name: weight.detach().clone() for name, weight in model.named_parameters()}

    ranks = Loopback(pp_size * dp_size).run(run)
    gradients, weights = {}, {}
    for _, owned, after in ranks:
        gradients.update(owned)
        weights.update(after)
    return {"losses": [losses for losses, *_ in ranks], "gradients": gradients, "weights": weights}


def assert_same_training(actual, expected):
    assert actual["losses"] == expected["losses"]
    assert_same(actual["gradients"], expected["gradients"])
    assert_same(actual["weights"], expected["weights"])


@pytest.mark.covering("pp_size precision")
@pytest.mark.parametrize(
    ("make_model", "pp_size", "precision"),
    [
        (tiny_vit, 1, "fp32"),
        (tiny_vit, 2, "bf16"),
        (tiny_llama, 1, "bf16"),
        (tiny_llama, 2, "fp32"),
        (tied_llama, 1, "fp32"),
        (tied_llama, 2, "bf16"),
        (tied_llama, 4, "fp32"),
        (tiny_mixtral, 2, "bf16"),
    ],
)
def test_a_model_boosted_without_weights_trains_as_one_boosted_with_them(tmp_path, make_model, pp_size, precision):
    make_model().save_pretrained(tmp_path)
    batches = [image_batch(4) if make_model is tiny_vit else token_batch(4) for _ in range(2)]
    settings = {"pp_size": pp_size, "precision": precision, "num_microbatches": 2}
    expected = train(make_model, batches, **settings)
    assert_same_training(train_from_folder(tmp_path, make_model, batches, **settings), expected)


@pytest.mark.parametrize("settings", [{"pp_size": 1}, {"pp_size": 2, "num_model_chunks": 2}])
def test_with_replicas_and_several_stages_on_a_rank_too(tmp_path, settings):
    tied_llama().save_pretrained(tmp_path)
    schedule = {"schedule": "gpipe"} if "num_model_chunks" in settings else {}
    settings = {"dp_size": 2, "num_microbatches": 2, **schedule, **settings}
    batches = [token_batch(4)] * 2
    assert_same_training(
        train_from_folder(tmp_path, tied_llama, batches, **settings), train(tied_llama, batches, **settings)
    )


class Plain(nn.Module):
    """Buffers of all kinds: in the state, derived by a rule, and in a stage of their own."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()) for _ in range(4)])
        self.scale = Scale()

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.scale(x)


class Scale(nn.Module):
    """Multiplies by a buffer that no state dict holds."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))
        self.register_buffer("steps", torch.empty(4), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.ones_(self.weight)
        with torch.no_grad():
            self.steps.copy_(torch.arange(4.0))

    def forward(self, x):
        return x * self.weight * self.steps


class Recurrent(nn.Module):
    """An LSTM keeps weak references to its weights."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(4, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, x):
        x = self.rnn(x)[0]
        for block in self.blocks:
            x = block(x)
        return x


def recurrent():
    torch.manual_seed(0)
    return Recurrent()


def plain():
    torch.manual_seed(0)
    return Plain()


def squares(outputs, inputs):
    return outputs.square().mean()


@pytest.mark.parametrize(
    ("make_model", "pp_size", "precision"),
    [
        (plain, 1, "bf16"),
        (plain, 2, "fp32"),
        (plain, 4, "bf16"),
        (recurrent, 1, "fp32"),
        (recurrent, 1, "bf16"),
        (recurrent, 2, "bf16"),
    ],
)
def test_a_plain_module(tmp_path, make_model, pp_size, precision):
    save_file(make_model().state_dict(), tmp_path / "model.safetensors")
    batches = [torch.randn(6, 4, generator=torch.Generator().manual_seed(0))] * 2
    settings = {"pp_size": pp_size, "precision": precision, "criterion": squares}
    expected = train(make_model, batches, **settings)
    assert_same_training(train_from_folder(tmp_path, make_model, batches, **settings), expected)


def test_accelerates_empty_weights_will_do_as_well(tmp_path):
    tiny_llama().save_pretrained(tmp_path)

    def run():
        with init_empty_weights():
            model = tiny_llama()
        booster, model, optimizer = boosted(model, sgd, token_batch(2), pp_size=2)
        booster.load_model(model, tmp_path)
        return booster.execute_pipeline(iter([token_batch(2)]), model, model_loss, optimizer)["loss"].item()

    assert Loopback(2).run(run) == train(tiny_llama, [token_batch(2)], pp_size=2)["losses"][0] * 2


def held_by(model):
    """Bytes of memory behind all tensors of a model, wherever a module keeps them."""
    storages = {}
    for module in model.modules():
        for place in (module._parameters, module._buffers, vars(module)):
            for tensor in place.values():
                if isinstance(tensor, torch.Tensor):
                    storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def test_a_rank_has_memory_for_what_it_owns_only():
    def run():
        model = empty(tiny_llama)
        parameters = dict(model.named_parameters())
        _, model, optimizer = boosted(model, sgd, token_batch(2), pp_size=4)
        owned = dict(model.named_parameters())
        foreign = [parameter for name, parameter in parameters.items() if name not in owned]
        assert all(parameter.is_meta for parameter in foreign)
        assert not any(parameter.is_meta for parameter in owned.values())
        assert all(parameters[name] is parameter for name, parameter in owned.items()), "the same objects as before"
        assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in owned.values()]
        own = sum(parameter.nbytes for parameter in owned.values())
        return own, held_by(model)

    whole = sum(parameter.nbytes for parameter in tiny_llama().parameters())
    ranks = Loopback(4).run(run)
    assert sum(own for own, _ in ranks) == whole
    for own, held in ranks:
        assert held < own + 200, "hollows and rotary frequencies"


def test_tied_weights_stay_one_tensor():
    model = empty(tied_llama)
    boosted(model, sgd, token_batch(2))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not model.lm_head.weight.is_meta


def test_nothing_runs_before_the_weights_are_there(tmp_path):
    def run():
        booster, model, optimizer = boosted(empty(tiny_vit), sgd, image_batch(2), pp_size=2)
        with pytest.raises(ConfigError, match=re.escape(WAITS)):
            booster.execute_pipeline(iter([image_batch(2)]), model, model_loss, optimizer)
        with pytest.raises(ConfigError, match=re.escape(WAITS)), torch.no_grad():
            booster.execute_pipeline(iter([image_batch(2)]), model, return_loss=False)
        with pytest.raises(ConfigError, match=re.escape(WAITS)):
            booster.save_model(model, tmp_path)

    Loopback(2).run(run)
    booster, model, optimizer = boosted(empty(tiny_vit), sgd, image_batch(2))
    with pytest.raises(ConfigError, match=re.escape(WAITS)):
        model(**image_batch(2))
    with pytest.raises(ConfigError, match=re.escape(WAITS)):
        booster.backward(torch.ones((), requires_grad=True), optimizer)
    tiny_vit().save_pretrained(tmp_path)
    booster.load_model(model, tmp_path)
    booster.backward(model(**image_batch(2)).loss, optimizer)


def test_a_folder_that_lacks_weights(tmp_path):
    plain_state = plain().state_dict()
    del plain_state["blocks.3.0.weight"]
    save_file(plain_state, tmp_path / "model.safetensors")
    data = torch.ones(2, 4)

    def run():
        booster, model, optimizer = boosted(empty(plain), sgd, data, pp_size=2)
        with pytest.raises((CheckpointError, PeerError)):
            booster.load_model(model, tmp_path)
        with pytest.raises(ConfigError, match=re.escape(WAITS)):
            booster.execute_pipeline(iter([data]), model, squares, optimizer)
        booster.load_model(model, tmp_path, strict=False)
        with pytest.raises(
            ConfigError, match=re.escape("they are not in the folder that was loaded: ['blocks.3.0.weight']. Call")
        ):
            booster.execute_pipeline(iter([data]), model, squares, optimizer)
        save_file({"blocks.3.0.weight": torch.eye(4)}, tmp_path / "model.safetensors")
        booster.load_model(model, tmp_path, strict=False)
        return booster.execute_pipeline(iter([data]), model, squares, optimizer)["loss"].item()

    first, second = Loopback(2).run(run)
    assert first == second


def test_a_hugging_face_folder_that_lacks_weights(tmp_path):
    ViTForImageClassification(tiny_vit().config).vit.save_pretrained(tmp_path)

    def run():
        booster, model, _ = boosted(empty(tiny_vit), sgd, image_batch(2), pp_size=2)
        with pytest.raises(CheckpointError, match=r"missing .*classifier.weight"):
            booster.load_model(model, tmp_path)
        booster.load_model(model, tmp_path, strict=False)
        with pytest.raises(ConfigError, match=re.escape("was loaded: ['classifier.bias', 'classifier.weight']. Call")):
            booster.save_model(model, tmp_path)

    Loopback(2).run(run)


class Lost(Scale):
    """A buffer that nothing makes again."""

    def reset_parameters(self):
        nn.init.ones_(self.weight)


class Aside(nn.Module):
    """A tensor that is no buffer."""

    def __init__(self):
        super().__init__()
        self.steps = torch.arange(4.0)

    def forward(self, x):
        return x * self.steps


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (Lost, "buffer 1.steps is on the meta device, is not in the state dict and is not computed by a reset_para"),
        (Aside, "1.steps is a tensor on the meta device that is no parameter and no buffer, so nothing can fill it."),
    ],
)
def test_what_no_folder_holds_is_refused_by_name(part, text):
    model = empty(lambda: nn.Sequential(nn.Linear(4, 4), part()))
    with pytest.raises(ConfigError, match=re.escape(text)):
        boosted(model, sgd, torch.ones(2, 4))


def test_what_has_numbers_keeps_them():
    model = nn.Sequential(nn.Linear(4, 4), Scale())
    nn.init.constant_(model[1].weight, 3.0)
    model[1].steps = torch.empty(4, device="meta")
    model[0].register_buffer("derived", torch.ones(4), persistent=False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    _, model, _ = boosted(model, sgd, torch.ones(2, 4))
    assert_same(dict(model.state_dict()), before)
    assert model[1].steps.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert model[0].derived.tolist() == [1.0] * 4


def test_load_model_gives_masters_the_precision_of_the_file(tmp_path):
    tiny_vit(seed=1).save_pretrained(tmp_path)

    def run():
        booster, model, optimizer = boosted(tiny_vit(), sgd, image_batch(2), pp_size=2, precision="bf16")
        booster.load_model(model, tmp_path)
        booster.execute_pipeline(iter([image_batch(4)]), model, model_loss, optimizer)
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.step()
        return {name: master.detach() for name, master in booster.plugin._engine(model).masters.masters.items()}

    masters = {}
    for part in Loopback(2).run(run):
        masters.update(part)
    assert_same(masters, dict(tiny_vit(seed=1).named_parameters()))


def read_whole(contents, names):
    return {name: stored.full().clone() for name, stored in contents.read(names)}


@pytest.mark.parametrize("make_model", [tiny_vit, tiny_llama, tied_llama, tiny_mixtral])
def test_only_what_is_asked_for_is_read(tmp_path, make_model, monkeypatch):
    model = make_model()
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    state = model.state_dict()
    files = len(list(tmp_path.glob("*.safetensors")))
    contents = open_folder(model, tmp_path, strict=True)
    assert {name: torch.Size(shape) for name, shape in contents.shapes.items()} == {
        n: t.shape for n, t in state.items()
    }
    assert files > 1
    names = list(state)[::3]
    (tmp_path / "config.json").unlink()  # transformers cannot load it whole any more
    assert_same(read_whole(contents, names), {name: state[name] for name in names})


def test_a_folder_without_safetensors_is_read_too(tmp_path):
    model = tiny_vit()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    contents = open_folder(model, tmp_path, strict=True)
    assert_same(read_whole(contents, ["classifier.bias"]), {"classifier.bias": model.classifier.bias.detach()})


def test_stale_files_beside_an_index_are_not_read(tmp_path):
    booster, model, _ = boosted(nn.Sequential(nn.Linear(400, 400), nn.Linear(400, 400)), sgd, torch.ones(2, 400))
    booster.save_model(model, tmp_path, size_per_shard=1)
    assert (tmp_path / "model.safetensors.index.json").exists()
    save_file({"old": torch.ones(1)}, tmp_path / "old.safetensors")
    booster.load_model(model, tmp_path)


def by_load_state_dict(model, state):
    # Not strict: batch normalisation asks for what another stage has, where a state is of no version.
    model.load_state_dict({name: state[name] for name in model.state_dict()}, strict=False)


def past_the_version(model, state):
    """As many scripts initialise weights."""
    for name, parameter in model.named_parameters():
        parameter.data.copy_(state[name])
    for name, buffer in model.named_buffers():
        buffer.copy_(state.get(name, buffer))


def by_new_memory(model, state):
    for name, tensor in model.state_dict(keep_vars=True).items():
        tensor.data = state[name].to(tensor.dtype)


def rounded():
    return plain().bfloat16().float()


@pytest.mark.covering
@pytest.mark.parametrize(("pp_size", "precision"), [(1, "fp32"), (1, "bf16"), (2, "bf16")])
@pytest.mark.parametrize("fill", [by_load_state_dict, past_the_version, by_new_memory])
def test_a_script_may_fill_the_model_itself(fill, pp_size, precision):
    data = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    settings = {"pp_size": pp_size, "precision": precision}
    expected = train(rounded, [data], criterion=squares, **settings)

    def run():
        booster, model, optimizer = boosted(empty(rounded), sgd, data, **settings)
        with torch.no_grad():
            fill(model, rounded().state_dict())
        loss = booster.execute_pipeline(iter([data]), model, squares, optimizer)["loss"].item()
        optimizer.step()
        return loss, {name: weight.detach().clone() for name, weight in model.named_parameters()}

    ranks = Loopback(pp_size).run(run)
    assert [[loss] for loss, _ in ranks] == expected["losses"]
    assert_same({name: weight for _, weights in ranks for name, weight in weights.items()}, expected["weights"])


def test_what_a_script_forgets_to_fill_is_named_on_every_rank():
    def run():
        booster, model, optimizer = boosted(empty(plain), sgd, torch.ones(2, 4), pp_size=2)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name != "blocks.3.0.bias":
                    parameter.data.normal_()
            for buffer in model.buffers():
                buffer.zero_()
        text = "have no values, because they were not written to: ['blocks.3.0.bias']. Call boost"
        with pytest.raises(ConfigError, match=re.escape(text).replace(r"\.\*", ".*")):
            booster.execute_pipeline(iter([torch.ones(2, 4)]), model, squares, optimizer)
        if "blocks.3.0.bias" in dict(model.named_parameters()):
            model.get_parameter("blocks.3.0.bias").data.zero_()
        booster.execute_pipeline(iter([torch.ones(2, 4)]), model, squares, optimizer)

    Loopback(2).run(run)


def test_replicas_that_look_at_their_model_alone_do_not_run_ahead():
    def run():
        booster, model, optimizer = boosted(empty(plain), sgd, torch.ones(2, 4))
        by_load_state_dict(model, plain().state_dict())
        if current_world().rank:
            model(torch.ones(2, 4))
        return booster.execute_pipeline(iter([torch.ones(2, 4)]), model, squares, optimizer)["loss"].item()

    first, second = Loopback(2).run(run)
    assert first == second


def test_a_load_that_fails_half_way_leaves_the_weights_lacking(tmp_path, monkeypatch):
    save_file(plain().state_dict(), tmp_path / "model.safetensors")

    def run():
        booster, model, optimizer = boosted(empty(plain), sgd, torch.ones(2, 4), pp_size=2)
        last = current_world().rank == 1
        with monkeypatch.context() as context:
            if last:
                context.setattr(InFile, "full", broken)
            with pytest.raises((CheckpointError, PeerError)):
                booster.load_model(model, tmp_path)
        with pytest.raises(ConfigError, match=re.escape(WAITS)):
            booster.execute_pipeline(iter([torch.ones(2, 4)]), model, squares, optimizer)
        booster.load_model(model, tmp_path)
        booster.execute_pipeline(iter([torch.ones(2, 4)]), model, squares, optimizer)

    whole = InFile.full

    def broken(stored):
        if current_world().rank == 1:
            raise CheckpointError("the disk is gone")
        return whole(stored)

    Loopback(2).run(run)


def test_masters_from_an_optimizer_state_keep_their_precision():
    data = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    booster, model, optimizer = boosted(plain(), sgd, data, precision="bf16")
    state = optimizer.state_dict()
    masters = {name: master.clone() for name, master in state["masters"].items()}
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    booster, model, optimizer = boosted(empty(plain), sgd, data, precision="bf16")
    optimizer.load_state_dict(state)
    model.load_state_dict(weights)
    booster.execute_pipeline(iter([data]), model, squares, optimizer)
    assert_same({name: m.detach() for name, m in booster.plugin._engine(model).masters.masters.items()}, masters)
