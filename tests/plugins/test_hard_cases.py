"""Cases that are easy to get wrong without a word: each compares with one process or with plain torch."""

import copy
import functools
import gc
import itertools
import math
import weakref

import pytest
import torch
from support import (
    assert_near,
    assert_same,
    boosted,
    gradients_of,
    image_batch,
    model_loss,
    replica_part,
    sgd,
    tiny_vit,
    train,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import Loopback, current_world
from hybridpp.errors import ConfigError, NonFiniteLossError, PartitionError
from hybridpp.nn.torch_private import FakeTensor

DATA = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


def squares(outputs, inputs):
    return outputs.square().mean()


def losses_and_gradients(make_model, pp_size, batches=None, **settings):
    options = {"criterion": squares, "num_microbatches": 2, **settings}
    result = train(make_model, batches or [DATA], pp_size=pp_size, **options)
    return result["losses"][0], result["gradients"]


def assert_equal(make_model, pp_size, batches=None):
    losses, gradients = losses_and_gradients(make_model, pp_size, batches)
    expected_losses, expected_gradients = losses_and_gradients(make_model, 1, batches)
    assert losses == expected_losses
    assert_same(gradients, expected_gradients)


def seeded(make):
    def make_model():
        torch.manual_seed(0)
        return make()

    return make_model


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = nn.functional.dropout(x + block(x), 0.2, self.training)
        return x


@pytest.mark.parametrize("pp_size", [2, 4])
def test_cutting_finer_than_the_outer_layers_draws_the_same_dropout(pp_size):
    make_model = seeded(lambda: nn.Sequential(Inner(), Inner()))
    losses, gradients = losses_and_gradients(make_model, pp_size)
    expected_losses, expected_gradients = losses_and_gradients(make_model, 1)
    assert losses == expected_losses
    # To rounding: inside a residual block two stages add to one gradient, in another order than one stage.
    assert_near(gradients, expected_gradients, 1e-5)


class Repeats(nn.Module):
    """Two blocks, each called twice, the calls checkpointed from outside."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(2)])
        self.reentrant = reentrant

    def forward(self, x):
        x = x + self.blocks[0].get_submodule("0").weight.sum() * 0  # something that requires a gradient goes in
        for block in (*self.blocks, *self.blocks):
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize(("pp_size", "reentrant"), [(1, False), (1, True), (2, False)])
def test_a_checkpointed_block_called_twice_repeats_each_calls_dropout(pp_size, reentrant):
    expected = losses_and_gradients(seeded(Repeats), 1)
    actual = losses_and_gradients(seeded(functools.partial(Repeats, reentrant)), pp_size)
    assert actual[0] == expected[0]
    assert_near(actual[1], expected[1])


def test_reentrant_checkpointing_around_a_stages_last_unit_is_refused():
    with pytest.raises(PartitionError, match="Checkpoint with use_reentrant=False"):
        losses_and_gradients(seeded(functools.partial(Repeats, True)), 2)


class Remembers(nn.Module):
    """Keeps a cache and a counter on itself, as rotary embeddings do."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.register_buffer("frequencies", torch.arange(4.0))
        self.cache = None
        self.num_calls = 0
        self.seen = []

    def forward(self, x):
        if self.cache is None:
            self.cache = torch.cos(self.frequencies)
        self.num_calls += 1
        self.seen.append(tuple(x.shape))
        for layer in self.layers:
            x = layer(x) * self.cache * self.num_calls
        return x


@pytest.mark.parametrize("pp_size", [2, 4])
def test_tracing_leaves_no_cache_of_fakes_and_moves_no_counter(pp_size):
    batches = [DATA, DATA[:6], DATA]
    assert_equal(seeded(Remembers), pp_size, batches)


@pytest.mark.parametrize("pp_size", [1, 2])
def test_evaluation_under_inference_mode(pp_size):
    def run():
        booster, model, _ = boosted(tiny_vit().eval(), None, image_batch(2), pp_size=pp_size)
        with torch.inference_mode():
            return booster.execute_pipeline(iter([image_batch(4)]), model, model_loss)["loss"].item()

    with torch.no_grad():
        expected = tiny_vit().eval()(**image_batch(4)).loss.item()
    assert Loopback(pp_size).run(run) == [pytest.approx(expected, abs=1e-6)] * pp_size


class MaskDependent(nn.Module):
    """Takes another way for another mask of the same shape."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, x, mask):
        early = self.layers[0](x)
        late = self.layers[2](self.layers[1](early))
        return self.layers[3](late if mask.all() else late + early)


def test_a_value_that_the_trace_did_not_foresee_gives_no_silent_result():
    """The mask of the trace hides that the last stage may need the first one's output."""
    batches = [{"x": DATA, "mask": torch.ones(8)}, {"x": DATA, "mask": torch.zeros(8)}]
    with pytest.raises(NonFiniteLossError):
        train(seeded(MaskDependent), batches, pp_size=4, criterion=squares)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_keeps_dtypes_of_complex_buffers_and_batch_norm(precision):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4))
            self.register_buffer("rotation", torch.polar(torch.ones(2), torch.arange(2.0)))
            self.register_buffer("derived", torch.tensor([1e5, 1.0, 1.0, 1.0]), persistent=False)
            self.register_buffer("table", torch.ones(4))

        def forward(self, x):
            x = x * self.rotation.real.repeat(2).to(x.dtype) * self.table
            return self.layers(x) + (self.derived / self.derived).to(x.dtype)

    def run():
        torch.manual_seed(0)
        booster, model, optimizer = boosted(Mixed(), sgd, DATA, precision=precision, pp_size=2)
        booster.execute_pipeline(iter([DATA]), model, squares, optimizer)
        optimizer.step()
        assert model.rotation.dtype == torch.complex64
        assert model.derived[0] == 1e5
        assert model.table.dtype != torch.float32
        return {name: tensor.dtype for name, tensor in model.state_dict().items()}

    dtypes = {}
    for part in Loopback(2).run(run):
        dtypes.update(part)
    assert dtypes["layers.1.running_mean"] == dtypes["layers.1.weight"] == torch.float32
    assert dtypes["layers.0.weight"] != torch.float32


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_written_after_boost_count(precision):
    def run():
        booster, model, optimizer = boosted(tiny_vit(), sgd, image_batch(2), precision=precision, pp_size=2)
        model.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()})
        booster.execute_pipeline(iter([image_batch(4)]), model, model_loss, optimizer)
        optimizer.step()
        return max(parameter.abs().max().item() for name, parameter in model.named_parameters() if "layers" in name)

    assert max(Loopback(2).run(run)) < 1e-3


def test_clipping_twice_clips_once():
    def run():
        booster, model, optimizer = boosted(tiny_vit(), sgd, image_batch(2), max_norm=0.01)
        booster.execute_pipeline(iter([image_batch(4)]), model, model_loss, optimizer)
        optimizer.clip_grad_by_norm(0.01)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.step()
        moved = [(before[name] - p.detach()).flatten() / 0.1 for name, p in model.named_parameters()]
        return torch.cat(moved).norm().item()

    assert Loopback(1).run(run) == [pytest.approx(0.01, rel=1e-2)]


def test_each_evaluation_and_each_model_draws_its_own_random_numbers():
    def run():
        plugin = HybridParallelPlugin(tp_size=1, pp_size=1, num_microbatches=1, precision="fp32")
        booster = Booster(plugin=plugin, device="cpu")
        losses = []
        for _ in range(2):
            model = booster.boost(tiny_vit(0.5)).model
            with torch.no_grad():
                for _ in range(2):
                    result = booster.execute_pipeline(iter([image_batch(4)]), model, model_loss)
                    losses.append(result["loss"].item())
        return len(set(losses))

    assert Loopback(1).run(run) == [4]


class SometimesUsed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.extra = nn.Linear(4, 4)

    def forward(self, x):
        y = self.layers(x)
        return y + 0.0 * self.extra(x) if x.sum() > 0 else y


def test_replicas_agree_on_which_parameters_were_reached():
    def run():
        torch.manual_seed(0)
        booster, model, optimizer = boosted(
            SometimesUsed(), functools.partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5), None
        )
        sign = 1 if current_world().rank == 0 else -1
        booster.execute_pipeline(iter([sign * torch.ones(2, 4)]), model, squares, optimizer)
        optimizer.step()
        return {name: p.detach() for name, p in model.named_parameters()}

    first, second = Loopback(2).run(run)
    assert_same(first, second)


def failing_steps(error, criterion):
    """By rank: the gradients of a step that follows one which failed and was caught."""

    def run():
        booster, model, optimizer = boosted(tiny_vit(), sgd, image_batch(2), pp_size=2, num_microbatches=2)
        mine = replica_part(image_batch(8), booster.plugin.layout.here.dp, 2)
        with pytest.raises(error):
            booster.execute_pipeline(iter([mine]), model, criterion, optimizer)
        booster.execute_pipeline(iter([mine]), model, model_loss, optimizer)
        return gradients_of(booster, model)

    gradients = {}
    for part in Loopback(4).run(run):
        gradients.update(part)
    return gradients


def test_a_step_that_failed_leaves_nothing_behind():
    model = tiny_vit()
    model(**image_batch(8)).loss.backward()
    gradients = failing_steps(NonFiniteLossError, lambda outputs, inputs: outputs.loss * math.nan)
    assert_near(gradients, {name: p.grad for name, p in model.named_parameters()})


def test_losses_of_both_infinities_are_reported_on_every_rank():
    def run():
        booster, model, optimizer = boosted(tiny_vit(), sgd, image_batch(2), pp_size=2, num_microbatches=2)
        signs = itertools.cycle([math.inf, -math.inf])
        with pytest.raises(NonFiniteLossError, match="the loss of micro-batch 0 is infinite"):
            booster.execute_pipeline(
                iter([image_batch(4)]), model, lambda outputs, inputs: outputs.loss * next(signs), optimizer
            )
        return True

    assert Loopback(2).run(run) == [True, True]


def test_a_criterion_that_cannot_be_called_twice_does_not_hide_a_bad_loss():
    booster, model, optimizer = boosted(tiny_vit(), sgd, image_batch(2))
    factors = iter([math.nan])
    with pytest.raises(NonFiniteLossError, match=r"is NaN .*a second run of the step failed: StopIteration"):
        booster.execute_pipeline(
            iter([image_batch(2)]), model, lambda outputs, inputs: outputs.loss * next(factors), optimizer
        )


def test_an_error_in_the_last_backward_leaves_nothing_behind():
    model = tiny_vit()
    model(**image_batch(8)).loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}

    def run():
        booster, model, optimizer = boosted(tiny_vit(), sgd, image_batch(2))
        mine = replica_part(image_batch(8), current_world().rank, 2)

        def broken(gradient):
            raise ValueError("broken")

        handle = model.vit.embeddings.cls_token.register_hook(broken)
        with pytest.raises(ValueError, match="broken"):
            booster.execute_pipeline(iter([mine]), model, model_loss, optimizer)
        handle.remove()
        booster.execute_pipeline(iter([mine]), model, model_loss, optimizer)
        return gradients_of(booster, model)

    for gradients in Loopback(2).run(run):
        assert_near(gradients, expected)


def test_gradients_set_or_cleared_by_hand_count():
    def run():
        booster, model, optimizer = boosted(tiny_vit(), sgd, image_batch(2))
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        booster.execute_pipeline(iter([image_batch(4)]), model, model_loss, optimizer)
        for parameter in model.parameters():
            parameter.grad = None
        model.classifier.bias.grad = torch.ones(5)
        optimizer.step()
        assert torch.allclose(model.classifier.bias, before.pop("classifier.bias") - 0.1)
        assert_same({name: p.detach() for name, p in model.named_parameters() if name in before}, before)

    Loopback(1).run(run)


def test_a_second_step_without_a_backward_pass_changes_nothing():
    def run():
        booster, model, optimizer = boosted(tiny_vit(), sgd, image_batch(2))
        booster.execute_pipeline(iter([image_batch(4)]), model, model_loss, optimizer)
        optimizer.step()
        after = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.step()
        assert_same({name: p.detach() for name, p in model.named_parameters()}, after)

    Loopback(1).run(run)


def refusal(act, dp_size=1, **settings):
    def run():
        booster, model, optimizer = boosted(tiny_vit(), sgd, image_batch(2), **settings)
        with pytest.raises(ConfigError) as raised:
            act(booster, model, optimizer)
        return str(raised.value)

    return Loopback(dp_size).run(run)[0]


def step_in_no_sync(booster, model, optimizer):
    with booster.no_sync(model, optimizer):
        booster.execute_pipeline(iter([image_batch(4)]), model, model_loss, optimizer)
        optimizer.step()


def add(booster, model, optimizer):
    model.late = nn.Parameter(torch.ones(1))
    booster.execute_pipeline(iter([image_batch(4)]), model, model_loss, optimizer)


def replace(booster, model, optimizer):
    model.classifier.bias = nn.Parameter(torch.ones_like(model.classifier.bias))
    booster.execute_pipeline(iter([image_batch(4)]), model, model_loss, optimizer)


def tie(booster, model, optimizer):
    one, other = [module for name, module in model.named_modules() if name.endswith("layernorm_before")][:2]
    one.bias = other.bias
    booster.execute_pipeline(iter([image_batch(4)]), model, model_loss, optimizer)


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda b, m, o: m(**image_batch(2)).loss.backward(), "Call booster.backward(loss, optimizer)"),
        (lambda b, m, o: o.add_param_group({"params": []}), "parameter groups must be added before booster.boost."),
        (lambda b, m, o: copy.deepcopy(o), "a boosted optimizer cannot be copied or pickled."),
        (step_in_no_sync, "step inside no_sync would make the replicas diverge."),
        (add, "late was frozen when the model was boosted, or not there, and requires a gradient now."),
        (replace, "classifier.bias was replaced by another parameter, or removed, after booster.boost: the optimizer"),
        (tie, "0.layernorm_before.bias was replaced by another parameter, or removed, after booster.boost: the"),
    ],
)
def test_what_would_go_wrong_later_is_refused(act, text):
    assert text in refusal(act)


def test_what_was_frozen_at_boost_is_not_trained_later():
    def run():
        model = tiny_vit()
        model.classifier.bias.requires_grad_(False)
        booster, model, optimizer = boosted(model, sgd, image_batch(2))
        booster.execute_pipeline(iter([image_batch(4)]), model, model_loss, optimizer)
        model.classifier.bias.requires_grad_()
        with pytest.raises(ConfigError, match=r"^classifier\.bias was frozen when the model was boosted, or not there"):
            booster.execute_pipeline(iter([image_batch(4)]), model, model_loss, optimizer)

    Loopback(1).run(run)


def test_hooks_of_the_optimizer_run():
    calls = []

    def run():
        booster, model, optimizer = boosted(tiny_vit(), sgd, image_batch(2))
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        booster.execute_pipeline(iter([image_batch(4)]), model, model_loss, optimizer)
        optimizer.step()

    Loopback(1).run(run)
    assert calls == ["before", "after"]


def test_a_copy_of_a_boosted_model_is_an_ordinary_model():
    def run():
        booster, model, _ = boosted(tiny_vit().eval(), sgd, image_batch(2))
        average = copy.deepcopy(model)
        assert average.vit.embeddings.cls_token is not model.vit.embeddings.cls_token
        with torch.no_grad():
            assert torch.equal(average(**image_batch(2)).logits, model(**image_batch(2)).logits)
        with pytest.raises(ConfigError, match="was not boosted by this booster"):
            booster.execute_pipeline(iter([image_batch(2)]), average, model_loss)

    Loopback(1).run(run)


def test_a_boosted_model_is_freed_when_nobody_holds_it():
    def run():
        booster, model, _ = boosted(tiny_vit(), sgd, image_batch(2), pp_size=2)
        reference = weakref.ref(model)
        del model, _
        gc.collect()
        return reference() is None, booster is not None

    assert Loopback(2).run(run) == [(True, True)] * 2


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_state_of_another_precision_is_refused(precision):
    def run():
        _, _, plain = boosted(tiny_vit(), sgd, image_batch(2))
        _, _, half = boosted(tiny_vit(), sgd, image_batch(2), precision=precision)
        with pytest.raises(ConfigError, match="this state has another precision: "):
            half.load_state_dict(plain.state_dict())

    Loopback(1).run(run)


@pytest.mark.parametrize("pp_size", [1, 2])
def test_a_lone_layer_and_a_model_without_lists(pp_size):
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.second(self.first(x).relu())

    losses_and_gradients(seeded(lambda: nn.Linear(4, 4)), 1)
    assert_equal(seeded(Plain), pp_size)


@pytest.mark.parametrize(("pp_size", "num_model_chunks"), [(1, 4), (2, 2)])
def test_several_stages_per_rank_give_one_process_bit_for_bit(pp_size, num_model_chunks):
    batches = [image_batch(8, seed) for seed in range(3)]
    make_model = functools.partial(tiny_vit, 0.1)
    expected = train(make_model, batches, num_microbatches=3)
    actual = train(
        make_model,
        batches,
        pp_size=pp_size,
        num_microbatches=3,
        schedule="gpipe",
        num_model_chunks=num_model_chunks,
    )
    assert actual["losses"] == expected["losses"] * pp_size
    assert_same(actual["weights"], expected["weights"])
    if (pp_size, num_model_chunks) == (2, 2):
        assert {name.split(".")[2] for name in actual["names"][0] if "layers" in name} == {"0", "2"}


@pytest.mark.parametrize("dp_size", [1, 2])
def test_several_stages_per_rank_with_tied_weights_and_evaluation(dp_size):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

        def forward(self, x):
            for layer in (*self.layers, *self.layers):
                x = torch.tanh(layer(x))
            return x

    expected = losses_and_gradients(seeded(Tied), 1)
    options = {"schedule": "gpipe", "num_model_chunks": 2, "criterion": squares, "num_microbatches": 2}
    result = train(seeded(Tied), [DATA], pp_size=2, dp_size=dp_size, **options)
    assert_near(result["gradients"], expected[1])

    def run():
        torch.manual_seed(0)
        booster, model, _ = boosted(Tied(), None, DATA, pp_size=2, **{k: options[k] for k in options if k[0] != "c"})
        with torch.no_grad():
            return booster.execute_pipeline(iter([DATA]), model, squares)["loss"].item()

    assert Loopback(2).run(run) == [pytest.approx(expected[0][0], abs=1e-6)] * 2


class ReturnsHiddenStates(nn.Module):
    def __init__(self):
        super().__init__()
        self.vit = tiny_vit()

    def forward(self, **inputs):
        return self.vit(output_hidden_states=True, **inputs)


@pytest.mark.parametrize("pp_size", [2, 4])
def test_hidden_states_of_every_stage_reach_the_criterion(pp_size):
    def criterion(outputs, inputs):
        assert len(outputs.hidden_states) == 5
        return outputs.loss + sum(hidden.square().mean() for hidden in outputs.hidden_states)

    options = {"batches": [image_batch(6)], "criterion": criterion}
    expected = losses_and_gradients(ReturnsHiddenStates, 1, **options)
    actual = losses_and_gradients(ReturnsHiddenStates, pp_size, **options)
    assert actual[0] == expected[0]
    assert_near(actual[1], expected[1])


class DropoutBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.drop = nn.Linear(6, 6), nn.Dropout(0.5)
        self.down, self.last_drop = nn.Linear(6, 6), nn.Dropout(0.5)

    def forward(self, x):
        return x + self.last_drop(self.down(torch.tanh(self.drop(self.up(x)))))


class DropoutNet(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([DropoutBlock() for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(("name", "is_same"), [("up", True), ("down", True), ("drop", False), ("last_drop", False)])
def test_dropout_inside_a_cut_block_is_the_same_after_a_linear_layer(name, is_same):
    """As docs/cutting.md says."""

    def trained(**settings):
        batch = (torch.randn(4, 6, generator=torch.Generator().manual_seed(0)),)
        return train(DropoutNet, [batch], criterion=squares, **settings)

    one, cut = trained(), trained(pp_size=2, split_points={f"blocks.1.{name}": "before"})
    assert one["gradients"].keys() == cut["gradients"].keys()
    same = [torch.equal(cut["gradients"][key], value) for key, value in one["gradients"].items()]
    assert all(same) is is_same


class BiasedBlock(nn.Module):
    """Returns an argument that stands after one that may be None."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, mask, bias):
        x = x if mask is None else x * mask
        return x + self.linear(x) * bias, bias


class MasksWhatIsMasked(nn.Module):
    """Leaves out a mask of ones, as transformers does, which keeps it while a model is traced."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(BiasedBlock() for _ in range(2))

    def forward(self, x, mask):
        if not isinstance(mask, FakeTensor) and bool(mask.all()):
            mask = None
        bias = x.mean(-1, keepdim=True)
        for block in self.blocks:
            x, bias = block(x, mask, bias)
        return x


def test_a_unit_returns_its_argument_after_one_that_is_not_given():
    mask = torch.ones(8, 1)
    mask[2] = 0
    batch = {"x": DATA, "mask": mask}
    make_model = seeded(MasksWhatIsMasked)
    losses, gradients = losses_and_gradients(make_model, 2, [batch], num_microbatches=4)
    expected_losses, expected_gradients = losses_and_gradients(make_model, 1, [batch], num_microbatches=4)
    assert losses == expected_losses
    assert_same(gradients, expected_gradients)
