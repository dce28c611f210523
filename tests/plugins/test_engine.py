"""One `execute_pipeline` after another: any batch, any shape, any mode, one code path."""

import functools
import itertools

import pytest
import torch
from support import (
    IMAGE,
    NUM_LABELS,
    assert_near,
    assert_same,
    boosted,
    gradients_of,
    image_batch,
    model_loss,
    sgd,
    small_vit,
    tiny_vit,
    train,
)
from torch import nn

from hybridpp.cluster import Loopback


def on_ranks(pp_size, function, *, dp_size=1):
    return Loopback(pp_size * dp_size).run(function)


@pytest.mark.parametrize(
    ("num_samples", "num_microbatches", "pp_size"),
    [
        *((1, 1, 2), (1, 4, 4), (2, 4, 1), (2, 4, 2), (5, 3, 1), (7, 2, 4), (9, 9, 2)),
        *(pytest.param(*case, marks=pytest.mark.matrix) for case in ((1, 4, 2), (5, 3, 4), (7, 2, 2))),
    ],
)
def test_any_batch_size_gives_the_mean_gradient_of_the_whole_batch(pp_size, num_samples, num_microbatches):
    batch = image_batch(num_samples)
    model = tiny_vit()
    loss = model(**batch).loss
    loss.backward()
    result = train(tiny_vit, [batch], pp_size=pp_size, num_microbatches=num_microbatches)
    assert result["losses"] == [[pytest.approx(loss.item(), abs=1e-6)]] * pp_size
    assert_near(result["gradients"], {name: p.grad for name, p in model.named_parameters()})


def test_by_size_the_last_microbatch_may_be_smaller():
    batches = [image_batch(7)]
    by_size = train(small_vit, batches, pp_size=2, microbatch_size=3)
    whole = train(small_vit, batches, pp_size=2, num_microbatches=1)
    assert_near(by_size["gradients"], whole["gradients"])


@pytest.mark.parametrize("pp_size", [1, 2])
def test_sizes_change_between_steps_and_evaluation_runs_in_between(pp_size):
    sizes = [8, 3, 8, 1, 12]

    def run(evaluate):
        booster, model, optimizer = boosted(small_vit(0.1), sgd, image_batch(2), pp_size=pp_size, num_microbatches=3)
        losses = []
        for step, size in enumerate(sizes):
            batch = image_batch(size, step)
            losses.append(booster.execute_pipeline(iter([batch]), model, model_loss, optimizer)["loss"].item())
            optimizer.step()
            if evaluate:
                model.eval()
                with torch.no_grad():
                    small = booster.execute_pipeline(iter([image_batch(2)]), model, model_loss, return_outputs=True)
                model.train()
                assert small["outputs"] is None or len(small["outputs"].logits) == 2
        return losses

    with_evaluation = on_ranks(pp_size, functools.partial(run, True))
    without = on_ranks(pp_size, functools.partial(run, False))
    assert with_evaluation == without, "evaluating must not move training, dropout included"


def test_image_sizes_may_change_between_steps():
    def resized(size):
        batch = image_batch(4)
        return batch | {"pixel_values": torch.randn(4, 3, size, size), "interpolate_pos_encoding": True}

    batches = [resized(IMAGE), resized(2 * IMAGE), resized(IMAGE), resized(3 * IMAGE)]
    one = train(tiny_vit, batches, num_microbatches=2)
    two = train(tiny_vit, batches, num_microbatches=2, pp_size=4)
    assert two["losses"] == one["losses"] * 4
    assert_near(two["weights"], one["weights"], 0)


@pytest.mark.parametrize("pp_size", [1, 2, 4])
def test_evaluation_gives_the_models_own_loss_and_outputs(pp_size):
    batch = image_batch(7)
    model = tiny_vit().eval()
    with torch.no_grad():
        expected = model(**batch)

    def run():
        booster, model, _ = boosted(tiny_vit().eval(), None, image_batch(2), pp_size=pp_size, num_microbatches=3)
        with torch.no_grad():
            result = booster.execute_pipeline(iter([batch]), model, model_loss, return_outputs=True)
        assert not any(parameter.grad is not None for parameter in model.parameters())
        return result

    results = on_ranks(pp_size, run)
    for result in results:
        assert result["loss"].dtype == torch.float32
        assert not result["loss"].requires_grad
        assert result["loss"].item() == pytest.approx(expected.loss.item(), abs=1e-6)
    for result in results[:-1]:
        assert result["outputs"] is None
    outputs = results[-1]["outputs"]
    torch.testing.assert_close(outputs.logits, expected.logits)
    assert outputs.loss.item() == pytest.approx(expected.loss.item(), abs=1e-6)


def test_a_ragged_evaluation_is_the_exact_mean_not_the_mean_of_means():
    batch = image_batch(5)
    with torch.no_grad():
        expected = small_vit()(**batch).loss.item()

    def run():
        booster, model, _ = boosted(small_vit(), None, image_batch(2), microbatch_size=4)
        with torch.no_grad():
            return booster.execute_pipeline(iter([batch]), model, model_loss)["loss"].item()

    assert on_ranks(1, run) == [pytest.approx(expected, abs=1e-6)]


def test_without_loss_only_the_outputs_are_made():
    def run():
        booster, model, _ = boosted(small_vit(), None, image_batch(2), pp_size=2)
        with torch.no_grad():
            data = iter([image_batch(3)["pixel_values"]])
            return booster.execute_pipeline(data, model, return_loss=False, return_outputs=True)

    first, last = on_ranks(2, run)
    assert first == {"loss": None, "num_items": None, "outputs": None}
    assert last["loss"] is None
    assert last["outputs"].logits.shape == (3, NUM_LABELS)


class MaybeMasked(nn.Module):
    """Called like many: with an argument that most scripts leave out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 1)

    def forward(self, x, mask=None):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x if mask is None else x * mask)


class Huber(nn.Module):
    def forward(self, predicted, depth):
        return nn.functional.huber_loss(predicted, depth)


@pytest.mark.parametrize("pp_size", [1, 2])
@pytest.mark.parametrize(
    "criterion",
    [lambda o, i: nn.functional.huber_loss(o, i[1]), lambda o, y_true: nn.functional.huber_loss(o, y_true), Huber()],
)
def test_the_label_of_a_pair_never_becomes_an_optional_argument(pp_size, criterion):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(4, 4, generator=generator), torch.randn(4, 1, generator=generator)
    plain = MaybeMasked()
    loss = nn.functional.huber_loss(plain(x), y)
    loss.backward()

    def evaluated(booster, model, optimizer):
        with torch.no_grad():
            return booster.execute_pipeline(iter([(x, y)]), model, return_loss=False, return_outputs=True)["outputs"]

    result = train(MaybeMasked, [(x, y)], criterion=criterion, pp_size=pp_size, num_microbatches=2, after=evaluated)
    assert result["losses"] == [[pytest.approx(loss.item(), abs=1e-6)]] * pp_size
    assert_near(result["gradients"], {name: p.grad for name, p in plain.named_parameters()})
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter -= 0.1 * parameter.grad
    assert_near({"outputs": result["after"][-1]}, {"outputs": plain(x)})


def mlp():
    torch.manual_seed(0)
    widths = [6, 8, 8, 8, 2]
    layers = []
    for width, after in itertools.pairwise(widths):
        layers += [nn.Linear(width, after), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers[:-1])


def squares(outputs, inputs):
    return outputs.square().mean()


@pytest.mark.covering
@pytest.mark.parametrize("pack", [lambda x: x, lambda x: (x,), lambda x: [x], lambda x: {"input": x}])
@pytest.mark.parametrize("pp_size", [1, 2, 4])
def test_tensor_tuple_list_and_dict_batches_call_the_model(pack, pp_size):
    data = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    model = mlp()
    loss = squares(model(data), None)
    loss.backward()
    result = train(mlp, [pack(data)], pp_size=pp_size, num_microbatches=2, criterion=squares)
    assert result["losses"] == [[pytest.approx(loss.item())]] * pp_size
    assert_near(result["gradients"], {name: p.grad for name, p in model.named_parameters()})


def test_the_criterion_sees_the_microbatchs_own_inputs():
    seen = []

    def criterion(outputs, inputs):
        seen.append(inputs["labels"].tolist())
        return outputs.loss

    batch = image_batch(5)
    train(small_vit, [batch], pp_size=2, num_microbatches=2, criterion=criterion)
    labels = batch["labels"].tolist()
    assert seen == [labels[:3], labels[3:]]


def test_the_users_random_numbers_do_not_move():
    def run():
        booster, model, optimizer = boosted(small_vit(0.1), sgd, image_batch(2))
        torch.manual_seed(5)
        before = torch.rand(1)
        torch.manual_seed(5)
        booster.execute_pipeline(iter([image_batch(4)]), model, model_loss, optimizer)
        return torch.equal(torch.rand(1), before)

    assert on_ranks(1, run) == [True]


def test_a_stage_cannot_be_called_by_itself():
    def run():
        _, model, _ = boosted(small_vit(), None, image_batch(2), pp_size=2)
        with pytest.raises(RuntimeError, match=r"holds stage \d of 2 only.*Call booster.execute_pipeline"):
            model(**image_batch(2))

    on_ranks(2, run)


def test_class_and_names_are_kept_and_every_parameter_has_one_owner():
    whole = {name: parameter.shape for name, parameter in tiny_vit().named_parameters()}

    def run():
        _, model, _ = boosted(tiny_vit(), sgd, image_batch(2), pp_size=4)
        assert type(model) is type(tiny_vit())
        assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}
        return {name: parameter.shape for name, parameter in model.named_parameters()}

    owned = on_ranks(4, run)
    assert sum(map(len, owned)) == len(whole)
    assert {name: shape for rank in owned for name, shape in rank.items()} == whole
    assert all(owned), "every stage holds something"


class WritesToItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.ReLU(inplace=True), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)])

    def forward(self, x):
        x += 1
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("pp_size", [1, 2, 4])
def test_a_model_that_writes_to_its_input_sees_each_input_once(pp_size):
    def data():
        return torch.randn(6, 6, generator=torch.Generator().manual_seed(0))

    model = WritesToItsInput()
    squares(model(data()), None).backward()

    def run():
        booster, model, optimizer = boosted(WritesToItsInput(), sgd, data()[:1], pp_size=pp_size, num_microbatches=3)
        booster.execute_pipeline(iter([data()]), model, squares, optimizer)
        return gradients_of(booster, model)

    gradients = {}
    for part in on_ranks(pp_size, run):
        gradients.update(part)
    assert_near(gradients, {name: p.grad for name, p in model.named_parameters()})


@pytest.mark.covering
@pytest.mark.parametrize("pp_size", [1, 2])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_draws_the_same_dropout_again(pp_size, use_reentrant):
    def checkpointed():
        model = small_vit(0.1)
        new_name = hasattr(model, "activation_checkpointing_enable")  # since transformers 5.20 or so
        enable = model.activation_checkpointing_enable if new_name else model.gradient_checkpointing_enable
        enable({"use_reentrant": use_reentrant})
        return model

    batches = [image_batch(8, seed) for seed in range(2)]
    without = train(functools.partial(small_vit, 0.1), batches, num_microbatches=2)
    with_it = train(checkpointed, batches, pp_size=pp_size, num_microbatches=2)
    assert with_it["losses"][0] == without["losses"][0]
    assert_same(with_it["gradients"], without["gradients"])
