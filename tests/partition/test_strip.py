import torch
from torch import nn

from hybridpp.partition import parameter_names
from hybridpp.partition.strip import strip

CPU = torch.device("cpu")


def make_model():
    model = nn.ModuleDict({"a": nn.Linear(2, 3), "norm": nn.BatchNorm1d(3), "b": nn.Linear(3, 2)})
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
    strip(model, OWNERS, [number], foreign, device, dtypes)
    return model


def test_a_tied_parameter_has_one_name():
    assert parameter_names(make_model()) == list(OWNERS)


def test_each_stage_shows_what_it_owns_under_the_old_names():
    first, second = stage(0, {"norm", "b"}), stage(1, {"a"})
    assert parameter_names(first) == ["scale", "a.weight", "a.bias"]
    assert parameter_names(second) == ["scale", "a.weight", "norm.weight", "norm.bias", "b.weight", "b.bias"]
    assert set(first.state_dict()) == {"scale", "table", "a.weight", "a.bias", "tied.weight"}
    assert "norm.running_mean" in second.state_dict()


def test_what_is_owned_is_the_same_object_and_still_tied():
    model = make_model()
    before = dict(model.named_parameters())
    strip(model, OWNERS, [0], {"norm", "b"}, CPU, {})
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert model["tied"].weight is model["a"].weight


def test_what_is_gone_still_tells_its_shape_dtype_and_device_without_memory():
    model = stage(0, {"norm", "b"}, dtype=torch.bfloat16)
    hollow = model["b"].weight
    assert not isinstance(hollow, nn.Parameter)
    assert (hollow.shape, hollow.dtype, hollow.device, hollow.requires_grad) == ((2, 3), torch.bfloat16, CPU, False)
    assert hollow.untyped_storage().nbytes() == 2
    assert not hollow.any()
    assert "norm.running_mean" not in dict(model.named_buffers())
    assert torch.equal(model["norm"].running_var, torch.ones(3))


def test_a_parameter_tied_to_another_unit_is_gone_from_both():
    model = make_model()
    strip(model, {**OWNERS, "a.weight": (1,)}, [0], {"norm", "b"}, CPU, {})
    assert parameter_names(model) == ["scale", "a.bias"]
    assert model["tied"].weight.shape == (3, 2)


def test_a_parameter_that_is_none_stays_none():
    model = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2, track_running_stats=False)])
    strip(model, {"0.weight": (1,), "1.weight": (1,), "1.bias": (1,)}, [0], {"0", "1"}, CPU, {})
    assert model[0].bias is None
    assert model[1].running_mean is None


def test_a_model_on_the_meta_device_is_stripped_alike():
    with torch.device("meta"):
        model = make_model()
    strip(model, OWNERS, [0], {"b"}, CPU, {})
    assert (model["b"].weight.device, model["a"].weight.device.type) == (CPU, "meta")
