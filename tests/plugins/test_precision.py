"""fp16 and bf16: masters, one loss scale for the whole job, one norm."""

import functools
import math

import pytest
import torch
import transformers
from support import assert_near, assert_same, boosted, image_batch, model_loss, replica_part, sgd, tiny_vit, train

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import Loopback, current_world
from hybridpp.nn.deferred_tensor import deferred
from hybridpp.optim import LinearWarmupLR, OneCycleLR
from hybridpp.pipeline import criterion as criterion_module

BATCHES = [image_batch(8, seed) for seed in range(2)]


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-5)


@pytest.mark.parametrize(("precision", "make_optimizer"), [("fp16", adamw), ("bf16", sgd)])
def test_half_precision_is_bit_equal_over_pipeline_sizes_and_near_fp32(precision, make_optimizer):
    make_model = functools.partial(tiny_vit, 0.1)
    options = {"num_microbatches": 2, "make_optimizer": make_optimizer}
    full = train(make_model, BATCHES, **options)
    one = train(make_model, BATCHES, precision=precision, **options)
    two = train(make_model, BATCHES, precision=precision, pp_size=2, **options)
    assert two["losses"] == one["losses"] * 2
    assert_same(two["weights"], one["weights"])
    assert_same(two["gradients"], one["gradients"])
    assert one["losses"][0] == pytest.approx(full["losses"][0], rel=0.02)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_masters_keep_updates_that_half_precision_would_round_away(precision):
    steps, lr = 20, 1e-5

    def run():
        booster, model, optimizer = boosted(
            tiny_vit(), functools.partial(torch.optim.SGD, lr=lr), image_batch(2), pp_size=2, precision=precision
        )
        before = {name: master.detach().clone() for name, master in masters_of(booster, model).items()}
        for _ in range(steps):
            booster.execute_pipeline(iter([image_batch(4)]), model, model_loss, optimizer)
            optimizer.step()
        after = masters_of(booster, model)
        assert all((p.dtype is torch.float32) == ("norm" in name) for name, p in model.named_parameters())
        return {name: (before[name] - after[name].detach()) / (steps * lr) for name in before}

    model = tiny_vit()
    model(**image_batch(4)).loss.backward()
    updates = {}
    for part in Loopback(2).run(run):
        updates.update(part)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(updates[name], parameter.grad, atol=0.03, rtol=0.05)


def masters_of(booster, model):
    return booster.plugin._engine(model).masters.masters


@pytest.mark.parametrize("num_calls", [2, 8])
def test_gradients_of_microbatches_add_up_in_fp32(num_calls):
    """Half-precision sums would lose the small parts; here every call's gradient is rounded alone."""

    def run():
        booster, model, optimizer = boosted(
            tiny_vit(), sgd, image_batch(2), precision="bf16", num_microbatches=num_calls
        )
        batch = image_batch(1)
        many = {name: torch.cat([value] * num_calls) for name, value in batch.items()}
        booster.execute_pipeline(iter([many]), model, model_loss, optimizer)
        engine = booster.plugin._engine(model)
        summed = {name: gradient.clone() for name, gradient in engine.buckets.gradients.items()}
        optimizer.zero_grad()
        booster.execute_pipeline(iter([batch]), model, model_loss, optimizer)
        assert all(gradient.dtype == torch.float32 for gradient in summed.values())
        # The weight of a micro-batch is a power of two here: scaling by it is exact. What is left is fp32's rounding.
        assert_near(summed, dict(engine.buckets.gradients), 1e-7)

    Loopback(1).run(run)


def inject(model, where, value):
    """Put ``value`` into the gradient of the last parameter of the rank ``where``."""
    if current_world().rank == where:
        *_, parameter = model.parameters()
        parameter.register_hook(lambda gradient: torch.full_like(gradient, value))


@pytest.mark.parametrize(("where", "value"), [(0, math.inf), (1, math.nan), (2, math.nan), (3, math.inf)])
def test_an_overflow_on_one_rank_makes_every_rank_skip_and_back_off(where, value):
    def run():
        booster, model, optimizer = boosted(
            tiny_vit(),
            functools.partial(torch.optim.AdamW, lr=0.1),
            image_batch(2),
            pp_size=2,
            num_microbatches=2,
            precision="fp16",
            initial_scale=64,
        )
        handle = None
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        masters = {name: master.detach().clone() for name, master in masters_of(booster, model).items()}
        if current_world().rank == where:
            *_, parameter = model.parameters()
            handle = parameter.register_hook(lambda gradient: torch.full_like(gradient, value))
        mine = replica_part(image_batch(8), booster.plugin.layout.here.dp, 2)
        booster.execute_pipeline(iter([mine]), model, model_loss, optimizer)
        optimizer.step()
        assert_same(model.state_dict(), before)
        assert_same({name: master.detach() for name, master in masters_of(booster, model).items()}, masters)
        assert not optimizer.unwrap().state, "no moment was touched"
        skipped = (optimizer.skipped_steps, optimizer.loss_scale, optimizer.last_step_skipped)
        if handle is not None:
            handle.remove()
        booster.execute_pipeline(iter([mine]), model, model_loss, optimizer)
        optimizer.step()
        assert any(not torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        assert not optimizer.last_step_skipped
        return skipped

    assert Loopback(4).run(run) == [(1, 32.0, True)] * 4


SCHEDULES = {
    "LinearWarmupLR": functools.partial(LinearWarmupLR, total_steps=10),
    "OneCycleLR": functools.partial(OneCycleLR, total_steps=10),
    "torch": functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=10),
    "transformers": functools.partial(
        transformers.get_polynomial_decay_schedule_with_warmup, num_warmup_steps=2, num_training_steps=10
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_learning_rate_stands_still_at_a_skipped_step(name):
    plain = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    expected, alone = [], SCHEDULES[name](plain)
    for _ in range(2):
        plain.step()
        alone.step()
        expected.append(alone.get_last_lr()[0])

    def run():
        model = tiny_vit()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = SCHEDULES[name](optimizer)
        plugin = HybridParallelPlugin(tp_size=1, pp_size=1, num_microbatches=1, precision="fp16", initial_scale=2.0)
        booster = Booster(plugin=plugin, device="cpu")
        model, optimizer, _, _, scheduler = booster.boost(model, optimizer, lr_scheduler=scheduler)
        rates = []
        for step in range(3):
            handle = None
            if step == 1:
                handle = model.classifier.weight.register_hook(lambda gradient: gradient * math.inf)
            booster.execute_pipeline(iter([image_batch(2)]), model, model_loss, optimizer)
            optimizer.step()
            scheduler.step()
            rates.append(scheduler.get_last_lr()[0])
            if handle is not None:
                handle.remove()
        return rates, scheduler.last_epoch, optimizer.skipped_steps

    assert Loopback(1).run(run) == [([expected[0], expected[0], expected[1]], 2, 1)]


def test_a_scale_too_large_for_fp16_is_found_and_lowered():
    def run():
        booster, model, optimizer = boosted(
            tiny_vit(), sgd, image_batch(2), pp_size=2, precision="fp16", initial_scale=2.0**24
        )
        while optimizer.skipped_steps < 20:
            booster.execute_pipeline(iter([image_batch(4)]), model, model_loss, optimizer)
            optimizer.step()
            if not optimizer.last_step_skipped:
                break
        return optimizer.skipped_steps, optimizer.loss_scale

    (skipped, scale), other = Loopback(2).run(run)
    assert (skipped, scale) == other
    assert 0 < skipped < 20
    assert scale == 2.0 ** (24 - skipped)


@pytest.mark.parametrize(
    ("precision", "pp_size", "dp_size"),
    [("fp32", 4, 1), ("fp32", 2, 2), ("bf16", 1, 1), ("bf16", 2, 2), ("fp16", 2, 1), ("fp16", 2, 2)],
)
def test_the_norm_is_that_of_the_whole_models_gradient(precision, pp_size, dp_size):
    batch = image_batch(8)
    model = tiny_vit()
    model(**batch).loss.backward()
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf).item()

    def run():
        booster, model, optimizer = boosted(
            tiny_vit(), sgd, image_batch(2), pp_size=pp_size, num_microbatches=2, precision=precision
        )
        mine = replica_part(batch, booster.plugin.layout.here.dp, dp_size)
        booster.execute_pipeline(iter([mine]), model, model_loss, optimizer)
        return optimizer.get_grad_norm()

    norms = Loopback(pp_size * dp_size).run(run)
    assert len(set(norms)) == 1
    assert norms[0] == pytest.approx(expected, rel={"fp32": 1e-5, "fp16": 1e-3, "bf16": 1e-2}[precision])


@functools.cache
def clipped_in_one_process():
    return train(tiny_vit, BATCHES, **CLIPPED)["weights"]


CLIPPED = {"make_optimizer": adamw, "max_norm": 0.1, "num_microbatches": 2}


@pytest.mark.parametrize("pp_size", [2, 4])
def test_clipping_is_torchs_and_bit_equal_over_pipeline_sizes(pp_size):
    model = tiny_vit()
    optimizer = adamw(model.parameters())
    for batch in BATCHES:
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    result = train(tiny_vit, BATCHES, pp_size=pp_size, **CLIPPED)
    assert_near(result["weights"], {name: p.detach() for name, p in model.named_parameters()}, 1e-5)
    assert_same(result["weights"], clipped_in_one_process())


def write(parameter):
    parameter.grad.mul_(100.0)


def replace(parameter):
    parameter.grad = parameter.grad * 100.0


def clear(parameter):
    parameter.grad = None


@pytest.mark.parametrize(
    ("change", "asks_before"), [(write, False), (write, True), (replace, True), (clear, False), (clear, True)]
)
def test_gradients_that_one_stage_changes_by_hand_count_in_the_norm_of_all(change, asks_before):
    batch = image_batch(4)
    model = tiny_vit()
    model(**batch).loss.backward()
    change(model.classifier.bias)
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01).item()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def run():
        booster, model, optimizer = boosted(tiny_vit(), sgd, image_batch(2), pp_size=2, max_norm=0.01)
        booster.execute_pipeline(iter([batch]), model, model_loss, optimizer)
        if asks_before:
            optimizer.get_grad_norm()
        if booster.plugin.stage_manager.is_last_stage():
            change(model.classifier.bias)
        norms = [optimizer.get_grad_norm()] if asks_before else []
        optimizer.step()
        return [*norms, optimizer.get_grad_norm()], dict(optimizer.gradients())

    (norms, first), (same, last) = Loopback(2).run(run)
    assert norms == same
    assert norms == pytest.approx([expected] * len(norms), rel=1e-5)
    assert_near({**first, **last}, gradients, 1e-7)


def test_clipping_by_value_does_not_hide_an_overflow():
    def run():
        booster, model, optimizer = boosted(tiny_vit(), sgd, image_batch(2), pp_size=2, precision="fp16")
        inject(model, 1, math.inf)
        booster.execute_pipeline(iter([image_batch(4)]), model, model_loss, optimizer)
        optimizer.clip_grad_by_value(1.0)
        optimizer.step()
        return optimizer.skipped_steps, optimizer.applied_steps

    assert Loopback(2).run(run) == [(1, 0)] * 2


def test_clipping_by_hand():
    def run():
        booster, model, optimizer = boosted(tiny_vit(), sgd, image_batch(2), pp_size=2)
        booster.execute_pipeline(iter([image_batch(4)]), model, model_loss, optimizer)
        norm = optimizer.clip_grad_by_norm(0.01)
        assert norm > 0.01
        optimizer.clip_grad_by_value(1e-3)
        gradients = booster.plugin._engine(model).buckets.gradients
        assert max(gradient.abs().max().item() for gradient in gradients.values()) <= 1.001e-3
        assert optimizer.get_grad_norm() <= 0.01

    Loopback(2).run(run)


def test_optimizer_state_survives_a_round_trip_with_masters_and_scale():
    def run():
        def start():
            return boosted(tiny_vit(), adamw, image_batch(2), precision="fp16", pp_size=2, growth_interval=2)

        def go(booster, model, optimizer, seeds):
            for seed in seeds:
                booster.execute_pipeline(iter([image_batch(4, seed)]), model, model_loss, optimizer)
                optimizer.step()

        booster, model, optimizer = start()
        go(booster, model, optimizer, range(3))
        saved = torch.load(_saved(optimizer.state_dict()), weights_only=False)
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        go(booster, model, optimizer, [3])
        other_booster, other, other_optimizer = start()
        other_optimizer.load_state_dict(saved)
        other.load_state_dict(weights)
        go(other_booster, other, other_optimizer, [3])
        assert other_optimizer.loss_scale == optimizer.loss_scale
        assert_same(other.state_dict(), model.state_dict())

    Loopback(2).run(run)


def _saved(state):
    import io

    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return buffer


@pytest.mark.parametrize("by_hand", [False, True])
def test_float64_gradients_are_exact_with_uneven_micro_batches(by_hand):
    """Three replicas of three micro-batches, of three, two and two samples: the weights are no fp32 numbers."""
    batch = {name: value.double() if value.is_floating_point() else value for name, value in image_batch(7).items()}

    def run():
        booster, model, optimizer = boosted(tiny_vit().double(), sgd, batch, num_microbatches=3)
        if by_hand:
            booster.backward(model(**batch).loss / 7, optimizer)
        else:
            booster.execute_pipeline(iter([batch]), model, lambda outputs, _: outputs.loss / 7, optimizer)
        return dict(optimizer.gradients())

    model = tiny_vit().double()
    (model(**batch).loss / 7).backward()
    assert_near(Loopback(3).run(run)[0], {name: p.grad for name, p in model.named_parameters()}, 1e-15)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_hundred_updates_of_a_ten_thousandth_add_up_as_in_fp32(precision):
    """The gradient is the same at every step, and exact in half precision: only the updates are compared."""
    steps, rows = 100, torch.tensor([[0.5, -0.25, 1.0, 2.0]])

    def run(precision):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 8)
        start = model.weight.detach().clone()
        optimizer = functools.partial(torch.optim.SGD, lr=1e-4 * start.abs().mean().item())
        booster, model, optimizer = boosted(model, optimizer, (rows,), precision=precision)
        for _ in range(steps):
            booster.execute_pipeline(iter([(rows,)]), model, lambda outputs, _: outputs.sum(), optimizer)
            optimizer.step()
        return start, masters_of(booster, model).get("weight", model.weight).detach()

    ((start, full),) = Loopback(1).run(lambda: run("fp32"))
    ((_, half),) = Loopback(1).run(lambda: run(precision))
    assert (full - start).abs().max() > 1e-2 * start.abs().mean()
    torch.testing.assert_close(half, full, rtol=1e-5, atol=0)


class Heads(torch.nn.Module):
    """A model whose own loss is small, and whose logits are not."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
        self.head = torch.nn.Linear(4, 64)

    def forward(self, x, labels):
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        loss = torch.nn.functional.cross_entropy(logits, labels)
        return transformers.modeling_outputs.SequenceClassifierOutput(loss=loss, logits=logits)


READERS = {
    "loss": (lambda outputs, _: outputs.loss, 0),
    "container only": (lambda outputs, _: outputs.loss * (len(outputs.to_tuple()) == 2 and outputs[1].shape[1] > 0), 0),
    "attribute": (lambda outputs, inputs: torch.nn.functional.cross_entropy(outputs.logits, inputs["labels"]), 1),
    "key": (lambda outputs, inputs: torch.nn.functional.cross_entropy(outputs["logits"], inputs["labels"]), 1),
    "index": (lambda outputs, inputs: (outputs[1] ** 2).mean(), 1),
    "tuple": (lambda outputs, inputs: (outputs.to_tuple()[1] ** 2).mean(), 1),
    "dtype": (lambda outputs, inputs: (outputs.logits.to(torch.float32).float() ** 2).mean(), 1),
}


@pytest.mark.covering
@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("name", READERS)
def test_logits_are_widened_only_where_the_criterion_reads_them(name, tp_size, monkeypatch):
    criterion, reads = READERS[name]
    widened, seen = [], []

    def noting(like, make, *, dtype, device):
        return deferred(like, lambda: (widened.append(tuple(like.shape)), make())[1], dtype=dtype, device=device)

    def watched(outputs, inputs):
        seen.append((type(outputs).__name__, outputs.logits.dtype, outputs.logits.requires_grad))
        return criterion(outputs, inputs)

    watched.reduction = "mean"
    batch = {"x": torch.randn(4, 4), "labels": torch.tensor([1, 2, 3, 4])}
    runs = []
    for wrapper in (noting, lambda like, make, **_: make()):
        monkeypatch.setattr(criterion_module, "deferred", wrapper)
        plan = {"tensor_parallel_plan": {"head": "gathered_column"}} if tp_size > 1 else {}
        settings = {"num_microbatches": 2, "precision": "bf16", "tp_size": tp_size, **plan}
        runs.append(train(Heads, [batch], criterion=watched, **settings))
    assert widened == [(2, 64)] * 2 * reads * tp_size
    assert set(seen) == {("SequenceClassifierOutput", torch.float32, True)}
    assert runs[0]["losses"] == runs[1]["losses"]
    assert_same(runs[0]["gradients"], runs[1]["gradients"])
    assert runs[0]["gradients"]["head.weight"].abs().max() > 0


def test_outputs_that_a_script_asks_for_are_plain_and_in_fp32():
    batch = {"x": torch.randn(4, 4), "labels": torch.tensor([1, 2, 3, 4])}
    booster, model, _ = boosted(Heads(), None, batch, precision="bf16")
    with torch.no_grad():
        outputs = booster.execute_pipeline(iter([batch]), model, model_loss, return_outputs=True)["outputs"]
    assert type(outputs.logits) is torch.Tensor
    assert outputs.logits.dtype is torch.float32
