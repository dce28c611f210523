import copy
import re

import pytest
import torch
from torch import Tensor, nn

from hybridpp.errors import ConfigError
from hybridpp.partition import parameter_names
from hybridpp.partition.prune import prune_parameters

CPU = torch.device("cpu")


def make_model():
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(2, 3), "norm": nn.BatchNorm1d(3), "b": nn.Linear(3, 2)})
    model["b"].register_buffer("angles", torch.arange(3.0))
    model["b"].register_buffer("calls", torch.zeros(2))
    model.register_parameter("scale", nn.Parameter(torch.ones(2)))
    model.register_buffer("table", torch.arange(4))
    model["tied"] = nn.Linear(2, 3, bias=False)
    model["tied"].weight = model["a"].weight
    return model


OWNERS = {
    "scale": (0, 1),
    "a.weight": (0, 1),
    "a.bias": (0,),
    "norm.weight": (1,),
    "norm.bias": (1,),
    "b.weight": (1,),
    "b.bias": (1,),
}


def stage(number, foreign, device=CPU, dtype=None):
    model = make_model()
    dtypes = {} if dtype is None else {id(parameter): dtype for parameter in model.parameters()}
    prune_parameters(model, OWNERS, [number], foreign, device, dtypes)
    return model


def test_a_tied_parameter_has_one_name():
    assert parameter_names(make_model()) == list(OWNERS)


def test_each_stage_shows_what_it_owns_under_the_old_names():
    first, second = stage(0, {"norm", "b"}), stage(1, {"a"})
    assert parameter_names(first) == ["scale", "a.weight", "a.bias"]
    assert parameter_names(second) == ["scale", "a.weight", "norm.weight", "norm.bias", "b.weight", "b.bias"]
    assert set(first.state_dict()) == {"scale", "table", "a.weight", "a.bias", "tied.weight"}
    assert "norm.running_mean" in second.state_dict()


def test_buffers_that_several_units_share_stay_where_one_of_them_is_owned():
    def shared():
        model = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(2))
        table = nn.Module()
        table.register_buffer("angles", torch.arange(3.0))
        for block in model:
            block.table = table
        return model

    for number, foreign in enumerate([{"1"}, {"0"}]):
        model = shared()
        owners = {name: (int(name[0]),) for name, _ in model.named_parameters()}
        prune_parameters(model, owners, [number], foreign, CPU, {})
        table = model[number].table
        assert torch.equal(table._buffers["angles"], torch.arange(3.0))
        assert [name for name, _ in table.named_buffers()] == ["angles"]
    model = shared()
    prune_parameters(model, {name: (1,) for name, _ in model.named_parameters()}, [0], {"0", "1"}, CPU, {})
    assert not list(model.buffers())


def test_what_is_owned_is_the_same_object_and_still_tied():
    model = make_model()
    before = dict(model.named_parameters())
    prune_parameters(model, OWNERS, [0], {"norm", "b"}, CPU, {})
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert model["tied"].weight is model["a"].weight


def test_pruned_parameters_keep_shape_dtype_and_device_without_memory():
    model = make_model()
    dtypes = {id(parameter): torch.bfloat16 for parameter in model.parameters()}
    visibility = prune_parameters(model, OWNERS, [0], {"norm", "b"}, CPU, dtypes)
    placeholder = model["b"].weight
    assert not isinstance(placeholder, nn.Parameter)
    assert (placeholder.shape, placeholder.dtype, placeholder.device, placeholder.requires_grad) == (
        (2, 3),
        torch.bfloat16,
        CPU,
        True,
    )
    with visibility.showing_all():
        assert placeholder.untyped_storage().nbytes() == 2
        assert placeholder.isnan().shape == (2, 3)
    assert "b.angles" not in dict(model.named_buffers())
    assert torch.equal(model["b"].angles, torch.arange(3.0))


def test_values_of_buffers_that_other_stages_write_to_are_refused():
    model = make_model()
    prune_parameters(model, OWNERS, [0], {"norm", "b"}, CPU, {}, {(nn.Linear, "calls")})
    for name in ("norm.running_mean", "norm.num_batches_tracked", "b.calls"):
        module, _, key = name.rpartition(".")
        buffer = getattr(model[module], key)
        assert not buffer.requires_grad
        for read in (torch.neg, torch.sum, Tensor.tolist):
            with pytest.raises(ConfigError, match=rf"^{re.escape(name)} is a buffer of another stage"):
                read(buffer)
    # As scripts reset them everywhere.
    model["norm"].reset_running_stats()
    model["norm"].running_mean.data.mul_(0.5)
    assert model["norm"].running_mean.shape == (3,)


def test_values_of_a_pruned_parameter_are_refused_outside_of_the_forward():
    model = stage(0, {"norm", "b"})
    absent = model["b"].weight
    assert (absent.numel(), absent.grad, len(absent), absent.is_leaf) == (6, None, 2, True)
    absent.requires_grad = False
    own = model["a"].weight.detach()
    for act in (
        lambda: float(absent.norm()),
        lambda: bool(absent.isnan().any()),
        lambda: absent.detach().tolist(),
        lambda: own.add_(absent.norm()),
        lambda: torch.add(own, absent.sum(), out=own),
        lambda: torch._foreach_add_([own], [absent.sum()]),
        lambda: model["a"].bias.detach() + absent.sum(),
        lambda: model["b"](torch.ones(1, 3)),
    ):
        with pytest.raises(ConfigError, match=r"^b\.weight is a parameter of another stage"):
            act()
    absent.requires_grad_().grad = None
    with pytest.raises(ConfigError, match=r"^b\.weight is a parameter of another stage"):
        absent.norm()


def test_all_ranks_may_go_over_parameters_of_a_part_and_write_to_them():
    states = []
    for make in (make_model, lambda: stage(0, {"norm", "b"}), lambda: stage(1, {"a", "tied"})):
        model = make()
        named = dict(model["b"].named_parameters())
        assert [tuple(one.shape) for one in named.values()] == [(2, 3), (2,)]
        assert all(p is q for p, q in zip(model["b"].parameters(), named.values(), strict=True))
        assert len([*copy.deepcopy(model["b"]).parameters()]) == 2
        with torch.no_grad():
            model["b"].reset_parameters()
            for one in model["b"].parameters():
                one.mul_(0.5).clamp_(max=0.2)
                one.div_(one.norm())
                one.data = one.data - 0.1 * torch.rand_like(one)
                one.add_(torch.randn_like(one))
            torch._foreach_mul_([*model["a"].parameters(), *model["b"].parameters()], 0.5)
        model["a"].requires_grad_(False)
        model["a"].zero_grad()
        states.append((dict(model.named_parameters()), torch.rand(1)))
    (whole, drawn), *others = states
    for state, number in others:
        assert torch.equal(number, drawn)
        assert all(torch.equal(one, whole[name]) for name, one in state.items())


@pytest.mark.parametrize(
    "follow",
    [
        lambda teacher, weight: teacher.copy_(weight),
        lambda teacher, weight: torch._foreach_lerp_([teacher], [weight], 0.1),
        lambda teacher, weight: teacher.data.mul_(0.9).add_(weight, alpha=0.1),
        lambda teacher, weight: setattr(teacher, "data", teacher.data * 0.9 + weight.data * 0.1),
    ],
)
def test_a_weight_that_follows_one_of_another_stage_is_refused_on_both(follow):
    with torch.no_grad():
        for number, foreign, message in ((0, {"norm", "b"}, "norm.bias"), (1, {"a", "tied"}, "a.bias")):
            model = stage(number, foreign)
            (_, weight), (_, teacher) = model["a"].parameters(), model["norm"].parameters()
            with pytest.raises(
                ConfigError, match=f"^{message} is a parameter of another stage.* needs both on one rank"
            ):
                follow(teacher, weight)
            follow(model["norm"].bias, model["norm"].weight)
    model["b"].bias.detach().copy_(model.scale)  # which both have


def test_a_parameter_tied_to_another_unit_is_gone_from_both():
    model = make_model()
    prune_parameters(model, {**OWNERS, "a.weight": (1,)}, [0], {"norm", "b"}, CPU, {})
    assert parameter_names(model) == ["scale", "a.bias"]
    assert model["tied"].weight.shape == (3, 2)


def test_a_parameter_that_is_none_stays_none():
    model = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2, track_running_stats=False)])
    prune_parameters(model, {"0.weight": (1,), "1.weight": (1,), "1.bias": (1,)}, [0], {"0", "1"}, CPU, {})
    assert model[0].bias is None
    assert model[1].running_mean is None


def test_a_model_on_the_meta_device_is_stripped_alike():
    with torch.device("meta"):
        model = make_model()
    prune_parameters(model, OWNERS, [0], {"b"}, CPU, {})
    assert (model["b"].weight.device, model["a"].weight.device.type) == (CPU, "meta")


def seen(tensors):
    return [(name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in tensors]


def test_full_visibility_lists_all_parameters_and_buffers_in_order():
    model = make_model()
    model["norm"].bias.requires_grad_(False)
    expected = seen(model.named_parameters()), seen(model.named_buffers())
    visibility = prune_parameters(model, {**OWNERS, "a.bias": (1,)}, [0], {"norm", "b"}, CPU, {})
    owned = parameter_names(model)
    with visibility.showing_all():
        with visibility.showing_all():
            pass
        assert (seen(model.named_parameters()), seen(model.named_buffers())) == expected
        assert next(model["a"].parameters()) is model["a"].weight
        assert next(model["b"].parameters()) is model["b"].weight
    assert parameter_names(model) == owned == ["scale", "a.weight"]
    assert list(model.state_dict()) == ["scale", "table", "a.weight", "tied.weight"]


def test_a_copy_of_a_pruned_model_shows_its_own():
    model = make_model()
    visibility = prune_parameters(model, OWNERS, [0], {"norm", "b"}, CPU, {})
    copied, copied_visibility = copy.deepcopy((model, visibility))
    copied["b"].weight = 1
    with copied_visibility.showing_all():
        assert dict(copied.named_parameters())["b.bias"] is copied["b"].bias
        assert copied["b"]._parameters.items() >= {("weight", 1)}
    with visibility.showing_all():
        assert dict(model.named_parameters())["b.weight"] is model["b"].weight
    assert parameter_names(copied) == parameter_names(model)


def test_container_code_may_replace_a_buffer_of_another_stage():
    model = make_model()
    visibility = prune_parameters(model, OWNERS, [0], {"norm", "b"}, CPU, {})
    with visibility.showing_all():
        model["norm"].running_mean = torch.full((3,), 7.0)
        assert dict(model.named_buffers())["norm.running_mean"] is model["norm"].running_mean
    assert model["norm"].running_mean[0] == 7
    assert "norm.running_mean" not in model.state_dict()
