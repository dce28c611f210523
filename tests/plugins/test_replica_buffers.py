"""Buffers that forward passes write to: all replicas have those of the first, or each its own."""

from functools import partial

import pytest
import torch
from processes import run_ranks
from support import assert_near, boosted, replica_part, sgd
from torch import nn
from torch.nn import functional as F

from hybridpp.cluster import Loopback
from hybridpp.errors import ConfigError

WIDTH = 4


class Block(nn.Module):
    """Keeps a sum of what it has seen, and how often it was called."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(WIDTH, dtype=torch.float64))
        self.register_buffer("positive", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("scratch", torch.zeros(()), persistent=False)
        self.register_buffer("constant", torch.arange(5.0))

    def forward(self, x):
        if self.training:
            self.calls += 1
            self.seen += x.detach().sum(0)
            self.positive = x.detach()[:3].sum(1) > 0
            self.scratch += x.detach().sum()
        return self.linear(x).tanh() + 0 * self.seen.to(x.dtype)


class Model(nn.Module):
    def __init__(self, make=Block):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(make() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def squares(outputs, inputs):
    return F.mse_loss(outputs, inputs.flip(1))


def rows(step, size=12):
    return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(step))


def trained(dp_size, *, make=Block, steps=3, part=replica_part, **settings):
    """This rank's buffers after each step."""
    booster, model, optimizer = boosted(Model(make), sgd, rows(0), num_microbatches=2, **settings)
    after = []
    for step in range(steps):
        batch = part(rows(step), booster.plugin.layout.here.dp, dp_size)
        booster.execute_pipeline(iter([batch]), model, squares, optimizer)
        optimizer.step()
        after.append({name: value.clone() for name, value in model.named_buffers()})
    model.eval()
    with torch.no_grad():
        after.append({"loss": booster.execute_pipeline(iter([rows(9)]), model, squares)["loss"].reshape(())})
    return after


def assert_equal(one, other, leave_out="nothing"):
    assert one.keys() == other.keys()
    for name in one:
        assert leave_out in name or torch.equal(one[name], other[name]), name


LAYOUTS = [
    {"dp_size": 2},
    {"dp_size": 3, "zero_stage": 1},
    {"dp_size": 2, "pp_size": 2, "schedule": "interleaved", "num_model_chunks": 2},
    {"dp_size": 2, "pp_size": 2, "max_norm": 1.0, "precision": "bf16"},
    {"dp_size": 2, "tp_size": 2, "tensor_parallel_plan": {}},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_replicas_have_the_buffers_of_the_first_after_each_step(layout):
    settings = {name: value for name, value in layout.items() if name != "dp_size"}
    dp_size, per_replica = layout["dp_size"], layout.get("pp_size", 1) * layout.get("tp_size", 1)
    ranks = Loopback(dp_size * per_replica).run(partial(trained, dp_size, **settings))
    for place in range(per_replica):
        first, *others = ranks[place::per_replica]
        assert first[0]["blocks.0.calls" if place < layout.get("tp_size", 1) else "blocks.3.calls"] == 2
        for other in others:
            for one, two in zip(first, other, strict=True):
                assert_equal(one, two, leave_out="scratch")


def test_they_are_those_that_the_first_replicas_data_makes():
    (alone,) = Loopback(1).run(partial(trained, 2, steps=1, part=lambda batch, replica, size: batch[:6]))
    for rank in Loopback(2).run(partial(trained, 2, steps=1)):
        assert_equal(rank[0], alone[0], leave_out="scratch")


class Codebook(nn.Module):
    """A parameter that is not trained and follows its inputs, after some calls."""

    def __init__(self, start, through_data):
        super().__init__()
        self.linear, self.mean = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(WIDTH), requires_grad=False)
        self.calls, self.start, self.through_data = 0, start, through_data

    def forward(self, x):
        self.calls += 1
        if self.calls > self.start:
            with torch.no_grad():
                mean = self.mean.data if self.through_data else self.mean
                mean.lerp_(x.detach().mean(0).to(mean.dtype), 0.5)
        return self.linear(x - self.mean)


def with_codebook(num_ranks, start, through_data=False, is_loop=False, **settings):
    """Each rank's parameters of :class:`Codebook` after three steps on its own samples."""

    def run():
        torch.manual_seed(0)
        model = Codebook(start, through_data)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        booster, model, optimizer = boosted(model, lambda _: torch.optim.SGD(trained, lr=0.1), None, **settings)
        for step in range(3):
            x = replica_part(rows(step), booster.plugin.layout.here.dp, 2)
            if is_loop:
                booster.backward(squares(model(x), x), optimizer)
            else:
                booster.execute_pipeline(iter([x]), model, squares, optimizer)
            optimizer.step()
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    return Loopback(num_ranks).run(run)


@pytest.mark.parametrize("is_loop", [False, True])
@pytest.mark.parametrize(("start", "through_data"), [(0, False), (0, True), (1, False)])
def test_replicas_take_frozen_parameters_that_the_forward_moves(start, through_data, is_loop):
    first, second = with_codebook(2, start, through_data, is_loop, broadcast_buffers=start == 0)
    assert first["mean"].abs().min() > 0
    assert_equal(first, second)
    assert not torch.equal(with_codebook(1, start)[0]["mean"], torch.zeros(WIDTH)), "one process has no message"


@pytest.mark.parametrize("is_loop", [False, True])
@pytest.mark.parametrize("through_data", [False, True])
def test_frozen_parameters_that_move_are_refused_where_they_are_divided(through_data, is_loop):
    with pytest.raises(ConfigError, match=r"^mean is a parameter that is not trained, .* Register it as a buffer"):
        with_codebook(2, 1, through_data, is_loop, zero_stage=3)


class Scaled(nn.Module):
    """Scales its weight in the forward: all of it, or the rows that it looks up."""

    def __init__(self, by_samples):
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.by_samples = nn.Embedding(8, WIDTH, max_norm=1.0 if by_samples else None), by_samples

    def forward(self, ids):
        if not self.by_samples:
            with torch.no_grad():
                self.rows.weight.clamp_(-0.5, 0.5)
        return self.rows(ids)


@pytest.mark.parametrize("is_loop", [False, True])
@pytest.mark.parametrize("zero_stage", [0, 1, 3])
@pytest.mark.parametrize("by_samples", [False, True])
def test_forwards_that_write_trained_weights_unlike_are_refused(by_samples, zero_stage, is_loop):
    def run():
        booster, model, optimizer = boosted(Scaled(by_samples), sgd, None, zero_stage=zero_stage)
        for _ in range(3):
            ids = torch.arange(4) + 4 * booster.plugin.layout.here.dp
            if is_loop:
                booster.backward(model(ids).square().mean(), optimizer)
            else:
                booster.execute_pipeline(iter([ids]), model, lambda outputs, _: outputs.square().mean(), optimizer)
            optimizer.step()
        with booster.unsharded(model):
            return model.rows.weight.detach().clone()

    if by_samples:
        with pytest.raises(ConfigError, match=r"^rows.weight is trained, and the forward writes to it by the samples"):
            Loopback(2).run(run)
    else:
        first, second = Loopback(2).run(run)
        assert torch.equal(first, second)


@pytest.mark.parametrize("pp_size", [1, 2])
def test_each_replica_keeps_its_own_where_that_is_asked_for(pp_size):
    first, *_, last = Loopback(2 * pp_size).run(partial(trained, 2, pp_size=pp_size, broadcast_buffers=False))
    if pp_size == 1:
        assert not torch.equal(first[0]["blocks.0.seen"], last[0]["blocks.0.seen"])
    own = Loopback(1).run(partial(trained, 2, steps=1, part=lambda batch, replica, size: batch[6:]))[0][0]
    for name in last[0].keys() & {"blocks.0.seen", "blocks.3.calls"}:
        torch.testing.assert_close(last[0][name], own[name])


class Late(Block):
    """Writes where inputs are large."""

    def forward(self, x):
        if self.training and x.sum() > 3:
            self.seen += 1
        return 0 * self.linear(x) - 1


def unlike(batch, replica, size):
    """Batches of other sizes on each replica, of which that of the third step on the last one is large."""
    return torch.ones(4 + replica, WIDTH) * (1.0 if batch.sum() == rows(2).sum() and replica == size - 1 else -1.0)


@pytest.mark.covering
@pytest.mark.parametrize("pp_size", [1, 2])
@pytest.mark.parametrize("broadcast", [True, False])
def test_a_buffer_that_one_replica_writes_to_late_is_found(pp_size, broadcast):
    settings = {"make": Late, "steps": 5, "part": unlike, "pp_size": pp_size, "broadcast_buffers": broadcast}
    ranks = Loopback(2 * pp_size).run(partial(trained, 2, **settings))
    counted = [sum(value.sum().item() for name, value in rank[4].items() if "seen" in name) for rank in ranks]
    assert any(counted) is not broadcast, "as on the first replica, or not"


class ThroughData(Block):
    def forward(self, x):
        if self.training:
            self.seen.data.add_(x.detach().sum(0))
        return self.linear(x)


def test_writes_that_no_version_shows_are_found_in_the_first_step():
    first, second = Loopback(2).run(partial(trained, 2, make=ThroughData))
    for one, other in zip(first, second, strict=True):
        assert_equal(one, other, leave_out="scratch")


class Growing(Block):
    def forward(self, x):
        if self.training:
            self.seen = x.detach().sum(1).double()
        return self.linear(x)


@pytest.mark.parametrize("sizes", [(6, 4), (4, 6)])
def test_buffers_of_other_shapes_are_refused_on_every_rank(sizes):
    def run():
        with pytest.raises(ConfigError) as error:
            trained(2, make=Growing, part=lambda batch, replica, size: batch[: sizes[replica]])
        return str(error.value)

    first, second = (f"({size // 2},) torch.float64" for size in sizes)
    for text in Loopback(2).run(run):
        assert text == (
            f"the buffer blocks.0.seen differs in shape or dtype between replicas after a step ({first}, {second}), so "
            "that of the first cannot be sent to the others. Register it with persistent=False, or set "
            "broadcast_buffers=False."
        )


def test_a_buffer_that_grows_everywhere_is_refused_by_name():
    def run():
        sizes = iter([4, 4, 6, 6])
        with pytest.raises(ConfigError) as error:
            trained(2, make=Growing, part=lambda batch, replica, size: batch[: next(sizes)])
        return str(error.value)

    for text in Loopback(2).run(run):
        assert text.startswith("the buffer blocks.0.seen has another shape or dtype than in earlier steps")


@pytest.mark.parametrize(("make", "expected"), [(Block, 1), (partial(nn.Linear, WIDTH, WIDTH), 0)])
def test_all_buffers_go_in_one_message_and_none_without_them(make, expected):
    def run():
        booster, model, optimizer = boosted(Model(make), sgd, rows(0))
        group, counts = booster.plugin.layout.dp, []
        for step in range(3):
            before = dict(group._num_collectives)
            booster.execute_pipeline(iter([rows(step)]), model, squares, optimizer)
            counts.append(group._num_collectives["all_reduce"] - before["all_reduce"])
            optimizer.step()
        return counts

    plain = 2  # the bucket of gradients, and which parameters were reached
    assert Loopback(2).run(run) == [[plain + expected] * 3] * 2


def test_backward_passes_by_hand_leave_them_equal():
    def run():
        booster, model, optimizer = boosted(Model(), sgd, None)
        replica, after = booster.plugin.layout.here.dp, []
        for step in range(3):
            batch = rows(10 * step + replica)
            with booster.no_sync(model, optimizer):
                booster.backward(squares(model(batch), batch), optimizer)
            booster.backward(squares(model(batch), batch), optimizer)
            optimizer.step()
            after.append({name: value.clone() for name, value in model.named_buffers()})
        return after

    first, second = Loopback(2).run(run)
    for one, other in zip(first, second, strict=True):
        assert_equal(one, other, leave_out="scratch")
    assert first[-1]["blocks.0.calls"] == 6


def test_processes_have_those_of_the_first():
    first, second = run_ranks(partial(trained, 2), 2)
    for one, other in zip(first, second, strict=True):
        assert_equal(one, other, leave_out="scratch")


@pytest.mark.parametrize("value", ["no", 1, None])
def test_other_values_are_refused(value):
    with pytest.raises(ConfigError, match="broadcast_buffers must be True or False"):
        boosted(Model(), sgd, None, broadcast_buffers=value)


class WithTarget(nn.Module):
    """A network, and a frozen one that the script sets to it now and then."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.online, self.target = nn.Linear(4, 3), nn.Linear(4, 3)
        self.target.requires_grad_(False)

    def forward(self, x):
        return self.online(x), self.target(x + 1)


def follow(model, rate):
    with torch.no_grad():
        for one, other in zip(model.target.parameters(), model.online.parameters(), strict=True):
            one.lerp_(other, rate)


@pytest.mark.parametrize("in_pipeline", [False, True])
@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_a_target_that_the_script_writes_to_is_no_work_of_the_forward(zero_stage, in_pipeline, caplog):
    batches = torch.randn(6, 8, 4, generator=torch.Generator().manual_seed(0))

    def loss_of(outputs, _=None):
        now, later = outputs
        return nn.functional.mse_loss(now.max(1).values, 0.9 * later.max(1).values.detach() + 1)

    def run():
        booster, model, optimizer = boosted(WithTarget(), trained_sgd, batches[0][:4], zero_stage=zero_stage)
        here = booster.plugin.layout.here.dp
        for number, batch in enumerate(batches):
            part = batch[here * 4 : here * 4 + 4]
            if in_pipeline:
                booster.execute_pipeline(iter([part]), model, loss_of, optimizer)
            else:
                booster.backward(loss_of(model(part)), optimizer)
            optimizer.step()
            with booster.unsharded(model):
                follow(model, 1.0 if number % 2 else 0.1)
        with booster.unsharded(model):
            return {name: one.detach().clone() for name, one in model.named_parameters()}

    found = Loopback(2).run(run)[1]
    assert not [one for one in caplog.records if "the forward writes to" in one.getMessage()]
    model = WithTarget()
    optimizer = trained_sgd(model.parameters())
    for number, batch in enumerate(batches):
        optimizer.zero_grad()
        loss_of(model(batch)).backward()
        optimizer.step()
        follow(model, 1.0 if number % 2 else 0.1)
    assert_near(found, {name: one.detach() for name, one in model.named_parameters()}, 1e-6)


def trained_sgd(parameters):
    return torch.optim.SGD([one for one in parameters if one.requires_grad], lr=0.1)
