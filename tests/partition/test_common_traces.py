"""In-process ranks share a trace where each would make an equal one, and only there."""

import copy
import functools
from contextvars import ContextVar

import pytest
import torch
from module_adapter import test_order
from partition import aux_loss_models, resetting_models, user_models
from partition.test_hooks import check, total
from partition.tracing import tracer
from support import image_batch, tiny_vit, train
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from hybridpp.cluster import CommonResults, Loopback, ResultStores, current_world
from hybridpp.nn.torch_private import FakeSpec
from hybridpp.partition import CommonTraces, Tracer
from hybridpp.partition.common_traces import CommonTrace

ROWS = torch.ones(6, 4)
SETTING = ContextVar("setting", default=0)


@pytest.fixture
def made(monkeypatch):
    """The traces that were made, and not given."""
    found, trace = [], Tracer._trace

    def recorded(self, *args, **kwargs):
        found.append(trace(self, *args, **kwargs))
        return found[-1]

    monkeypatch.setattr(Tracer, "_trace", recorded)
    return found


@pytest.mark.parametrize(
    ("layout", "num_traces"),
    [
        ({"pp_size": 4}, 2),
        # At boost, and in the first step of each replica, whose samples are others.
        ({"pp_size": 2, "dp_size": 2}, 3),
        # Of each shard; and one in the search for a plan, on one rank for all.
        ({"pp_size": 2, "tp_size": 2}, 5),
    ],
    ids=str,
)
def test_ranks_that_hold_equal_models_make_one_trace_of_equal_inputs(made, layout, num_traces):
    train(tiny_vit, [image_batch(8)], num_microbatches=2, **layout)
    assert len(made) == num_traces


def test_a_rank_that_is_given_all_traces_makes_no_fakes(monkeypatch):
    made = []
    before = FakeSpec.make
    monkeypatch.setattr(FakeSpec, "make", lambda spec, mode: (made.append(current_world().rank), before(spec, mode))[1])
    train(tiny_vit, [image_batch(8)], num_microbatches=2, pp_size=4)
    # One rank makes the trace at boost, it or another one that of the first step.
    assert len(set(made)) <= 2
    assert len(made) == len(set(made)) * sum(1 for _ in tiny_vit().parameters())


def test_a_model_with_other_inputs_is_traced_again_once(made):
    batches = [image_batch(8), image_batch(4), image_batch(8)]
    train(tiny_vit, batches, num_microbatches=2, pp_size=2)
    assert len(made) == 3


def test_ranks_that_communicate_in_a_trace_all_trace(made):
    """A cut inside of blocks on sequence shards: their container code gathers real inputs."""
    test_order.study("cuts in blocks")
    assert len(made) == 8


def test_hooks_of_a_rank_that_was_given_a_trace_run_once(made):
    """Whether they only look is found out by the trace."""

    def hook_up(model, noted):
        model.body.register_forward_hook(lambda module, args, output: noted.append(("end", total(output))))

    check(hook_up)
    assert len(made) == 4  # on two stages, and on four


def traces(results):
    return CommonTraces(CommonResults("", ResultStores(results, None), lambda: 0))


def given(first, second, first_args=(ROWS,), second_args=(ROWS,)):
    """Whether the trace of one model is given to the holder of the other."""
    results = {}
    expected = tracer(first, common=traces(results)).trace(first_args, {})
    return tracer(second, common=traces(results)).trace(second_args, {}) is expected


def base():
    return user_models.Base()


def looking(module, args, output):
    return None


@pytest.mark.parametrize(
    "make", [base, tiny_vit, lambda: copy.deepcopy(tiny_vit())], ids=["base", "transformers", "copied"]
)
def test_the_trace_of_an_equal_model_is_given(make):
    samples = (image_batch(2)["pixel_values"],) if make is not base else (ROWS,)
    assert given(make(), make(), samples, samples)


def in_evaluation(model):
    model.blocks[1].eval()


def hooked(model):
    model.blocks[1].register_forward_hook(looking)


def frozen(model):
    model.blocks[1].requires_grad_(False)


def wider(model):
    model.blocks[1], model.blocks[2] = nn.Linear(4, 6), nn.Linear(6, 4)


def numbered(model):
    model.blocks[1].number = 5


def of_another_class(model):
    model.blocks[1] = nn.Identity()


def of_another_dtype(model):
    model.blocks[1].double()
    model.blocks[1].register_forward_pre_hook(to_double)
    model.blocks[1].register_forward_hook(to_float)


def to_double(module, args):
    return (args[0].double(),)


def to_float(module, args, output):
    return output.float()


def tied(model):
    model.blocks[1].weight = model.blocks[2].weight


def patched(model):
    model.blocks[1].forward = functools.partial(nn.Linear.forward, model.blocks[1])


def configured(model):
    model.config = {"layers": [1, 2]}


def with_buffer(model):
    model.register_buffer("table", torch.arange(3))


CHANGES = [
    in_evaluation,
    hooked,
    frozen,
    wider,
    numbered,
    of_another_class,
    of_another_dtype,
    tied,
    patched,
    configured,
    with_buffer,
]


def changed(change):
    model = base()
    change(model)
    return model


@pytest.mark.parametrize("change", CHANGES)
def test_the_trace_of_a_model_that_differs_is_not(change):
    assert not given(base(), changed(change))
    assert given(changed(change), changed(change)) or change is patched, "but those of one change are equal"


def test_buffers_with_other_values_are_traced():
    def with_table(start):
        model = base()
        model.register_buffer("table", torch.arange(start, start + 3))
        return model

    assert given(with_table(0), with_table(0))
    assert not given(with_table(0), with_table(1))


class Taking(user_models.Base):
    def forward(self, x, more=None):
        return super().forward(x)


@pytest.mark.parametrize(
    "args",
    [
        (torch.ones(3, 4),),
        (torch.zeros(6, 4),),
        (torch.ones(4, 6).T,),
        (ROWS.clone().requires_grad_(),),
        (ROWS, None),
        (ROWS, [ROWS]),
    ],
    ids=["shape", "values", "strides", "requires grad", "one more", "once more"],
)
def test_the_trace_for_other_arguments_is_not(args):
    assert given(Taking(), Taking())
    assert given(Taking(), Taking(), args, args)
    assert not given(Taking(), Taking(), second_args=args)


def test_what_else_a_forward_may_see_counts():
    results = {}

    def trace():
        return tracer(base(), common=traces(results)).trace((ROWS,), {})

    expected = trace()
    assert trace() is expected
    token = SETTING.set(1)
    assert trace() is not expected
    SETTING.reset(token)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert trace() is not expected
    handle = register_module_forward_hook(looking)
    assert trace() is not expected
    handle.remove()
    assert trace() is expected


def test_values_that_the_holder_changes_later_do_not_count():
    rows, results = ROWS.clone(), {}
    expected = tracer(base(), common=traces(results)).trace((rows,), {})
    rows.zero_()
    assert tracer(base(), common=traces(results)).trace((ROWS,), {}) is expected


@pytest.mark.parametrize("make_model", [aux_loss_models.AuxiliaryLosses, aux_loss_models.OwnLists])
def test_the_trace_of_units_that_keep_tensors_is_not_given(make_model):
    assert not given(make_model(), make_model())


def test_the_trace_of_a_model_with_resets_is_not_given():
    results, samples = {}, (torch.ones(2, 3, 4),)
    first, second = (
        tracer(resetting_models.Pieces(), common=traces(results)).trace(samples, {}, cuts=[("blocks.1", 2)])
        for _ in range(2)
    )
    assert first.resets == second.resets
    assert any(first.resets)
    assert first is not second


class Naming(nn.Linear):
    def forward(self, x):
        return super().forward(x), type(self)


class Named(user_models.Base):
    def forward(self, x):
        for block in self.blocks:
            x, _ = block(x)
        return self.head(x)


def test_objects_of_one_rank_are_not_given_to_another():
    assert not given(Named(Naming), Named(Naming))


class Settings:
    kind = None
    calls = ()


class Deciding(user_models.Base):
    """As transformers' models choose their loss in the first forward, and keep it in their configuration."""

    def __init__(self):
        super().__init__()
        self.config = Settings()

    def forward(self, x):
        if self.config.kind is None:
            self.config.kind = "regression"
        return super().forward(x)


class Recording(Deciding):
    def forward(self, x):
        self.config.calls = [*self.config.calls, tuple(x.shape)]
        return super().forward(x)


def test_what_a_trace_sets_in_objects_is_set_on_the_rank_that_is_given_it():
    first, second = Deciding(), Deciding()
    assert given(first, second)
    assert (first.config.kind, second.config.kind) == ("regression", "regression")


def test_a_trace_that_leaves_more_in_objects_is_made_by_every_rank():
    first, second = Recording(), Recording()
    assert not given(first, second)
    assert first.config.calls == second.config.calls == [(6, 4)]


def test_what_watches_the_units_sees_them(made):
    shared, seen = traces({}), []
    tracer(base(), common=shared).trace((ROWS,), {})
    tracer(base(), common=shared).trace((ROWS,), {}, watch=lambda name, *_: seen.append(name))
    assert len(seen) == 5


class Casts:
    """As a layer that learns in complete forwards what stages alone would not show it."""

    def __init__(self):
        self.seen = set()

    def learned(self):
        return frozenset(self.seen)

    def learn(self, learned):
        self.seen |= learned


class Casting(user_models.Base):
    casts = None

    def forward(self, x):
        self.casts[0].seen.add(tuple(x.shape))
        return super().forward(x)


def test_what_layers_learn_in_a_trace_is_learned_by_those_of_all_ranks(monkeypatch):
    results, layers = {}, [Casts(), Casts()]
    monkeypatch.setattr(Casting, "casts", layers)
    for layer in layers:
        shared = CommonTraces(CommonResults("", ResultStores(results, None), lambda: 0), [layer])
        tracer(Casting(), common=shared).trace((ROWS,), {})
    assert layers[0].seen == layers[1].seen == {(6, 4)}


def test_ranks_that_build_different_models_trace_each_their_own(made):
    def run():
        model = base()
        model.blocks[0].number = current_world().rank
        shared = CommonTraces(current_world().common_results(""))
        return tracer(model, common=shared).trace((ROWS,), {})

    Loopback(3).run(run)
    assert len(made) == 3


def kept_by_jobs(monkeypatch, make_model, **settings):
    """The traces that a job of in-process ranks leaves to later ones."""
    kept = {}
    monkeypatch.setattr(Loopback, "results_of_any_run", kept)
    train(make_model, [image_batch(8)], num_microbatches=2, pp_size=2, **settings)
    return [value for value in kept.values() if isinstance(value, CommonTrace)]


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16"}, {"tp_size": 2}], ids=str)
def test_later_jobs_take_traces_of_equal_models(made, monkeypatch, settings):
    num_made = len(kept_by_jobs(monkeypatch, tiny_vit, **settings))
    assert len(made) == num_made > 1
    train(tiny_vit, [image_batch(8)], num_microbatches=2, pp_size=2, schedule="gpipe", **settings)
    assert len(made) == num_made


def test_jobs_with_other_layers_on_the_model_trace_again(made, monkeypatch):
    num_made = len(kept_by_jobs(monkeypatch, tiny_vit))
    train(tiny_vit, [image_batch(8)], num_microbatches=2, pp_size=2, precision="bf16")
    train(tiny_vit, [image_batch(8, seed=1)], num_microbatches=2, pp_size=2)
    assert len(made) == 3 * num_made == 6


def test_a_trace_made_with_what_other_layers_had_learned_is_not_given():
    results, layers = {}, [Casts(), Casts()]
    layers[1].seen.add("more")
    for layer in layers:
        shared = CommonTraces(CommonResults("", ResultStores(results, None), lambda: 0), [layer])
        tracer(base(), common=shared).trace((ROWS,), {})
    assert len(results) == 2
