"""Weights of divided layers to disk and back: folders are whole, whatever the layout."""

import re

import pytest
import torch
from divided_models import LLAMA, MODELS, llama, token_batch
from support import assert_near, assert_same, boosted, model_loss, sgd, whole_over_tp
from transformers import LlamaForCausalLM

from hybridpp.checkpoint.read import InFile
from hybridpp.cluster import Loopback, current_world
from hybridpp.errors import CheckpointError
from hybridpp.tensor_parallel import sharding_of

LAYOUTS = [{"tp_size": 2}, {"tp_size": 4}, {"tp_size": 2, "pp_size": 2}, {"tp_size": 2, "precision": "bf16"}]


def on_layout(function, tp_size=1, pp_size=1, dp_size=1, **settings):
    settings = {"tp_size": tp_size, "pp_size": pp_size, **settings}
    return Loopback(tp_size * pp_size * dp_size).run(lambda: function(settings))


def empty(make_model):
    with torch.device("meta"):
        return make_model()


@pytest.mark.covering
@pytest.mark.parametrize("layout", [*LAYOUTS, {"tp_size": 2, "dp_size": 2}], ids=str)
@pytest.mark.parametrize("name", ["llama-tied", "llama-one-kv-head"])
def test_from_pretrained_reads_what_divided_layers_saved(tmp_path, name, layout):
    make_model, plan = MODELS[name]

    def save(settings):
        booster, model, _ = boosted(make_model(), sgd, token_batch(), tensor_parallel_plan=plan, **settings)
        booster.save_model(model, tmp_path, shard=True)

    on_layout(save, **layout)
    loaded, info = LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_same(dict(loaded.named_parameters()), dict(make_model().named_parameters()))


@pytest.mark.covering
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("on_meta", [False, True])
def test_each_rank_takes_its_part_of_a_folder(tmp_path, layout, on_meta):
    written = llama()
    for parameter in written.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    written.save_pretrained(tmp_path)

    def load(settings):
        model = empty(llama) if on_meta else llama()
        booster, model, optimizer = boosted(model, sgd, token_batch(), tensor_parallel_plan=LLAMA, **settings)
        booster.load_model(model, tmp_path)
        masters = booster.plugin._engine(model).masters.masters
        held = {name: masters.get(name, p).detach().clone() for name, p in model.named_parameters()}
        whole = whole_over_tp(booster, model, held)
        loss = booster.execute_pipeline(iter([token_batch()]), model, model_loss, optimizer)["loss"].item()
        return whole, loss

    ranks = on_layout(load, **layout)
    whole = {name: tensor for weights, _ in ranks for name, tensor in weights.items()}
    assert_same(whole, dict(written.named_parameters()))
    tolerance = 2e-2 if "precision" in layout else 1e-5
    expected = written(**token_batch()).loss.item()
    assert [loss for _, loss in ranks] == pytest.approx([expected] * len(ranks), abs=tolerance)


@pytest.fixture
def read(monkeypatch):
    """How many elements each rank brought to the host, by rank and name in the file."""
    sizes = {}

    def counting(method):
        def counted(stored, *args):
            tensor = method(stored, *args)
            key = current_world().rank, stored.key
            sizes[key] = sizes.get(key, 0) + tensor.numel()
            return tensor

        return counted

    monkeypatch.setattr(InFile, "full", counting(InFile.full))
    monkeypatch.setattr(InFile, "narrow", counting(InFile.narrow))
    return sizes


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gpt2"])
def test_of_a_divided_weight_a_rank_reads_its_share_only(tmp_path, read, name):
    make_model, plan = MODELS[name]
    make_model().save_pretrained(tmp_path)

    def load(settings):
        booster, model, _ = boosted(empty(make_model), sgd, token_batch(), tensor_parallel_plan=plan, **settings)
        booster.load_model(model, tmp_path)
        return {name: sharding_of(parameter) for name, parameter in model.named_parameters()}

    lies, _ = on_layout(load, tp_size=2)
    whole = {name: parameter.numel() for name, parameter in make_model().named_parameters()}
    assert sum(place is not None for place in lies.values()) > len(lies) / 3
    for parameter, place in lies.items():
        mine = [read[rank, parameter] for rank in range(2)]
        if place is None:
            assert mine == [whole[parameter]] * 2, parameter
        else:
            assert sum(mine) == whole[parameter], parameter
            # The last rows of an embedding may be one fewer.
            assert mine[0] - mine[1] in (0, place.full_shape[1 - place.dim] if len(place.full_shape) > 1 else 0)


def test_eight_ranks_read_no_more_than_they_own(tmp_path, read):
    def make_model():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(16, 64, bias=False), torch.nn.Linear(64, 16, bias=False))

    def parts_of(settings):
        return boosted(make_model(), sgd, torch.ones(2, 16), **settings)

    def save(settings):
        booster, model, _ = parts_of(settings)
        booster.save_model(model, tmp_path)

    on_layout(save)

    def load(settings):
        booster, model, _ = parts_of({**settings, "tensor_parallel_plan": {"0": "column", "1": "row"}})
        booster.load_model(model, tmp_path)
        return sum(parameter.numel() for parameter in model.parameters())

    owned = on_layout(load, tp_size=8)
    assert sum(owned) == 2 * 16 * 64
    assert sum(read.values()) <= 1.05 * sum(owned)


def test_training_goes_on_from_a_folder_in_another_layout(tmp_path):
    batches = [token_batch(seed=seed) for seed in range(4)]

    def steps(booster, model, optimizer, batches):
        for batch in batches:
            booster.execute_pipeline(iter([batch]), model, model_loss, optimizer)
            optimizer.step()
        return whole_over_tp(booster, model, {name: p.detach().clone() for name, p in model.named_parameters()})

    def first(settings):
        parts = boosted(llama(), sgd, token_batch(), tensor_parallel_plan=LLAMA, **settings)
        steps(*parts, batches[:2])
        parts[0].save_model(parts[1], tmp_path)

    def second(settings):
        parts = boosted(llama(), sgd, token_batch(), tensor_parallel_plan=LLAMA, **settings)
        parts[0].load_model(parts[1], tmp_path)
        return steps(*parts, batches[2:])

    on_layout(first, tp_size=4)
    ranks = on_layout(second, tp_size=2, pp_size=2)
    expected = on_layout(lambda settings: steps(*boosted(llama(), sgd, token_batch(), **settings), batches))[0]
    assert_near({name: tensor for rank in ranks for name, tensor in rank.items()}, expected, 1e-5)


def test_a_folder_of_another_size_is_refused_with_whole_shapes(tmp_path):
    llama(num_kv_heads=4).save_pretrained(tmp_path)

    def load(settings):
        booster, model, _ = boosted(llama(), sgd, token_batch(), tensor_parallel_plan=LLAMA, **settings)
        with pytest.raises(CheckpointError, match=re.escape("k_proj.weight")) as raised:
            booster.load_model(model, tmp_path)
        return str(raised.value)

    for message in on_layout(load, tp_size=2):
        assert "(32, 32)" in message or "torch.Size([32, 32])" in message
