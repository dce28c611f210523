"""From block to block shards stay shards, also between stages; whatever else reads them finds them whole."""

import functools

import pytest
import torch
from divided_models import VIT
from sequence_models import SHARDS, Block, Net, assert_equal, images, sequences, squares, vit
from support import assert_same, boosted, gradients_of, model_loss, sgd, train, trained_alone, whole_over_tp
from torch.utils.checkpoint import checkpoint

from hybridpp.cluster import Loopback, current_world
from hybridpp.cluster.loopback_group import LoopbackGroup

PLAN = {"*.up": "column", "*.down": "row"}
OPTIONS = {"num_microbatches": 2, "tensor_parallel_plan": PLAN, **SHARDS}


def calls_of_step(monkeypatch, num_layers, **layout):
    """How often activations go through collectives in a step of one micro-batch; and the shapes of messages."""
    return step_on_shards(monkeypatch, num_layers, **layout)[:2]


def step_on_shards(monkeypatch, num_layers, **layout):
    """The same, and the losses of the ranks and the gradients of that step."""
    counts, messages = dict.fromkeys(["start_all_gather", "start_reduce_scatter", "all_reduce"], 0), []

    def counted(name, own):
        def call(group, tensor, *others):
            counts[name] += tensor.dim() == 3 and len(tensor) == 2  # no parameter has two rows
            return own(group, tensor, *others)

        return call

    def sent(group, tensor, peer):
        if tensor.dim() == 3:  # not what boost sends once
            messages.append(tuple(tensor.shape))
        return send(group, tensor, peer)

    for name in counts:
        monkeypatch.setattr(LoopbackGroup, name, counted(name, getattr(LoopbackGroup, name)))
    send = LoopbackGroup.send
    monkeypatch.setattr(LoopbackGroup, "send", sent)

    def rank():
        booster, model, optimizer = boosted(vit(num_layers=num_layers), sgd, images(2), **SHARDS, **layout)
        for name in counts:
            counts[name] = 0
        step = booster.execute_pipeline(iter([images(2)]), model, model_loss, optimizer)
        return step["loss"].item(), whole_over_tp(booster, model, gradients_of(booster, model))

    found = Loopback(2 * layout.get("pp_size", 1)).run(rank)
    assert not any(count % 2 for count in counts.values())
    calls = {name.removeprefix("start_"): count // 2 for name, count in counts.items()}
    gradients = {name: gradient for _, owned in found for name, gradient in owned.items()}
    return calls, messages, [loss for loss, _ in found], gradients


def calls_of_blocks(num_blocks):
    """Of a step without recomputation.

    Each block: two of each, forwards and backwards, and there two all-gathers of what column layers read: queries, keys
    and values share one. One more behind the last block and, backwards, before the first.
    """
    return {"all_gather": num_blocks * 6 + 2, "reduce_scatter": num_blocks * 4, "all_reduce": 0}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_blocks_hand_on_shards(schedule, monkeypatch):
    calls, _ = calls_of_step(monkeypatch, 3, tensor_parallel_plan=VIT, schedule=schedule)
    assert calls == calls_of_blocks(3)


def test_what_is_run_again_is_not_joined_once_more(monkeypatch):
    calls, _ = calls_of_step(monkeypatch, 3, tensor_parallel_plan=VIT, gradient_checkpoint_config={})
    # Each block, forwards, again and backwards.
    assert calls["all_gather"] == 3 * (2 + 2 + 2) + 2


def test_gradients_of_norms_are_summed_in_one_message(monkeypatch):
    sizes = []
    all_reduce = LoopbackGroup.all_reduce

    def noted(group, tensor):
        if tensor.dim() == 1 and tensor.numel() > 1 and len(group.ranks) == 2:
            sizes.append(tensor.numel())
        return all_reduce(group, tensor)

    monkeypatch.setattr(LoopbackGroup, "all_reduce", noted)
    train(vit, [images(2)], tensor_parallel_plan=VIT, **SHARDS)
    # Two ranks, two blocks, two norms of width 16 with a bias each; and a number for each that says whether it has one.
    assert sizes == [2 * 2 * 2 * (16 + 1)] * 2


def test_stages_hand_on_shards(monkeypatch):
    calls, messages = calls_of_step(monkeypatch, 3, tensor_parallel_plan=VIT, pp_size=2)
    assert calls == calls_of_blocks(3)
    assert sorted(messages) == [(2, 32, 16)] * 2 + [(2, 33, 16)] * 2


MIXED = [["*norm*"], ["vit.layers.1", "!vit.layers.1.mlp.fc1"], ["*.o_proj", "*.fc1", "vit.layers.2"]]


def test_norms_in_fp32_keep_shards(monkeypatch):
    layout = {"tensor_parallel_plan": VIT, "precision": "bf16", "fp32_modules": MIXED[0]}
    calls, messages = calls_of_step(monkeypatch, 3, pp_size=2, **layout)
    assert calls == calls_of_blocks(3)
    assert sorted(messages) == [(2, 32, 16)] * 2 + [(2, 33, 16)] * 2


# What is computed with norms alone: test_fp32_norms.py.
@pytest.mark.parametrize(
    ("fp32_modules", "precision"),
    [pytest.param(MIXED[0], "bf16", marks=pytest.mark.matrix), (MIXED[1], "fp16"), (MIXED[2], "bf16")],
    ids=str,
)
def test_formats_that_change_between_and_in_blocks_keep_shards(precision, fp32_modules, monkeypatch):
    options = {"precision": precision, "fp32_modules": fp32_modules}
    make = functools.partial(vit, num_layers=3)
    expected = train(make, [images(2)], **options)
    run = train(make, [images(2)], tensor_parallel_plan=VIT, **options, **SHARDS)
    # As near as the same layers divided without sequence parallelism.
    divided = train(make, [images(2)], tensor_parallel_plan=VIT, tp_size=2, **options)
    assert off(run, expected) < 1.5 * off(divided, expected) + 1e-4
    layout = {"tensor_parallel_plan": VIT, "pp_size": 2, **options}
    calls, messages, losses, gradients = step_on_shards(monkeypatch, 3, **layout)
    assert calls == calls_of_blocks(3)
    assert sorted(messages) == [(2, 32, 16)] * 2 + [(2, 33, 16)] * 2
    assert losses == 4 * run["losses"][0]
    assert_same(gradients, run["gradients"])


def off(run, expected):
    """The worst difference of a gradient, of its largest number."""
    return max(
        ((run["gradients"][name] - gradient).abs().max() / gradient.abs().max()).item()
        for name, gradient in expected["gradients"].items()
    )


LENGTHS = {num_places: [sequences(num_places)] for num_places in (64, 65, 197)}


def net():
    """Of the fewest blocks of which one of two stages has two."""
    return Net(Block, num_blocks=3)


@pytest.mark.parametrize(
    ("num_places", "layout"),
    [
        (64, {}),
        (197, {}),
        (65, {"pp_size": 2}),
        (64, {"pp_size": 2, "gradient_checkpoint_config": {}}),
        (197, {"pp_size": 2, "gradient_checkpoint_config": {}}),
        (64, {"tp_size": 4, "pp_size": 2}),
        (65, {"tp_size": 4, "pp_size": 2}),
    ],
    ids=str,
)
def test_gradients_are_those_of_one_process(num_places, layout):
    batches = LENGTHS[num_places]
    expected = trained_alone(net, batches, criterion=squares, num_microbatches=2)
    assert_equal(train(net, batches, criterion=squares, **OPTIONS | layout), expected)


def test_stages_hand_on_sequences_shorter_than_the_ranks_are_many():
    batches = [sequences(5), sequences(1), sequences(3)]
    expected = train(net, batches, criterion=squares, num_microbatches=2)
    assert_equal(train(net, batches, criterion=squares, **OPTIONS | {"tp_size": 4, "pp_size": 2}), expected)


@pytest.fixture(scope="module")
def dropped_on_one_stage():
    return dropping()


def dropping(**layout):
    make = functools.partial(vit, dropout=0.2)
    return train(make, [images(2)], num_microbatches=2, tensor_parallel_plan=VIT, **SHARDS, **layout)


@pytest.mark.parametrize("layout", [{"pp_size": 2}, {"pp_size": 2, "gradient_checkpoint_config": {}}], ids=str)
def test_dropped_numbers_do_not_depend_on_stages(layout, dropped_on_one_stage):
    expected, run = dropped_on_one_stage, dropping(**layout)
    assert run["losses"][0] == expected["losses"][0]
    assert_same(run["gradients"], expected["gradients"])


class Collecting(Net):
    def forward(self, x):
        states = [x]
        for block in self.blocks:
            states.append(block(states[-1]))
        return sum(state * (number + 1) / 10 for number, state in enumerate(states))


class Skipping(Net):
    def forward(self, x):
        first = x
        for number, block in enumerate(self.blocks):
            if number == 1:
                continue
            x = block(x)
            if number == 2:
                x = x + first.float() * 2
            first = x
        return x


class Writing(Net):
    def forward(self, x):
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1:
                kept = x
                x *= 2
                x[:, 0] = 1
                x = kept
        return x


class Centering(Net):
    def forward(self, x):
        for number, block in enumerate(self.blocks):
            x = block(x)
            x = x - x.mean(1, keepdim=True) if number == 0 else x * 0.5
        return x


class Hooked(Net):
    def forward(self, x):
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 2 and x.requires_grad:
                x.register_hook(lambda gradient: gradient * gradient.shape[1])
        return x


class Checkpointing(Net):
    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Adding(Block):
    """Writes to what it is given."""

    def forward(self, x):
        x += self.down(self.up(self.norm(x.clone())))
        return x


class Late(Net):
    """Reads what the second block wrote to, which is what the first one returned."""

    def __init__(self):
        super().__init__(Block, 1)
        self.blocks.append(Adding())
        self.blocks.append(Block())
        self.blocks.append(Block())

    def forward(self, x):
        first = self.blocks[0](x)
        before = first.sum((1, 2), keepdim=True)
        x = self.blocks[2](self.blocks[1](first))
        return (self.blocks[3](x) + first + before) / 10


NETS = [functools.partial(net, Block) for net in (Collecting, Skipping, Writing, Centering, Hooked, Checkpointing)]
FIVE = [sequences(5)]


@pytest.mark.covering
@pytest.mark.parametrize("make", NETS, ids=lambda make: make.func.__name__)
@pytest.mark.parametrize("layout", [{}, {"pp_size": 2}, {"gradient_checkpoint_config": {}}], ids=str)
def test_what_container_code_does_to_shards_is_done_to_the_whole(make, layout):
    expected = trained_alone(make, FIVE, criterion=squares, num_microbatches=2)
    assert_equal(train(make, FIVE, criterion=squares, **OPTIONS, **layout), expected)


def test_what_a_block_writes_to_its_input_is_seen():
    expected = train(Late, [sequences(5)], criterion=squares, num_microbatches=2)
    assert_equal(train(Late, [sequences(5)], criterion=squares, **OPTIONS), expected)


def test_backward_hooks_of_blocks_see_the_whole():
    shapes = []

    def make():
        model = Net(Block)
        model.blocks[1].register_full_backward_hook(
            lambda _, ours, theirs: shapes.append((ours[0].shape, theirs[0].shape))
        )
        return model

    expected = train(make, [sequences(5)], criterion=squares, num_microbatches=2)
    assert_equal(train(make, [sequences(5)], criterion=squares, **OPTIONS), expected)
    assert {(tuple(ours[1:]), tuple(theirs[1:])) for ours, theirs in shapes} == {((5, 8), (5, 8))}


def test_one_rank_alone_may_look_at_what_a_model_returns_without_gradients():
    def rank():
        _, model, _ = boosted(vit(), sgd, images(2), tensor_parallel_plan=VIT, **SHARDS)
        with torch.no_grad():
            states = model(**images(2), output_hidden_states=True).hidden_states
        return [float(state.sum()) for state in states] if current_world().rank == 0 else []

    with torch.no_grad():
        expected = vit()(**images(2), output_hidden_states=True).hidden_states
    assert Loopback(2).run(rank) == [pytest.approx([float(state.sum()) for state in expected], rel=1e-4), []]


def test_outputs_are_plain():
    def rank(**settings):
        booster, model, optimizer = boosted(vit(), sgd, images(2), num_microbatches=2, **settings)
        model.config.output_hidden_states = True
        for result in ("training", "evaluation"):
            with torch.set_grad_enabled(result == "training"):
                step = booster.execute_pipeline(iter([images(4)]), model, model_loss, optimizer, return_outputs=True)
        return step["outputs"]["hidden_states"]

    expected = Loopback(1).run(rank)[0]
    for found in Loopback(2).run(functools.partial(rank, tensor_parallel_plan=VIT, **SHARDS)):
        assert [type(state) for state in found] == [torch.Tensor] * len(expected)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
