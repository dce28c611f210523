import gc
import weakref

import pytest
import torch
from data_parallel.replicas import (
    NUM_REPLICAS,
    TINY_MIB,
    accumulate,
    assert_equal,
    loss,
    make_buckets,
    make_model,
    on_replicas,
    plain,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from hybridpp.cluster import current_world
from hybridpp.data_parallel import GradientBuckets, GradientSharding, layout_of
from hybridpp.errors import ConfigError


@pytest.mark.parametrize("capacity_mib", [TINY_MIB, 2 * TINY_MIB, 25.0])
@pytest.mark.parametrize("num_replicas", [1, NUM_REPLICAS])
def test_sums_are_those_of_plain_accumulation(num_replicas, capacity_mib):
    def run():
        model = make_model()
        buckets = make_buckets(model, capacity_mib=capacity_mib)
        accumulate(buckets, model, [0, 1, 2])
        assert_equal(buckets, plain(num_replicas, [0, 1, 2]))
        for name, parameter in model.named_parameters():
            assert parameter.grad is buckets.gradients[name]

    on_replicas(run, num_replicas)


class CountingGroup:
    """Writes down when a reduction of which kind and size starts."""

    def __init__(self, group, events):
        self._group, self._events = group, events
        self.rank, self.size = group.rank, group.size

    def all_reduce(self, tensor):
        self._events.append(("sum", tensor.numel()))
        return self._group.all_reduce(tensor)

    def reduce_scatter_segments(self, flat):
        self._events.append(("scatter", flat.numel()))
        return self._group.reduce_scatter_segments(flat)


def wide_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 1500), nn.Linear(1500, 7, bias=False), nn.Linear(7, 1))


@pytest.mark.parametrize("kind", ["sum", "scatter"])
def test_full_buckets_reduce_during_the_last_backward_last_ones_first(kind):
    def run():
        model, events = wide_model(), []
        group = CountingGroup(current_world().control(), events)
        sharding = GradientSharding.SCATTERED if kind == "scatter" else GradientSharding.NONE
        buckets = make_buckets(model, group, TINY_MIB, sharding=sharding)
        model[0].weight.register_post_accumulate_grad_hook(lambda _: events.append("first weight done"))
        accumulate(buckets, model, [0, 1])
        return events

    # Two segments of multiples of 2048: the last layer's two, the middle weight, the first layer's bias and weight. At
    # the end a flag per parameter.
    sizes = [(kind, 4096), (kind, 12288), (kind, 4096), (kind, 8192)]
    # A hook of the script may change the gradient, so it is called before the reduction that needs it begins.
    expected = ["first weight done", *sizes[:3], "first weight done", sizes[3], ("sum", 5)]
    assert on_replicas(run, 2)[0] == expected


def test_a_stage_is_reduced_as_soon_as_its_last_pass_has_completed_it():
    """The last layer is a later stage, whose last pass is the one before the last; two stages use the middle one."""

    def run():
        model, events = wide_model(), []
        stages = {"0.weight": (0,), "0.bias": (0,), "1.weight": (0, 2), "2.weight": (2,), "2.bias": (2,)}
        group = CountingGroup(current_world().control(), events)
        parameters = dict(model.named_parameters())
        layout = layout_of(parameters, group, 1.0, stages=stages)
        buckets = GradientBuckets(parameters, group, layout)
        inputs = torch.randn(2, 4)
        buckets.begin()
        head = model[2](model[1](model[0](inputs).detach())).sum()
        buckets.begin_last_backward(2)
        head.backward()
        buckets.launch_remaining(2)
        events.append("stage 2 done")
        rest = model[1](model[0](inputs)).sum()
        buckets.begin_last_backward(0)
        rest.backward()
        buckets.launch_remaining(0)
        events.append("stage 0 done")
        buckets.finish_grad_sync()
        return events, {name: gradient.clone() for name, gradient in buckets.gradients.items()}

    ranks = on_replicas(run, 2)
    # The head; what both stages use; the first layer; a flag per parameter.
    expected = [("sum", 4096), "stage 2 done", ("sum", 12288), ("sum", 8192), ("sum", 5), "stage 0 done"]
    for events, gradients in ranks:
        assert events == expected
        assert all(bool(gradient.any()) for gradient in gradients.values())
    assert all(torch.equal(ranks[0][1][name], ranks[1][1][name]) for name in ranks[0][1])


def test_calls_add_up_and_reduced_sums_are_counted_once():
    def run():
        model = make_model()
        buckets = make_buckets(model, capacity_mib=TINY_MIB)
        accumulate(buckets, model, [0])
        accumulate(buckets, model, [1, 2])
        accumulate(buckets, model, [3])
        assert_equal(buckets, plain(NUM_REPLICAS, [0, 1, 2, 3]))

    on_replicas(run)


def test_no_sync_skips_the_reduction_and_the_next_one_reduces_everything():
    def run():
        model = make_model()
        buckets = make_buckets(model, capacity_mib=TINY_MIB)
        replica = current_world().rank
        with buckets.no_sync():
            accumulate(buckets, model, [0])
            accumulate(buckets, model, [1])
        own = make_model()
        (loss(own, replica, 0) + loss(own, replica, 1)).backward()
        assert_equal(buckets, {name: parameter.grad for name, parameter in own.named_parameters()})
        accumulate(buckets, model, [2])
        assert_equal(buckets, plain(NUM_REPLICAS, [0, 1, 2]))
        with buckets.no_sync():
            accumulate(buckets, model, [3])
        buckets.finish_grad_sync()
        assert_equal(buckets, plain(NUM_REPLICAS, [0, 1, 2, 3]))

    on_replicas(run)


def test_finish_reduces_what_no_sync_left_and_only_once():
    def run():
        model = make_model()
        buckets = make_buckets(model)
        with buckets.no_sync():
            accumulate(buckets, model, [0])
            buckets.finish_grad_sync()
        buckets.finish_grad_sync()
        buckets.finish_grad_sync()
        assert_equal(buckets, plain(NUM_REPLICAS, [0]))

    on_replicas(run)


def test_no_sync_ends_with_its_block_whatever_happens_in_it():
    def run():
        model = make_model()
        buckets = make_buckets(model)
        with pytest.raises(KeyError), buckets.no_sync(), buckets.no_sync():
            raise KeyError
        accumulate(buckets, model, [0])
        assert_equal(buckets, plain(NUM_REPLICAS, [0]))

    on_replicas(run)


def test_consumed_gradients_stay_readable_until_the_next_backward():
    def run():
        model = make_model()
        buckets = make_buckets(model)
        accumulate(buckets, model, [0, 1])
        buckets.consume()
        assert_equal(buckets, plain(NUM_REPLICAS, [0, 1]))
        accumulate(buckets, model, [2])
        assert_equal(buckets, plain(NUM_REPLICAS, [2]))
        buckets.zero()
        accumulate(buckets, model, [0])
        assert_equal(buckets, plain(NUM_REPLICAS, [0]))

    on_replicas(run)


@pytest.mark.parametrize("reset", [lambda model: model.zero_grad(), lambda model: model.zero_grad(set_to_none=False)])
def test_the_models_own_zero_grad_counts(reset):
    model = make_model()
    buckets = make_buckets(model)
    accumulate(buckets, model, [0, 1])
    reset(model)
    accumulate(buckets, model, [2])
    assert_equal(buckets, plain(1, [2]))


def test_a_gradient_that_another_hook_takes_away_is_looked_at_each_time():
    model = make_model()
    taken = []

    def take(parameter):
        if not taken:
            taken.append(parameter.grad)
            parameter.grad = None

    model[0].weight.register_post_accumulate_grad_hook(take)
    buckets = make_buckets(model)
    accumulate(buckets, model, [0])
    buckets.consume()
    taken.clear()
    buckets.begin()
    for number in (1, 2):
        loss(model, 0, number).backward()
        assert model[0].weight.grad is None
    buckets.finish_grad_sync()
    assert model[0].weight.grad is buckets._accumulator.views["0.weight"]
    assert_equal(buckets, plain(1, [1, 2]) | {"0.weight": plain(1, [2])["0.weight"]})


def test_parameters_that_no_backward_reached_are_unused():
    model = make_model()
    model.register_parameter("idle", nn.Parameter(torch.ones(2)))
    buckets = make_buckets(model)
    buckets.begin()
    assert buckets.unused_parameters() == list(dict(model.named_parameters()))
    accumulate(buckets, model, [0])
    assert buckets.unused_parameters() == ["idle"]
    assert torch.equal(buckets.gradients["idle"], torch.zeros(2))
    # A gradient of zero is one all the same.
    buckets.consume()
    buckets.begin()
    (0 * (model.idle.sum() + loss(model, 0, 0))).backward()
    assert buckets.unused_parameters() == []


def test_a_parameter_that_one_replica_uses_is_used_on_all():
    def run():
        model = make_model()
        model.register_parameter("seldom", nn.Parameter(torch.ones(2)))
        buckets = make_buckets(model, capacity_mib=TINY_MIB)
        buckets.begin()
        buckets.begin_last_backward()
        extra = model.seldom.sum() if current_world().rank == 1 else 0
        (loss(model, current_world().rank, 0) + extra).backward()
        buckets.finish_grad_sync()
        assert buckets.unused_parameters() == []
        assert_equal(buckets, plain(NUM_REPLICAS, [0]) | {"seldom": torch.ones(2)})

    on_replicas(run)


@pytest.mark.parametrize(
    "parameter",
    [
        torch.ones(4, 3, 2, 2).to(memory_format=torch.channels_last),
        torch.ones(3, 5).t(),
        torch.ones(2, 3),
        torch.ones(()),
        torch.ones(0, 2),
    ],
    ids=["channels_last", "transposed", "contiguous", "scalar", "empty"],
)
def test_gradients_are_laid_out_like_their_parameters(parameter):
    model = nn.Module()
    model.before = nn.Parameter(torch.ones(3))
    model.weight = nn.Parameter(parameter.clone())
    buckets = make_buckets(model)
    buckets.begin()
    (model.weight.square().sum() + model.before.sum()).backward()
    assert buckets.gradients["weight"].stride() == model.weight.stride()
    assert torch.equal(buckets.gradients["weight"], 2 * parameter)
    assert torch.equal(buckets.gradients["before"], torch.ones(3))
    # A fused step demands equal strides.
    torch.optim.SGD(model.parameters(), lr=1.0, fused=True).step()
    assert torch.equal(model.weight, -parameter)


def test_gradients_of_one_bucket_do_not_overlap():
    model = make_model()
    buckets = make_buckets(model)
    for number, gradient in enumerate(buckets.gradients.values()):
        gradient.fill_(number)
    for number, gradient in enumerate(buckets.gradients.values()):
        assert torch.equal(gradient, torch.full_like(gradient, number))


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("exposes_grad", [True, False])
@pytest.mark.parametrize("coalesced", [True, False])
def test_a_parameter_of_several_ranks_is_used_where_one_of_them_uses_it(coalesced, exposes_grad, num_replicas):
    """Two ranks share each replica's parameters; the last of them all uses one that nobody else does."""

    def run():
        world, model = current_world(), make_model()
        for name in ("seldom", "idle"):
            model.register_parameter(name, nn.Parameter(torch.ones(2)))
        num_ranks = 2 * num_replicas
        replicas = world.split([[one for one in range(num_ranks) if one % 2 == part] for part in range(2)])
        ranks = world.split([[one, one + 1] for one in range(0, num_ranks, 2)])
        shared = {name: [ranks] for name, _ in model.named_parameters()}
        buckets = make_buckets(
            model, replicas, TINY_MIB, shared, coalesced_group=ranks if coalesced else None, exposes_grad=exposes_grad
        )
        for step in range(3):
            buckets.begin()
            buckets.begin_last_backward()
            extra = model.seldom.sum() if step == 1 and world.rank == num_ranks - 1 else 0
            (loss(model, world.rank, 0) + extra).backward()
            buckets.launch_remaining()
            buckets.finish_grad_sync()
            if step == 2:  # as what the step's message has read with other numbers
                buckets.take_flags(buckets.unread_flags().tolist())
            assert list(buckets.unused_parameters()) == (["idle"] if step == 1 else ["seldom", "idle"])
            seldom = torch.full((2,), float(step == 1))
            assert_equal(buckets, plain(num_ranks, [0]) | {"seldom": seldom, "idle": torch.zeros(2)})
            buckets.consume()

    on_replicas(run, 2 * num_replicas)


def test_a_parameter_of_several_ranks_that_is_frozen_later_is_unused():
    """Else an optimizer with momentum would move it on."""

    def run():
        world, model = current_world(), make_model()
        replicas, ranks = world.split([[0], [1]]), world.split([[0, 1]])
        names = [name for name, _ in model.named_parameters()]
        buckets = make_buckets(model, replicas, shared={name: [ranks] for name in names})
        for frozen in ([], names[:1]):
            for name in frozen:
                model.get_parameter(name).requires_grad_(False)
            accumulate(buckets, model, [0])
            assert list(buckets.unused_parameters()) == frozen
            buckets.consume()

    on_replicas(run, 2)


@pytest.mark.parametrize("num_calls", [1, 2])
def test_a_shared_parameter_gets_the_sum_over_stages_and_replicas(num_calls):
    """Four ranks: two replicas of two stages, both of which hold the whole model here."""

    def run():
        world = current_world()
        replicas, stages = world.split([[0, 2], [1, 3]]), world.split([[0, 1], [2, 3]])
        model = make_model()
        names = [name for name, _ in model.named_parameters()]
        buckets = make_buckets(model, replicas, TINY_MIB, {name: [stages] for name in names})
        for call in range(num_calls):
            accumulate(buckets, model, [call])
        assert_equal(buckets, plain(4, range(num_calls)))

    on_replicas(run, 4)


class CalledTwice(nn.Module):
    """A shared module, checkpointed at both of its calls."""

    def __init__(self, use_reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.shared, x.requires_grad_(), use_reentrant=self.use_reentrant)
        return self.last(x)


@pytest.mark.parametrize(
    ("use_reentrant", "num_replicas", "fails"), [(False, 2, False), (True, 1, False), (True, 2, True)]
)
def test_a_gradient_that_comes_in_parts_is_complete_or_refused(use_reentrant, num_replicas, fails):
    def run():
        model = CalledTwice(use_reentrant)
        buckets = make_buckets(model, capacity_mib=2 * TINY_MIB)
        accumulate(buckets, model, [0])
        plain_model = CalledTwice(False)
        for replica in range(num_replicas):
            loss(plain_model, replica, 0).backward()
        torch.testing.assert_close(buckets.gradients["shared.weight"], plain_model.shared.weight.grad)

    if not fails:
        on_replicas(run, num_replicas)
        return
    text = "one backward pass added to the gradient of 'shared.(weight|bias)' again after its reduction had started."
    with pytest.raises(ConfigError, match=f"^{text} .* Checkpoint with use_reentrant=False, .*"):
        on_replicas(run, num_replicas)


def test_a_model_is_freed_with_its_buckets():
    model = nn.Linear(3, 3)
    buckets = make_buckets(model, capacity_mib=1.0)
    alive = weakref.ref(model.weight)
    del model, buckets
    gc.collect()
    assert alive() is None


def test_hooks_are_off_while_autograd_adds_in_place_and_on_afterwards():
    model = make_model()
    buckets = make_buckets(model)
    hooks = [parameter._post_accumulate_grad_hooks for parameter in model.parameters()]
    numbers = [[len(one) for one in hooks]]
    buckets.begin()
    for number in range(2):
        loss(model, 0, number).backward()
        numbers.append([len(one) for one in hooks])
    buckets.finish_grad_sync()
    numbers.append([len(one) for one in hooks])
    count = len(hooks)
    assert numbers == [[1] * count, [0] * count, [0] * count, [1] * count]
    buckets.consume()
    with pytest.raises(ConfigError, match="a backward pass outside of hybridpp"):
        loss(model, 0, 0).backward()


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_a_pass_that_replaces_gradients_is_added_too():
    model = make_model()
    buckets = make_buckets(model)
    buckets.begin()
    for number in range(3):
        # Autograd adds into a new tensor then, instead of in place.
        loss(model, 0, number).backward(create_graph=number == 1)
    buckets.finish_grad_sync()
    for name, gradient in plain(1, range(3)).items():
        torch.testing.assert_close(buckets.gradients[name], gradient)


class LateGroup(CountingGroup):
    """Its first reductions write their sums when they like, as a device does: at the latest when one waits."""

    def __init__(self, group, num_late):
        super().__init__(group, [])
        self.late, self._num_late = [], num_late

    def all_reduce(self, tensor):
        if self._num_late == 0:
            return self._group.all_reduce(tensor)
        self._num_late -= 1
        self.late.append(LateWork(tensor))
        return self.late[-1]


class LateWork:
    def __init__(self, tensor):
        self._tensor, self.is_waited_for = tensor, False

    def write(self):
        # Through ``data``, because a device's writes change no version.
        self._tensor.data.fill_(1000.0)

    def wait(self):
        self.is_waited_for = True
        self.write()


@pytest.mark.parametrize("when", ["before the next step", "at the wait for it"])
def test_a_reduction_that_ends_after_a_failed_step_changes_nothing(when):
    def run():
        model, group = make_model(), LateGroup(current_world().control(), 2)
        buckets = make_buckets(model, group, TINY_MIB)
        buckets.begin()
        buckets.begin_last_backward()
        loss(model, group.rank, 0).backward()
        first, second = group.late
        buckets.abort()
        assert not first.is_waited_for, "a replica that failed may never join it"
        assert not any(gradient.any() for gradient in buckets.gradients.values())
        if when == "before the next step":
            first.write(), second.write()
        accumulate(buckets, model, [1, 2])
        assert first.is_waited_for
        assert second.is_waited_for
        assert_equal(buckets, plain(2, [1, 2]))
        # A parameter that no pass reaches counts as zero, not as what was written there.
        model[2].weight.requires_grad_(False)
        buckets.consume()
        accumulate(buckets, model, [3])
        assert not buckets.gradients["2.weight"].any()

    on_replicas(run, 2)
