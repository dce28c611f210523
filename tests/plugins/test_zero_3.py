"""ZeRO 3: weights are there where they are used only, with scripts that call the model, read and write weights."""

from copy import deepcopy
from dataclasses import dataclass

import pytest
import torch
from plugins.zero_models import SAMPLE, WIDTH, Block, TiedModel, batches, cross_entropy, on_layout, step, weights_of
from support import assert_near, assert_same, boosted, replica_part, sgd
from torch import nn

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import Loopback
from hybridpp.errors import ConfigError

ZERO = {"zero_stage": 3, "zero_reduce": "step"}


def both(run, **layout):
    """What it gives without and with sharded weights, for each rank."""
    return list(zip(*(on_layout(run, **one, **layout) for one in ({}, ZERO)), strict=True))


def trained(booster, model, optimizer, num_steps=3):
    losses = []
    for batch in batches(num_steps, 12):
        losses.append(step(booster, model, optimizer, batch))
        optimizer.step()
    with booster.unsharded(model):
        return losses, weights_of(model)


def assert_bits(make_model, **layout):
    for plain, zero in both(trained, make_model=make_model, dp_size=2, **layout):
        assert zero[0] == plain[0]
        assert_same(zero[1], plain[1])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_scripts_own_passes_gather_what_they_use(precision):
    def run(booster, model, optimizer):
        for number, batch in enumerate(batches(3, 12)):
            replica = booster.plugin.layout.here.dp
            own = batch[replica * 6 : (replica + 1) * 6]
            booster.backward(cross_entropy(model(own), own), optimizer)
            optimizer.step()
            model.eval()
            with torch.no_grad():
                logits = model(batch)
            model.train(number != 1)
        with booster.unsharded(model):
            return logits, weights_of(model)

    for (logits, weights), (zero_logits, zero_weights) in both(run, dp_size=2, precision=precision):
        assert zero_logits.equal(logits)
        assert_same(zero_weights, weights)


@pytest.mark.parametrize("layout", [{}, {"pp_size": 2}, {"pp_size": 2, "schedule": "interleaved"}])
def test_evaluation_gathers_too(layout):
    def run(booster, model, optimizer):
        with torch.no_grad():
            return [step(booster, model, None, batch) for batch in batches(2, 12)]

    for plain, zero in both(run, dp_size=2, **layout):
        assert zero == plain


@pytest.mark.covering
@pytest.mark.parametrize("layout", [{}, {"pp_size": 2}])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_recomputed_blocks_have_the_bits_of_training_without_it(precision, layout):
    config = {"gradient_checkpointing_ratio": 1.0}
    assert_bits(TiedModel, precision=precision, gradient_checkpoint_config=config, **layout)


class ReadsOutside(TiedModel):
    """Container code reads parameters of units; the head is a function of the embedding's weight."""

    def __init__(self):
        super().__init__()
        del self.head

    def forward(self, tokens):
        x = self.embed(tokens) * self.blocks[0].norm.weight
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(x, self.embed.weight)


@dataclass
class Result:
    hidden: torch.Tensor


class Wrapped(Block):
    def forward(self, result):
        return Result(super().forward(result.hidden))


class PassesRecords(TiedModel):
    """Blocks take and return dataclasses, which torch's trees do not know."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Wrapped() for _ in range(3))

    def forward(self, tokens):
        result = Result(self.embed(tokens))
        for block in self.blocks:
            result = block(result)
        return self.head(result.hidden)


class SharesBlocks(TiedModel):
    """One block runs three times; another one twice in a row on its own output."""

    def forward(self, tokens):
        x = self.embed(tokens)
        for index in (0, 2, 0, 3, 3, 0):
            x = self.blocks[index](x)
        return self.head(x)


class ReturnsWeights(TiedModel):
    """A unit returns a weight itself."""

    def __init__(self):
        super().__init__()
        self.scale = Scale()

    def forward(self, tokens):
        x = self.embed(tokens) * self.scale()
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale())


class HasEmpty(TiedModel):
    """A parameter has no elements, and another one no dimension."""

    def __init__(self):
        super().__init__()
        self.blocks[2].none = nn.Parameter(torch.zeros(0, 3))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens):
        return super().forward(tokens) * self.scale


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((30, WIDTH), 1.1))

    def forward(self):
        return self.weight[0]


class WritesInPlace(TiedModel):
    """Container code writes to a unit's output, which is a view; a unit writes to its input, with its own weight."""

    def __init__(self):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.gain = Gain()

    def forward(self, tokens):
        x = self.embed(tokens)
        for linear in self.linears:
            y = linear(x)
            y += x
            x = y.relu_()
        return self.head(self.gain(x.sin()))


class Gain(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.full((WIDTH, WIDTH), 1.1))
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.down(x.mul_(self.gain[0]))


@pytest.mark.parametrize(
    "make_model", [ReadsOutside, PassesRecords, SharesBlocks, ReturnsWeights, WritesInPlace, HasEmpty]
)
def test_models_that_use_weights_in_other_ways(make_model):
    assert_bits(make_model)
    [plain, _] = on_layout(trained, make_model=make_model, dp_size=2)
    for zero in on_layout(trained, make_model=make_model, dp_size=2, schedule="gpipe", zero_stage=3):
        assert_near(zero[1], plain[1], 2e-6)


@pytest.mark.parametrize("make_model", [TiedModel, SharesBlocks])
@pytest.mark.parametrize("settings", [{"zero_stage": 3}, {**ZERO, "schedule": "gpipe"}])
def test_a_replica_gathers_for_several_micro_batches_that_it_lacks(settings, make_model):
    """With buckets enough that a reduction waits for earlier ones, in the order of the gathers."""

    def run(booster, model, optimizer):
        for batch in batches(2, 6):
            part = batch[:5] if booster.plugin.layout.here.dp == 0 else batch[5:]
            booster.execute_pipeline(iter([part]), model, cross_entropy, optimizer)
            optimizer.step()
        with booster.unsharded(model):
            return weights_of(model)

    layout = {"dp_size": 2, "make_model": make_model, "microbatch_size": 1, "num_microbatches": None}
    plain = on_layout(run, **layout)
    for expected, actual in zip(plain, on_layout(run, **layout, **settings), strict=True):
        assert_near(actual, expected, 2e-6)


def test_only_a_few_units_are_there_at_a_time():
    def run(booster, model, optimizer):
        weights, sizes = booster.plugin._engine(model).weights.sharded, []

        def note(*_):
            sizes.append(sum(bucket._flat.untyped_storage().nbytes() for bucket in weights._buckets))

        with torch.no_grad():
            model(SAMPLE)  # the first pass does not know the order yet
        for block in model.blocks:
            block.register_forward_pre_hook(note)
            block.register_full_backward_pre_hook(note)
        trained(booster, model, optimizer, 2)
        return max(sizes), sum(4 * bucket.layout.size for bucket in weights._buckets), sizes[-1]

    def deep():
        model = TiedModel()
        model.blocks = nn.ModuleList(Block() for _ in range(12))
        return model

    most, complete, _ = on_layout(run, dp_size=2, make_model=deep, num_microbatches=1, **ZERO)[0]
    # Of 12 blocks and a tied weight as large as one: what runs, what was before it, and what comes next.
    assert most < complete / 3


@pytest.mark.parametrize("pp_size", [1, 2])
def test_weights_that_are_written_in_unsharded_are_trained_on(pp_size):
    def run(booster, model, optimizer):
        for batch in batches(2, 12):
            step(booster, model, optimizer, batch)
            optimizer.step()
            with torch.no_grad(), booster.unsharded(model):
                for parameter in model.parameters():
                    parameter.mul_(0.5)
        return trained(booster, model, optimizer, 2)

    for precision in ("fp32", "bf16"):
        for plain, zero in both(run, dp_size=2, pp_size=pp_size, precision=precision):
            assert zero[0] == plain[0]
            assert_same(zero[1], plain[1])


def test_a_model_can_be_loaded_into_shards(tmp_path):
    def save(booster, model, optimizer):
        trained(booster, model, optimizer, 1)
        booster.save_model(model, tmp_path / "weights.safetensors")
        with booster.unsharded(model):
            return weights_of(model)

    def load(booster, model, optimizer):
        booster.load_model(model, tmp_path / "weights.safetensors")
        with booster.unsharded(model):
            return weights_of(model)

    [expected, _] = on_layout(save, dp_size=2, **ZERO)
    for precision in ("fp32", "bf16"):
        for actual in on_layout(load, dp_size=2, precision=precision, **ZERO):
            assert_near({n: w.float() for n, w in actual.items()}, expected, 1e-6 if precision == "fp32" else 1e-2)


@pytest.mark.parametrize("change", ["step", "load_model"])
def test_what_unsharded_would_undo_is_refused_inside(change, tmp_path):
    def run(booster, model, optimizer):
        booster.save_model(model, tmp_path / "weights.safetensors")
        batch = batches(1, 12)[0]
        booster.backward(cross_entropy(model(batch), batch), optimizer)
        apply = (
            optimizer.step if change == "step" else lambda: booster.load_model(model, tmp_path / "weights.safetensors")
        )
        with booster.unsharded(model):
            before = weights_of(model)
            with pytest.raises(ConfigError, match="Call these, and save, after the block"):
                apply()
        with booster.unsharded(model):
            assert_same(weights_of(model), before)
        apply()

    on_layout(run, dp_size=2, **ZERO)


@pytest.mark.parametrize("zero_reduce", ["step", "microbatch"])
def test_training_goes_on_after_an_error_in_a_backward_pass(zero_reduce):
    class Interruption(Exception):
        pass

    def interrupt(*_):
        raise Interruption

    def passes(booster, model, optimizer, fails):
        for batch in batches(3, 12):
            if fails:
                handle = model.blocks[2].register_full_backward_pre_hook(interrupt)
                with pytest.raises(Interruption):
                    booster.backward(cross_entropy(model(batch), batch), optimizer)
                handle.remove()
            booster.backward(cross_entropy(model(batch), batch), optimizer)
            optimizer.step()
        with booster.unsharded(model):
            return weights_of(model)

    def without_drops():
        model = TiedModel()
        return model.eval()

    results = [
        on_layout(
            lambda *parts, fails=fails: passes(*parts, fails),
            dp_size=2,
            make_model=without_drops,
            zero_stage=3,
            zero_reduce=zero_reduce,
        )
        for fails in (False, True)
    ]
    for expected, actual in zip(*results, strict=True):
        assert_same(actual, expected)


@pytest.mark.parametrize("what", ["state_dict", "a copy of the model"])
def test_reading_all_weights_is_refused_with_the_remedy(what):
    read = (lambda model: model.state_dict()) if what == "state_dict" else deepcopy

    def run(booster, model, optimizer):
        with pytest.raises(ConfigError) as error:
            read(model)
        with booster.unsharded(model):
            read(model)
        return str(error.value)

    assert on_layout(run, dp_size=2, **ZERO)[0] == (
        f"{what} needs all weights, of which each replica holds a part: got zero_stage=3. Use `with "
        "booster.unsharded(model):` on every rank around it, booster.save_model, or booster.averaged(model) "
        "for averages."
    )


def test_without_sharded_weights_unsharded_does_nothing():
    def run(booster, model, optimizer):
        with booster.unsharded(model):
            return weights_of(model)

    for weights in on_layout(run, dp_size=1, zero_stage=3):
        assert_same(weights, dict(TiedModel().named_parameters()))


class TwoWays(nn.Module):
    """A tower for some batches, of which container code reads a weight, too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tower = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x, labels, pixels=None):
        if pixels is not None:
            x = x + self.tower(pixels * self.tower[1].weight.sum())
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("pixels", [[(1, 0), (0, 1)], [(0, 0), (1, 0)]], ids=["in the first step", "later"])
def test_replicas_of_which_one_reads_weights_outside_of_units(pixels):
    def batch(number, has_pixels):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(number))
        batch = {"x": x, "labels": torch.tensor([number % 4, 1])}
        return batch | {"pixels": x.flip(0)} if has_pixels else batch

    def loss(outputs, inputs):
        return nn.functional.cross_entropy(outputs, inputs["labels"])

    def run():
        booster, model, optimizer = boosted(TwoWays(), sgd, batch(0, True), zero_stage=3)
        replica = booster.plugin.layout.here.dp
        for number, has in enumerate(pixels):
            data = iter([batch(2 * number + replica, has[replica])])
            booster.execute_pipeline(data, model, loss, optimizer)
            optimizer.step()
        with booster.unsharded(model):
            return weights_of(model)

    expected = TwoWays()
    optimizer = sgd(expected.parameters())
    for number, has in enumerate(pixels):
        optimizer.zero_grad()
        for replica in range(2):
            inputs = batch(2 * number + replica, has[replica])
            (loss(expected(**inputs), inputs) / 2).backward()
        optimizer.step()
    for weights in Loopback(2).run(run):
        assert_near(weights, dict(expected.named_parameters()))


class Critic(nn.Module):
    """Twice differentiable."""

    def __init__(self):
        super().__init__()
        self.start, self.head = nn.Linear(4, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))

    def forward(self, x):
        x = self.start(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def slope(critic, x):
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    return gradient.square().sum(1)


def wasserstein(critic, real, fake, number):
    return (critic(fake) - critic(real)).mean() + 0.1 * (slope(critic, (real + fake) / 2).sqrt() - 1).square().mean()


def seldom_penalized(critic, real, fake, number):
    loss = (nn.functional.softplus(critic(fake)) + nn.functional.softplus(-critic(real))).mean()
    return loss + slope(critic, real).mean() if number % 2 == 0 else loss


def adversarial_networks(critic_loss, boost, backward, own):
    """Train a critic and a generator; ``own`` gives this replica's part of a batch."""
    torch.manual_seed(0)
    critic, generator = Critic(), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    (critic, critic_optimizer), (generator, optimizer) = (
        boost(one, sgd(one.parameters())) for one in (critic, generator)
    )
    for number in range(3):
        real, noise = own(torch.randn(8, 4)), own(torch.randn(8, 4))
        backward(critic_loss(critic, real, generator(noise).detach(), number), critic_optimizer)
        critic_optimizer.step()
        critic_optimizer.zero_grad()
        optimizer.zero_grad()
        backward(-critic(generator(noise)).mean(), optimizer)
        optimizer.step()
        critic_optimizer.zero_grad()
    return critic, generator


@pytest.mark.parametrize("critic_loss", [wasserstein, seldom_penalized])
def test_penalties_of_gradients_beside_other_passes_train_as_one_process(critic_loss):
    def rank():
        booster = Booster(plugin=HybridParallelPlugin(zero_stage=3))
        replica = booster.plugin.layout.here.dp

        def boost(model, optimizer):
            return booster.boost(model, optimizer)[:2]

        models = adversarial_networks(critic_loss, boost, booster.backward, lambda x: replica_part(x, replica, 2))
        with booster.unsharded(models[0]), booster.unsharded(models[1]):
            return [weights_of(model) for model in models]

    alone = adversarial_networks(critic_loss, lambda *parts: parts, lambda loss, _: loss.backward(), lambda x: x)
    for weights in Loopback(2).run(rank):
        for one, expected in zip(weights, alone, strict=True):
            assert_near(one, weights_of(expected))


class Untied(TiedModel):
    def __init__(self):
        super().__init__()
        self.head.weight = nn.Parameter(self.embed.weight.detach().clone())


def unfrozen_by_and_by(booster, model, optimizer):
    trainable = {name: one for name, one in model.named_parameters() if one.requires_grad}
    for batch, frozen in zip(batches(3, 12), (("embed", "blocks.0"), ("embed",), ()), strict=True):
        for name, parameter in trainable.items():
            parameter.requires_grad_(not name.startswith(frozen))
        step(booster, model, optimizer, batch)
        optimizer.step()
        optimizer.zero_grad()
    with booster.unsharded(model):
        return weights_of(model)


def test_first_layers_that_were_frozen_after_boost_are_unfrozen():
    for plain, zero in both(unfrozen_by_and_by, make_model=Untied, dp_size=2):
        assert_same(zero, plain)
