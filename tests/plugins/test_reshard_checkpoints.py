"""A checkpoint of any layout is loaded in any other: weights, moments and the next loss are the same bits."""

import functools

import pytest
import torch
from divided_models import GPT2, LLAMA, gpt2, llama, token_batch
from run_checkpoints import on_layout, tensors_in
from support import assert_same, model_loss, replica_part

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import Loopback

LAYOUTS = {
    "one": {},
    "pp2": {"pp_size": 2},
    "pp3 uneven": {"pp_size": 3, "layers_per_stage": [1, 1, 2], "schedule": "zb-h1"},
    "pp2 zb-v": {"pp_size": 2, "schedule": "zb-v"},
    "tp2": {"tp_size": 2},
    "tp2 pp2": {"tp_size": 2, "pp_size": 2},
    "dp2 zero 1": {"dp_size": 2, "zero_stage": 1, "ddp_bucket_cap_mb": 0.01},
    "dp3 zero 2": {"dp_size": 3, "zero_stage": 2},
    "dp2 zero 3": {"dp_size": 2, "zero_stage": 3},
    "dp2 offloaded": {"dp_size": 2, "zero_stage": 1, "ddp_bucket_cap_mb": 0.01, "offload_optimizer": 0.5},
    "tp2 pp2 dp2 zero 1": {"tp_size": 2, "pp_size": 2, "dp_size": 2, "zero_stage": 1, "ddp_bucket_cap_mb": 0.01},
}
STEP = 2


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same run, saved by every layout."""
    path = tmp_path_factory.mktemp("reshard")

    def first(make):
        run = make()
        run.steps(range(STEP))
        run.booster.save(path / "first", step=STEP)

    on_layout(first)

    def convert(make, name):
        run = make(make_optimizer=run_first)
        run.booster.resume(path / "first")
        run.booster.save(path / name, step=STEP)

    for name, layout in LAYOUTS.items():
        on_layout(functools.partial(convert, name=name), **layout)
    return path


def run_first(parameters):
    """Other settings than those of the run that is loaded, in the same groups."""
    parameters = list(parameters)
    matrices, others = ([p for p in parameters if (p.dim() > 1) == is_matrix] for is_matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.3, "betas": (0.1, 0.2)}, {"params": others, "lr": 7.0}]
    return torch.optim.AdamW(groups, lr=0.5)


@pytest.mark.parametrize("target", LAYOUTS)
def test_every_layout_loads_what_other_layouts_saved(folders, target, tmp_path):
    """And each is loaded by others: a quarter of the pairs."""
    number = [*LAYOUTS].index(target)
    sources = [source for index, source in enumerate(LAYOUTS) if (index + number) % 4 == 0]
    expected = tensors_in(folders / "first", STEP)
    assert sum("/optimizer/" in key for key in expected) > sum("/weights/" in key for key in expected) > 20

    def load(make):
        run = make(make_optimizer=run_first)
        losses = []
        for source in sources:
            assert run.booster.resume(folders / source).step == STEP
            run.booster.save(tmp_path / source, step=STEP)
            losses.append(run.steps([STEP]))
            settings = [(group["weight_decay"], group["betas"]) for group in run.optimizer.param_groups]
            assert settings == [(0.1, (0.9, 0.999)), (0, (0.9, 0.999))]
        return losses

    for losses in on_layout(load, **LAYOUTS[target]):
        assert losses == [losses[0]] * len(sources)
    for source in sources:
        assert_same(tensors_in(tmp_path / source, STEP), expected)


def losses_of(folder, make_model, plan, tp_size, then):
    def rank():
        plugin = HybridParallelPlugin(tp_size=tp_size, tensor_parallel_plan=plan if tp_size > 1 else None)
        booster, model = Booster(plugin=plugin), make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        parts = booster.boost(model, optimizer, sample=token_batch(2))
        if then == "resume":
            booster.resume(folder)
        losses = []
        for number in range(2):
            data = iter([replica_part(token_batch(4, number), plugin.layout.here.dp, plugin.dp_size)])
            losses.append(booster.execute_pipeline(data, parts.model, model_loss, parts.optimizer)["loss"].item())
            parts.optimizer.step()
        if then == "save":
            booster.save(folder, step=1)
        return losses

    return Loopback(tp_size).run(rank)[0]


@pytest.mark.covering
@pytest.mark.parametrize("saved_at", [1, 2])
@pytest.mark.parametrize(
    ("make_model", "plan"),
    [(functools.partial(llama, num_kv_heads=1), LLAMA), (gpt2, GPT2)],
    ids=["copied kv heads, padded vocabulary", "fused qkv"],
)
def test_copies_fused_layers_and_padding_are_left_out(tmp_path, make_model, plan, saved_at):
    names = {name: tuple(parameter.shape) for name, parameter in make_model().named_parameters()}
    losses_of(tmp_path, make_model, plan, saved_at, "save")
    stored = tensors_in(tmp_path, 1)
    weights = {key.removeprefix("model0/weights/"): tensor for key, tensor in stored.items() if "/weights/" in key}
    assert {name: tuple(weights[name].shape) for name in names} == names
    one, two = (losses_of(tmp_path, make_model, plan, size, "resume") for size in (1, 2))
    assert one == pytest.approx(two, abs=1e-5)


def test_pieces_of_channels_last_weights_are_boxes(tmp_path):
    """Whose elements lie in memory in another order of dimensions."""

    def network():
        torch.manual_seed(0)
        layers = [torch.nn.Conv2d(3, 32, 3), torch.nn.ReLU(), torch.nn.Conv2d(32, 40, 3), torch.nn.Flatten()]
        return torch.nn.Sequential(*layers).to(memory_format=torch.channels_last)

    def rank(save, load=None):
        booster = Booster(plugin=HybridParallelPlugin(zero_stage=1, ddp_bucket_cap_mb=0.001))
        model = network()
        parts = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.1), sample=torch.ones(1, 3, 6, 6))
        if load is None:
            data = iter([torch.ones(2, 3, 6, 6)])
            booster.execute_pipeline(data, parts.model, lambda out, _: out.square().mean(), parts.optimizer)
            parts.optimizer.step()
        else:
            booster.resume(load)
        booster.save(save, step=1)
        return sum(part.numel() for part in parts.optimizer.target.tensors.values())

    Loopback(1).run(lambda: rank(tmp_path / "one"))
    sizes = Loopback(3).run(lambda: rank(tmp_path / "three", tmp_path / "one"))
    assert min(sizes) > 0
    Loopback(2).run(lambda: rank(tmp_path / "two", tmp_path / "three"))
    Loopback(1).run(lambda: rank(tmp_path / "one again", tmp_path / "two"))
    for name in ("two", "three", "one again"):
        assert_same(tensors_in(tmp_path / name, 1), tensors_in(tmp_path / "one", 1))
