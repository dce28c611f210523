"""Promise 1: the layout never changes the result."""

import functools

import pytest
import torch
from processes import run_ranks
from support import assert_near, assert_same, image_batch, tiny_vit, train

NUM_STEPS = 3
BATCHES = [image_batch(12, seed) for seed in range(NUM_STEPS)]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters):
    # A large eps: where a gradient is zero but for rounding (a key's bias), Adam would blow the rounding up.
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-5)


OPTIMIZERS = {"sgd": sgd, "adamw": adamw}
# The optimizer comes after the micro-batches, so every number of them goes with one optimizer. 7 are uneven.
RUNS = [("sgd", 1), ("sgd", 4), ("sgd", 7), ("adamw", 3)]
# Each run with every number of stages and of replicas, and those with each other.
LAYOUTS = [
    (*run, pp_size, 1 + (number + place) % 2)
    for number, run in enumerate(RUNS)
    for place, pp_size in enumerate((1, 2, 4))
]


@functools.cache
def one_process(optimizer, num_microbatches, dropout):
    return train(
        functools.partial(tiny_vit, dropout),
        BATCHES,
        make_optimizer=OPTIMIZERS[optimizer],
        num_microbatches=num_microbatches,
    )


@functools.cache
def plain_torch(optimizer):
    """A loop that knows nothing of hybridpp."""
    model = tiny_vit()
    stepper = OPTIMIZERS[optimizer](model.parameters())
    losses, gradients = [], {}
    for batch in BATCHES:
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss.item())
        gradients = gradients or {name: p.grad.clone() for name, p in model.named_parameters()}
        stepper.step()
        stepper.zero_grad()
    return {"losses": losses, "gradients": gradients, "weights": dict(model.named_parameters())}


@pytest.mark.covering
@pytest.mark.parametrize("pp_size", [2, 4])
@pytest.mark.parametrize(("optimizer", "num_microbatches"), RUNS)
def test_every_pipeline_size_gives_one_process_bit_for_bit_with_dropout(optimizer, pp_size, num_microbatches):
    expected = one_process(optimizer, num_microbatches, 0.1)
    actual = train(
        functools.partial(tiny_vit, 0.1),
        BATCHES,
        make_optimizer=OPTIMIZERS[optimizer],
        pp_size=pp_size,
        num_microbatches=num_microbatches,
    )
    assert actual["losses"] == expected["losses"] * pp_size
    assert_same(actual["gradients"], expected["gradients"])
    assert_same(actual["weights"], expected["weights"])


@pytest.mark.covering("pp_size dp_size")
@pytest.mark.parametrize(("optimizer", "num_microbatches", "pp_size", "dp_size"), LAYOUTS)
def test_every_layout_gives_plain_torch(optimizer, pp_size, dp_size, num_microbatches):
    expected = plain_torch(optimizer)
    actual = train(
        tiny_vit,
        BATCHES,
        make_optimizer=OPTIMIZERS[optimizer],
        pp_size=pp_size,
        dp_size=dp_size,
        num_microbatches=num_microbatches,
    )
    for step, loss in enumerate(expected["losses"]):
        replicas = {losses[step] for losses in actual["losses"]}
        assert sum(replicas) / len(replicas) == pytest.approx(loss, abs=1e-6)
    assert_near(actual["gradients"], expected["gradients"])
    assert_near(actual["weights"], {name: p.detach() for name, p in expected["weights"].items()})


def test_replicas_draw_the_dropout_of_one_process_on_the_same_microbatches():
    expected = one_process("sgd", 4, 0.1)
    actual = train(
        functools.partial(tiny_vit, 0.1), BATCHES, make_optimizer=sgd, dp_size=2, pp_size=2, num_microbatches=2
    )
    assert_near(actual["gradients"], expected["gradients"])
    assert_near(actual["weights"], expected["weights"])


def _processes_train():
    from support import boosted, gradients_of, model_loss, replica_part

    from hybridpp.cluster import current_world

    booster, model, optimizer = boosted(tiny_vit(0.1), sgd, image_batch(2), pp_size=2, num_microbatches=3)
    replica = booster.plugin.layout.here.dp
    data = iter([replica_part(batch, replica, 2) for batch in BATCHES])
    losses, gradients = [], {}
    for step in range(NUM_STEPS):
        losses.append(booster.execute_pipeline(data, model, model_loss, optimizer)["loss"].item())
        if step == 0:
            gradients = gradients_of(booster, model)
        optimizer.step()
    return losses, gradients, {name: p.detach() for name, p in model.named_parameters()}, current_world().rank


def test_processes_give_what_the_in_process_ranks_give():
    expected = train(
        functools.partial(tiny_vit, 0.1), BATCHES, make_optimizer=sgd, dp_size=2, pp_size=2, num_microbatches=3
    )
    ranks = run_ranks(_processes_train, 4)
    assert [losses for losses, *_ in ranks] == expected["losses"]
    for _, gradients, weights, rank in ranks:
        assert set(weights) == expected["names"][rank]
        assert_near(gradients, {name: expected["gradients"][name] for name in gradients})
        assert_near(weights, {name: expected["weights"][name] for name in weights})
