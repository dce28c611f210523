"""One CUDA device: alone, and shared by several ranks through host memory."""

import math
import warnings
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from hybridpp_plugins.sample import find_samples
from processes import torchrun
from support import ROOT, assert_same, boosted, image_batch, model_loss, sgd, tiny_vit, train
from torch.utils.data import DataLoader

from hybridpp.nn.fp32_products import add_product, adds_products
from hybridpp.pipeline import Microbatch
from hybridpp.pipeline.boundary import InputCopies, StepInputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Where the first kernel of autograd's thread is a matrix product.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
]

BATCHES = [image_batch(8, seed) for seed in range(5)]


@pytest.fixture(autouse=True)
def exact_convolutions() -> Iterator[None]:
    """By default cuDNN rounds fp32 to TF32, and may choose kernels that add up in no fixed order."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        yield


def tolerance(precision: str) -> float:
    """Of losses after a few steps, against fp32 on the CPU."""
    return 1e-4 if precision == "fp32" else 2e-2


def on_device(batch):
    return {key: value.to("cuda") for key, value in batch.items()}


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_one_process_on_cuda_gives_the_cpus_losses(precision):
    expected = train(tiny_vit, BATCHES, num_microbatches=2)["losses"][0]
    booster, model, optimizer = boosted(
        tiny_vit(), sgd, image_batch(2), device="cuda", num_microbatches=2, precision=precision
    )
    data = iter(BATCHES)
    losses = []
    for _ in BATCHES:
        loss = booster.execute_pipeline(data, model, model_loss, optimizer)["loss"]
        optimizer.step()
        assert loss.device.type == "cuda"
        losses.append(loss.item())
    assert optimizer.skipped_steps == 0
    assert losses == pytest.approx(expected, abs=tolerance(precision))


def test_recomputing_on_cuda_changes_no_bit():
    """Dropout draws from the device's generator."""

    def run(**settings):
        device = {"device": "cuda", "num_microbatches": 2, **settings}
        booster, model, optimizer = boosted(tiny_vit(dropout=0.1), sgd, image_batch(2), **device)
        for batch in BATCHES[:2]:
            booster.execute_pipeline(iter([batch]), model, model_loss, optimizer)
            optimizer.step()
        return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}

    assert_same(run(gradient_checkpoint_config={}), run())


def test_taking_a_sample_leaves_the_devices_generator_alone():
    dataset = [torch.ones(4), torch.ones(4)]

    def collate(items):
        return torch.stack(items) + torch.rand(4, device="cuda").cpu()

    torch.cuda.manual_seed(0)
    before = torch.cuda.get_rng_state()
    loader = DataLoader(dataset, batch_size=2, collate_fn=collate)
    find_samples(torch.nn.Linear(4, 4), loader, None, torch.device("cuda", 0))
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_an_fp16_overflow_on_cuda_skips_the_step():
    booster, model, optimizer = boosted(tiny_vit(), sgd, image_batch(2), device="cuda", precision="fp16")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    handle = model.classifier.bias.register_hook(lambda gradient: gradient * math.inf)
    booster.execute_pipeline(iter([image_batch(4)]), model, model_loss, optimizer)
    optimizer.step()
    handle.remove()
    assert optimizer.skipped_steps == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("place", [dict, on_device], ids=["batch on the host", "batch on the device"])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_a_step_waits_for_the_device_once(precision, place):
    """The model computes its loss itself, so the watch for loss functions is in it."""
    batch = place(image_batch(4))
    booster, model, optimizer = boosted(
        tiny_vit(), sgd, image_batch(2), device="cuda", num_microbatches=2, precision=precision, max_norm=1.0
    )

    def step():
        booster.execute_pipeline(iter([batch]), model, model_loss, optimizer)
        optimizer.step()

    for _ in range(3):
        step()
    assert host_waits(step) == 1


def host_waits(function) -> int:
    """How often the host waits for the device, as far as torch sees it."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        # It says itself, once, that it is a prototype.
        torch.cuda.set_sync_debug_mode("warn")
        try:
            function()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing CUDA operation" in str(warning.message) for warning in said)


def test_a_wait_is_noticed():
    number = torch.ones(1, device="cuda")
    assert host_waits(lambda: (number.item(), number + 1, number.cpu())) == 2


def test_what_a_script_went_back_through_itself_is_run_again_on_cuda():
    """With the device's random numbers: without them dropout would give other values."""
    booster, model, optimizer = boosted(tiny_vit(dropout=0.5), sgd, image_batch(2), device="cuda", precision="fp16")
    # A linear layer of the second block, which has another name in other versions of transformers.
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    name, seen = next(name for name in reversed(linear) if "1" in name.split(".")), []

    def overflow(module, args, output):
        seen.append(output.detach().clone())
        return output * math.inf

    handle = model.get_submodule(name).register_forward_hook(overflow)
    booster.backward(model(**on_device(image_batch(2))).loss, optimizer)
    before = torch.cuda.get_rng_state()
    optimizer.step()
    handle.remove()
    assert optimizer.overflow_report == f"the output of {name!r} holds inf (stage 0, micro-batch 0) on rank 0"
    first, again = seen
    assert torch.equal(first, again)
    assert torch.equal(torch.cuda.get_rng_state(), before)


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1", "zb-v"])
def test_the_schedule_changes_no_bit_on_cuda(schedule):
    def losses(schedule):
        torch.manual_seed(0)
        options = {"device": "cuda", "num_microbatches": 4, "precision": "fp16", "schedule": schedule}
        booster, model, optimizer = boosted(tiny_vit(0.1), sgd, image_batch(2), **options)
        data, found = iter(BATCHES), []
        for _ in BATCHES:
            found.append(booster.execute_pipeline(data, model, model_loss, optimizer)["loss"].item())
            optimizer.step()
        return found

    assert losses(schedule) == losses("1f1b")


def test_a_timeline_of_the_device():
    booster, model, optimizer = boosted(tiny_vit(), sgd, image_batch(2), device="cuda", num_microbatches=2)
    with booster.record_timeline(model) as recording:
        booster.execute_pipeline(iter([image_batch(4)]), model, model_loss, optimizer)
    computed = [span.name for span in recording.timeline.of_rank(0) if span.computes]
    assert computed == ["0F0", "0B0", "0F1", "0B1"]
    assert recording.timeline.busy_ms(0) > 0
    (rank,) = recording.recording.ranks
    assert rank.memory_kind == "device"
    held = [action.memory for action in rank.actions if action.computes]
    # A micro-batch's activations are there after its forward, and not after its backward pass.
    assert held[0] > held[1] > sum(size for name, size in rank.held.items() if name != "host") / 2
    assert rank.peak_bytes >= max(held)
    assert [phase.name for phase in rank.phases] == ["read", "actions", "end"]


def test_dropout_on_cuda_is_drawn_by_place_not_by_history():
    def one_loss():
        torch.manual_seed(0)
        booster, model, optimizer = boosted(tiny_vit(0.5), sgd, image_batch(2), device="cuda", num_microbatches=2)
        return booster.execute_pipeline(iter([image_batch(8)]), model, model_loss, optimizer)["loss"].item()

    first = one_loss()
    torch.rand(7, device="cuda")
    assert one_loss() == first


@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [
        (2, ["--pp-size", "2"]),
        (2, ["--pp-size", "1"]),
        (2, ["--pp-size", "1", "--tp-size", "2"]),
        (4, ["--pp-size", "2", "--tp-size", "2"]),
        (4, ["--pp-size", "2"]),
        (4, ["--pp-size", "4"]),
        (2, ["--pp-size", "2", "--schedule", "zb-h1"]),
        (2, ["--pp-size", "2", "--schedule", "zb-v"]),
        (2, ["--pp-size", "1", "--zero-stage", "2"]),
        (2, ["--pp-size", "1", "--zero-stage", "3"]),
        (4, ["--pp-size", "2", "--zero-stage", "3"]),
    ],
    ids=lambda value: "".join(value) if isinstance(value, list) else str(value),
)
def test_ranks_that_share_a_device_give_the_cpus_losses(num_ranks, layout):
    precisions = ["fp32", "fp16", "bf16"]
    job = torchrun(num_ranks, ROOT / "tests/scripts/shared_device.py", *layout, "--precisions", *precisions)
    assert job.returncode == 0, job.stderr
    expected = train(tiny_vit, BATCHES, num_microbatches=2)["losses"][0]
    lines = [line.split() for line in job.stdout.splitlines() if line.startswith(tuple(precisions))]
    assert [precision for precision, *_ in lines] == precisions
    for precision, *losses in lines:
        assert [float(loss) for loss in losses] == pytest.approx(expected, abs=tolerance(precision))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("make", [torch.nn.LayerNorm, torch.nn.RMSNorm])
def test_norms_sum_the_gradients_of_their_weights_in_fp32(make, dtype):
    """Why ``fp32_norms=None`` leaves these in half precision: on the CPU, LayerNorm's are 5 % off over 2000 rows."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 64, generator=generator).cuda().to(dtype)
    norm, exact = make(64).cuda().to(dtype), make(64).cuda().double()
    norm(x).float().square().mean().mul(1024).backward()
    exact(x.double()).square().mean().mul(1024).backward()
    error = (norm.weight.grad.double() - exact.weight.grad).abs() / exact.weight.grad.abs()
    assert error.max() < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_are_added_to_fp32_sums_where_the_kernel_is_there(dtype):
    if not adds_products(torch.device("cuda", 0), dtype):
        pytest.skip("this torch adds no half-precision products to fp32 sums")
    generator = torch.Generator().manual_seed(0)
    dy, x = (torch.randn(300, size, generator=generator).cuda().to(dtype) for size in (40, 56))
    total = torch.randn(40, 56, generator=generator).cuda()
    expected = total.double() + dy.double().t() @ x.double()
    add_product(total, dy.t(), x, keep=True)
    torch.testing.assert_close(total.double(), expected, rtol=1e-4, atol=1e-4)


def test_gradients_that_kernels_add_are_those_of_autograd():
    def run(fused):
        settings = {"device": "cuda", "precision": "bf16", "num_microbatches": 2, "fused_weight_gradients": fused}
        booster, model, optimizer = boosted(tiny_vit(), sgd, image_batch(2), **settings)
        booster.execute_pipeline(iter([image_batch(4)]), model, model_loss, optimizer)
        return dict(optimizer.gradients())

    expected = run(False)
    for name, gradient in run(True).items():
        scale = expected[name].abs().max().item()
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=0.02 * scale + 1e-5, msg=name)


def test_adam_is_fused_and_clips_in_its_kernel():
    def run(**settings):
        make_optimizer = partial(torch.optim.AdamW, lr=0.01)
        settings = {"device": "cuda", "max_norm": 0.1, **settings}
        _, _, weights = trained(make_optimizer, **settings)
        return weights

    expected = run(fused_optimizer=False)
    for name, weight in run().items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-5)


def trained(make_optimizer, **settings):
    booster, model, optimizer = boosted(tiny_vit(), make_optimizer, image_batch(2), **settings)
    assert optimizer.param_groups[0]["fused"] is (None if settings.get("fused_optimizer") is False else True)
    for batch in BATCHES[:2]:
        booster.execute_pipeline(iter([batch]), model, model_loss, optimizer)
        optimizer.step()
    return booster, model, {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_compiled_blocks_train_as_uncompiled_ones(schedule):
    def run(**settings):
        settings = {"device": "cuda", "num_microbatches": 2, "schedule": schedule, **settings}
        booster, model, optimizer = boosted(tiny_vit(), sgd, image_batch(2), **settings)
        booster.execute_pipeline(iter([image_batch(4)]), model, model_loss, optimizer)
        return dict(optimizer.gradients())

    torch.compiler.reset()
    expected = run()
    for name, gradient in run(compile_blocks=True).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-5, msg=name)


def test_inputs_copied_ahead_arrive_whole_whatever_memory_they_come_from():
    device = torch.device("cuda", torch.cuda.current_device())

    def batch(seed):
        images = torch.randn(64, 3, 32, 32, generator=torch.Generator().manual_seed(seed))
        return {
            "pageable": images,
            "pinned": images.pin_memory(),
            "strided": images.transpose(1, 2),
            "channels last": images.contiguous(memory_format=torch.channels_last).pin_memory(),
            "on the device": images.to(device),
        }

    microbatches = [Microbatch(batch(seed), 64, 1.0) for seed in range(6)]
    inputs = StepInputs(InputCopies(device), microbatches, training=True, is_cut=False)
    inputs.expect([(0, number) for number in range(6)])
    busy = torch.randn(2048, 2048, device=device)
    for number, microbatch in enumerate(microbatches):
        taken = inputs.take(0, number)
        busy = (busy @ busy).clamp(-1, 1)
        for name, tensor in taken.items():
            assert tensor.device == device
            assert torch.equal(tensor.cpu(), microbatch.inputs[name].cpu()), name
