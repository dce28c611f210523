"""Numbers of every dtype arrive, also over a backend that refuses most of them."""

import pytest
import torch
import torch.distributed as dist
from processes import run_ranks

from hybridpp.cluster import Loopback, current_world, resolved
from hybridpp.cluster.wire_format import CARRIED_DTYPES, as_carried

ODD = [torch.int16, torch.uint16, torch.uint32, torch.complex64, torch.complex128, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", [*ODD, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 2), (2, 3)])
def test_bytes_are_a_view_of_the_numbers(dtype, shape):
    tensor = torch.ones(shape).to(dtype)
    carried = as_carried(tensor)
    assert carried.data_ptr() == tensor.data_ptr()
    assert carried.dtype in CARRIED_DTYPES
    assert (carried is tensor) == (dtype in CARRIED_DTYPES)
    assert carried.nbytes == tensor.nbytes


def test_a_lazy_view_is_resolved_and_nothing_else_is_copied():
    plain, numbers = torch.ones(2), torch.tensor([1 + 2j])
    assert resolved(plain) is plain
    assert torch.view_as_real(resolved(numbers.conj())).tolist() == [[1, -2]]
    assert not resolved(numbers.conj().imag).is_neg()


def refusing(function):
    """A function of ``torch.distributed`` as NCCL has it: for some dtypes."""

    def checked(*args, **options):
        for tensor in (part for arg in args for part in (arg if isinstance(arg, list) else [arg])):
            is_carried = not isinstance(tensor, torch.Tensor) or tensor.dtype in CARRIED_DTYPES
            assert is_carried, f"Unsupported data type {tensor.dtype} for NCCL process group"
        return function(*args, **options)

    return checked


def exchange():
    """What each rank gets of the other, for every dtype: as messages, and in a collective."""
    pair = current_world().split([[0, 1]])
    got = []
    for dtype in ODD:
        mine = torch.full((3, 2), 1.0 + pair.rank).to(dtype)
        mine = mine * 1j if dtype.is_complex else mine
        theirs = torch.empty_like(mine)
        # As a model may return it.
        mine = mine.conj() if dtype.is_complex else mine
        receiving = pair.receive(theirs, 1 - pair.rank)
        pair.send(resolved(mine), 1 - pair.rank).wait()
        receiving.wait()
        got.append(
            (
                dtype,
                [
                    torch.view_as_real(part).tolist() if dtype.is_complex else part.float().tolist()
                    for part in (theirs, *pair.all_gather(mine))
                ],
            )
        )
    return got


def exchange_as_nccl():
    """Without shared memory, and with what NCCL refuses."""
    dist.isend, dist.irecv, dist.all_gather = map(refusing, (dist.isend, dist.irecv, dist.all_gather))
    world = current_world()
    split = world.split

    def without_shared_memory(lists):
        group = split(lists)
        group._shared_memory_group = None
        return group

    world.split = without_shared_memory
    return exchange()


def test_every_dtype_arrives_where_the_backend_refuses_it():
    expected = Loopback(2).run(exchange)
    assert expected[0][3][1][1:] == [[[[0.0, -1.0]] * 2] * 3, [[[0.0, -2.0]] * 2] * 3]
    assert run_ranks(exchange_as_nccl, 2) == expected
    assert run_ranks(exchange, 2) == expected
