"""A run that goes on from the state of its optimizer is the run that was not interrupted, bit for bit."""

import copy
import io
import re

import pytest
import torch
from support import assert_same, image_batch, model_loss, replica_part, sgd, tiny_vit
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import Loopback, current_world
from hybridpp.errors import ConfigError
from hybridpp.precision import LossScale

LAYOUTS = {"one": {}, "pp2": {"pp_size": 2}, "tp2": {"tp_size": 2}, "dp2": {"dp_size": 2}}
PRECISIONS = {
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16", "initial_scale": 2.0**24},  # the first steps overflow
}


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def two_groups(parameters):
    parameters = list(parameters)
    matrices, others = ([p for p in parameters if (p.dim() > 1) == is_matrix] for is_matrix in (True, False))
    return torch.optim.AdamW([{"params": others}, {"params": matrices, "weight_decay": 0.1}], lr=1e-2)


class Run:
    """What a script has."""

    def __init__(self, seed, make_optimizer=adamw, dropout=0.2, dp_size=1, **settings):
        settings = {"tp_size": 1, "pp_size": 1, "precision": "fp32", "num_microbatches": 2, **settings}
        plan = {"*.[qkv]_proj": "column", "*.o_proj": "row", "*.fc1": "column", "*.fc2": "row"}
        if settings["tp_size"] > 1:
            settings["tensor_parallel_plan"] = plan
        self.booster = Booster(plugin=HybridParallelPlugin(**settings))
        model = tiny_vit(dropout=dropout, num_layers=2, seed=seed)
        optimizer = make_optimizer(model.parameters())
        scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
        self.model, self.optimizer, _, _, self.scheduler = self.booster.boost(
            model, optimizer, lr_scheduler=scheduler, sample=image_batch(2)
        )
        self.dp_size = dp_size

    def steps(self, seeds, schedule=True):
        """Losses, as they are."""
        replica = self.booster.plugin.layout.here.dp
        losses = []
        for seed in seeds:
            batch = replica_part(image_batch(4 * self.dp_size, seed), replica, self.dp_size)
            losses.append(self.booster.execute_pipeline(iter([batch]), self.model, model_loss, self.optimizer)["loss"])
            self.optimizer.step()
            if schedule:
                self.scheduler.step()
        return [loss.item().hex() for loss in losses]

    def evaluate(self):
        with torch.no_grad():
            result = self.booster.execute_pipeline(iter([image_batch(2)]), self.model, model_loss)
        return result["loss"].item().hex()

    def save(self, folder):
        self.booster.save_model(self.model, folder)
        return written({"optimizer": self.optimizer.state_dict(), "scheduler": self.scheduler.state_dict()})

    def load(self, folder, state):
        self.booster.load_model(self.model, folder)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])

    def everything(self):
        inner = self.optimizer.unwrap()
        tensors = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        for place, state in enumerate(inner.state.values()):
            tensors |= {f"{place} {key}": torch.as_tensor(value).clone() for key, value in state.items()}
        for name, master in self.booster.plugin._engine(self.model).masters.masters.items():
            tensors[f"master {name}"] = master.detach().clone()
        return tensors, (self.optimizer.counts, self.optimizer.loss_scale, self.scheduler.get_last_lr())


def written(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def assert_same_run(actual, expected):
    assert actual[1] == expected[1]
    assert_same(actual[0], expected[0])


def on_layout(run, layout):
    sizes = {"tp_size": 1, "pp_size": 1, "dp_size": 1, **layout}
    return Loopback(sizes["tp_size"] * sizes["pp_size"] * sizes["dp_size"]).run(run)


@pytest.mark.covering
@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        *(("one", precision) for precision in PRECISIONS),
        ("pp2", "fp16"),
        ("tp2", "bf16"),
        ("dp2", "fp16"),
    ],
)
def test_three_steps_saved_and_three_more_are_six(tmp_path, layout, precision):
    layout, precision = LAYOUTS[layout], PRECISIONS[precision]

    def run():
        unbroken = Run(0, **layout, **precision)
        before = unbroken.steps(range(3))
        unbroken.evaluate()
        state = unbroken.save(tmp_path)
        after, evaluated = unbroken.steps(range(3, 6)), unbroken.evaluate()
        assert unbroken.optimizer.skipped_steps >= ("initial_scale" in precision)
        resumed = Run(7, **layout, **precision)  # other weights, and another seed
        resumed.load(tmp_path, state)
        assert resumed.optimizer.counts.applied + resumed.optimizer.counts.skipped == 3
        assert (resumed.steps(range(3, 6)), resumed.evaluate()) == (after, evaluated)
        assert len({*before, *after}) == 6
        assert_same_run(resumed.everything(), unbroken.everything())

    on_layout(run, layout)


def test_more_replicas_go_on_from_the_state_of_one(tmp_path):
    states = []

    def first():
        run = Run(0)
        run.steps(range(2))
        states.append(run.save(tmp_path))

    def then():
        run = Run(7, dp_size=2)
        run.load(tmp_path, copy.deepcopy(states[0]))
        assert run.optimizer.applied_steps == 2
        return run.steps([3])

    Loopback(1).run(first)
    Loopback(2).run(then)


def test_reloading_in_one_process_repeats_the_steps_and_drops_gradients(tmp_path):
    run = Run(0, precision="fp16", initial_scale=2.0**16, growth_interval=2)
    run.steps(range(2))
    state = run.save(tmp_path)
    expected = run.steps(range(2, 5))
    wanted = run.everything()
    for _ in range(2):
        run.booster.execute_pipeline(iter([image_batch(4)]), run.model, model_loss, run.optimizer)
        run.load(tmp_path, copy.deepcopy(state))
        assert run.steps(range(2, 5)) == expected
        assert_same_run(run.everything(), wanted)


def test_a_state_that_lacks_gradients_says_so(caplog):
    run = Run(0)
    run.steps([0])
    run.optimizer.state_dict()
    assert not caplog.records
    run.booster.execute_pipeline(iter([image_batch(4)]), run.model, model_loss, run.optimizer)
    run.optimizer.state_dict()
    assert "state_dict was called between backward and step" in caplog.text


@pytest.mark.parametrize("kind", ["state dict", "folder"])
def test_masters_keep_their_precision_whichever_is_loaded_first(tmp_path, kind):
    run = Run(0, precision="bf16")
    run.steps(range(2))
    weights, state = written(run.model.state_dict()), run.save(tmp_path)
    expected, wanted = run.steps([2]), run.everything()
    resumed = Run(7, precision="bf16")
    resumed.optimizer.load_state_dict(state["optimizer"])
    if kind == "folder":
        resumed.booster.load_model(resumed.model, tmp_path)
    else:
        resumed.model.load_state_dict(weights)
    resumed.scheduler.load_state_dict(state["scheduler"])
    assert resumed.steps([2]) == expected
    assert_same_run(resumed.everything(), wanted)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"precision": "bf16"},
        {"precision": "bf16", "zero_stage": 1, "dp_size": 2},
        {"precision": "fp16", "zero_stage": 2, "dp_size": 2},
    ],
)
def test_a_state_of_the_optimizer_alone_leaves_the_weights_alone(settings, caplog):
    """As in torch: a script starts the moments again from those of an earlier step."""

    def run():
        one = Run(0, dropout=0.0, **settings)
        one.steps([0])
        state = copy.deepcopy(one.optimizer.state_dict())
        one.steps([1])
        before = {name: weight.clone() for name, weight in one.model.state_dict().items()}
        held = one.booster.plugin._engine(one.model).masters.masters
        masters = {name: master.clone() for name, master in held.items()}
        one.optimizer.load_state_dict(state)
        assert_same(one.model.state_dict(), before)
        assert_same(held, masters)
        one.steps([2])

    Loopback(settings.get("dp_size", 1)).run(run)
    texts = [one.getMessage() for one in caplog.records if "saved with other weights" in one.getMessage()]
    assert len(texts) == ("precision" in settings)


@pytest.mark.parametrize("order", ["optimizer first", "scheduler first", "optimizer alone"])
def test_the_lr_schedule_does_not_advance_at_a_skipped_step_before_a_save(order):
    """Saved between ``optimizer.step`` and ``scheduler.step``."""
    run = Run(0, precision="fp16", initial_scale=2.0**10)
    run.steps(range(2))
    run.optimizer.loss_scaler.state = LossScale(2.0**40)  # the next one overflows
    run.steps([2], schedule=False)
    assert run.optimizer.last_step_skipped
    state = written({"optimizer": run.optimizer.state_dict(), "scheduler": run.scheduler.state_dict()})
    resumed = Run(7, precision="fp16", initial_scale=2.0**10)
    if order == "scheduler first":
        resumed.scheduler.load_state_dict(state["scheduler"])
    resumed.optimizer.load_state_dict(state["optimizer"])
    if order == "optimizer first":
        resumed.scheduler.load_state_dict(state["scheduler"])
    if order == "optimizer alone":  # the next step is skipped, too, and the counts of the old run say nothing of it
        rate = resumed.scheduler.get_last_lr()
        resumed.optimizer.loss_scaler.state = LossScale(2.0**40)
        resumed.steps([3])
        assert resumed.scheduler.get_last_lr() == rate
        return
    for each in (run, resumed):
        each.scheduler.step()
    assert resumed.scheduler.get_last_lr() == run.scheduler.get_last_lr() == [pytest.approx(1e-2 / 3)]


def refused(layout, change, text, **settings):
    """On every rank, whatever was changed about one rank's state."""

    def run():
        run = Run(0, make_optimizer=sgd, **LAYOUTS[layout], **settings)
        run.steps([0])
        rank = current_world().rank
        states[rank] = run.optimizer.state_dict()
        run.booster.plugin.layout.control.all_gather(torch.zeros(1))
        before = run.everything()
        state = change(dict(states), rank, run)
        with pytest.raises(ConfigError) as raised:
            run.optimizer.load_state_dict(state)
        assert_same_run(run.everything(), before)
        return str(raised.value)

    states = {}
    messages = on_layout(run, LAYOUTS[layout])
    for message in messages:
        assert re.search(text, message), message
    return messages


def test_the_state_of_another_rank_is_refused_on_every_rank():
    way_out = "Save optimizer.state_dict.. on every rank, in a file with the rank in its name"

    def swapped(states, rank, run):
        return states[1 - rank]

    def of_rank_0(states, rank, run):
        return states[0]

    refused("pp2", swapped, f"it has .* of shape .* where this rank has .*{way_out}")
    refused(
        "tp2",
        swapped,
        f"rank (1 of 2, and this is tensor-parallel rank 0|0 of 2, and this is tensor-parallel rank 1) of 2. {way_out}",
    )
    first, second = refused("tp2", of_rank_0, "by tensor-parallel rank 0 of 2, and this is tensor-parallel rank 1 of 2")
    assert first == f"rank 1 was given a state of another rank or layout: {second}"


def test_the_state_of_equal_shapes_and_other_names_is_refused():
    def run():
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(2)])
        optimizer = sgd(model.parameters())
        booster = Booster(plugin=HybridParallelPlugin(tp_size=1, pp_size=2, num_microbatches=1, precision="fp32"))
        _, optimizer, *_ = booster.boost(model, optimizer, sample=torch.ones(2, 4))
        states[current_world().rank] = optimizer.state_dict()
        booster.plugin.layout.control.all_gather(torch.zeros(1))
        with pytest.raises(ConfigError) as raised:
            optimizer.load_state_dict(states[1 - current_world().rank])
        return str(raised.value)

    states = {}
    first, second = Loopback(2).run(run)
    assert "it has '1.weight' of shape (4, 4) where this rank has '0.weight' of shape (4, 4). Save" in first
    assert "it has '0.weight' of shape (4, 4) where this rank has '1.weight' of shape (4, 4). Save" in second


def test_states_of_several_moments_are_refused():
    def later(states, rank, run):
        return {**states[rank], "counts": {**states[rank]["counts"], "applied": 1 + rank}}

    refused(
        "pp2", later, r"of different steps: .*'applied': 1.* on rank 0, .*'applied': 2.* on rank 1. Load the states"
    )


def test_what_is_no_state_of_this_optimizer_is_refused():
    def refused_alone(state, text, **settings):
        refused("one", lambda *_: state, text, **settings)

    half, full = (Run(0, sgd, precision=precision).optimizer for precision in ("bf16", "fp32"))
    refused_alone(full.unwrap().state_dict(), r"got \['param_groups', 'state'\]. Load the state of a plain optimizer")
    refused_alone(None, "got NoneType. Load the state of a plain optimizer before booster.boost.")
    refused_alone(
        half.state_dict(), "another precision: it was saved in bf16, and this run uses fp32. Use the precision that"
    )
    refused_alone(
        full.state_dict(), "another precision: it was saved in fp32, and this run uses bf16.", precision="bf16"
    )
    old = {key: full.state_dict()[key] for key in ("optimizer", "loss_scale", "masters")}
    refused_alone(old, "it was saved in another one, and this run uses bf16.", precision="bf16")


@pytest.mark.parametrize("layout", [{"pp_size": 2}, {"dp_size": 2, "zero_stage": 1}])
def test_the_state_is_by_the_names_of_the_complete_model(layout):
    def rank():
        run = Run(0, two_groups, **layout)
        run.steps([0])
        state = run.optimizer.state_dict()["optimizer"]
        own = [name for group in state["param_groups"] for name in group["params"]]
        assert {*own} == {*state["state"]} <= {*tiny_vit(num_layers=2).state_dict()}
        tensors = run.optimizer.target.tensors
        for name in own:
            assert torch.equal(state["state"][name]["exp_avg"], run.optimizer.state[tensors[name]]["exp_avg"])
        return own

    own = on_layout(rank, layout)
    assert {*own[0], *own[1]} == {name for name, _ in tiny_vit(num_layers=2).named_parameters()}


def test_a_state_of_an_older_version_is_loaded_with_a_warning(caplog):
    run = Run(0)
    run.steps(range(2))
    state = run.optimizer.state_dict()
    old = written({key: state[key] for key in ("optimizer", "loss_scale", "masters")})
    old["optimizer"] = run.optimizer.unwrap().state_dict()  # by numbers
    resumed = Run(7)
    resumed.optimizer.load_state_dict(old)
    assert "this optimizer state was saved by an older version, without the run's progress" in caplog.text
    assert_same(
        {str(n): state["exp_avg"] for n, state in enumerate(resumed.optimizer.unwrap().state.values())},
        {str(n): state["exp_avg"] for n, state in enumerate(run.optimizer.unwrap().state.values())},
    )
