"""The order in which passes gather and free the weights of units."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hybridpp.module_adapter import AdapterLayer, ModuleAdapter
from hybridpp.partition import UnitGather, unit_gather
from hybridpp.partition.intercept import Interceptor
from hybridpp.partition.unit_gather import REST


class Recorder:
    """Weights that note what is asked of them; ``there`` has the units in use."""

    def __init__(self):
        self.events, self.users = [], {}

    @property
    def there(self):
        return {unit for unit, users in self.users.items() if users}

    def start_unit(self, unit, user, overdue=frozenset()):
        if not self.users.get(unit):
            self.events.append(f"+{unit}")
        self.users.setdefault(unit, set()).add(user)

    def wait_unit(self, unit):
        assert self.users[unit]

    def release_unit(self, unit, user):
        self.users[unit].discard(user)
        if not self.users[unit]:
            self.events.append(f"-{unit}")

    def shares_memory(self, unit, tensor):
        return False

    def absent_part(self, parameter):
        return 0

    def move_to_rest(self, part, user):
        self.events.append("read outside")
        return ["0.weight"]

    def take(self):
        events, self.events = self.events, []
        return " ".join(events)


class Model(nn.Sequential):
    """Three layers; what a backward pass needs must be there."""

    def __init__(self):
        super().__init__(*(nn.Linear(4, 4) for _ in range(3)))


def gathering(model, learns=False):
    weights = Recorder()
    gather = UnitGather(weights, {"0": 0, "1": 1, "2": 2}, learns=learns)
    Interceptor(ModuleAdapter(model), AdapterLayer.UNIT_RNG, ["0", "1", "2"]).around = gather.around_unit
    return weights, gather, lambda x: gather.around_model(model.forward, (x,), {})


def test_the_next_unit_is_on_its_way_from_the_second_pass_on():
    weights, _, call = gathering(Model())
    with torch.no_grad():
        call(torch.ones(2, 4))
        assert weights.take() == f"+{REST} +0 -0 +1 -1 +2 -2 -{REST}"
        call(torch.ones(2, 4))
    assert weights.take() == f"+{REST} +0 +1 -0 +2 -1 -2 -{REST}"
    assert weights.there == set()


def test_a_backward_pass_gathers_again_and_frees_each_unit_behind_it():
    weights, gather, call = gathering(Model())
    ended = []
    gather.after_backward = ended.append
    for _ in range(2):
        loss = call(torch.ones(2, 4)).sum()
        weights.take()
        with gather.own_backward():
            loss.backward()
    # The model's output is that of its last unit.
    assert weights.take() == f"+2 +{REST} +1 -2 +0 -1 -{REST} -0"
    assert ended == [2, 1, 0] * 2
    assert weights.there == set()


def test_a_pass_without_gradients_of_weights_changes_no_pass_of_a_step():
    weights, gather, call = gathering(Model())
    ended = []
    gather.after_backward = ended.append

    def step():
        loss = call(torch.ones(2, 4)).sum()
        weights.take()
        with gather.own_backward():
            loss.backward()
        return weights.take()

    expected = [step() for _ in range(2)][-1]
    ended.clear()
    # The same units in another order, twice.
    x = torch.ones(2, 4, requires_grad=True)
    for _ in range(2):
        torch.autograd.grad((call(x) + call(x)).sum(), x)
    assert not ended
    step()
    assert step() == expected
    assert ended[-3:] == [2, 1, 0]


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_units_find_their_weights(reentrant):
    model = Model()
    weights, _, call = gathering(model)
    plain = model[1].forward
    seen = []

    def forward(x):
        seen.append(1 in weights.there)
        return checkpoint(plain, x, use_reentrant=reentrant)

    model[1].forward = forward
    call(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert all(seen)
    assert weights.there == set()


def test_passes_of_other_replicas_are_followed_event_by_event():
    weights, gather, call = gathering(Model())
    ended = []
    gather.after_backward = ended.append

    def backward():
        with gather.own_backward():
            call(torch.ones(2, 4)).sum().backward()

    for _ in range(2):
        backward()
    weights.take()
    ended.clear()
    backward()
    expected, order = [event for event in weights.take().split() if event[0] == "+"], list(ended)
    ended.clear()
    gather.gather_as_others(backward=False)
    gather.gather_as_others(backward=True)
    assert [event for event in weights.take().split() if event[0] == "+"] == expected
    assert ended == order
    assert weights.there == set()


def test_parameters_that_other_code_reads_are_found_in_the_first_call():
    class Reads(Model):
        def forward(self, x):
            assert self[0].weight.dtype is torch.float32  # a dtype is no value
            return super().forward(x) @ self[0].weight.T

    weights, gather, call = gathering(Reads(), learns=True)
    moved = []
    gather.after_move = moved.extend
    call(torch.ones(2, 4))
    assert "0.weight" in moved
    assert weights.events.count("read outside") >= 1
    weights.take()
    call(torch.ones(2, 4))
    assert "read outside" not in weights.events


def test_a_failed_call_leaves_nothing_in_use():
    class Fails(Model):
        def forward(self, x):
            super().forward(x)
            raise ValueError("no output")

    weights, _, call = gathering(Fails())
    with pytest.raises(ValueError, match="no output"):
        call(torch.ones(2, 4))
    assert weights.there == set()


def test_graphs_are_freed():
    class Hook:
        def __call__(self, gradients):
            """A part of the graph, which can be referred to weakly."""

    _, _, call = gathering(Model())
    output, hook = call(torch.ones(2, 4)), Hook()
    output.grad_fn.register_prehook(hook)
    seen = weakref.ref(hook)
    del output, hook
    gc.collect()
    assert seen() is None


def test_a_node_keeps_its_key_and_shares_it_with_no_other():
    # As the layers of a model, of which nobody holds Python's objects of the nodes.
    value, results = torch.ones(2, requires_grad=True), []
    for _ in range(50):
        value = value * 2
        results.append(value)
    keys = [unit_gather._key(result.grad_fn) for result in results]
    assert len(set(keys)) == 50
    assert [unit_gather._key(result.grad_fn) for result in results] == keys
