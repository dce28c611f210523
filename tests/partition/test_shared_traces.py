"""In-process ranks share a trace where each would make an equal one, and only there."""

import pytest
import torch
from partition import aux_loss_models, resetting_models, user_models
from partition.tracing import tracer
from support import image_batch, tiny_vit, train
from torch import nn

from hybridpp.partition import SharedTraces, Tracer

ROWS = torch.ones(6, 4)


@pytest.fixture
def runs(monkeypatch):
    """The traces that were made, and not given."""
    made, trace = [], Tracer._trace

    def recorded(self, *args, **kwargs):
        made.append(trace(self, *args, **kwargs))
        return made[-1]

    monkeypatch.setattr(Tracer, "_trace", recorded)
    return made


@pytest.mark.parametrize(("layout", "num_traces"), [({"pp_size": 4}, 2), ({"pp_size": 2, "dp_size": 2}, 3)], ids=str)
def test_ranks_that_hold_equal_models_make_one_trace_of_equal_inputs(runs, layout, num_traces):
    """At boost, and in the first step of each replica, whose samples are others."""
    train(tiny_vit, [image_batch(8)], num_microbatches=2, **layout)
    assert len(runs) == num_traces


def test_ranks_that_share_layers_trace_for_themselves(runs):
    train(tiny_vit, [image_batch(4)], num_microbatches=2, pp_size=2, tp_size=2)
    assert len(runs) == 8


def test_a_model_with_other_inputs_is_traced_again_once(runs):
    batches = [image_batch(8), image_batch(4), image_batch(8)]
    train(tiny_vit, batches, num_microbatches=2, pp_size=2)
    assert len(runs) == 3


def given(first, second, first_args=(ROWS,), second_args=(ROWS,)):
    """Whether the trace of one model is given to the holder of the other."""
    shared = SharedTraces()
    expected = tracer(first, shared=shared).trace(first_args, {})
    found = tracer(second, shared=shared).trace(second_args, {})
    return found is expected


def base():
    return user_models.Base()


def test_the_trace_of_an_equal_model_is_given():
    assert given(base(), base())


def in_evaluation(model):
    model.blocks[1].eval()


def hooked(model):
    model.blocks[1].register_forward_hook(lambda *_: None)


def frozen(model):
    model.blocks[1].requires_grad_(False)


def wider(model):
    model.blocks[1], model.blocks[2] = nn.Linear(4, 6), nn.Linear(6, 4)


def renamed(model):
    model.blocks[1].number = 5


def of_another_class(model):
    model.blocks[1] = nn.Identity()


@pytest.mark.parametrize("change", [in_evaluation, hooked, frozen, wider, renamed, of_another_class])
def test_the_trace_of_a_model_that_differs_is_not(change):
    other = base()
    change(other)
    assert not given(base(), other)


@pytest.mark.parametrize(
    "args",
    [(torch.ones(3, 4),), (torch.zeros(6, 4),), (torch.ones(4, 6).T,), (ROWS.clone().requires_grad_(),), (ROWS, None)],
    ids=["shape", "values", "strides", "requires grad", "one more"],
)
def test_the_trace_for_other_arguments_is_not(args):
    class Taking(user_models.Base):
        def forward(self, x, more=None):
            return super().forward(x)

    assert given(Taking(), Taking())
    assert not given(Taking(), Taking(), second_args=args)


def test_arguments_that_cannot_be_compared_are_traced():
    class Calling(user_models.Base):
        def forward(self, x, function):
            return super().forward(function(x))

    assert not given(Calling(), Calling(), (ROWS, torch.relu), (ROWS, torch.relu))


def test_values_that_the_holder_changes_later_do_not_count():
    rows, shared = ROWS.clone(), SharedTraces()
    expected = tracer(base(), shared=shared).trace((rows,), {})
    rows.zero_()
    assert tracer(base(), shared=shared).trace((ROWS,), {}) is expected


@pytest.mark.parametrize("make_model", [aux_loss_models.AuxiliaryLosses, aux_loss_models.OwnLists])
def test_the_trace_of_units_that_keep_tensors_is_not_given(make_model):
    assert not given(make_model(), make_model())


def test_the_trace_of_a_model_with_resets_is_not_given():
    shared, samples = SharedTraces(), (torch.ones(2, 3, 4),)
    traces = [tracer(resetting_models.Pieces(), shared=shared).trace(samples, {}, cuts=[("blocks.1", 2)]) for _ in "12"]
    assert traces[0].resets == traces[1].resets
    assert any(traces[0].resets)
    assert traces[0] is not traces[1]


def test_objects_of_one_rank_are_not_given_to_another():
    class Naming(nn.Linear):
        def forward(self, x):
            return super().forward(x), type(self)

    class Named(user_models.Base):
        def forward(self, x):
            for block in self.blocks:
                x, _ = block(x)
            return self.head(x)

    assert not given(Named(Naming), Named(Naming))


def test_what_watches_the_units_sees_them(runs):
    shared, seen = SharedTraces(), []
    tracer(base(), shared=shared).trace((ROWS,), {})
    tracer(base(), shared=shared).trace((ROWS,), {}, watch=lambda name, *_: seen.append(name))
    assert len(seen) == 5
