"""Products that a kernel adds to fp32 sums: where there is such a kernel is found out by trying it."""

import pytest
import torch

from hybridpp.nn import fp32_products
from hybridpp.nn.fp32_products import adds_products

CPU = torch.device("cpu")
HALF = [torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def _forget():
    adds_products.cache_clear()
    yield
    adds_products.cache_clear()


@pytest.mark.parametrize("dtype", HALF)
def test_the_cpu_has_no_kernel(dtype):
    assert not adds_products(CPU, dtype)


def exact(total, a, b, out_dtype, beta, out):
    """What the kernel of CUDA does."""
    return out.copy_(a.float() @ b.float() + (beta * total if beta else 0))


def rounding(total, a, b, out_dtype, beta, out):
    return out.copy_((a @ b + (beta * total.to(a.dtype) if beta else 0)).float())


def multiplying(total, a, b, out_dtype, beta, out):
    """NaN times zero is NaN."""
    return out.copy_(a.float() @ b.float() + beta * total)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("kernel", "is_one"), [(exact, True), (rounding, False), (multiplying, False)])
def test_only_a_kernel_that_sums_in_fp32_and_overwrites_is_one(kernel, is_one, dtype, monkeypatch):
    monkeypatch.setattr(torch, "addmm", kernel)
    assert adds_products(CPU, dtype) is is_one


def test_a_kernel_of_another_signature_is_none(monkeypatch):
    monkeypatch.setattr(torch, "addmm", lambda total, a, b, *, beta, out: out)
    assert not adds_products(CPU, torch.bfloat16)


@pytest.mark.parametrize("keep", [True, False])
def test_a_product_is_added_or_overwrites(keep, monkeypatch):
    monkeypatch.setattr(torch, "addmm", exact)
    total, a, b = torch.full((2, 3), 1.0 if keep else torch.nan), torch.ones(2, 4).half(), torch.ones(4, 3).half()
    fp32_products.add_product(total, a, b, keep)
    assert torch.equal(total, torch.full((2, 3), 5.0 if keep else 4.0))
