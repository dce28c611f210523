"""What a gradient is: the mean over the global batch, whatever is frozen, shared, uneven or spread over calls."""

import functools

import pytest
import torch
from support import (
    assert_near,
    boosted,
    gradients_of,
    image_batch,
    model_loss,
    replica_part,
    sgd,
    small_vit,
    tiny_vit,
    train,
)
from torch import nn

from hybridpp.cluster import Loopback, current_world
from hybridpp.errors import ConfigError


def whole_gradients(make_model, batch, criterion=model_loss):
    model = make_model()
    criterion(model(**batch), batch).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def collect(num_ranks, run):
    whole = {}
    for gradients in Loopback(num_ranks).run(run):
        whole.update(gradients)
    return whole


def test_replicas_with_different_sample_counts_weigh_by_count():
    batch = image_batch(8)

    def run():
        booster, model, optimizer = boosted(small_vit(), sgd, image_batch(2), pp_size=2, num_microbatches=2)
        first = booster.plugin.layout.here.dp == 0
        mine = {name: value[:5] if first else value[5:] for name, value in batch.items()}
        booster.execute_pipeline(iter([mine]), model, model_loss, optimizer)
        return gradients_of(booster, model)

    assert_near(collect(4, run), whole_gradients(small_vit, batch))


class CountedLoss:
    """The mean over labels that are not ignored, of which it tells the number."""

    def __call__(self, outputs, inputs):
        return nn.functional.cross_entropy(outputs.logits, inputs["labels"], ignore_index=-100)

    def num_items(self, inputs):
        return (inputs["labels"] != -100).sum()


@pytest.mark.parametrize("pp_size", [1, 2])
def test_a_criterion_may_say_what_its_mean_is_taken_over(pp_size):
    batch = image_batch(8)
    batch["labels"][[0, 1, 2, 5]] = -100  # the first micro-batch of two holds nothing that counts

    def make_inputs(part):
        return {"pixel_values": part["pixel_values"], "labels": part["labels"]}

    def make_model():
        model = small_vit()
        # The model's own loss knows no ignored label here; only the criterion is asked.
        original = model.forward
        model.forward = lambda pixel_values, labels: original(pixel_values)
        return model

    criterion = CountedLoss()
    expected = whole_gradients(make_model, batch, criterion)

    def run():
        booster, model, optimizer = boosted(
            make_model(), sgd, make_inputs(image_batch(2)), pp_size=pp_size, num_microbatches=2
        )
        mine = replica_part(batch, booster.plugin.layout.here.dp, 2)
        loss = booster.execute_pipeline(iter([make_inputs(mine)]), model, criterion, optimizer)["loss"]
        labels = mine["labels"]
        with torch.no_grad():
            exact = criterion(make_model()(**make_inputs(mine)), {"labels": labels})
        assert loss.item() == pytest.approx(exact.item(), abs=1e-6)
        return gradients_of(booster, model)

    assert_near(collect(2 * pp_size, run), expected)


class SummedLoss(nn.Module):
    """Like a Hugging Face model that is told the number of items: its loss is a sum divided by it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x, labels, num_items_in_batch=None):
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = nn.functional.cross_entropy(self.layers(x), labels, reduction=reduction)
        return loss if num_items_in_batch is None else loss / num_items_in_batch


@pytest.mark.parametrize("num_items", [7, torch.tensor(7)])
def test_num_items_in_batch_makes_the_losses_parts_of_a_sum(num_items):
    generator = torch.Generator().manual_seed(0)
    batch = {"x": torch.randn(7, 4, generator=generator), "labels": torch.randint(0, 3, (7,), generator=generator)}
    expected = whole_gradients(SummedLoss, batch, lambda outputs, inputs: outputs)
    told = batch | {"num_items_in_batch": num_items}
    result = train(SummedLoss, [told], criterion=lambda outputs, inputs: outputs, pp_size=2, num_microbatches=3)
    assert_near(result["gradients"], expected)
    exact = SummedLoss()(**batch).item()
    assert result["losses"] == [[pytest.approx(exact, abs=1e-6)]] * 2


@pytest.mark.parametrize("sync", ["always", "last", "never"])
def test_accumulation_over_calls_equals_one_big_batch(sync):
    batch = image_batch(12)
    expected = whole_gradients(small_vit, batch)

    def run():
        booster, model, optimizer = boosted(small_vit(), sgd, image_batch(2), pp_size=2, num_microbatches=2)
        mine = replica_part(batch, booster.plugin.layout.here.dp, 2)
        third = lambda outputs, inputs: outputs.loss / 3  # noqa: E731
        for part in range(3):
            data = iter([replica_part(mine, part, 3)])
            if sync == "always" or (sync == "last" and part == 2):
                booster.execute_pipeline(data, model, third, optimizer)
            else:
                with booster.no_sync(model, optimizer):
                    booster.execute_pipeline(data, model, third, optimizer)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.step()
        return {name: (before[name] - p.detach()) / 0.1 for name, p in model.named_parameters()}

    assert_near(collect(4, run), expected, 1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero_grad", [False, True])
def test_step_uses_the_gradients_up_with_and_without_zero_grad(precision, zero_grad):
    def run():
        booster, model, optimizer = boosted(small_vit(), sgd, image_batch(2), precision=precision)
        for _ in range(2):
            booster.execute_pipeline(iter([image_batch(4)]), model, model_loss, optimizer)
            optimizer.step()
            if zero_grad:
                optimizer.zero_grad()
        return {name: p.detach().float() for name, p in model.named_parameters()}

    (weights,) = Loopback(1).run(run)
    model = small_vit()
    optimizer = sgd(model.parameters())
    for _ in range(2):
        model(**image_batch(4)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = {name: p.detach() for name, p in model.named_parameters()}
    assert_near(weights, expected, 1e-6 if precision == "fp32" else 3e-2)


def test_two_equal_calls_double_the_gradient_and_evaluation_keeps_it():
    def run():
        booster, model, optimizer = boosted(small_vit(), sgd, image_batch(2), pp_size=2, num_microbatches=2)
        booster.execute_pipeline(iter([image_batch(4)]), model, model_loss, optimizer)
        once = gradients_of(booster, model)
        with torch.no_grad():
            booster.execute_pipeline(iter([image_batch(3)]), model, model_loss)
        booster.execute_pipeline(iter([image_batch(4)]), model, model_loss, optimizer)
        twice = gradients_of(booster, model)
        assert_near({name: 2 * gradient for name, gradient in once.items()}, twice)

    Loopback(4).run(run)


@pytest.mark.parametrize("dp_size", [1, 2])
def test_backward_of_a_loss_computed_by_hand_is_the_mean_over_replicas(dp_size):
    batch = image_batch(8)
    expected = whole_gradients(small_vit, batch)

    def run():
        booster, model, optimizer = boosted(small_vit(), sgd, image_batch(2))
        mine = replica_part(batch, current_world().rank, dp_size)
        booster.backward(model(**mine).loss, optimizer)
        return gradients_of(booster, model)

    assert_near(collect(dp_size, run), expected)


def frozen_vit(*patterns):
    model = tiny_vit()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = not any(pattern in name for pattern in patterns)
    return model


FIRST, BLOCKS, LAST, BIASES = (
    ("embeddings", "layers.0."),
    ("layers.",),
    ("classifier", "layers.3.", "layernorm."),
    ("bias",),
)


@pytest.mark.parametrize(
    ("frozen", "pp_size"),
    [(FIRST, 1), (BLOCKS, 2), (BIASES, 2), (FIRST, 4), (BLOCKS, 4), (LAST, 4)],
)
def test_frozen_parameters_and_whole_frozen_stages(pp_size, frozen):
    make_model = functools.partial(frozen_vit, *frozen)
    batch = image_batch(6)
    model = make_model()
    optimizer = sgd(model.parameters())
    model(**batch).loss.backward()
    optimizer.step()
    result = train(make_model, [batch], pp_size=pp_size, num_microbatches=3)
    assert_near(result["gradients"], {n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    assert_near(result["weights"], {n: p.detach() for n, p in model.named_parameters()})


class TiedAutoencoder(nn.Module):
    """Every weight is used twice, the first one on the first and on the last stage."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])
        self.scale = nn.Parameter(torch.ones(6))
        self.never = nn.Linear(2, 2)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        for layer in reversed(self.layers):
            x = x @ layer.weight
        return x


def squares(outputs, inputs):
    return outputs.square().mean()


@pytest.mark.covering
@pytest.mark.parametrize("dp_size", [1, 2])
@pytest.mark.parametrize("pp_size", [1, 2, 4])
def test_parameters_that_several_stages_use_get_the_sum_of_their_gradients(pp_size, dp_size):
    batches = [{"x": torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))} for seed in range(2)]
    model = TiedAutoencoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-5)
    gradients = {}
    for batch in batches:
        squares(model(**batch), None).backward()
        gradients = gradients or {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    result = train(
        TiedAutoencoder,
        batches,
        pp_size=pp_size,
        dp_size=dp_size,
        num_microbatches=2,
        criterion=squares,
        make_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-5),
    )
    used = {name: gradient for name, gradient in result["gradients"].items() if not name.startswith("never")}
    assert_near(used, gradients)
    assert_near(result["weights"], {name: p.detach() for name, p in model.named_parameters()})


@pytest.mark.parametrize(("pp_size", "named"), [(1, False), (2, True), (2, False), (4, True)])
def test_every_parameter_group_keeps_its_settings(pp_size, named):
    def make_groups(model):
        decay = [(n, p) for n, p in model.named_parameters() if p.dim() > 1]
        others = [(n, p) for n, p in model.named_parameters() if p.dim() <= 1]
        strip = (lambda pairs: pairs) if named else (lambda pairs: [p for _, p in pairs])
        return [
            {"params": strip(decay), "weight_decay": 0.5, "lr": 0.02},
            {"params": strip(others), "weight_decay": 0.0, "lr": 0.2},
        ]

    model = tiny_vit()
    optimizer = torch.optim.SGD(make_groups(model), lr=1.0, momentum=0.9)
    for seed in range(2):
        model(**image_batch(6, seed)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def run():
        model = tiny_vit()
        groups = make_groups(model)
        booster, model, optimizer = boosted(
            model, lambda _: torch.optim.SGD(groups, lr=1.0, momentum=0.9), image_batch(2), pp_size=pp_size
        )
        assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.2]
        for seed in range(2):
            booster.execute_pipeline(iter([image_batch(6, seed)]), model, model_loss, optimizer)
            optimizer.step()
        return {name: p.detach() for name, p in model.named_parameters()}

    assert_near(collect(pp_size, run), {name: p.detach() for name, p in model.named_parameters()})


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam])
def test_any_torch_optimizer(cls):
    batches = [image_batch(4, seed) for seed in range(2)]
    make_optimizer = functools.partial(cls, lr=1e-3, eps=1e-5)
    one = train(small_vit, batches, make_optimizer=make_optimizer, num_microbatches=2)
    two = train(small_vit, batches, make_optimizer=make_optimizer, num_microbatches=2, pp_size=2)
    assert_near(two["weights"], one["weights"], 0)


def test_gradients_are_readable_as_grad_until_the_next_backward():
    def run():
        booster, model, optimizer = boosted(small_vit(), sgd, image_batch(2), num_microbatches=2)
        booster.execute_pipeline(iter([image_batch(4)]), model, model_loss, optimizer)
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    (gradients,) = Loopback(1).run(run)
    assert_near(gradients, whole_gradients(small_vit, image_batch(4)))


@pytest.mark.parametrize("pp_size", [1, 2])
def test_a_user_may_clear_gradients_the_torch_way(pp_size):
    def run():
        booster, model, optimizer = boosted(small_vit(), sgd, image_batch(2), pp_size=pp_size)
        booster.execute_pipeline(iter([image_batch(4, 1)]), model, model_loss, optimizer)
        model.zero_grad()
        booster.execute_pipeline(iter([image_batch(4)]), model, model_loss, optimizer)
        return gradients_of(booster, model)

    assert_near(collect(pp_size, run), whole_gradients(small_vit, image_batch(4)))


_ROWS, _CLASSES = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 0])


def _small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def _with_own_gradients(model, optimizer, *, zeroed, in_place=False):
    for _ in range(3):
        if zeroed == "before":
            optimizer.zero_grad()
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(nn.functional.cross_entropy(model(_ROWS), _CLASSES), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if in_place and parameter.grad is not None:
                parameter.grad.copy_(gradient)
            else:
                parameter.grad = gradient
        optimizer.step()
        if zeroed == "after":
            optimizer.zero_grad()
    return dict(model.named_parameters())


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("zeroed", ["before", "after", "never"])
def test_gradients_that_a_script_makes_on_one_rank_are_those_of_a_step(zeroed, in_place):
    model = _small()
    expected = _with_own_gradients(model, sgd(model.parameters()), zeroed=zeroed, in_place=in_place)
    _, model, optimizer = boosted(_small(), sgd, _ROWS)
    assert_near(_with_own_gradients(model, optimizer, zeroed=zeroed, in_place=in_place), expected)


def test_gradients_that_a_script_makes_may_be_clipped_before_the_step():
    _, model, optimizer = boosted(_small(), sgd, _ROWS)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert optimizer.clip_grad_by_norm(0.5) == pytest.approx(sum(one.numel() for one in before) ** 0.5)
    optimizer.step()
    moved = torch.cat([(one - two).flatten() for one, two in zip(before, model.parameters(), strict=True)])
    assert moved.norm().item() == pytest.approx(0.1 * 0.5, rel=1e-4)


@pytest.mark.parametrize("zeroed", ["before", "after", "never"])
@pytest.mark.parametrize(
    ("number", "settings"),
    [(2, {}), (2, {"zero_stage": 1}), (2, {"zero_stage": 3}), (1, {"precision": "bf16"})],
    ids=str,
)
def test_gradients_that_a_script_makes_elsewhere_are_refused(number, settings, zeroed):
    def run():
        _, model, optimizer = boosted(_small(), sgd, _ROWS, **settings)
        with pytest.raises(ConfigError, match=r"made gradients \(0.bias.grad\) without booster.backward"):
            _with_own_gradients(model, optimizer, zeroed=zeroed)

    Loopback(number).run(run)


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_gradients_of_replicas_are_put_together_by_a_backward_pass(zero_stage):
    whole = _small()
    nn.functional.cross_entropy(whole(_ROWS), _CLASSES).backward()

    def run():
        booster, model, optimizer = boosted(_small(), sgd, _ROWS, zero_stage=zero_stage)
        with booster.unsharded(model):
            rows, classes = (one.chunk(2)[current_world().rank] for one in (_ROWS, _CLASSES))
            parameters = list(model.parameters())
            gradients = torch.autograd.grad(nn.functional.cross_entropy(model(rows), classes), parameters)
            pairs = zip(parameters, gradients, strict=True)
            booster.backward(sum((p * g).sum() for p, g in pairs), optimizer, num_items=1)
        return gradients_of(booster, model)

    for found in Loopback(2).run(run):
        assert_near(found, {name: one.grad for name, one in whole.named_parameters()})


@pytest.mark.parametrize("before", ["nothing", "zero_grad", "backward", "step"])
def test_a_backward_pass_of_the_script_is_refused_at_any_time(before):
    def run():
        booster, model, optimizer = boosted(_small(), sgd, _ROWS)
        if before == "zero_grad":
            optimizer.zero_grad()
        if before in ("backward", "step"):
            booster.backward(model(_ROWS).square().mean(), optimizer)
        if before == "step":
            optimizer.step()
        with pytest.raises(ConfigError, match="a backward pass outside of hybridpp"):
            model(_ROWS).square().mean().backward()

    Loopback(2).run(run)


@pytest.mark.parametrize("settings", [{}, {"zero_stage": 2}, {"zero_stage": 3}], ids=str)
def test_two_losses_may_go_back_through_one_graph(settings):
    whole = _small()
    outputs = whole(_ROWS)
    (nn.functional.cross_entropy(outputs, _CLASSES) + outputs.square().mean()).backward()

    def run():
        booster, model, optimizer = boosted(_small(), sgd, _ROWS, **settings)
        rows, classes = (one.chunk(2)[current_world().rank] for one in (_ROWS, _CLASSES))
        outputs = model(rows)
        booster.backward(nn.functional.cross_entropy(outputs, classes), optimizer, retain_graph=True)
        booster.backward(outputs.square().mean(), optimizer)
        return gradients_of(booster, model)

    for found in Loopback(2).run(run):
        assert_near(found, {name: one.grad for name, one in whole.named_parameters()})
