"""Of what column layers read joined, only the shard is kept, and it is joined again while something is computed."""

import re

import pytest
import torch
from divided_models import VIT
from sequence_models import SHARDS, Block, Net, images, sequences, squares, vit
from support import assert_same, boosted, sgd
from torch.nn import functional

from hybridpp.cluster import Loopback, current_world
from hybridpp.cluster.loopback_group import LoopbackGroup
from hybridpp.pipeline import WeightGradients
from hybridpp.tensor_parallel import TensorParallelContext

PLAN = {"*.up": "column", "*.down": "row"}


@pytest.fixture
def joined(monkeypatch):
    """The memory of every joined activation."""
    storages, join = [], TensorParallelContext.gather_from_sp_region

    def noted(context, shard):
        whole = join(context, shard)
        if not isinstance(whole, torch._subclasses.FakeTensor):
            storages.append(whole.untyped_storage())
        return whole

    monkeypatch.setattr(TensorParallelContext, "gather_from_sp_region", noted)
    return storages


def others_that_hold(storages):
    """How many hold each, beside the list."""
    return [torch._C._storage_Use_Count(storage._cdata) - 1 for storage in storages]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_no_joined_activation_outlives_the_forward_of_a_step(joined, schedule):
    held = []

    def rank():
        booster, model, optimizer = boosted(
            vit(), sgd, images(2), tensor_parallel_plan=VIT, schedule=schedule, **SHARDS
        )
        del joined[:]

        def criterion(outputs, inputs):
            held.append(others_that_hold(joined))
            return outputs.loss

        booster.execute_pipeline(iter([images(2)]), model, criterion, optimizer)

    Loopback(2).run(rank)
    # Two ranks that take turns, two blocks, two of each.
    assert held[-1] == [0] * 8


def test_no_joined_activation_outlives_a_forward_by_hand(joined):
    def rank():
        _, model, _ = boosted(vit(), sgd, images(2), tensor_parallel_plan=VIT, **SHARDS)
        del joined[:]
        return model(**images(2)).loss

    losses = Loopback(2).run(rank)
    assert all(loss.requires_grad for loss in losses)
    assert others_that_hold(joined) == [0] * 8


def test_a_graph_that_is_kept_can_be_gone_back_through_again():
    def rank():
        _, model, _ = boosted(Net(Block, 2), sgd, sequences(5), tensor_parallel_plan=PLAN, **SHARDS)
        loss = squares(model(sequences(5)), None)
        weights = dict(model.named_parameters())
        return [
            dict(zip(weights, torch.autograd.grad(loss, weights.values(), retain_graph=True), strict=True))
            for _ in range(2)
        ]

    for once, again in Loopback(2).run(rank):
        assert once["blocks.0.up.weight"].any()
        assert_same(again, once)


class Overwriting(Block):
    """Writes to what a layer has read: autograd refuses that in one process, too."""

    def forward(self, x):
        y = self.norm(x)
        up = self.up(y)
        if y.shape[1] in self.lengths:
            y.mul_(2)
        return x + self.down(functional.relu(up)) + y


def overwriting(lengths):
    model = Net(Overwriting, 1)
    model.blocks[0].lengths = lengths
    return model


def test_a_shard_that_is_written_to_after_a_layer_has_read_it_is_refused():
    def rank(by_hand):
        # Not on the sample, which would be refused at boost.
        sample, batch = sequences(5), sequences(8)
        booster, model, optimizer = boosted(overwriting({4}), sgd, sample, tensor_parallel_plan=PLAN, **SHARDS)
        if by_hand:
            booster.backward(squares(model(batch), None), optimizer)
        else:
            booster.execute_pipeline(iter([batch]), model, squares, optimizer)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares(overwriting({8})(sequences(8)), None).backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Loopback(2).run(lambda: rank(by_hand=False))
    text = "an activation that the backward pass needs was written to in place after a sharded layer had read it."
    with pytest.raises(RuntimeError, match=re.escape(text)):
        Loopback(2).run(lambda: rank(by_hand=True))


class Noted:
    """A communication under way that says when it is waited for."""

    def __init__(self, pending, say):
        self._pending, self._say = pending, say

    def wait(self):
        self._say()
        return self._pending.wait()


@pytest.fixture
def events(monkeypatch):
    """What the first rank starts and waits for, and which weights' gradients it computes between."""
    noted = []

    def noting(name, own):
        def start(group, tensor, *others):
            if tensor.dim() != 3 or current_world().rank:
                return own(group, tensor, *others)
            what = name.removeprefix("start_")
            noted.append(f"start {what}")
            return Noted(own(group, tensor, *others), lambda: noted.append(f"wait {what}"))

        return start

    for name in ("start_all_gather", "start_reduce_scatter", "all_reduce"):
        monkeypatch.setattr(LoopbackGroup, name, noting(name, getattr(LoopbackGroup, name)))
    add = WeightGradients._add

    def adding(weights, name, *others, **options):
        if name.endswith("weight") and not current_world().rank:
            noted.append(name.split(".")[-2])
        return add(weights, name, *others, **options)

    monkeypatch.setattr(WeightGradients, "_add", adding)
    return noted


def first_backward(events, **layout):
    """The events of the first of two micro-batches' backward pass, of a ViT with one block."""

    def rank():
        booster, model, optimizer = boosted(
            vit(num_layers=1), sgd, images(4), num_microbatches=2, tensor_parallel_plan=VIT, **layout
        )
        own = [] if current_world().rank else events
        model.register_forward_pre_hook(lambda *_: own.append("forward"))

        def criterion(outputs, inputs):
            own.append("loss")
            return outputs.loss

        criterion.reduction = "mean"  # it is called once, not on halves of the samples, too
        del events[:]
        booster.execute_pipeline(iter([images(4)]), model, criterion, optimizer)

    Loopback(2).run(rank)
    first = events.index("loss")
    return events[first + 1 : events.index("forward", first)]


ATTENTION = ["v_proj", "k_proj", "q_proj"]


def under_way(what, meanwhile):
    """A communication, and what is done until it is waited for."""
    return [f"start {what}", *meanwhile, f"wait {what}"]


def test_weight_gradients_are_computed_while_input_gradients_are_summed(events):
    seen = first_backward(events, tp_size=2)
    assert seen == under_way("all_reduce", ["fc1"]) + under_way("all_reduce", ATTENTION)


def test_input_gathers_and_gradient_sums_overlap_the_other_matmuls(events):
    gather = under_way("all_gather", [])

    def columns(weights):
        # Their input's shards set off first; the input's gradient is computed; it sets off; then the weights' are.
        return ["start all_gather", *under_way("reduce_scatter", ["wait all_gather", *weights])]

    seen = first_backward(events, **SHARDS)
    # A row layer's gradient is joined before anything can be computed of it, and so are those behind and before it all.
    assert seen == [*gather, *columns(["fc1"]), *gather, *columns(ATTENTION), *gather]


def test_inputs_of_deferred_weight_gradients_are_gathered_one_weight_ahead(events):
    seen = first_backward(events, schedule="zb-h1", **SHARDS)
    weights = seen[seen.index("classifier") :]
    ahead = [*under_way("all_gather", ["fc2"]), "fc1", *under_way("all_gather", ["o_proj"]), *ATTENTION]
    assert weights[: len(ahead) + 1] == ["classifier", *ahead]
    assert "start all_gather" not in weights[len(ahead) + 1 :]
