import pytest
import torch
from support import boosted, sgd
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hybridpp.cluster import Loopback
from hybridpp.errors import ConfigError


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_averages_are_those_of_the_weights_that_are_trained(tmp_path, precision, zero):
    def run():
        settings = {"precision": precision, "zero_stage": zero}
        booster, model, optimizer = boosted(
            make_model(), lambda p: torch.optim.AdamW(p, lr=1e-5), (torch.zeros(1, 8),), **settings
        )
        average = booster.averaged(model, get_ema_multi_avg_fn(0.5))
        expected = None
        for step in range(4):
            data = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)), torch.zeros(4, 8)
            booster.execute_pipeline(iter([data]), model, nn.MSELoss(), optimizer)
            optimizer.step()
            average.update_parameters(model)
            booster.save_model(model, tmp_path / "model.safetensors")
            now = load(tmp_path / "model.safetensors")
            expected = now if expected is None else {name: (expected[name] + now[name]) / 2 for name in now}
        booster.save_model(average, tmp_path / "average.safetensors")
        for name, value in load(tmp_path / "average.safetensors").items():
            torch.testing.assert_close(value, expected[name], atol=1e-7, rtol=0)
        booster.load_model(average, tmp_path / "model.safetensors")
        assert all(one.dtype is torch.float32 for one in average.parameters())

    Loopback(2, in_order=True).run(run)


def load(path):
    from safetensors.torch import load_file

    return {name: value.clone() for name, value in load_file(path).items()}


def test_a_copy_of_a_model_in_half_precision_warns_once(caplog):
    def run():
        _, model, _ = boosted(make_model(), sgd, (torch.zeros(1, 8),), precision="bf16")
        for _ in range(2):
            AveragedModel(model)

    Loopback(1).run(run)
    assert caplog.text.count("Make averages with booster.averaged(model)") == 1


def test_averages_of_what_is_not_trained_are_refused():
    def run():
        booster, model, _ = boosted(make_model(), None, (torch.zeros(1, 8),))
        with pytest.raises(ConfigError, match="boost the model with its optimizer"):
            booster.averaged(model)

    Loopback(1).run(run)
