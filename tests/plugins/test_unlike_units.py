"""ZeRO 3 where replicas call other units, where passes are within others, or go through several calls of the model."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import Loopback, current_world, gather_numbers
from hybridpp.errors import UnlikeCallsError
from hybridpp.partition.unit_gather import UnitGather


class Layers(nn.Module):
    """A stack of layers, of which those in ``left_out`` are not called, and one of two heads, of unlike sizes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.heads = nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 6))})

    def forward(self, x, left_out="", head="a"):
        for index, layer in enumerate(self.layers):
            if str(index) not in left_out:
                x = layer(x).tanh()
        return self.heads[head](x)


class Branches(nn.Module):
    """Calls a layer and a head of each branch, in another order than that of its modules."""

    def __init__(self):
        super().__init__()
        self.layers, self.heads = (nn.ModuleList(nn.Linear(6, 6) for _ in range(2)) for _ in range(2))

    def forward(self, x, which):
        return sum(self.heads[i](self.layers[i](x).tanh()) for i in which)


class Outputs(Layers):
    """Calls both heads."""

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return {name: head(x) for name, head in self.heads.items()}


class Terms(Layers):
    """Its loss has a term of each head, the second after more layers; of labels -100, there is none."""

    def __init__(self):
        super().__init__()
        self.layers, self.more = (
            nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)) for _ in range(2)
        )

    def forward(self, x, labels):
        for layer in self.layers:
            x = x + layer(x)
        loss = F.cross_entropy(self.heads["a"](x), labels[:, 0])
        for layer in self.more:
            x = x + layer(x)
        return loss + F.cross_entropy(self.heads["b"](x), labels[:, 1])


class Forces(nn.Module):
    """A layer after the gradient of what others computed, which the loss depends on."""

    def __init__(self):
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1))
        self.last = nn.Linear(6, 6)

    def forward(self, x):
        x = x.detach().requires_grad_()
        return self.last(torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0])


class Recomputed(torch.autograd.Function):
    """Calls a function without a graph, and takes its gradients in the backward pass."""

    @staticmethod
    def forward(ctx, x, function, *parameters):
        ctx.function, ctx.parameters = function, parameters
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        of_x, *others = torch.autograd.grad(y, (x, *ctx.parameters), gradient)
        return of_x, None, *others


class TakesGradients(nn.Sequential):
    def __init__(self):
        super().__init__(*(nn.Linear(6, 6) for _ in range(3)))

    def forward(self, x):
        x = Recomputed.apply(self[0](x), lambda x: self[1](x).tanh(), *self[1].parameters())
        return self[2](x)


def mean_square(outputs, inputs):
    return outputs.square().mean()


mean_square.reduction = "mean"  # the gradient of a sum in the forward is of each sample alone


def once(model, x, inputs):
    return model(x, **inputs).square().mean()


def twice(model, x, inputs):
    return model(x, **inputs).square().mean() - 0.5 * model(x + 1, **inputs).mean()


def of_one_output(model, x, inputs):
    return model(x)[inputs["head"]].square().mean()


def of_some_outputs(model, x, inputs):
    outputs = model(x)
    return sum((outputs[name].square().mean() for name in inputs["heads"]), torch.zeros((), requires_grad=True))


def of_some_calls(model, x, inputs):
    """A call of the model for each head."""
    losses = (model(x + index, head=head).square().mean() for index, head in enumerate(inputs["heads"]))
    return sum(losses, torch.zeros((), requires_grad=True))


def of_a_part_as_well(model, x, inputs):
    return model(x)["a"].square().mean() - model.heads["a"](model.layers[inputs["layer"]](x)).mean()


def step_difference(make_model, loss_of, steps, *, pipeline=False, **settings):
    """The largest difference of weights after steps of two replicas to those of one process.

    Args:
        make_model: makes the model.
        loss_of: of the model, a replica's samples and its further inputs.
        steps: by step, the further inputs of both replicas.
        pipeline: whether ``execute_pipeline`` runs the steps, in two micro-batches.
        settings: of the plugin.
    """
    batches = torch.randn(len(steps), 2, 4, 6, generator=torch.Generator().manual_seed(1))

    def made():
        torch.manual_seed(0)
        model = make_model()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def run():
        rank = current_world().rank
        plugin = HybridParallelPlugin(zero_stage=3, num_microbatches=2 if pipeline else 1, **settings)
        booster = Booster(plugin=plugin, device="cpu")
        model, optimizer, *_ = booster.boost(*made())
        for batch, inputs in zip(batches, steps, strict=True):
            x = batch[rank]
            if pipeline:
                data = iter([{"x": x, **inputs[rank]}])
                booster.execute_pipeline(data, model, mean_square, optimizer)
            else:
                # The mean of the replicas' losses, of whichever outputs they are.
                booster.backward(loss_of(model, x, inputs[rank]), optimizer, num_items=1)
            optimizer.step()
        with booster.unsharded(model):
            return [parameter.detach().clone() for parameter in model.parameters()]

    found = Loopback(2).run(run)
    model, optimizer = made()
    for batch, inputs in zip(batches, steps, strict=True):
        optimizer.zero_grad()
        for x, own in zip(batch, inputs, strict=True):
            (loss_of(model, x, own) / 2).backward()
        optimizer.step()
    return max(F.l1_loss(a, b).item() for rank in found for a, b in zip(rank, model.parameters(), strict=True))


A, B = {"head": "a"}, {"head": "b"}
FIRST, LAST, ALL, NONE = ({"left_out": which} for which in ("0", "2", "012", ""))


@pytest.mark.parametrize("pipeline", [False, True])
@pytest.mark.parametrize("settings", [{}, {"zero_reduce": "step"}], ids=["microbatch", "step"])
@pytest.mark.parametrize(
    "steps",
    [
        [(A, B), (B, A), (A, B)],
        [(A, A), (B, A), (B, B), (A, B)],
        [(FIRST, LAST), (NONE, FIRST), (ALL, NONE), (ALL, NONE)],
        [(FIRST, FIRST), (LAST, LAST), (FIRST, FIRST), (NONE, ALL)],
    ],
    ids=["heads", "new heads", "layers", "the same layers"],
)
def test_replicas_that_call_other_units_train_as_one_process(steps, settings, pipeline):
    assert step_difference(Layers, once, steps, pipeline=pipeline, **settings) < 1e-7


@pytest.mark.parametrize("make_model", [Forces, TakesGradients])
@pytest.mark.parametrize("pipeline", [False, True])
def test_gradients_taken_within_a_pass_are_those_of_one_process(make_model, pipeline):
    assert step_difference(make_model, once, [({}, {})] * 2, pipeline=pipeline) < 1e-7


@pytest.mark.parametrize("settings", [{}, {"zero_reduce": "step"}], ids=["microbatch", "step"])
def test_one_backward_pass_may_go_through_two_calls_of_the_model(settings):
    steps = [({}, {}), (FIRST, LAST)]
    assert step_difference(Layers, twice, steps, **settings) < 1e-7


@pytest.mark.parametrize("settings", [{}, {"zero_reduce": "step"}], ids=["microbatch", "step"])
@pytest.mark.parametrize("steps", [[(A, A), (B, B), (A, A)], [(A, A), (A, B), (B, B)]], ids=["alike", "unlike"])
def test_a_step_may_train_an_output_that_none_has_trained(steps, settings):
    assert step_difference(Outputs, of_one_output, steps, **settings) < 1e-7


def test_calls_may_be_in_another_order_than_modules():
    first, second, both = ({"which": which} for which in ((0,), (1,), (0, 1)))
    steps = [(first, second), (both, first), (second, both), (both, both)]
    assert step_difference(Branches, once, steps) < 1e-7


BOTH, ONLY_A, ONLY_B, NEITHER = ({"heads": which} for which in ("ab", "a", "b", ""))


@pytest.mark.parametrize("settings", [{}, {"zero_reduce": "step"}], ids=["microbatch", "step"])
@pytest.mark.parametrize(
    "steps",
    [
        [(BOTH, BOTH), (BOTH, ONLY_A), (ONLY_B, BOTH)],
        [(ONLY_A, ONLY_B), (BOTH, BOTH), (ONLY_B, ONLY_A)],
        [(BOTH, ONLY_A), (ONLY_A, ONLY_A), (ONLY_A, ONLY_B)],
        [(BOTH, NEITHER), (NEITHER, ONLY_A), (ONLY_B, NEITHER)],
    ],
    ids=["both first", "one first", "one last", "none on one"],
)
def test_losses_of_replicas_may_be_of_other_outputs(steps, settings):
    assert step_difference(Outputs, of_some_outputs, steps, **settings) < 1e-7


@pytest.mark.parametrize(
    "steps",
    [
        [(BOTH, ONLY_A), (BOTH, ONLY_B), (BOTH, BOTH), (ONLY_A, BOTH)],
        [(BOTH, BOTH), (ONLY_B, BOTH), (BOTH, NEITHER)],
        [(NEITHER, ONLY_A), (ONLY_A, ONLY_B), (NEITHER, BOTH)],
    ],
    ids=["fewer first", "alike first", "none first"],
)
def test_replicas_may_call_the_model_unlike_numbers_of_times(steps):
    assert step_difference(Layers, of_some_calls, steps) < 1e-7


def test_loops_with_one_call_tell_of_calls_in_the_first_pass_only(monkeypatch):
    told = []
    inner = UnitGather._tell

    def noted(self, own):
        told.append(self._tells_calls)
        return inner(self, own)

    monkeypatch.setattr(UnitGather, "_tell", noted)
    step_difference(Layers, once, [({}, {})] * 3)
    assert sorted(told) == [False] * 8 + [True] * 4  # a call and the pass, on two replicas


@pytest.mark.parametrize("recomputed", [0, 1])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_replicas_may_lack_the_labels_of_a_term_of_the_loss(num_microbatches, recomputed):
    generator = torch.Generator().manual_seed(1)
    batches = torch.randn(3, 2, 4, 6, generator=generator)
    labels = torch.randint(6, (3, 2, 4, 2), generator=generator)
    labels[0, 1, : 4 // num_microbatches, 1] = -100  # step, replica, samples, term
    labels[2, 0, : 4 // num_microbatches, 0] = -100

    def made():
        torch.manual_seed(0)
        model = Terms()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def run():
        replica = current_world().rank
        settings = {"gradient_checkpoint_config": {"gradient_checkpointing_ratio": recomputed}} if recomputed else {}
        plugin = HybridParallelPlugin(zero_stage=3, num_microbatches=num_microbatches, **settings)
        booster = Booster(plugin=plugin, device="cpu")
        model, optimizer, criterion, *_ = booster.boost(*made(), lambda loss, batch: loss)
        for x, of_step in zip(batches, labels, strict=True):
            data = iter([{"x": x[replica], "labels": of_step[replica]}])
            booster.execute_pipeline(data, model, criterion, optimizer)
            optimizer.step()
        with booster.unsharded(model):
            return [parameter.detach().clone() for parameter in model.parameters()]

    found = Loopback(2).run(run)
    model, optimizer = made()
    for x, of_step in zip(batches, labels, strict=True):
        optimizer.zero_grad()
        model(x.flatten(0, 1), of_step.flatten(0, 1)).backward()
        optimizer.step()
    for rank in found:
        torch.testing.assert_close(rank, list(model.parameters()), rtol=0, atol=1e-6)


def test_passes_through_fewer_units_exchange_no_message_about_them(monkeypatch):
    asked = []

    def counted(control, call, numbers):
        asked.append(call)
        return gather_numbers(control, call, numbers)

    monkeypatch.setattr("hybridpp_plugins.trained_weights.gather_numbers", counted)
    step_difference(Outputs, of_some_outputs, [(BOTH, BOTH)])
    in_first_step = len(asked)
    step_difference(Outputs, of_some_outputs, [(BOTH, BOTH), (BOTH, ONLY_A), (ONLY_A, BOTH)])
    assert len(asked) == 2 * in_first_step > 0


def test_a_loss_may_go_through_a_part_that_the_script_calls_itself():
    first, last = {"layer": 0}, {"layer": 2}
    assert step_difference(Outputs, of_a_part_as_well, [(first, first), (last, last)]) < 1e-7


def test_other_parts_that_replicas_call_at_once_are_refused():
    def run():
        torch.manual_seed(0)
        booster = Booster(plugin=HybridParallelPlugin(zero_stage=3))
        made = Layers()
        model, *_ = booster.boost(made, torch.optim.SGD(made.parameters()))
        x, layers, rank = torch.ones(2, 6), model.layers, current_world().rank
        found = layers[0](x)
        with booster.unsharded(model):
            layers[rank](x)
        with pytest.raises(
            UnlikeCallsError, match=rf"layers\.{rank} on this rank, with zero_stage=3. Call the same on"
        ):
            layers[rank](x)
        return found

    one, two = Loopback(2).run(run)
    assert torch.equal(one, two)


def test_steps_alike_exchange_no_message_about_units(monkeypatch):
    asked = []
    exchanged = "hybridpp_plugins.trained_weights.gather_numbers"

    def counted(control, call, numbers):
        asked.append(call)
        return [tuple(numbers)] * control.size

    monkeypatch.setattr(exchanged, counted)
    step_difference(TakesGradients, once, [({}, {})])
    in_one_step = len(asked)
    step_difference(TakesGradients, once, [({}, {})] * 3)
    assert in_one_step > 0
    assert len(asked) == 2 * in_one_step
