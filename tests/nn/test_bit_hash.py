import pytest
import torch

from hybridpp.nn.bit_hash import bit_hash

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def flip(tensor, element, bit):
    bits = tensor.view(-1).view(INTEGERS[tensor.element_size()])
    bits[element] ^= torch.bitwise_left_shift(torch.ones((), dtype=bits.dtype), bit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.uint8])
def test_a_hash_differs_wherever_one_bit_does(dtype):
    values = (
        torch.randn(2100, dtype=dtype) if dtype.is_floating_point or dtype.is_complex else torch.ones(2100).to(dtype)
    )
    values = values.view(42, 50).t()
    expected = bit_hash(values)
    assert bit_hash(values.clone()) == expected
    for element in (0, 999, 1024, 2099):
        for bit in (0, 5, 7):
            changed = values.clone()
            plain = torch.view_as_real(changed) if dtype.is_complex else changed
            flat = plain.flatten().clone()
            flip(flat, element, bit)
            assert bit_hash(flat.view(plain.shape)) != expected
    assert len({int(bit_hash(torch.zeros(size, dtype=dtype))) for size in (0, 1, 5000)}) == 1


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_a_hash_does_not_depend_on_where_in_memory_a_weight_lies(dtype):
    whole = torch.arange(20_003).remainder(251).to(dtype)
    assert bit_hash(whole[3:]) == bit_hash(whole[3:].clone())
