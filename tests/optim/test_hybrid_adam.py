import copy
import re

import pytest
import torch

from hybridpp.errors import ConfigError
from hybridpp.optim import HybridAdam

SHAPES = [(4, 3), (5,), (), (0,), (1, 2, 3)]


def parameters(dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in SHAPES]


def train(optimizer, num_steps=5, first_step=0):
    """Steps whose gradients depend on the step and the parameter's place only; returns the parameters."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for index in range(first_step, first_step + num_steps):
        generator = torch.Generator().manual_seed(index)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param)
        optimizer.step()
    return [param.detach() for param in params]


@pytest.mark.parametrize(("adamw_mode", "reference"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_torch(adamw_mode, reference, weight_decay, dtype):
    options = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": weight_decay}
    ours = train(HybridAdam(parameters(dtype), adamw_mode=adamw_mode, **options))
    fused = train(reference(parameters(dtype), fused=True, **options))
    plain = train(reference(parameters(dtype), foreach=False, **options))
    torch.testing.assert_close(ours, fused, rtol=0, atol=0)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


def test_defaults_are_adamw_without_decay():
    torch.testing.assert_close(
        train(HybridAdam(parameters())), train(torch.optim.AdamW(parameters(), weight_decay=0.0, fused=True))
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_steps_half_precision_parameters(dtype):
    ours = train(HybridAdam(parameters(dtype), lr=0.1))
    expected = train(torch.optim.AdamW(parameters(dtype), lr=0.1, weight_decay=0.0, foreach=False))
    torch.testing.assert_close(ours, expected, rtol=0.05, atol=0.05)


def test_groups_keep_their_own_settings_and_may_be_empty():
    first, second = parameters()[:2]
    optimizer = HybridAdam(
        [{"params": [first], "lr": 0.5}, {"params": []}, {"params": [second], "weight_decay": 0.3}], lr=0.1
    )
    assert [group["fused"] for group in optimizer.param_groups] == [True, True, True]
    ours = train(optimizer)
    first, second = parameters()[:2]
    groups = [{"params": [first], "lr": 0.5}, {"params": [second], "weight_decay": 0.3}]
    torch.testing.assert_close(ours, train(torch.optim.AdamW(groups, lr=0.1, weight_decay=0.0)))


def test_parameters_without_gradient_are_left_alone():
    param, frozen = parameters()[:2]
    before = frozen.detach().clone()
    optimizer = HybridAdam([param, frozen])
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert torch.equal(frozen, before)
    assert frozen not in optimizer.state


def test_dtype_may_change_before_the_first_step():
    model = torch.nn.Linear(3, 2)
    optimizer = HybridAdam(model.parameters())
    model.to(torch.bfloat16)
    train(optimizer)
    assert optimizer.state[model.weight]["exp_avg"].dtype == torch.bfloat16


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_parameters_may_move_to_cuda_before_the_first_step(dtype):
    model = torch.nn.Linear(3, 2)
    reference = copy.deepcopy(model).to(dtype)
    optimizer = HybridAdam(model.parameters(), lr=0.1)
    model.to("cuda", dtype)
    ours = [param.cpu() for param in train(optimizer)]
    torch.testing.assert_close(ours, train(HybridAdam(reference.parameters(), lr=0.1)), rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("params", "options", "fused", "foreach"),
    [
        ([torch.zeros(2)], {}, True, None),
        ([torch.zeros(4, 2).t()], {}, True, None),
        ([torch.zeros(2), torch.zeros(2, dtype=torch.complex64)], {}, None, None),
        ([torch.zeros(4, 2)[:, :1]], {}, None, None),
        ([torch.zeros(1).expand(2)], {}, None, None),
        ([torch.zeros(2, device="meta")], {}, None, None),
        ([torch.zeros(2)], {"fused": False}, False, None),
        ([torch.zeros(2)], {"foreach": True}, None, True),
        ([torch.zeros(2)], {"foreach": False}, None, False),
        ([torch.zeros(2)], {"differentiable": True}, None, None),
        ([{"params": [torch.zeros(2)], "fused": False}], {}, False, None),
    ],
)
def test_runs_fused_where_it_can_unless_told_otherwise(params, options, fused, foreach):
    (group,) = HybridAdam(params, **options).param_groups
    assert (group["fused"], group["foreach"]) == (fused, foreach)


def test_complex_parameters_step_without_the_fused_kernel():
    def pair():
        return [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))]

    torch.testing.assert_close(train(HybridAdam(pair())), train(torch.optim.AdamW(pair(), weight_decay=0.0)))


def test_adds_groups_later():
    first, second = parameters()[:2]
    optimizer = HybridAdam([first], adamw_mode=False)
    optimizer.add_param_group({"params": [second], "lr": 0.5})
    assert optimizer.param_groups[1]["fused"] is True
    assert optimizer.param_groups[1]["decoupled_weight_decay"] is False


def test_named_parameters_and_other_torch_options_are_passed_on():
    optimizer = HybridAdam(torch.nn.Linear(2, 2).named_parameters(), amsgrad=True, maximize=True)
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    assert optimizer.param_groups[0]["amsgrad"] is optimizer.param_groups[0]["maximize"] is True
    train(optimizer)


# torch's fused CPU kernels walk memory without looking at strides; without a copy each of these goes wrong.
@pytest.mark.parametrize("param_layout", ["rows", "columns"])
@pytest.mark.parametrize("grad_layout", ["rows", "columns", "expanded"])
def test_a_gradient_in_another_memory_layout_updates_the_right_elements(param_layout, grad_layout):
    def run(optimizer_class, **options):
        values = torch.arange(12.0).reshape(3, 4)
        param = torch.nn.Parameter(values.clone() if param_layout == "rows" else values.t().contiguous().t())
        optimizer = optimizer_class([param], lr=0.1, amsgrad=True, **options)
        for index in range(3):
            grad = torch.randn(3, 4, generator=torch.Generator().manual_seed(index))
            layouts = {"rows": grad, "columns": grad.t().contiguous().t(), "expanded": grad[0].expand(3, 4)}
            param.grad = layouts[grad_layout]
            optimizer.step()
            assert param.grad is layouts[grad_layout]
        return param.detach()

    torch.testing.assert_close(run(HybridAdam), run(torch.optim.AdamW, weight_decay=0.0))


def test_moments_loaded_in_another_memory_layout_stay_with_their_elements():
    def transposed():
        return torch.nn.Parameter(torch.arange(12.0).reshape(4, 3).t())

    optimizer = HybridAdam([transposed()])
    train(optimizer, num_steps=2)
    saved = optimizer.state_dict()
    saved["state"][0] = {
        name: value.clone(memory_format=torch.contiguous_format) for name, value in saved["state"][0].items()
    }
    expected = train(optimizer, first_step=2)

    resumed = HybridAdam([transposed()])
    train(resumed, num_steps=2)
    resumed.load_state_dict(saved)
    torch.testing.assert_close(train(resumed, first_step=2), expected)


@pytest.mark.parametrize("num_steps", [0, 3])
def test_state_dict_round_trip_continues_bit_for_bit(num_steps):
    optimizer = HybridAdam(parameters(), lr=0.01, weight_decay=0.1)
    params = [torch.nn.Parameter(param.clone()) for param in train(optimizer, num_steps)]
    resumed = HybridAdam(params)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    expected = train(optimizer, first_step=num_steps)
    torch.testing.assert_close(train(resumed, first_step=num_steps), expected, rtol=0, atol=0)


@pytest.mark.parametrize(("source", "target"), [(HybridAdam, torch.optim.AdamW), (torch.optim.AdamW, HybridAdam)])
def test_state_dict_is_exchanged_with_torch(source, target):
    optimizer = source(parameters(), weight_decay=0.1)
    params = [torch.nn.Parameter(param.clone()) for param in train(optimizer)]
    resumed = target(params)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    torch.testing.assert_close(train(resumed, first_step=5), train(optimizer, first_step=5))


def test_step_hooks_run_once_a_step():
    torch.optim.Adam(parameters()).step()  # torch then has its hook caller around Adam.step, too
    calls = []
    optimizer = HybridAdam(parameters())
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    train(optimizer, num_steps=2)
    assert calls == ["post", "post"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"bias_correction": False},
            "HybridAdam always corrects the bias of its moments: got bias_correction=False. Leave it out; "
            "a learning-rate warm-up has a similar effect on the first steps.",
        ),
        (
            {"nvme_offload_fraction": 0.5},
            "HybridAdam does not offload its state to NVMe: got nvme_offload_fraction=0.5, nvme_offload_dir=None. "
            "Leave both out; more pipeline stages divide the state too.",
        ),
        ({"nvme_offload_dir": "/nvme"}, "got nvme_offload_fraction=0.0, nvme_offload_dir='/nvme'. Leave both out"),
        (
            {"momentum": 0.9, "decoupled_weight_decay": True},
            "HybridAdam has no option of this name: got decoupled_weight_decay, momentum. Use one of amsgrad, "
            "maximize, capturable, differentiable, foreach, fused, or put extra keys into the parameter groups.",
        ),
    ],
)
def test_refuses_by_name_what_it_does_not_offer(options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        HybridAdam(parameters(), **options)


def test_takes_the_arguments_of_colossal_at_their_defaults():
    optimizer = HybridAdam(
        parameters(),
        lr=1e-3,
        bias_correction=True,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0,
        adamw_mode=True,
        nvme_offload_fraction=0.0,
        nvme_offload_dir=None,
    )
    torch.testing.assert_close(train(optimizer), train(HybridAdam(parameters())), rtol=0, atol=0)
