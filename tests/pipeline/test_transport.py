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
        return function(world.rank, Transport(world.split(stages), CPU))

    return Loopback(num_stages).run(run)


def test_values_go_down_and_gradients_up_at_the_same_time():
    def values(stage, microbatch):
        return [torch.full((2, 2), 10.0 * stage + microbatch), torch.tensor([stage, microbatch])]

    def run(stage, transport):
        seen = []
        for microbatch in range(2):
            specs = [spec_of(tensor) for tensor in values(0, 0)]
            down = transport.receive(specs, stage - 1) if stage > 0 else None
            up = transport.receive(specs, stage + 1) if stage < 2 else None
            if stage < 2:
                transport.send(values(stage, microbatch), stage + 1)
            if stage > 0:
                transport.send(values(stage, microbatch + 5), stage - 1)
            seen.append([receipt and [tensor.tolist() for tensor in receipt.wait()] for receipt in (down, up)])
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
            return transport.send(tensors, 1).wait()
        return transport.receive([spec_of(tensor) for tensor in tensors], 0).wait()

    received = on_a_pipeline(2, run)[1]
    for ours, theirs in zip(received, tensors, strict=True):
        assert ours.dtype is theirs.dtype
        assert not ours.requires_grad
        assert torch.equal(ours, theirs)


def test_a_receipt_may_be_asked_twice():
    def run(stage, transport):
        if stage == 0:
            return transport.send([torch.ones(2)], 1).wait()
        receipt = transport.receive([Spec((2,))], 0)
        return receipt.wait() == receipt.wait()

    assert on_a_pipeline(2, run) == [None, True]


def test_no_values_are_no_message():
    def run(stage, transport):
        if stage == 0:
            transport.send([], 1)
            return transport.send([torch.ones(1)], 1).wait()
        assert transport.receive([], 0).wait() == []
        return transport.receive([Spec((1,))], 0).wait()[0].item()

    assert on_a_pipeline(2, run) == [None, 1.0]


def test_both_ends_may_send_first():
    def run(rank, transport):
        peer = 1 - rank
        # Both send first and in both kinds, as the ends of a loop of stages do.
        sent = [transport.send([torch.tensor(1.0 + rank)], peer)]
        sent.append(transport.send([torch.tensor(5.0 + rank)], peer))
        received = [transport.receive([Spec(())], peer), transport.receive([Spec(())], peer)]
        values = [receipt.wait()[0].item() for receipt in received]
        for message in sent:
            message.wait()
        return values

    assert on_a_pipeline(2, run) == [[2.0, 6.0], [1.0, 5.0]]


class SlowGroup:
    """A group whose sends are away only when someone waits for them."""

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


def test_a_tensor_is_kept_until_it_is_away_and_no_longer():
    group = SlowGroup()
    transport = Transport(group, CPU)
    sent = transport.send([torch.ones(3)], 1)
    assert len(group.under_way) == 1
    sent.wait()
    assert group.under_way == []
    sent.wait()  # a second time does nothing
