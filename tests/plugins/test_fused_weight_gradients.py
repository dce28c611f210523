"""Weight gradients of linear layers that a kernel adds to the fp32 sums, with a kernel for the CPU in its place."""

import functools

import pytest
import torch
from compiled_blocks import ROWS, Blocks, mean_square, run_compiled
from hybridpp_plugins import setup
from support import boosted, gradients_of, noted_hooks, sgd, train

from hybridpp.data_parallel import outside_gradients, reducible_sums
from hybridpp.data_parallel.bucket import Bucket


@pytest.fixture
def kernel(monkeypatch):
    """Let the CPU have it; a list of the calls' shapes and whether they added."""
    calls = []

    def add_product(total, a, b, keep):
        assert total.dtype is torch.float32
        assert a.dtype is b.dtype is torch.bfloat16
        calls.append((tuple(total.shape), keep))
        product = a.float() @ b.float()
        total.copy_(total + product if keep else product)

    monkeypatch.setattr(reducible_sums, "add_product", add_product)
    for user in (outside_gradients, setup):
        monkeypatch.setattr(user, "adds_products", lambda device, dtype: True)
    return calls


@pytest.fixture
def hooked(monkeypatch):
    """The names of the parameters whose gradients came from autograd."""
    return noted_hooks(monkeypatch)


def run(**settings):
    return train(Blocks, [ROWS, ROWS], criterion=mean_square, precision="bf16", **{"num_microbatches": 2, **settings})


LINEAR = {"first", "last"} | {f"blocks.{n}.{layer}" for n in range(4) for layer in ("wide", "narrow")}


def test_no_half_precision_gradient_of_a_linear_layer_is_made(kernel, hooked):
    run()
    # Two steps of two micro-batches; the first of each overwrites what the sum held.
    assert len(kernel) == len(LINEAR) * 4
    assert sum(not keep for _, keep in kernel) == len(LINEAR) * 2 - len(LINEAR)  # new sums are zero
    # Autograd says in the first pass that it has nothing to add, and is not asked again: neither in that step, nor, for
    # small parameters, in any later one.
    assert hooked.count("last.weight") == hooked.count("last.bias") == hooked.count("blocks.0.norm.weight") == 1


def test_without_a_kernel_or_the_switch_nothing_changes(kernel, hooked, monkeypatch):
    run(fused_weight_gradients=False)
    assert kernel == []
    assert "first.weight" in hooked
    monkeypatch.setattr(outside_gradients, "adds_products", lambda device, dtype: False)
    run()
    assert kernel == []


def test_a_gradient_is_rounded_once_less(kernel):
    ours, theirs = run(num_microbatches=1), run(num_microbatches=1, fused_weight_gradients=False)
    for name in ("first.weight", "blocks.1.wide.weight", "last.weight", "blocks.1.wide.bias"):
        one, other = ours["gradients"][name], theirs["gradients"][name]
        assert torch.equal(other, other.bfloat16().float())
        assert not torch.equal(one, one.bfloat16().float()), name
        torch.testing.assert_close(one, other, rtol=2**-7, atol=1e-6)


@functools.cache
def unfused():
    return run(num_microbatches=4, fused_weight_gradients=False)


@pytest.mark.parametrize(
    "settings",
    [
        {"pp_size": 2},
        {"pp_size": 2, "schedule": "zb-h1"},
        {"dp_size": 2},
        {"dp_size": 2, "pp_size": 2, "schedule": "zb-h1"},
        {"gradient_checkpoint_config": {}},
        {"tp_size": 2, "tensor_parallel_plan": {"*.wide": "column", "*.narrow": "row"}},
    ],
    ids=str,
)
def test_every_layout_sums_what_one_process_sums(settings, kernel):
    # As many micro-batches over all replicas.
    count = 4 // settings.get("dp_size", 1)
    expected = unfused()
    actual = run(num_microbatches=count, **settings)
    assert kernel
    for kind in ("gradients", "weights"):
        for name, tensor in expected[kind].items():
            scale = tensor.abs().max().item()
            torch.testing.assert_close(actual[kind][name], tensor, rtol=0, atol=0.02 * scale + 1e-6, msg=name)


def test_replicas_reduce_each_bucket_when_its_last_gradient_was_added(kernel, monkeypatch):
    log = []
    launch = Bucket.launch_reduce

    def logged(bucket, *args, **options):
        log.append(len(kernel))
        launch(bucket, *args, **options)

    monkeypatch.setattr(Bucket, "launch_reduce", logged)
    # Buckets of one parameter each, nearly.
    run(dp_size=2, ddp_bucket_cap_mb=1e-4)
    assert len(kernel) == 2 * 2 * 2 * len(LINEAR)
    # In the last pass, reductions start between the additions of kernels.
    assert len(set(log)) > len(LINEAR)


def test_pipelines_agree_bit_for_bit(kernel):
    expected = run()
    for settings in ({"pp_size": 2}, {"pp_size": 2, "schedule": "zb-h1"}, {"gradient_checkpoint_config": {}}):
        actual = run(**settings)
        for name, gradient in expected["gradients"].items():
            assert torch.equal(actual["gradients"][name], gradient), (settings, name)


def test_a_weight_that_two_layers_use_gets_both(kernel):
    def tied():
        model = Blocks()
        model.blocks[1].wide.weight = model.blocks[0].wide.weight
        return model

    ours, theirs = (
        train(tied, [ROWS], criterion=mean_square, precision="bf16", num_microbatches=2, fused_weight_gradients=fused)
        for fused in (True, False)
    )
    name = "blocks.0.wide.weight"
    torch.testing.assert_close(ours["gradients"][name], theirs["gradients"][name], rtol=0.02, atol=1e-4)


def test_passes_of_the_script_and_of_a_schedule_add_up(kernel):
    booster, model, optimizer = boosted(Blocks(), sgd, ROWS, precision="bf16")
    booster.execute_pipeline(iter([ROWS]), model, mean_square, optimizer)
    once = gradients_of(booster, model)
    num_calls = len(kernel)
    booster.backward(mean_square(model(ROWS), None), optimizer)
    assert len(kernel) == num_calls
    for name, gradient in gradients_of(booster, model).items():
        torch.testing.assert_close(gradient, 2 * once[name], rtol=0.02, atol=1e-3)


def test_in_fp32_autograd_adds_in_place(kernel):
    train(Blocks, [ROWS], criterion=mean_square, num_microbatches=2)
    assert kernel == []


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    ("backend", "settings"),
    [
        ("eager", {}),
        pytest.param("eager", {"gradient_checkpoint_config": {}}, marks=pytest.mark.matrix),  # with aot_eager, below
        ("aot_eager", {"pp_size": 2}),
        ("aot_eager", {"dp_size": 2, "ddp_bucket_cap_mb": 1e-4}),
        ("aot_eager", {"gradient_checkpoint_config": {}}),
    ],
    ids=str,
)
def test_compiled_blocks_add_in_kernels_under_every_schedule(backend, settings, kernel):
    expected = run(**settings)
    num_calls = len(kernel)
    kernel.clear()
    actual, graphs = run_compiled(backend=backend, precision="bf16", **settings)
    assert len(kernel) == num_calls
    assert len(graphs) == settings.get("pp_size", 1) * settings.get("dp_size", 1)
    for name, gradient in expected["gradients"].items():
        assert torch.equal(actual["gradients"][name], gradient), name


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_blocks_leave_cuda_graphs_to_the_compiler(kernel, monkeypatch):
    monkeypatch.setattr(setup, "makes_cuda_graphs", lambda keywords: True)
    run_compiled(precision="bf16")
    # The layers outside of blocks: two steps of two micro-batches.
    assert len(kernel) == 2 * 2 * 2
