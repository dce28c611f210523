import pytest
import torch
from safetensors.torch import load_file
from support import boosted, sgd
from torch import nn
from torch.nn import functional

from hybridpp.cluster import Loopback

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Gate(nn.Module):
    """Computes in fp32 itself, as routers do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))
        self.register_buffer("correction", 3 + torch.arange(8) / 1000)

    def forward(self, x):
        return x * (functional.linear(x.float(), self.weight.float()) + self.correction).argmax(-1, keepdim=True)


class Declaring(nn.Module):
    """As a model of transformers declares."""

    _keep_in_fp32_modules = ("wo",)
    _keep_in_fp32_modules_strict = ("correction", "tower")

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.wo = Gate(), nn.Linear(8, 8)
        self.tower = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
        self.seen = []

    def forward(self, x):
        hidden = self.wo(self.gate(x).to(self.wo.weight.dtype))
        out = self.tower(hidden)
        self.seen.append((hidden.dtype, out.dtype))
        return out


class Mixed(Declaring):
    """As one of diffusers."""

    _keep_in_fp32_modules = ("wo",)

    def __getattribute__(self, name):
        if name == "_keep_in_fp32_modules_strict":
            raise AttributeError(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize(
    ("make", "precision", "wide"),
    [
        (Declaring, "bf16", {"gate.correction", "tower"}),
        (Declaring, "fp16", {"gate.correction", "tower", "wo"}),
        (Mixed, "bf16", {"wo", "tower.1"}),
    ],
)
def test_what_a_model_declares_is_fp32_in_steps_and_in_files(tmp_path, make, precision, wide):
    def run():
        model, half = make(), HALVES[precision]
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        booster, model, optimizer = boosted(model, sgd, (torch.ones(2, 8),), precision=precision)
        for name, tensor in model.state_dict().items():
            is_wide = any(name == one or name.startswith(f"{one}.") for one in wide)
            assert tensor.dtype is (torch.float32 if is_wide else half), name
        batch = torch.randn(4, 8), torch.zeros(4, 8)
        booster.execute_pipeline(iter([batch]), model, nn.MSELoss(), optimizer)
        optimizer.step()
        hidden, out = model.seen[-1]
        assert hidden is (torch.float32 if "wo" in wide else half)
        assert out is (torch.float32 if "tower" in wide else half)
        booster.save_model(model, tmp_path / "model.safetensors")
        saved = load_file(tmp_path / "model.safetensors")
        assert torch.equal(saved["gate.correction"], before["gate.correction"]) == ("gate.correction" in wide)

    Loopback(1).run(run)


def test_users_can_put_in_half_precision_what_a_model_declares():
    def run():
        _, model, _ = boosted(Declaring(), sgd, (torch.ones(2, 8),), precision="bf16", fp32_modules=["!tower*"])
        assert {one.dtype for one in model.tower.parameters()} == {torch.bfloat16}

    Loopback(1).run(run)


def test_a_tied_weight_of_which_only_one_side_is_declared_is_half():
    def run():
        model = Declaring()
        model.wo.weight = model.tower[0].weight
        _, model, _ = boosted(model, sgd, (torch.ones(2, 8),), precision="bf16")
        assert model.wo.weight.dtype is torch.bfloat16
        assert model.tower[2].weight.dtype is torch.float32

    Loopback(1).run(run)


def test_fp32_buffers_of_a_model_that_comes_in_half_precision_stay():
    def run():
        model = nn.Sequential(Gate(), nn.Linear(8, 8))
        model[1].bfloat16()
        _, model, _ = boosted(model, sgd, (torch.ones(2, 8, dtype=torch.bfloat16),), precision="bf16")
        assert model[0].correction.dtype is torch.float32
        assert model[0].weight.dtype is torch.bfloat16

    Loopback(1).run(run)
