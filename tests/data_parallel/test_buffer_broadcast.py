"""The first replica's buffers go to the others in one message."""

import pytest
import torch
from torch import nn

from hybridpp.cluster import Loopback, current_world
from hybridpp.data_parallel import BufferBroadcast, buffers_to_send
from hybridpp.errors import ConfigError

VALUES = {
    "bf16": torch.tensor([1.5, -0.0, float("nan")], dtype=torch.bfloat16),
    "wide": torch.tensor([[1e-300, float("inf")], [-2.0, 3.0]], dtype=torch.float64),
    "flag": torch.tensor([True, False, True]),
    "count": torch.tensor(-7, dtype=torch.int64),
    "complex": torch.tensor([1 + 2j, -3j]),
    "empty": torch.empty(0, 3),
    "turned": torch.arange(6.0).reshape(2, 3).t(),
}


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        for name, value in VALUES.items():
            self.register_buffer(name, torch.zeros_like(value))
        self.norm = nn.BatchNorm1d(2)
        self.alias = nn.Module()
        self.alias.register_buffer("count", self.count)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def test_every_dtype_and_shape_arrives_bit_by_bit():
    def run():
        group, model = current_world().split([[0, 1, 2]]), Holder()
        broadcast = BufferBroadcast(model, group)
        for replica_value, buffer in zip(VALUES.values(), model._buffers.values(), strict=False):
            buffer.copy_(replica_value if group.rank == 0 else torch.ones_like(buffer))
        broadcast.agree(sorted(VALUES))
        return dict(model.named_buffers())

    for buffers in Loopback(3).run(run):
        for name, value in VALUES.items():
            bits = [each.contiguous().reshape(-1).view(torch.uint8) for each in (buffers[name], value)]
            assert torch.equal(*bits), name
            assert buffers[name].stride() == value.stride(), name


def test_running_statistics_scratch_and_second_names_are_no_candidates():
    def run():
        return BufferBroadcast(Holder(), current_world().split([[0, 1]])).described()

    assert Loopback(2).run(run)[0].keys() == VALUES.keys()


def test_one_replica_has_no_candidates():
    broadcast = Loopback(1).run(lambda: BufferBroadcast(Holder(), current_world().split([[0]])))[0]
    assert not broadcast.has_candidates


def test_writes_between_passes_count_as_the_scripts():
    def run():
        model = Holder()
        broadcast = BufferBroadcast(model, current_world().split([[0, 1]]))
        model.wide += 1
        broadcast.begin()
        model.flag[0] = True
        broadcast.finish()
        return [name for name, (*_, is_written) in broadcast.described().items() if is_written]

    assert Loopback(2).run(run) == [["flag"]] * 2


def test_replicas_send_what_any_of_them_wrote():
    rows = [{"a": [[2], "torch.float32", written], "b": [[], "torch.int64", False]} for written in (False, True)]
    assert buffers_to_send(rows) == ["a"]


@pytest.mark.parametrize("other", [{"a": [[3], "torch.float32", False]}, {}])
def test_replicas_with_other_shapes_cannot_agree(other):
    with pytest.raises(ConfigError, match=r"the buffer a differs in shape or dtype between replicas"):
        buffers_to_send([{"a": [[2], "torch.float32", True]}, other])
