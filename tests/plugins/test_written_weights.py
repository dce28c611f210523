"""What a script reads is what trains, and what it writes is kept, in every precision, ZeRO stage, and with offload.

``docs/weights.md`` has the table of which this is the check.
"""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from support import assert_same, boosted
from torch import nn

from hybridpp.cluster import Loopback
from hybridpp.errors import ConfigError, RefusedByPeerError
from hybridpp.precision.write_watch import WriteWatch

FACTOR = 0.5


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 8))


class Swapping(torch.optim.SGD):
    """Has methods that write to weights, beside its step."""

    @torch.no_grad()
    def halve(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(FACTOR)

    def halve_data(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(FACTOR)

    def halve_by_replacing(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = parameter.data * FACTOR

    def count(self):
        return len(self.param_groups)


def sgd(parameters):
    # Far below what half precision resolves: what the script writes is all that can be seen of a step.
    return Swapping(parameters, lr=1e-9)


@torch.no_grad()
def by_foreach(model):
    torch._foreach_mul_([*model.parameters()], FACTOR)


def by_data(model):
    for parameter in model.parameters():
        parameter.data.mul_(FACTOR)


def by_data_copy(model):
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data * FACTOR)


def by_replacing(model):
    for parameter in model.parameters():
        parameter.data = parameter.data * FACTOR


def by_memory(model):
    for parameter in model.parameters():
        bits = parameter.detach().view(torch.int16 if parameter.itemsize == 2 else torch.int32)
        bits.numpy()[...] = (parameter.detach() * FACTOR).view(bits.dtype).numpy()


def by_dlpack(model):
    for parameter in model.parameters():
        torch.from_dlpack(parameter.detach()).mul_(FACTOR)


def by_state_dict(model):
    model.load_state_dict({name: value * FACTOR for name, value in model.state_dict().items()})


@torch.no_grad()
def by_clamp(model):
    for parameter in model.parameters():
        parameter.mul_(FACTOR).clamp_(-1, 1)


def by_init(model):
    for parameter in model.parameters():
        before = parameter.detach() * FACTOR
        nn.init.zeros_(parameter)
        with torch.no_grad():
            parameter.add_(before)


WRITERS = {
    writer.__name__: writer
    for writer in (
        *(by_foreach, by_data, by_data_copy, by_replacing, by_memory, by_dlpack, by_state_dict, by_clamp),
        by_init,
    )
}
METHODS = ("halve", "halve_data", "halve_by_replacing")


def step(booster, model, optimizer):
    data = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)), torch.zeros(4, 8)
    booster.execute_pipeline(iter([data]), model, nn.MSELoss(), optimizer)
    optimizer.step()


def read(booster, model, zero):
    with booster.unsharded(model) if zero == 3 else nullcontext():
        return {name: parameter.detach().float().clone() for name, parameter in model.named_parameters()}


def masters_of(booster, model):
    return {name: one.detach() for name, one in booster.plugin._engine(model).masters.masters.items()}


@pytest.mark.parametrize(("precision", "other"), [("fp32", "half"), ("bf16", "float"), ("fp16", "double")])
def test_another_dtype_is_refused_on_the_model_and_on_a_weight(precision, other):
    def run(zero):
        settings = {"precision": precision, "zero_stage": zero}
        booster, model, optimizer = boosted(make_model(), sgd, (torch.zeros(1, 8),), **settings)
        model.to("cpu")
        with pytest.raises(ConfigError, match=r"^Sequential is boosted: half\(\), float\(\), .* would bring"):
            getattr(model, other)()
        with booster.unsharded(model) if zero == 3 else nullcontext():
            getattr(copy.deepcopy(model), other)()
        step(booster, model, optimizer)
        getattr(model[0], other)()
        with pytest.raises(ConfigError, match=r"^0\.weight is float\d+ and was b?float\d+ after booster\.boost"):
            step(booster, model, optimizer)

    for zero in (0, 1, 3):
        Loopback(2).run(lambda zero=zero: run(zero))


@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_another_dtype_of_a_part_is_refused_though_it_is_frozen(precision, number):
    def run(is_manual):
        made = make_model()
        made[2].requires_grad_(False)
        make = lambda parameters: sgd([one for one in parameters if one.requires_grad])  # noqa: E731
        booster, model, optimizer = boosted(made, make, (torch.zeros(1, 8),), precision=precision)
        model[number].double()
        with pytest.raises(ConfigError, match=rf"^{number}\.weight is float64 and was b?float\d+ after booster\.boost"):
            model(torch.zeros(4, 8)) if is_manual else step(booster, model, optimizer)

    for is_manual in (False, True):
        Loopback(1).run(lambda is_manual=is_manual: run(is_manual))


@pytest.mark.covering("writer zero", "writer precision")
@pytest.mark.parametrize("offload", [0.0, 1.0])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("writer", [*WRITERS, *METHODS])
def test_what_is_written_between_steps_is_kept_or_refused(writer, precision, zero, offload):
    is_refused = zero > 0 and writer == "by_replacing"

    def run():
        settings = {"precision": precision, "zero_stage": zero, "offload_optimizer": offload}
        booster, model, optimizer = boosted(make_model(), sgd, (torch.zeros(1, 8),), **settings)
        step(booster, model, optimizer)
        before = read(booster, model, zero)
        if writer in METHODS:
            getattr(optimizer, writer)()
        else:
            with booster.unsharded(model) if zero == 3 else nullcontext():
                WRITERS[writer](model)
        expected = {name: value * FACTOR for name, value in before.items()}
        step(booster, model, optimizer)
        after, masters = read(booster, model, zero), masters_of(booster, model)
        for name, value in expected.items():
            torch.testing.assert_close(after[name], value, atol=1e-6, rtol=1e-2)
        if not zero:
            for name, master in masters.items():
                torch.testing.assert_close(master, expected[name], atol=1e-6, rtol=1e-2)

    if is_refused:
        with pytest.raises(ConfigError, match="was given other memory"):
            Loopback(2).run(run)
    else:
        Loopback(2).run(run)


@pytest.mark.parametrize(("precision", "zero", "offload"), [("bf16", 0, 0.0), ("fp16", 2, 1.0), ("fp32", 0, 1.0)])
def test_one_late_write_of_few_elements_of_a_large_weight_is_kept(precision, zero, offload):
    def run():
        settings = {"precision": precision, "zero_stage": zero, "offload_optimizer": offload}
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 16384, bias=False), nn.Linear(16384, 8))
        booster, model, optimizer = boosted(model, sgd, (torch.zeros(1, 8),), **settings)
        for _ in range(10):
            step(booster, model, optimizer)
        weight = model[1].weight.detach()
        one, other = weight[77, 1].clone(), weight[77, 5].clone()
        weight.data[1234, 3] = 5.0
        weight.data[77, 1], weight.data[77, 5] = other, one
        step(booster, model, optimizer)
        torch.testing.assert_close(
            weight[[1234, 77, 77], [3, 1, 5]], torch.stack([torch.full_like(one, 5.0), other, one])
        )

    Loopback(2).run(run)


def watched(sizes, dtype=torch.bfloat16, **options):
    weights = {str(size): torch.randn(size).to(dtype) for size in sizes}
    watch = WriteWatch(**options)
    watch.note(weights)
    return watch, weights


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.complex64])
def test_a_watch_sees_every_element_wherever_a_weight_lies(dtype):
    whole = torch.randn(200_003).to(dtype)
    weights = {
        "apart": whole[3:],
        "turned": torch.randn(300, 300).to(dtype).t(),
        "gaps": torch.randn(9, 8).to(dtype)[:, ::2],
    }
    watch = WriteWatch()
    watch.note(weights)
    assert not watch.written(weights)
    for name, where in (("apart", 0), ("apart", 150_000), ("apart", -1), ("turned", (7, 299)), ("gaps", (8, 3))):
        before = weights[name][where].clone()
        weights[name].data[where] = -before
        assert name in watch.written(weights)
        weights[name].data[where] = before
    assert not watch.written(weights)


def test_where_the_host_does_not_wait_a_write_is_refused_later():
    watch, weights = watched((3, 70_000), waits=False)
    weights["70000"].data[-1] = 9.0
    assert not watch.written(weights)
    with pytest.raises(ConfigError, match=r"weights were written where torch counts nothing"):
        watch.check(weights)
    assert not watch.check(weights)


def test_where_the_host_does_not_wait_a_write_that_torch_counts_is_kept():
    watch, weights = watched((3, 4, 70_000), waits=False)
    weights["3"].fill_(2.0)
    assert watch.written(weights, {"3"}) == {"3", "4", "70000"}
    assert not watch.check(weights)


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16"}, {"offload_optimizer": 1.0}], ids=str)
def test_a_parameter_that_was_swapped_with_another_trains_on(settings):
    def run():
        booster, model, optimizer = boosted(
            make_model(), lambda parameters: torch.optim.SGD(parameters, lr=0.5), (torch.zeros(1, 8),), **settings
        )
        weight = model[0].weight
        for _ in range(2):
            torch.utils.swap_tensors(weight, nn.Parameter(weight.detach() * FACTOR))
            before = weight.detach().clone()
            step(booster, model, optimizer)
            gradient = dict(optimizer.gradients())["0.weight"]
            assert gradient.any()
            torch.testing.assert_close(weight.float(), before - 0.5 * gradient, atol=4e-3, rtol=1e-2)

    Loopback(2).run(run)


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.mul_(0.5),
        lambda weight: weight.data.mul_(0.5),
        lambda weight: weight.detach().lerp_(torch.zeros(40, 8), 0.5),
        lambda weight: weight.data.__setitem__(0, 1.0),
        nn.init.zeros_,
        lambda weight: setattr(weight, "data", torch.zeros(weight.shape)),
    ],
)
def test_writes_to_weights_that_are_not_there_are_refused_by_name(write):
    def run():
        booster, model, optimizer = boosted(make_model(), sgd, (torch.zeros(1, 8),), zero_stage=3)
        step(booster, model, optimizer)
        with torch.no_grad(), pytest.raises(ConfigError, match=r"^0\.weight was written while .* booster\.unsharded"):
            write(model[0].weight)
        with booster.unsharded(model):
            write(model[0].weight.detach())
            assert type(model[0].weight) is nn.Parameter

    Loopback(2).run(run)


class Scaled(nn.Module):
    """Has a weight of one element; its code may use a weight of a block."""

    def __init__(self, use=None):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.scale, self.use = nn.Parameter(torch.ones(())), use

    def forward(self, x):
        if self.use:
            x = x + self.use(self.blocks[1][0].weight)
        for block in self.blocks:
            x = block(x)
        return x * self.scale


def scaled(use=None):
    booster, model, optimizer = boosted(Scaled(use), sgd, (torch.zeros(1, 8),), zero_stage=3)
    inputs = torch.linspace(-1, 1, 16).reshape(2, 8)

    def step():
        booster.backward(loss := model(inputs).square().mean(), optimizer)
        optimizer.step()
        return loss.item()

    return booster, model, step


def test_scalars_that_are_not_there_are_neither_read_nor_written():
    writes = (lambda p: p.data.clamp_(0, 0.5), lambda p: p.data.copy_(torch.zeros(())), lambda p: p.fill_(0))
    reads = (
        *(float, lambda p: p.item(), lambda p: p.norm(), lambda p: 2 * p, lambda p: p.data.item()),
        *(lambda p: torch.norm(p.detach()), lambda p: torch.zeros(()).copy_(p.data), lambda p: p.view(1, 1).T.sum()),
    )

    def run():
        booster, model, step = scaled()
        expected = step()
        for what, done in [*((one, "written") for one in writes), *((one, "read") for one in reads)]:
            with torch.no_grad(), pytest.raises(ConfigError, match=rf"^scale was {done} .* booster\.unsharded"):
                what(model.scale)
        torch._foreach_clamp_max_([model.scale.requires_grad_(False)], 0.5)
        with pytest.raises(ConfigError, match=r"^scale was written while it was not there"):
            model(torch.zeros(2, 8))
        assert (model.scale.shape, model.scale.data.dtype, str(model.scale)[:20]) == (
            (),
            torch.float32,
            "FreedParameter(scale",
        )
        with booster.unsharded(model):
            model.scale.data.clamp_(0, 0.5)
        assert step() == pytest.approx(expected / 4)

    Loopback(2).run(run)


@pytest.mark.parametrize(
    "use", [lambda p: p.data.clamp_(-0.1, 0.1).mean(), lambda p: p.detach().norm(), lambda p: (2 * p).T.mean(0)]
)
def test_code_between_blocks_finds_weights_of_blocks_in_every_way(use):
    alone = Scaled(use)
    expected = alone(torch.linspace(-1, 1, 16).reshape(2, 8)).square().mean().item()

    def run():
        _, _, step = scaled(use)
        return [step(), step()]

    for losses in Loopback(2).run(run):
        assert losses == pytest.approx([expected] * 2)


class Towers(nn.Module):
    """A network, and one that follows it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.online = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()) for _ in range(4)))
        self.target = copy.deepcopy(self.online).requires_grad_(False).eval()

    def forward(self, x):
        return self.online(x) - self.target(x)

    @torch.no_grad()
    def follow(self):
        for weight, followed in zip(self.target.parameters(), self.online.parameters(), strict=True):
            weight.lerp_(followed, 0.3)
        for buffer, followed in zip(self.target.buffers(), self.online.buffers(), strict=True):
            buffer.copy_(followed)


def square_mean(outputs, inputs):
    return outputs.square().mean()


def test_networks_that_follow_others_need_both_on_one_rank(tmp_path):
    from safetensors.torch import load_file

    def train(follow, **settings):
        model = Towers()
        x = torch.randn(8, 4)
        sgd = partial(torch.optim.SGD, lr=0.5)
        booster, model, optimizer = boosted(model, lambda _: sgd(model.online.parameters()), (x,), **settings)
        for _ in range(3):
            booster.execute_pipeline(iter([(x,)]), model, square_mean, optimizer)
            optimizer.step()
            follow(model)
        name = f"{len(settings)}.safetensors"
        booster.save_model(model, tmp_path / name)
        return load_file(tmp_path / name)

    pipeline = {"pp_size": 2, "schedule": "interleaved", "layers_per_stage": [2, 2, 2, 2]}
    whole = Loopback(1).run(lambda: train(Towers.follow))[0]
    cut = Loopback(2).run(lambda: train(Towers.follow, **pipeline))[0]
    torch.testing.assert_close(cut, whole)

    def refused(model):
        with pytest.raises(ConfigError, match=r"^(online|target)\.\d.* is a parameter of another stage.*'inter"):
            model.follow()

    Loopback(2).run(lambda: train(refused, pp_size=2))


def test_what_numpy_writes_to_weights_that_are_not_there_is_refused():
    def run():
        booster, model, optimizer = boosted(make_model(), sgd, (torch.zeros(1, 8),), zero_stage=3)
        step(booster, model, optimizer)
        with pytest.raises(ConfigError, match=r"^0\.weight was read while it was not there: with zero_stage=3"):
            model[0].weight.detach().numpy()[...] = 1.0

    Loopback(2).run(run)


def test_a_write_through_data_is_saved_without_a_step(tmp_path):
    def run():
        booster, model, optimizer = boosted(make_model(), sgd, (torch.zeros(1, 8),), precision="bf16")
        for _ in range(12):
            step(booster, model, optimizer)
        model[0].weight.data[20, 5] = 3.0
        booster.save_model(model, tmp_path / "model.safetensors")

    from safetensors.torch import load_file

    Loopback(1).run(run)
    assert load_file(tmp_path / "model.safetensors")["0.weight"][20, 5] == 3.0


def test_memory_of_another_format_is_refused():
    def run():
        booster, model, optimizer = boosted(make_model(), sgd, (torch.zeros(1, 8),), precision="bf16")
        step(booster, model, optimizer)
        model[0].weight.data = model[0].weight.data.float()
        with pytest.raises(ConfigError, match=r"0\.weight was given a tensor of torch\.float32"):
            booster.plugin._engine(model).optimizer.target.pull(in_step=True)

    Loopback(1).run(run)


def test_a_frozen_weight_stays_in_every_precision():
    def run():
        for precision in ("fp32", "bf16"):
            booster, model, optimizer = boosted(
                make_model(), lambda p: torch.optim.AdamW(p, lr=0.1), (torch.zeros(1, 8),), precision=precision
            )
            step(booster, model, optimizer)
            model[0].requires_grad_(False)
            before = copy.deepcopy(model.state_dict())
            step(booster, model, optimizer)
            assert torch.equal(model[0].weight, before["0.weight"])
            assert not torch.equal(model[2].weight, before["2.weight"])

    Loopback(1).run(run)


class Sharpness(torch.optim.SGD):
    """Writes between backward and step: SAM, by the norm of all gradients."""

    @torch.no_grad()
    def first_step(self):
        parameters = [one for group in self.param_groups for one in group["params"]]
        norm = torch.stack([one.grad.norm() for one in parameters]).norm()
        for one in parameters:
            self.state[one]["old"] = one.detach().clone()
            one.add_(one.grad * (0.5 / norm))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for one in group["params"]:
                one.data = self.state[one]["old"]
        self.step()
        self.zero_grad()


def sharpness(parameters):
    return Sharpness(parameters, lr=0.5)


def pass_of(booster, model, optimizer, replica=0, size=4):
    data = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))[replica * size :][:size]
    booster.execute_pipeline(iter([(data, torch.ones(size, 8))]), model, nn.MSELoss(), optimizer)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_methods_that_read_gradients_have_them_in_half_precision_too(precision):
    def run(size):
        booster, model, optimizer = boosted(make_model(), sharpness, (torch.zeros(1, 8),), precision=precision)
        replica = booster.plugin.layout.here.dp
        for method in ("first_step", "second_step"):
            pass_of(booster, model, optimizer, replica, 4 // size)
            getattr(optimizer, method)()
        return {name: one.detach().float() for name, one in model.named_parameters()}

    plain = make_model()
    optimizer = sharpness(plain.parameters())
    data = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    for method in (optimizer.first_step, optimizer.second_step):
        nn.functional.mse_loss(plain(data), torch.ones(4, 8)).backward()
        method()
    tolerance = 1e-6 if precision == "fp32" else 1e-2
    for size in (1, 2):
        for weights in Loopback(size).run(lambda size=size: run(size)):
            for name, one in plain.named_parameters():
                torch.testing.assert_close(weights[name], one.detach(), atol=tolerance, rtol=tolerance)


def test_methods_that_cannot_read_gradients_are_refused_where_they_write():
    class Shrinking(torch.optim.SGD):
        @torch.no_grad()
        def shrink(self):
            for one in self.param_groups[0]["params"]:
                one.mul_(0.5)

    def run():
        make = lambda parameters: Shrinking(parameters, lr=0.1)  # noqa: E731
        booster, model, optimizer = boosted(make_model(), make, (torch.zeros(1, 8),), precision="fp16")
        pass_of(booster, model, optimizer)
        with pytest.raises(ConfigError, match=r"Shrinking\.shrink wrote to weights between backward and step"):
            optimizer.shrink()

    Loopback(1).run(run)


def test_methods_that_read_gradients_are_refused_where_these_are_divided():
    class Stacking(torch.optim.SGD):
        def first_step(self):
            return torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"] if p.grad is not None])

    def run():
        make = lambda parameters: Stacking(parameters, lr=0.1)  # noqa: E731
        booster, model, optimizer = boosted(make_model(), make, (torch.zeros(1, 8),), zero_stage=1)
        pass_of(booster, model, optimizer)
        with pytest.raises(ConfigError, match=r"Stacking\.first_step raised \w+ between backward .* zero_stage=0"):
            optimizer.first_step()

    Loopback(2).run(run)


def test_methods_and_values_of_the_optimizer_are_passed_on():
    def run():
        _, _, optimizer = boosted(make_model(), sgd, (torch.zeros(1, 8),), zero_stage=1)
        assert optimizer.count() == 1
        assert optimizer.defaults["lr"] == 1e-9

    Loopback(2).run(run)


class NormedBlock(nn.Module):
    def __init__(self, writes_data):
        super().__init__()
        self.linear, self.writes_data = nn.Linear(8, 8), writes_data

    def forward(self, x):
        with torch.no_grad():
            weight = self.linear.weight.data if self.writes_data else self.linear.weight
            weight.clamp_(-0.2, 0.2)
        return x + self.linear(x)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("writes_data", [False, True])
def test_what_a_forward_writes_to_sharded_weights_is_kept(precision, writes_data, tmp_path):
    def run(**settings):
        torch.manual_seed(0)
        model = nn.Sequential(NormedBlock(writes_data), NormedBlock(writes_data))
        sample = (torch.arange(32.0).view(4, 8).cos(), torch.ones(4, 8))
        booster, model, optimizer = boosted(
            model, lambda parameters: torch.optim.SGD(parameters, lr=0.5), sample, precision=precision, **settings
        )
        for _ in range(2):
            booster.execute_pipeline(iter([sample]), model, nn.functional.mse_loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        loss = booster.execute_pipeline(iter([sample]), model, nn.functional.mse_loss, optimizer)["loss"]
        with booster.unsharded(model):
            assert all(block.linear.weight.abs().max() <= 0.2 + 1e-3 for block in model)
        return loss.item()

    expected = Loopback(1).run(run)[0]
    found = Loopback(2).run(lambda: run(zero_stage=3))
    assert found == pytest.approx([expected] * 2, rel=1e-6 if precision == "fp32" else 1e-2)


def halved_in_place(tensors):
    with torch.no_grad():
        for tensor in tensors:
            tensor.mul_(FACTOR)


def halved_by_data(tensors):
    for tensor in tensors:
        tensor.data.mul_(FACTOR)


def halved_by_foreach(tensors):
    torch._foreach_mul_([tensor.data for tensor in tensors], FACTOR)


def halved_by_replacing(tensors):
    for tensor in tensors:
        tensor.data = tensor.data * FACTOR


HALVED = [halved_in_place, halved_by_data, halved_by_foreach, halved_by_replacing]


def decayed(halve, moment, num_ranks, is_manual=False, **settings):
    """Losses and weights of three steps, of which ``halve`` writes to what the optimizer holds before or after two."""
    batches = [torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(number)) for number in range(3)]

    def run():
        torch.manual_seed(0)
        # Large enough for each replica to have a part.
        model = nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 8))
        make = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
        booster, model, optimizer = boosted(model, make, (torch.zeros(1, 8),), **settings)
        replica, size = booster.plugin.layout.here.dp, 4 // booster.plugin.layout.dp.size
        losses = []
        for number, batch in enumerate(batches):
            data = tuple(part[replica * size :][:size] for part in batch)
            if is_manual:
                loss = nn.functional.mse_loss(model(data[0]).float(), data[1])
                booster.backward(loss, optimizer)
            else:
                loss = booster.execute_pipeline(iter([data]), model, nn.functional.mse_loss, optimizer)["loss"]
            losses.append(loss.item())
            held = [tensor for group in optimizer.param_groups for tensor in group["params"]]
            if moment == "before" and number < 2:
                halve(held)
            optimizer.step()
            if moment == "after" and number < 2:
                halve(held)
        return losses, read(booster, model, settings.get("zero_stage"))

    ranks = Loopback(num_ranks).run(run)
    weights = {name: one for _, found in ranks for name, one in found.items()}
    return [sum(losses) / num_ranks for losses in zip(*(losses for losses, _ in ranks), strict=True)], weights


_ALONE = {}


def decayed_alone(moment):
    if moment not in _ALONE:
        _ALONE[moment] = decayed(halved_by_data, moment, 1)
    return _ALONE[moment]


def assert_decayed(found, moment, precision="fp32"):
    tolerance = 1e-5 if precision == "fp32" else 1e-2
    losses, weights = decayed_alone(moment)
    assert found[0] == pytest.approx(losses, abs=tolerance)
    for name, one in weights.items():
        torch.testing.assert_close(found[1][name], one, atol=tolerance, rtol=tolerance, msg=name)


WRITTEN = r"was written between steps \(a tensor of optimizer\.param_groups\)|failed on ranks? \d"


@pytest.mark.covering("precision zero", "zero offload moment", "halve moment", "is_manual moment")
@pytest.mark.parametrize("is_manual", [False, True])
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("offload", [0.0, 1.0])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("halve", HALVED)
def test_a_decay_by_hand_is_that_of_one_process_or_refused(halve, precision, zero, offload, moment, is_manual):
    settings = {"precision": precision, "zero_stage": zero, "offload_optimizer": offload}
    if moment == "after" and zero in (1, 2):
        with pytest.raises((ConfigError, RefusedByPeerError), match=WRITTEN):
            decayed(halve, moment, 2, is_manual, **settings)
    else:
        assert_decayed(decayed(halve, moment, 2, is_manual, **settings), moment, precision)


@pytest.mark.parametrize(
    ("num_ranks", "settings"),
    [
        (4, {"zero_stage": 1}),
        (4, {"zero_stage": 1, "pp_size": 2}),
        (4, {"zero_stage": 3, "pp_size": 2}),
        (2, {"pp_size": 2, "precision": "bf16"}),
    ],
    ids=str,
)
def test_a_decay_by_hand_before_a_step_is_kept_on_more_ranks(num_ranks, settings):
    assert_decayed(
        decayed(halved_by_data, "before", num_ranks, **settings), "before", settings.get("precision", "fp32")
    )


@pytest.mark.parametrize(
    ("zero", "inside", "replaces", "precision"),
    [(1, False, True, "fp32"), (2, False, False, "fp32"), (3, True, False, "fp32"), (3, True, True, "bf16")],
)
def test_a_save_refuses_what_is_written_to_pieces_of_weights(zero, inside, replaces, precision, tmp_path):
    def run():
        settings = {"zero_stage": zero, "precision": precision}
        booster, model, optimizer = boosted(make_model(), sgd, (torch.zeros(1, 8),), **settings)
        for number in range(2):  # what the library writes is not the script's
            step(booster, model, optimizer)
            booster.save(tmp_path / "run", step=number)
            booster.resume(tmp_path / "run")
            booster.save_model(model, tmp_path / "model.safetensors")
            booster.load_model(model, tmp_path / "model.safetensors")
            with booster.unsharded(model), torch.no_grad():
                model[0].weight.mul_(FACTOR)
        with booster.unsharded(model) if inside else nullcontext(), torch.no_grad():
            for tensor in optimizer.param_groups[0]["params"]:
                if replaces:
                    tensor.data = tensor * FACTOR
                else:
                    tensor.mul_(FACTOR)
        with pytest.raises(ConfigError, match=r"was written between steps \(a tensor of optimizer.param_groups\)"):
            booster.save_model(model, tmp_path / "model.safetensors")

    Loopback(2).run(run)


def large_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 8))


def averages_swapped_in(optimizer):
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            tensor.data.copy_(torch.full_like(tensor, 0.01))


def evaluations(settings, reads_ahead):
    """What the model returns after averages were swapped in: as the booster runs it, and called by the script."""
    booster, model, optimizer = boosted(large_model(), sgd, (torch.zeros(1, 8),), **settings)
    data = torch.linspace(-1, 1, 64).view(8, 8), torch.zeros(8, 8)
    step(booster, model, optimizer)
    loader = booster.plugin.prepare_dataloader(torch.utils.data.TensorDataset(*data), batch_size=4)

    def evaluate():
        batches = iter(loader) if reads_ahead else iter([data])
        with torch.no_grad():
            for _ in range(len(loader) if reads_ahead else 1):
                found = booster.execute_pipeline(batches, model, None, return_loss=False, return_outputs=True)
            return found["outputs"]

    evaluate()
    averages_swapped_in(optimizer)
    outputs = evaluate()
    with torch.no_grad():
        called = model(data[0])
    return outputs, called


@pytest.mark.parametrize(
    "settings", [{"precision": "bf16"}, {"zero_stage": 3}, {"precision": "fp16", "zero_stage": 3}], ids=str
)
def test_an_evaluation_sees_averages_swapped_into_the_groups(settings):
    def run():
        outputs, called = evaluations(settings, reads_ahead=False)
        plain = large_model()
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.fill_(0.01)
            expected = plain(torch.linspace(-1, 1, 64).view(8, 8))
        torch.testing.assert_close(outputs.float(), expected, atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(called.float(), expected, atol=1e-2, rtol=1e-2)

    Loopback(2).run(run)


@pytest.mark.parametrize("reads_ahead", [False, True])
@pytest.mark.parametrize("settings", [{"zero_stage": 1}, {"precision": "bf16", "zero_stage": 2}], ids=str)
def test_an_evaluation_of_averages_in_parts_of_weights_is_refused(settings, reads_ahead):
    with pytest.raises((ConfigError, RefusedByPeerError), match=WRITTEN):
        Loopback(2).run(lambda: evaluations(settings, reads_ahead))


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_decay_by_hand_stays_where_the_step_is_skipped(zero):
    def run():
        settings = {"precision": "fp16", "zero_stage": zero}
        booster, model, optimizer = boosted(large_model(), sgd, (torch.zeros(1, 8),), **settings)
        step(booster, model, optimizer)
        before = read(booster, model, zero)
        batch = torch.full((4, 8), 3e4), torch.zeros(4, 8)
        booster.execute_pipeline(iter([batch]), model, lambda y, _: (y * 1e4).sum(1).mean(), optimizer)
        halved_by_data([tensor for group in optimizer.param_groups for tensor in group["params"]])
        optimizer.step()
        assert optimizer.last_step_skipped
        step(booster, model, optimizer)
        for name, one in read(booster, model, zero).items():
            torch.testing.assert_close(one, before[name] * FACTOR, atol=1e-3, rtol=1e-2, msg=name)

    Loopback(2).run(run)


def test_of_a_write_to_a_weight_and_one_to_its_copy_none_is_chosen():
    def run():
        for write in (lambda weight: weight.detach().zero_(), lambda weight: weight.data.zero_()):
            booster, model, optimizer = boosted(make_model(), sgd, (torch.zeros(1, 8),), precision="bf16")
            step(booster, model, optimizer)
            halved_by_data(optimizer.param_groups[0]["params"])
            write(model[0].weight)
            with pytest.raises(
                ConfigError, match=r"^0\.\w+, or a weight beside it, and its fp32 copy .* were both written"
            ):
                step(booster, model, optimizer)

    Loopback(1).run(run)


@pytest.mark.parametrize("is_first", [True, False])
def test_writes_inside_of_unsharded_and_to_copies_keep_their_order(is_first):
    def run():
        booster, model, optimizer = boosted(make_model(), sgd, (torch.zeros(1, 8),), precision="bf16", zero_stage=3)
        step(booster, model, optimizer)
        before = read(booster, model, 3)
        if not is_first:
            halved_by_data(optimizer.param_groups[0]["params"])
        with booster.unsharded(model), torch.no_grad():
            model[0].weight.add_(1.0)
        if is_first:
            halved_by_data(optimizer.param_groups[0]["params"])
        step(booster, model, optimizer)
        for name, one in read(booster, model, 3).items():
            added = 0.0 if name != "0.weight" else FACTOR if is_first else 1.0
            torch.testing.assert_close(one, before[name] * FACTOR + added, atol=1e-2, rtol=1e-2, msg=name)

    Loopback(2).run(run)


@pytest.mark.parametrize("reader", ["state_dict", "unboost"])
def test_a_decay_by_hand_is_in_what_is_read_next(reader):
    def run():
        booster, model, optimizer = boosted(make_model(), sgd, (torch.zeros(1, 8),), precision="bf16")
        step(booster, model, optimizer)
        halved_by_data(optimizer.param_groups[0]["params"])
        if reader == "unboost":
            found = dict(booster.unboost(model).named_parameters())
        else:
            found = optimizer.state_dict()["masters"]
        for name, one in make_model().named_parameters():
            torch.testing.assert_close(found[name].detach(), one.detach() * FACTOR, atol=1e-3, rtol=1e-2, msg=name)

    Loopback(1).run(run)


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("reader", ["nothing", "evaluation", "save_model", "optimizer.state_dict"])
def test_weights_that_are_swapped_and_put_back_keep_their_masters(reader, precision, zero, tmp_path):
    """As an evaluation of averages does: half precision has not the digits of what is trained."""

    def run():
        settings = {"precision": precision, "zero_stage": zero}
        booster, model, optimizer = boosted(make_model(), sgd, (torch.zeros(1, 8),), **settings)
        whole = partial(booster.unsharded, model) if zero == 3 else nullcontext
        step(booster, model, optimizer)
        before = {name: master.detach().clone() for name, master in masters_of(booster, model).items()}
        with whole():
            kept = {name: p.detach().clone() for name, p in model.named_parameters()}
            with torch.no_grad():
                torch._foreach_mul_(list(model.parameters()), 0.5)
        if reader == "evaluation":
            with torch.no_grad():
                booster.execute_pipeline(iter([(torch.ones(4, 8), torch.ones(4, 8))]), model, nn.MSELoss())
        elif reader == "save_model":
            booster.save_model(model, tmp_path / "model.safetensors")
        elif reader == "optimizer.state_dict":
            optimizer.state_dict()
        with whole(), torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(kept[name])
        optimizer.state_dict()
        assert_same(masters_of(booster, model), before)

    Loopback(2).run(run)
