from typing import NamedTuple

import torch

from hybridpp.cluster import Loopback, current_world
from hybridpp.pipeline import Transport

CPU = torch.device("cpu")


class Spec(NamedTuple):
    """What both sides know of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    requires_grad: bool = True


def spec_of(tensor):
    return Spec(tuple(tensor.shape), tensor.dtype)


def on_a_pipeline(num_stages, function):
    def run():
        world = current_world()
        stages = [list(range(num_stages))]
        return function(world.rank, Transport(world.split(stages), world.split(stages), CPU))

    return Loopback(num_stages).run(run)


def test_values_go_down_and_gradients_up_at_the_same_time():
    def values(stage, microbatch):
        return [torch.full((2, 2), 10.0 * stage + microbatch), torch.tensor([stage, microbatch])]

    def run(stage, transport):
        seen = []
        for microbatch in range(2):
            specs = [spec_of(tensor) for tensor in values(0, 0)]
            down = transport.receive_down(specs, stage - 1) if stage > 0 else None
            up = transport.receive_up(specs, stage + 1) if stage < 2 else None
            if stage < 2:
                transport.send_down(values(stage, microbatch), stage + 1)
            if stage > 0:
                transport.send_up(values(stage, microbatch + 5), stage - 1)
            seen.append([receipt and [tensor.tolist() for tensor in receipt.wait()] for receipt in (down, up)])
        transport.drain()
        return seen

    def message(stage, microbatch):
        return [tensor.tolist() for tensor in values(stage, microbatch)]

    assert on_a_pipeline(3, run) == [
        [
            [message(stage - 1, mb) if stage else None, message(stage + 1, mb + 5) if stage < 2 else None]
            for mb in (0, 1)
        ]
        for stage in range(3)
    ]


def test_tensors_of_any_layout_and_dtype_travel():
    tensors = [
        torch.arange(6.0).reshape(2, 3).t(),
        torch.arange(8).reshape(2, 4)[:, ::2],
        torch.tensor(True),
        torch.rand(2, 2).bfloat16(),
        torch.empty(0, 3),
        torch.ones(1).expand(4),
        torch.rand(2, requires_grad=True) * 2,
    ]

    def run(stage, transport):
        if stage == 0:
            return transport.send_down(tensors, 1)
        return transport.receive_down([spec_of(tensor) for tensor in tensors], 0).wait()

    received = on_a_pipeline(2, run)[1]
    for ours, theirs in zip(received, tensors, strict=True):
        assert ours.dtype is theirs.dtype
        assert not ours.requires_grad
        assert torch.equal(ours, theirs)


def test_a_receipt_may_be_asked_twice():
    def run(stage, transport):
        if stage == 0:
            return transport.send_down([torch.ones(2)], 1)
        receipt = transport.receive_down([Spec((2,))], 0)
        return receipt.wait() == receipt.wait()

    assert on_a_pipeline(2, run) == [None, True]


def test_no_values_are_no_message():
    def run(stage, transport):
        if stage == 0:
            transport.send_down([], 1)
            transport.send_down([torch.ones(1)], 1)
            return transport.drain()
        assert transport.receive_down([], 0).wait() == []
        return transport.receive_down([Spec((1,))], 0).wait()[0].item()

    assert on_a_pipeline(2, run) == [None, 1.0]


class SlowGroup:
    """A group of two whose sends are away only when someone waits for them."""

    rank, size = 0, 2

    def __init__(self):
        self.under_way = []

    def send(self, tensor, peer):
        group, entry = self, (tensor, peer)
        self.under_way.append(entry)

        class Away:
            def wait(self):
                group.under_way.remove(entry)

        return Away()


def test_what_is_under_way_is_bounded_and_drained():
    down, up = SlowGroup(), SlowGroup()
    transport = Transport(down, up, CPU, max_in_flight=3)
    most = 0
    for number in range(20):
        transport.send_down([torch.tensor(float(number)), torch.tensor(0.5)], 1)
        most = max(most, len(down.under_way))
    assert 2 <= most <= 2 * 3
    # The oldest leave first.
    assert down.under_way[-2][0].item() == 19
    assert up.under_way == []
    transport.drain()
    assert down.under_way == []
