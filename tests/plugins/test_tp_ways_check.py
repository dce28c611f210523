"""Sharded blocks that do something else in the run than on the sample are refused, or named."""

import re

import pytest
import torch
from hybridpp_plugins import tp_ways_check
from support import boosted, replica_part, sgd
from torch import nn
from torch.nn import functional as F

from hybridpp.cluster import Loopback
from hybridpp.errors import ConfigError

WIDTH, HIDDEN = 8, 16


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    """Other tests of this process may have compiled something."""
    monkeypatch.setattr(tp_ways_check, "has_compiled", lambda: False)


class Block(nn.Module):
    """A feed-forward block whose script may switch something on between its sharded layers."""

    def __init__(self, between=lambda block, h: h):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH), nn.LayerNorm(WIDTH)
        self.between, self.is_on = between, False

    def forward(self, x, bias=None):
        h = F.gelu(self.up(self.norm(x)))
        if bias is not None:
            h = F.layer_norm(h, h.shape[-1:])
        if self.is_on:
            h = self.between(self, h)
        return x + self.down(h)


class Model(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.blocks = nn.ModuleList([Block(**settings), Block(**settings)])

    def forward(self, x, bias=None):
        for block in self.blocks:
            x = block(x, bias)
        return x


def squares(outputs, inputs):
    return F.mse_loss(outputs, inputs["x"].flip(1))


def batches_of(num_steps, num_samples=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [{"x": torch.randn(num_samples, WIDTH, generator=generator)} for _ in range(num_steps)]


def train(make, batches, change=lambda model, step: None, *, pp_size=1, dp_size=1, sample=None, after=None, **settings):
    """Steps of a model over two tensor-parallel ranks; what each rank raises, or its losses."""

    def run():
        torch.manual_seed(0)
        booster, model, optimizer = boosted(
            make(), sgd, sample or replica_part(batches[0], 0, dp_size), tp_size=2, pp_size=pp_size, **settings
        )
        here, losses = booster.plugin.layout.here.dp, []
        try:
            for step, batch in enumerate(batches):
                change(model, step)
                own = replica_part(batch, here, dp_size)
                losses.append(booster.execute_pipeline(iter([own]), model, squares, optimizer)["loss"].item())
                optimizer.step()
        except ConfigError as error:
            return error
        if after is not None:
            after(booster, model, optimizer)
        return losses

    return Loopback(2 * pp_size * dp_size).run(run)


def switched_on(at):
    def change(model, step):
        for block in model.blocks:
            block.is_on = step >= at

    return change


MIXING = {
    "norm": lambda block, h: h / h.norm(dim=-1, keepdim=True),
    "softmax": lambda block, h: h.softmax(-1),
    "topk": lambda block, h: h * (h >= h.topk(4).values[..., -1:]),
    "argmax": lambda block, h: h + F.one_hot(h.argmax(-1), h.shape[-1]),
    "abs": lambda block, h: (h / h.abs().max() * 127).round() / 127,
    "layer_norm": lambda block, h: F.layer_norm(h, h.shape[-1:]),
    "detach": lambda block, h: h + ((h * 4 / h.abs().max()).round() - h).detach(),
}
ALONE = {
    "relu": lambda block, h: h.relu(),
    "dropout": lambda block, h: F.dropout(h, 0.1, block.training),
    "clamp": lambda block, h: h.clamp(-1, 1) * 0.5,
    "tokens": lambda block, h: h - h.mean(0, keepdim=True),
}


WORDS = r"block 'blocks\.0' calls .*\(test_tp_ways_check\.py:\d+\).* gives other results .*samples=\[one, another\]"


def assert_refused(errors):
    for error in errors:
        assert isinstance(error, ConfigError), error
        assert re.search(WORDS, str(error)), error


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if "did not on the sample" in record.getMessage()]


@pytest.mark.parametrize("function", MIXING)
def test_a_flag_that_mixes_features_is_refused_on_every_rank(function):
    errors = train(lambda: Model(between=MIXING[function]), batches_of(2), switched_on(1))
    assert_refused(errors)
    assert all("tensor_parallel_plan={'blocks.0.*': 'replicated', ...}" in str(error) for error in errors)


@pytest.mark.parametrize("function", ALONE)
def test_a_flag_that_leaves_features_apart_is_no_error(function, caplog):
    ranks = train(lambda: Model(between=ALONE[function]), batches_of(4), switched_on(1))
    assert all(isinstance(one, list) for one in ranks)
    assert not warnings_of(caplog)


def test_steps_that_are_no_power_of_two_are_not_watched():
    losses = train(lambda: Model(between=MIXING["softmax"]), batches_of(3), switched_on(2))
    assert [len(one) for one in losses] == [3, 3]
    assert_refused(train(lambda: Model(between=MIXING["softmax"]), batches_of(4), switched_on(2)))


@pytest.mark.parametrize(
    "settings", [{"num_microbatches": 2}, {"pp_size": 2, "num_microbatches": 2}, {"dp_size": 2}, {"precision": "bf16"}]
)
def test_an_argument_that_a_later_batch_gives_is_refused(settings):
    batches = batches_of(2, num_samples=4 * settings.get("dp_size", 1))
    batches[1]["bias"] = torch.zeros(len(batches[1]["x"]))
    assert_refused(train(Model, batches, **settings))


def test_a_stage_that_is_not_the_first_is_refused_on_every_rank():
    def change(model, step):
        model.blocks[1].is_on = step == 1

    errors = train(lambda: Model(between=MIXING["norm"]), batches_of(2), change, pp_size=2, num_microbatches=2)
    assert len(errors) == 4
    assert all("block 'blocks.1' calls" in str(error) for error in errors)


def test_an_argument_that_the_sample_gives_is_right():
    batches = batches_of(2)
    for batch in batches:
        batch["bias"] = torch.zeros(4)
    assert all(isinstance(one, list) for one in train(Model, batches))


class Quantised(Block):
    """Quantises what its first layer returns after a warm-up, by a count that it keeps."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x, bias=None):
        h = F.gelu(self.up(self.norm(x)))
        self.calls += 1
        if self.calls > 3:
            scale = h.abs().max() / 7
            h = h + ((h / scale).round() * scale - h).detach()
        return x + self.down(h)


def test_quantisation_after_a_warm_up_is_refused():
    make = lambda: nn.Sequential(Quantised(), Quantised())  # noqa: E731

    def run():
        torch.manual_seed(0)
        batches = torch.randn(4, 4, WIDTH, generator=torch.Generator().manual_seed(0))
        booster, model, optimizer = boosted(make(), sgd, batches[0], tp_size=2)
        for batch in batches[:3]:
            booster.execute_pipeline(iter([batch]), model, reversed_squares, optimizer)
            optimizer.step()
        with pytest.raises(ConfigError, match=r"block '0' calls .*max \(test_tp_ways_check\.py:\d+\)"):
            booster.execute_pipeline(iter([batches[3]]), model, reversed_squares, optimizer)

    Loopback(2).run(run)


def reversed_squares(outputs, inputs):
    return F.mse_loss(outputs, inputs.flip(1))


def test_a_refused_step_changes_no_weight_and_is_refused_again():
    def run():
        torch.manual_seed(0)
        booster, model, optimizer = boosted(Model(between=MIXING["norm"]), sgd, batches_of(1)[0], tp_size=2)

        def step(batch):
            booster.execute_pipeline(iter([batch]), model, squares, optimizer)
            optimizer.step()

        first, *others = batches_of(8)
        step(first)
        switched_on(0)(model, 0)
        before = [one.detach().clone() for one in model.parameters()]
        for batch in others[:1]:
            with pytest.raises(ConfigError, match="did not on the sample"):
                step(batch)
        assert all(map(torch.equal, before, model.parameters()))
        switched_on(9)(model, 0)
        step(others[1])
        switched_on(0)(model, 0)
        with pytest.raises(ConfigError, match="did not on the sample"):
            list(map(step, others[2:]))

    Loopback(2).run(run)


@pytest.mark.parametrize("dp_size", [1, 2])
def test_calls_of_the_script_are_watched(dp_size):
    def run():
        torch.manual_seed(0)
        booster, model, optimizer = boosted(Model(between=MIXING["norm"]), sgd, batches_of(1)[0], tp_size=2)
        for step, batch in enumerate(batches_of(2)):
            switched_on(1)(model, step)
            try:
                booster.backward(squares(model(**batch), batch), optimizer)
            except ConfigError as error:
                return error
            optimizer.step()
        return None

    assert_refused(Loopback(2 * dp_size).run(run))


def test_all_calls_of_a_watched_step_are_watched():
    def run():
        torch.manual_seed(0)
        booster, model, optimizer = boosted(Model(), sgd, batches_of(1)[0], tp_size=2)
        for step, batch in enumerate(batches_of(3)):
            for call in range(3):
                if step == 1 and call == 2:
                    batch["bias"] = torch.zeros(4)
                try:
                    loss = squares(model(**batch), batch)
                except ConfigError as error:
                    return error
                booster.backward(loss, optimizer)
            optimizer.step()
        return None

    assert_refused(Loopback(2).run(run))


def test_evaluations_are_watched():
    def run():
        torch.manual_seed(0)
        booster, model, _ = boosted(Model(between=MIXING["norm"]), sgd, batches_of(1)[0], tp_size=2)
        model.eval()
        for step, batch in enumerate(batches_of(2)):
            switched_on(1)(model, step)
            try:
                with torch.no_grad():
                    booster.execute_pipeline(iter([batch]), model, squares, None)["loss"].item()
            except RuntimeError as error:
                return error
            except ConfigError as error:
                return error
        return None

    errors = Loopback(2).run(run)
    assert_refused(errors[:1])
    assert "refused on rank 0" in str(errors[1])


def test_equal_blocks_that_no_trace_ran_are_compared_from_the_first_step():
    def run():
        with torch.device("meta"):
            model = Model(between=MIXING["norm"])
        booster, model, optimizer = boosted(model, sgd, batches_of(1)[0], tp_size=2)
        booster.init_model(model, seed=0)
        model.blocks[1].is_on = True
        with pytest.raises(ConfigError, match=r"block 'blocks\.1' calls norm"):
            booster.execute_pipeline(iter(batches_of(1)), model, squares, optimizer)

    Loopback(2).run(run)


def test_a_plan_that_was_not_tried_is_compared_with_the_first_step(caplog):
    plan = {"*.up": "column", "*.down": "row"}

    def run():
        torch.manual_seed(0)
        model = Model(between=MIXING["norm"])
        booster, model, optimizer = boosted(model, sgd, None, tp_size=2, tensor_parallel_plan=plan)
        booster.execute_pipeline(iter(batches_of(1)), model, squares, optimizer)
        optimizer.step()
        switched_on(0)(model, 0)
        booster.execute_pipeline(iter(batches_of(1)), model, squares, optimizer)

    with pytest.raises(ConfigError, match=WORDS):
        Loopback(2).run(run)


class Unalike(Block):
    """Does something that it does not do with other weights."""

    def forward(self, x, bias=None):
        h = F.gelu(self.up(self.norm(x)))
        if self.is_on and not self.up.bias.any():
            h = h.softmax(-1)
        return x + self.down(h)


def test_what_cannot_be_tried_is_named_once(caplog):
    def make():
        model = nn.Sequential(Unalike(), Unalike())
        for block in model:
            nn.init.zeros_(block.up.bias)
        return model

    def run():
        torch.manual_seed(0)
        booster, model, optimizer = boosted(make(), sgd, torch.zeros(4, WIDTH), tp_size=2)
        optimizer.param_groups[0]["lr"] = 0.0
        for step in range(4):
            for block in model:
                block.is_on = step > 0
            booster.execute_pipeline(iter([torch.randn(4, WIDTH)]), model, reversed_squares, optimizer)
            optimizer.step()

    Loopback(2).run(run)
    (text,) = warnings_of(caplog)
    assert re.search(
        r"block '0' and 1 more, .* calls softmax \(test_tp_ways_check\.py:\d+\), .*could not be tried: it", text
    )


@pytest.mark.parametrize("is_mixing", [True, False])
def test_blocks_of_a_users_plan_are_watched(is_mixing):
    plan = {"*.up": "column", "*.down": "row"}
    between = MIXING["norm"] if is_mixing else ALONE["relu"]
    ranks = train(lambda: Model(between=between), batches_of(2), switched_on(1), tensor_parallel_plan=plan)
    if is_mixing:
        assert_refused(ranks)
    else:
        assert all(isinstance(one, list) for one in ranks)


class Stochastic(nn.Module):
    """Branches on the mode, on chance and on the batch, and mixes nothing of which a rank has a part."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.up, self.down, self.norm = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH), nn.LayerNorm(WIDTH)
        self.num_calls = 0

    def forward(self, x, mask=None):
        self.num_calls += 1
        if mask is not None:
            x = x * mask[..., None]
        if self.training and self.num_calls % 3:
            x = x + 0.01 * x.std(-1, keepdim=True)
        if len(x) > 2:
            x = self.norm(x).softmax(-1) + x
        h = F.gelu(self.up(self.norm(x)))
        if self.num_calls % 2:
            h = h - h.mean(1, keepdim=True)
        return x + self.down(F.dropout(h, 0.1, self.training))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Stochastic(), Stochastic()])

    def forward(self, x, mask=None):
        for block in self.blocks:
            x = block(x, mask)
        return x


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ways_that_are_right_are_tried_and_not_named(precision, caplog):
    def run():
        torch.manual_seed(0)
        sample = {"x": torch.randn(2, 3, WIDTH)}
        booster, model, optimizer = boosted(Stack(), sgd, sample, tp_size=2, precision=precision)
        for step in range(9):
            batch = {"x": torch.randn(2 + step % 3, 3 + step % 2, WIDTH)}
            if step % 2:
                batch["mask"] = torch.ones(batch["x"].shape[:2])
            model.train()
            booster.execute_pipeline(iter([batch]), model, squares, optimizer)
            optimizer.step()
            model.eval()
            with torch.no_grad():
                booster.execute_pipeline(iter([batch]), model, squares, None)["loss"].item()

    Loopback(2).run(run)
    assert not warnings_of(caplog)
