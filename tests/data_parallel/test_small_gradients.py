"""Gradients of small parameters in half precision: added together, in the order and with the bits of one by one."""

from collections import Counter

import pytest
import torch
from data_parallel.replicas import TINY_MIB, accumulate, buckets_of, loss, make_buckets, make_model, on_replicas
from support import noted_hooks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from hybridpp.cluster import current_world
from hybridpp.data_parallel import accumulator
from hybridpp.data_parallel.accumulator import SmallGradients
from hybridpp.data_parallel.bucket import Bucket
from hybridpp.errors import ConfigError

HALF = torch.bfloat16


class CountOperators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def hooked(monkeypatch):
    """The names of the parameters whose hooks were called, in order."""
    return noted_hooks(monkeypatch)


def one_by_one(num_replicas, numbers, rank=0):
    """Each pass's gradients, added in fp32 by a hook of its own."""
    sums = []
    for replica in range(num_replicas):
        model = make_model(HALF)
        own = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
        for number in numbers:
            loss(model, replica, number).backward()
            for name, parameter in model.named_parameters():
                own[name].add_(parameter.grad)
                parameter.grad = None
        sums.append(own)
    return {name: sum(own[name] for own in sums[1:]) + sums[0][name] for name in sums[0]}


def train(buckets, model, numbers):
    buckets.begin()
    for number in numbers:
        if number == numbers[-1]:
            buckets.begin_last_backward()
        loss(model, current_world().rank, number).backward()
        buckets.end_backward()
    buckets.launch_remaining()
    buckets.finish_grad_sync()


def assert_same_bits(buckets, expected):
    for name, gradient in expected.items():
        assert torch.equal(buckets.gradients[name], gradient), name
    assert all(parameter.grad is None for parameter in buckets.parameters.values())


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_sums_have_the_bits_of_gradients_added_one_by_one(num_replicas):
    def run():
        model = make_model(HALF)
        buckets = make_buckets(model, capacity_mib=TINY_MIB)
        for numbers in ([0, 1, 2], [3], [4, 5]):
            train(buckets, model, numbers)
            assert_same_bits(buckets, one_by_one(num_replicas, numbers))
            assert buckets.unused_parameters() == []
            buckets.consume()

    on_replicas(run, num_replicas)


def test_hooks_are_called_in_the_first_pass_and_in_last_ones_of_replicas(hooked):
    def run(num_replicas):
        def rank():
            model = make_model(HALF)
            buckets = make_buckets(model)
            for _ in range(2):
                train(buckets, model, [0, 1, 2])
                buckets.consume()
            return len(list(model.parameters()))

        hooked.clear()
        count = on_replicas(rank, num_replicas)[0]
        assert len(hooked) % (count * num_replicas) == 0
        return len(hooked) // (count * num_replicas)

    assert run(1) == 1
    assert run(2) == 1 + 2


def test_a_pass_adds_all_of_them_in_one_call():
    model = make_model(HALF)
    buckets = make_buckets(model)
    train(buckets, model, [0])
    buckets.consume()
    buckets.begin()
    for number, operator in enumerate(["_foreach_copy_", "_foreach_add_", "_foreach_add_"]):
        half = loss(model, 0, number)
        with CountOperators() as counted:
            half.backward()
            buckets.end_backward()
        assert counted.calls[operator] == 1
        assert not counted.calls.keys() & {"add_", "copy_"}


def test_on_devices_kernels_convert_and_add_lists_of_one_format(monkeypatch):
    monkeypatch.setattr(accumulator, "_MAX_SMALL", 6)
    views = {name: torch.zeros(size, device="meta") for name, size in (("a", 2), ("b", 3), ("large", 7))}
    small = SmallGradients(views)
    assert list(small.views) == ["a", "b"]
    for dtype, operators in ((HALF, {"_foreach_copy_": 1, "_foreach_add_": 1}), (torch.float32, {"_foreach_add_": 1})):
        parts = {name: torch.ones_like(view, dtype=dtype) for name, view in small.views.items()}
        small.add(parts, ())  # the first time, it allocates
        with CountOperators() as counted:
            small.add(parts, ())
        assert counted.calls == operators


def test_each_bucket_is_reduced_as_soon_as_it_is_complete(monkeypatch):
    log = []

    def note(event):
        if current_world().rank == 0:
            log.append(event)

    launch = Bucket.launch_reduce

    def noted(bucket, *args, **options):
        note(bool(bucket.flat.any()))
        launch(bucket, *args, **options)

    monkeypatch.setattr(Bucket, "launch_reduce", noted)

    def run():
        model = make_model(HALF)
        buckets = make_buckets(model, capacity_mib=TINY_MIB)
        train(buckets, model, [0, 1])
        buckets.consume()
        note("second step")
        model[0].weight.register_hook(lambda _: note("last gradient"))
        train(buckets, model, [2, 3])

    on_replicas(run, 2)
    # Each of the four buckets holds its gradients when it is sent, and three before the pass reaches the last gradient.
    second = log[log.index("second step") + 1 :]
    assert second == ["last gradient", True, True, True, "last gradient", True]


def test_what_other_hooks_look_at_goes_through_hooks():
    model = make_model(HALF)
    seen = []
    buckets = make_buckets(model)
    train(buckets, model, [0])
    buckets.consume()
    model[0].bias.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.float()))
    train(buckets, model, [0, 1, 2])
    assert torch.equal(sum(seen), buckets.gradients["0.bias"])
    assert_same_bits(buckets, one_by_one(1, [0, 1, 2]))


def test_a_pass_inside_a_pass_adds_in_fp32():
    weight = nn.Parameter(torch.ones(3, dtype=HALF))
    buckets = buckets_of({"w": weight})
    small = 2.0**-12  # lost beside 1 in half precision
    for _ in range(2):
        buckets.begin()
        for _ in range(2):
            x = torch.ones(3, dtype=HALF, requires_grad=True)
            parts = [checkpoint(lambda x, f: x * weight * f, x, f, use_reentrant=True) for f in (1.0, small)]
            torch.stack([part.float().sum() for part in parts]).sum().backward()
            buckets.end_backward()
        buckets.finish_grad_sync()
        assert buckets.gradients["w"].tolist() == [2 * (1 + small)] * 3
        buckets.consume()


def test_nothing_is_left_of_a_pass_that_failed():
    model = make_model(HALF)
    buckets = make_buckets(model)
    train(buckets, model, [0, 1])
    buckets.consume()
    for fails_in_hooked_pass in (False, True):
        buckets.begin()
        if fails_in_hooked_pass:
            buckets._hooks.enable()
        failure = model[0].weight.register_hook(fail)
        with pytest.raises(KeyError):
            loss(model, 0, 7).backward()
        failure.remove()
        buckets.abort()
        assert not any(gradient.any() for gradient in buckets.gradients.values())
        train(buckets, model, [0, 1])
        assert_same_bits(buckets, one_by_one(1, [0, 1]))
        buckets.consume()


def fail(_):
    raise KeyError


def test_a_second_gradient_and_a_product_wait_for_the_first():
    one, tiny = torch.ones(2, dtype=HALF), torch.full((2,), 2.0**-24, dtype=HALF)

    def total(*parts):
        buckets = buckets_of({"w": nn.Parameter(one.clone())})
        buckets.begin()
        outside = buckets.outside()
        outside.mark_reached(["w"])
        for part in parts:
            outside.add("w", part)
        return buckets.gradients["w"].tolist()

    assert total(one, tiny, tiny) == [1.0] * 2
    assert total(tiny, tiny, one) == [1.0 + 2.0**-23] * 2


def test_a_backward_pass_outside_of_a_step_is_refused():
    model = make_model(HALF)
    buckets = make_buckets(model)
    for _ in range(2):
        accumulate(buckets, model, [0, 1])
        buckets.consume()
        with pytest.raises(ConfigError, match="a backward pass outside of hybridpp"):
            loss(model, 0, 0).backward()
