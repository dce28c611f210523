"""Between steps, a script may do to parts of a model what is done to each element; the rest is refused, or told."""

import copy
import io

import pytest
import torch
from support import boosted, sgd
from torch import Tensor, nn
from torch.nn import functional as F

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import Loopback
from hybridpp.errors import ConfigError
from hybridpp.sharding_plan.sharding_spec import DimShard
from hybridpp.tensor_parallel.parameter_sharding import ParameterSharding, divide
from hybridpp.tensor_parallel.script_reads import ScriptReads, WatchedParameter, WatchedTensor

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


def a_shard() -> tuple[nn.Parameter, ScriptReads]:
    parameter = nn.Parameter(torch.arange(32.0).view(8, 4))
    divide(parameter, SHARDING, 0)
    reads = ScriptReads([parameter, nn.Parameter(torch.ones(3))])
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


def of_layer(reset, parameter):
    layer = nn.Linear(4, 4)
    layer.weight = parameter
    reset(layer)


def noise_of_sam(p):
    p.add_(torch.randn_like(p) * 0.05)


DRAWN = {
    "nn.init.kaiming_normal_": nn.init.kaiming_normal_,
    "nn.init.kaiming_uniform_": lambda p: of_layer(nn.Linear.reset_parameters, p),
    "nn.init.xavier_normal_": lambda p: nn.init.xavier_normal_(p.data),
    "nn.init.xavier_uniform_": nn.init.xavier_uniform_,
    "nn.init.orthogonal_": nn.init.orthogonal_,
    "nn.init.eye_": nn.init.eye_,
    "nn.init.dirac_": lambda p: nn.init.dirac_(p.unsqueeze(2)),
    "nn.init.sparse_": lambda p: nn.init.sparse_(p, 0.5),
    "nn.init.trunc_normal_": nn.init.trunc_normal_,
    "nn.init.normal_": lambda p: nn.init.normal_(p.detach()),
    "nn.init.uniform_": lambda p: nn.init.uniform_(p, -1, 1),
    "nn.init._calculate_fan_in_and_fan_out": lambda p: nn.init._calculate_fan_in_and_fan_out(p),
    "normal_": lambda p: p.normal_(),
    "uniform_": lambda p: p.data[1].uniform_(-1, 1),
    "bernoulli_": lambda p: p.view(-1).bernoulli_(0.5),
    "exponential_": lambda p: p.exponential_(),
    "randn_like": noise_of_sam,
    "rand_like": lambda p: p.copy_(torch.rand_like(p.data)),
    "randint_like": lambda p: torch.randint_like(p, 3),
    "bernoulli": lambda p: torch.bernoulli(p / 100),
    "normal": lambda p: torch.normal(p, 1.0),
    "randn": lambda p: torch.randn(4, 4, out=p.data),
    "dropout": F.dropout,
    "eye": lambda p: torch.eye(4, out=p.data),
    "fill_diagonal_": lambda p: p.fill_diagonal_(1.0),
    "tril_": lambda p: p.tril_(),
}


@pytest.mark.parametrize("name", DRAWN)
def test_random_numbers_and_what_goes_by_the_shape_are_refused(name):
    parameter, reads = a_shard()
    before = parameter.detach().clone()
    text = (
        rf"^up.weight is a shard: .*\(4, 4\) of its \(8, 4\). {name} goes by .*Initialise before booster.boost; or .*"
    )
    with torch.no_grad(), pytest.raises(ConfigError, match=text + r'load_state_dict\({"up.weight": tensor}'):
        DRAWN[name](parameter)
    assert torch.equal(parameter, before)
    with torch.no_grad(), reads.plain():
        DRAWN[name](parameter)


def test_noise_for_the_gradient_of_a_shard_is_refused():
    parameter, reads = a_shard()
    with reads.plain():
        parameter.grad = torch.ones(4, 4)
    with pytest.raises(ConfigError, match=r"up.weight.grad is a shard: .* randn_like goes by"):
        parameter.grad.add_(torch.randn_like(parameter.grad))


@torch.no_grad()
def test_random_numbers_beside_shards_and_fills_of_one_number_are_torchs():
    parameter, _ = a_shard()
    for fill, number in ((nn.init.zeros_, 0.0), (nn.init.ones_, 1.0), (lambda p: nn.init.constant_(p, 3.0), 3.0)):
        for one in (parameter, parameter.data):
            parameter.fill_(7.0)
            fill(one)
            assert torch.equal(parameter, torch.full((4, 4), number))
    copied = parameter.detach().clone()
    nn.init.kaiming_normal_(copied)
    copied.add_(torch.randn_like(copied))
    nn.init.normal_(nn.Parameter(torch.ones(3)))
    staged, _ = of_a_stage()
    staged[0].grad.add_(torch.randn_like(staged[0].grad))
    layer = nn.Linear(4, 4)
    layer.weight = parameter
    with_noise = nn.Sequential(layer, nn.Dropout(0.5))
    with_noise[1].forward = lambda x: x @ F.dropout(layer.weight, 0.5)
    assert with_noise(torch.ones(2, 4)).shape == (2, 4)


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
    assert (type(parameter), type(view)) == (WatchedParameter, WatchedTensor)
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


@pytest.mark.parametrize("of", TOGETHER)
def test_what_takes_elements_of_a_shards_gradient_together_is_refused(of):
    parameter, reads = a_shard()
    with reads.plain():
        parameter.grad = torch.arange(16.0).view(4, 4)
    gradient, before = parameter.grad, parameter.grad.clone()
    text = r"up.weight.grad is a shard: .* Call optimizer.clip_grad_by_norm\(max_norm\), or optimizer.get_grad_norm\(\)"
    with torch.no_grad(), pytest.raises(ConfigError, match=text):
        TOGETHER[of](gradient)
    assert torch.equal(gradient, before)
    gradient.mul_(0.5).clamp_(-2, 2)
    parameter.grad = gradient.abs() * 2
    assert type(parameter.grad) is Tensor
    with torch.no_grad(), reads.plain():
        assert type(gradient) is Tensor
        TOGETHER[of](gradient)
        TOGETHER[of](parameter.grad)


def stack_overflow(tensors):
    return sum(one.detach().data.norm(2).item() ** 2 for one in tensors) ** 0.5


OVER_ALL = {
    "norms": stack_overflow,
    "stack": lambda tensors: torch.norm(torch.stack([one.norm(p=2) for one in tensors]), p=2),
    "vector": lambda tensors: torch.cat([one.detach().flatten() for one in tensors]).norm(),
    "squares": lambda tensors: sum((one**2).sum() for one in tensors),
    "get_total_norm": nn.utils.get_total_norm,
    "parameters_to_vector": lambda tensors: nn.utils.parameters_to_vector(tensors).norm(),
}


def told(caplog):
    return [one.getMessage() for one in caplog.records if "is not that of the complete model" in one.getMessage()]


def of_a_stage():
    parameters = [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2), False)]
    for one in parameters[:2]:
        one.grad = torch.ones_like(one)
    reads = ScriptReads(parameters, num_stages=2)
    reads.watch()
    return parameters[:2], reads


@pytest.mark.parametrize("of", OVER_ALL)
def test_what_is_made_of_all_gradients_of_a_stage_is_told_once(of, caplog):
    parameters, reads = of_a_stage()
    for _ in range(2):
        found = torch.as_tensor(OVER_ALL[of]([one.grad for one in parameters]), dtype=torch.float32)
        torch.testing.assert_close(found, torch.tensor(9.0 if of == "squares" else 3.0))
        with reads.plain():
            OVER_ALL[of]([one.grad for one in parameters])
    (text,) = told(caplog)
    assert "which with pp_size=2 are those of its stages" in text
    assert "optimizer.get_grad_norm()" in text


@pytest.mark.parametrize("of", OVER_ALL)
def test_what_is_made_of_all_weights_of_a_stage_is_told_once(of, caplog):
    parameters, reads = of_a_stage()
    for number in range(40):
        found = torch.as_tensor(OVER_ALL[of](parameters), dtype=torch.float32)
        torch.testing.assert_close(found, torch.tensor(9.0 if of == "squares" else 3.0))
        with reads.plain():
            OVER_ALL[of](parameters)
        if number == 32:  # they are watched again in some steps
            caplog.clear()
    assert not told(caplog)
    reads._num_watched = 63
    parameters, reads = of_a_stage()
    OVER_ALL[of](parameters)
    (text,) = told(caplog)
    assert "taken of all weights of one rank, which with pp_size=2 are those of its stages" in text
    assert "torch.distributed.all_reduce over plugin.pp_group" in text


DRAWS = {
    "noise like it": lambda p: p.add_(torch.randn_like(p), alpha=0.01),
    "noise for the gradient": lambda p: p.grad.add_(torch.randn_like(p.grad)),
    "in place": lambda p: p.normal_(),
    "data": lambda p: p.data.uniform_(-1, 1),
    "nn.init": lambda p: nn.init.normal_(p, std=0.02),
    "dropout": lambda p: F.dropout(p, 0.5),
}


@torch.no_grad()
@pytest.mark.parametrize("of", DRAWS)
def test_random_numbers_for_a_stage_are_told_once(of, caplog):
    parameters, _ = of_a_stage()
    for _ in range(2):
        for one in parameters:
            DRAWS[of](one)
    (text,) = [record.getMessage() for record in caplog.records]
    assert "drew random numbers for weights or gradients of one rank, which with pp_size=2 are those of its" in text
    assert "torch.Generator().manual_seed(zlib.crc32(name.encode()) + step)" in text
    caplog.clear()
    generator = torch.Generator().manual_seed(0)
    for one in of_a_stage()[0]:
        one.add_(torch.randn(one.shape, generator=generator))
    assert not caplog.records


def test_nothing_is_told_of_whole_models():
    assert not ScriptReads([nn.Parameter(torch.ones(2))]).has_parts


@torch.no_grad()
def test_some_numbers_of_a_stage_and_what_is_done_to_each_element(caplog):
    parameters, reads = of_a_stage()
    for number in range(4):
        parameters[number % 2].grad.norm().item()
        OVER_ALL["norms"](parameters[:1])
        nn.utils.clip_grad_value_(parameters, 0.5)
        gradients = [one.grad for one in parameters]
        copy.deepcopy(gradients)
        vector = nn.utils.parameters_to_vector(gradients) * 0.5
        nn.utils.vector_to_parameters(vector, [one.clone() for one in gradients])
        torch._foreach_mul_(gradients, 0.9)
        with reads.plain(), reads.plain():
            pass
    assert not told(caplog)
    assert {type(one.grad) for one in parameters} == {WatchedTensor}
    reads.end_watch()
    assert {type(one) for one in [*parameters, *gradients]} == {nn.Parameter, Tensor}
    assert not any(vars(one) for one in [*parameters, *gradients])


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
                    with pytest.raises(ConfigError, match=f"{name}.weight is a shard.* nn.init.kaiming_normal_ goes"):
                        nn.init.kaiming_normal_(getattr(model, name).weight)
                    getattr(model, name).weight.mul_(0.99)
        booster.backward(F.cross_entropy(model(x).flatten(0, 1).float(), x.flatten()), optimizer)
        optimizer.step()
        if settings.get("zero_stage") != 3:
            booster.averaged(model).update_parameters(model)
            assert {type(one) for one in model.state_dict().values()} == {Tensor}
        return set(kinds)

    kinds = Loopback(4 if settings.get("zero_stage") else 2).run(run)[0]
    assert WatchedParameter not in kinds
    if "zero_stage" not in settings:  # else replicas divide them
        assert kinds == {nn.Parameter}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_that_are_made_whole_are_loaded_into_shards(precision):
    whole = nn.init.kaiming_normal_(torch.empty(8, 16), generator=torch.Generator().manual_seed(0))

    def run():
        torch.manual_seed(0)
        model = Network()
        booster = Booster(plugin=HybridParallelPlugin(tp_size=2, tensor_parallel_plan=PLAN, precision=precision))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        x = torch.arange(8).view(2, 4)
        parts = booster.boost(model, optimizer, lambda y, x: F.cross_entropy(y.flatten(0, 1), x.flatten()), sample=x)
        for _ in range(2):
            booster.execute_pipeline(iter([x]), model, parts.criterion, parts.optimizer)
            parts.optimizer.step()
            model.load_state_dict({"down.weight": whole}, strict=False)
        return model.down.weight.detach().float().clone()

    loaded = torch.cat(Loopback(2).run(run), 1)
    assert torch.equal(loaded, whole if precision == "fp32" else whole.bfloat16().float())


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16"}, {"zero_stage": 1}], ids=str)
def test_a_boosted_models_stages_are_watched_between_steps_only(settings, caplog):
    x = torch.arange(8).view(2, 4)

    def run():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 16))
        booster, model, optimizer = boosted(model, sgd, x[:1], pp_size=2, num_microbatches=2, **settings)
        kinds = []
        model.register_forward_hook(lambda *_: kinds.extend(map(type, model.parameters())))
        for _ in range(4):
            booster.execute_pipeline(
                iter([x]), model, lambda y, x: F.cross_entropy(y.flatten(0, 1), x.flatten()), optimizer
            )
            optimizer.step()
            with booster.unsharded(model), torch.no_grad():
                stack_overflow(model.parameters())
                for one in model.parameters():
                    one.mul_(0.99).add_(torch.randn_like(one), alpha=0.01)
            optimizer.zero_grad()
        return set(kinds)

    num_ranks = 4 if "zero_stage" in settings else 2
    assert WatchedParameter not in Loopback(num_ranks).run(run)[0]
    texts = [one.getMessage() for one in caplog.records]
    for words in ("randn_like drew random numbers for weights or", "norm and the like were taken of all weights of"):
        assert len([text for text in texts if words in text]) == 2, "once on each stage"
