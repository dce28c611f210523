"""Expanded tensors and parameters that are views of others: the same in every layout, or refused by name."""

import pytest
import torch
from support import assert_near, boosted, sgd, train, trained_alone
from torch import nn

from hybridpp.cluster import Loopback
from hybridpp.errors import ConfigError

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        if wide == "view":
            self.whole = nn.Parameter(torch.ones(32))
            self.wide = nn.Parameter(self.whole.data[8:24])
        elif wide == "apart":
            self.whole = nn.Parameter(torch.ones(16, 2))
            self.wide, self.other = nn.Parameter(self.whole.data[:, 0]), nn.Parameter(self.whole.data[:, 1])
            del self.whole
        elif isinstance(wide, nn.Parameter):
            self.wide = nn.Parameter(wide.data, wide.requires_grad)
        else:
            self.register_buffer("wide", torch.ones(1).expand(16), persistent=wide == "persistent")

    def forward(self, x):
        return x + self.down(self.up(x).relu()) * self.wide


def make(wide):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(wide) for _ in range(2)))


def squares(outputs, inputs):
    return outputs.square().mean()


MODELS = {
    "derived buffer": lambda: make("derived"),
    "persistent buffer": lambda: make("persistent"),
    "frozen parameter": lambda: make(nn.Parameter(torch.ones(1).expand(16), requires_grad=False)),
    "columns of one tensor": lambda: make("apart"),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", [{}, {"tp_size": 2}, {"pp_size": 2}], ids=str)
def test_models_with_expanded_tensors_train_and_are_loaded(name, layout, tmp_path):
    def save_and_load(booster, model, optimizer):
        booster.save_model(model, tmp_path / "model")
        booster.load_model(model, tmp_path / "model")

    run = train(MODELS[name], [X], criterion=squares, after=save_and_load, **layout)
    assert_near(run["weights"], trained_alone(MODELS[name], [X], criterion=squares)["weights"])


@pytest.mark.parametrize(
    ("layout", "setting"),
    [({"tp_size": 2}, "tp_size"), ({"pp_size": 2}, "pp_size"), ({"precision": "bf16"}, "precision")],
    ids=str,
)
def test_trained_parameters_that_share_memory_are_refused_where_apart(layout, setting):
    def rank():
        with pytest.raises(ConfigError, match=rf"'0\.whole' and '0\.wide' share memory .* which {setting}= would not"):
            boosted(make("view"), sgd, X, **layout)

    Loopback(layout.get("tp_size", 1) * layout.get("pp_size", 1)).run(rank)
    boosted(make("view"), sgd, X)


def test_a_trained_parameter_that_is_expanded_is_refused():
    with pytest.raises(ConfigError, match=r"parameter '0\.wide' is trained, but expanded"):
        boosted(make(nn.Parameter(torch.ones(1).expand(16))), sgd, X)


class Scripted(nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(4, 4), torch.jit.trace(nn.Linear(4, 4), torch.zeros(1, 4)), nn.Linear(4, 4))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "layout", [{"tp_size": 2}, {"pp_size": 2, "num_microbatches": 2}, {"zero_stage": 3}, {}], ids=str
)
def test_scripted_modules_train_on_replicas_and_are_refused_where_apart(layout):
    def rank():
        x = torch.ones(2, 4)
        if not layout:
            booster, model, optimizer = boosted(Scripted(), sgd, x)
            before = model[1].weight.clone()
            booster.execute_pipeline(iter([x]), model, lambda outputs, inputs: outputs.square().mean(), optimizer)
            optimizer.step()
            assert not torch.equal(model[1].weight, before)
            return
        told = r"module '1' is a module of torch\.jit.* ([tp]p_size is 2|zero_stage is 3)\. Boost the module"
        with pytest.raises(ConfigError, match=told):
            boosted(Scripted(), sgd, x, **layout)

    Loopback(2).run(rank)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_scripted_model_is_refused_and_trains_inside_another():
    x = torch.ones(2, 4)
    with pytest.raises(ConfigError, match=r"whose forward cannot be replaced\. Boost nn\.Sequential\(model\)"):
        boosted(torch.jit.trace(nn.Linear(4, 4), x), sgd, x)
    boosted(nn.Sequential(torch.jit.trace(nn.Linear(4, 4), x)), sgd, x)
