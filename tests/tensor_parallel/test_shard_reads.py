"""Between steps, a script may do to shards what is done to each element; the rest is refused."""

import copy
import io

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import Loopback
from hybridpp.errors import ConfigError
from hybridpp.sharding_plan.sharding_spec import DimShard
from hybridpp.tensor_parallel.parameter_sharding import ParameterSharding, divide
from hybridpp.tensor_parallel.shard_reads import ShardParameter, ShardReads, ShardTensor

SHARDING = ParameterSharding(name="up.weight", full_shape=(8, 4), shard=DimShard(0, (8,)), size=2)
TOGETHER = {
    "norm": lambda p: p.norm(),
    "norm of data": lambda p: p.data.norm(2),
    "torch.norm": lambda p: torch.norm(p, dim=1),
    "renorm": lambda p: torch.renorm(p, 2, 0, 0.5),
    "vector_norm": torch.linalg.vector_norm,
    "matrix_norm": torch.linalg.matrix_norm,
    "linalg.norm": torch.linalg.norm,
    "foreach": lambda p: torch._foreach_norm([p]),
    "total norm": lambda p: nn.utils.get_total_norm([p]),
    "vector": lambda p: nn.utils.parameters_to_vector([p]).norm(),
    "division": lambda p: p.div_(p.norm()),
    "mean": lambda p: p.mean(),
    "std": lambda p: p.std(),
    "max": lambda p: p.max(),
    "max of dim": lambda p: torch.max(p, 0),
    "max of abs": lambda p: p.detach().abs().max(),
    "sum of squares": lambda p: (p**2).sum(),
    "mean of floats": lambda p: p.float().square().mean(),
    "zeros": lambda p: (p == 0).sum(),
    "softmax": lambda p: torch.softmax(p, 0),
    "quantile": lambda p: p.quantile(0.5),
    "sort": lambda p: p.flatten().sort(),
    "svd": torch.linalg.svdvals,
    "row": lambda p: p[0].norm(),
    "piece": lambda p: p.split(2)[0].norm(),
    "transposed": lambda p: p.T.norm(),
    "distance": lambda p: F.mse_loss(p, torch.zeros_like(p)),
    "moved": lambda p: (p - p.detach().clone()).norm(),
    "normalize": F.normalize,
    "product": lambda p: torch.ones(3, 4, dtype=p.dtype) @ p.T,
    "linear": lambda p: F.linear(torch.ones(3, 4, dtype=p.dtype), p),
    "einsum": lambda p: torch.einsum("ij->", p),
}


def a_shard() -> tuple[nn.Parameter, ShardReads]:
    parameter = nn.Parameter(torch.arange(32.0).view(8, 4))
    divide(parameter, SHARDING, 0)
    reads = ShardReads([parameter, nn.Parameter(torch.ones(3))])
    reads.watch()
    return parameter, reads


@pytest.mark.parametrize("of", TOGETHER)
def test_what_takes_elements_of_a_shard_together_is_refused(of):
    parameter, reads = a_shard()
    before = parameter.detach().clone()
    with torch.no_grad(), pytest.raises(ConfigError, match=r"up.weight is a shard.*\(4, 4\) of its \(8, 4\)"):
        TOGETHER[of](parameter)
    assert torch.equal(parameter, before)
    with torch.no_grad(), reads.plain():
        TOGETHER[of](parameter)


@torch.no_grad()
def test_what_is_done_to_each_element_of_a_shard_is_torchs():
    results = []
    for parameter in (a_shard()[0], nn.Parameter(torch.arange(16.0).view(4, 4))):
        average, state = parameter.detach().clone(), torch.zeros_like(parameter)
        parameter.mul_(0.9).clamp_(1, 9)
        parameter.data.add_(average, alpha=0.5)
        parameter.copy_(torch.sign(parameter) * torch.relu(parameter.abs() - 0.1))
        parameter.data = parameter.data * 0.5
        average.lerp_(parameter, 0.1)
        torch._foreach_lerp_([state], [parameter], 0.5)
        parameter.grad = parameter * 0.1
        parameter.grad.add_(parameter, alpha=0.1)
        made = [average, state, parameter.grad, parameter.maximum(state), parameter.isnan().any()]
        assert {type(one) for one in (average, state, parameter.grad, parameter.clone())} == {Tensor}
        results.append([*made, average.norm(), parameter.grad.norm(), torch.from_numpy(parameter.numpy().copy())])
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)
    parameter, _ = a_shard()
    torch.testing.assert_close(parameter.detach(), torch.arange(16.0).view(4, 4))
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        torch.testing.assert_close(parameter.detach(), parameter + 1)


def test_copies_and_files_of_shards_are_plain():
    parameter, _ = a_shard()
    view = parameter.detach()
    assert (type(parameter), type(view)) == (ShardParameter, ShardTensor)
    assert [type(one) for one in copy.deepcopy([parameter, view])] == [nn.Parameter, Tensor]
    with io.BytesIO() as file:
        torch.save({"view": view, "computed": parameter * 2}, file)
        file.seek(0)
        assert {type(one) for one in torch.load(file, weights_only=True).values()} == {Tensor}
    with io.BytesIO() as file:
        torch.save(parameter, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
    assert type(loaded) is nn.Parameter
    assert torch.equal(loaded, parameter)
    assert repr(parameter) == repr(loaded)
    assert f"{view} {view!r}" == f"{loaded.data} {loaded.data!r}"


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 16)

    def forward(self, x):
        x = self.embedding(x)
        return self.head(x + self.down(self.up(x).tanh()))


PLAN = {"embedding": "vocab", "up": "column", "down": "row", "head": "gathered_column"}


@pytest.mark.parametrize(
    "settings",
    [{"precision": "fp32"}, {"precision": "bf16", "zero_stage": 1}, {"precision": "fp16"}, {"zero_stage": 3}],
)
def test_shards_of_a_boosted_model_are_watched_between_steps_only(settings):
    def run():
        torch.manual_seed(0)
        model, booster = (
            Network(),
            Booster(plugin=HybridParallelPlugin(tp_size=2, tensor_parallel_plan=PLAN, **settings)),
        )
        x = torch.arange(8).view(2, 4)
        parts = booster.boost(
            model,
            torch.optim.AdamW(model.parameters(), lr=0.1),
            lambda y, x: F.cross_entropy(y.flatten(0, 1), x.flatten()),
            sample=x,
        )
        optimizer, kinds = parts.optimizer, []

        def note(*_):
            kinds.extend(type(one) for group in optimizer.param_groups for one in group["params"])

        model.up.register_forward_hook(lambda *_: kinds.append(type(model.up.weight)))
        optimizer.register_step_pre_hook(note)
        for _ in range(2):
            booster.execute_pipeline(iter([x]), model, parts.criterion, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            with booster.unsharded(model), torch.no_grad():
                for name in PLAN:
                    with pytest.raises(ConfigError, match=f"{name}.weight is a shard"):
                        getattr(model, name).weight.norm()
                    getattr(model, name).weight.mul_(0.99)
        booster.backward(F.cross_entropy(model(x).flatten(0, 1).float(), x.flatten()), optimizer)
        optimizer.step()
        if settings.get("zero_stage") != 3:
            booster.averaged(model).update_parameters(model)
            assert {type(one) for one in model.state_dict().values()} == {Tensor}
        return set(kinds)

    kinds = Loopback(4 if settings.get("zero_stage") else 2).run(run)[0]
    assert ShardParameter not in kinds
    if "zero_stage" not in settings:  # else replicas divide them
        assert kinds == {nn.Parameter}
