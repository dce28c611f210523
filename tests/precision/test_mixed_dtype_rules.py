"""What torch refuses because it is part half, part fp32."""

from contextlib import suppress

import pytest
import torch
from covering import one_test_for
from torch import Tensor, nn
from torch.nn import functional

from hybridpp.module_adapter import ModuleAdapter
from hybridpp.precision import FunctionCasts

WIDE = torch.arange(32.0).reshape(2, 4, 4) / 32 - 0.4
HALF = WIDE.bfloat16()
ROW = torch.tensor([0])


def index_put(x: Tensor, value: Tensor) -> Tensor:
    x[x > 0] = value[x > 0]
    return x


PRODUCTS = {
    "linear": lambda x, y: functional.linear(x, y[0]),
    "linear's bias": lambda x, y: functional.linear(y, y[0], x[0, 0]),
    "matmul": torch.matmul,
    "@": lambda x, y: x @ y,
    "bmm": torch.bmm,
    "method": lambda x, y: x.matmul(y),
    "addmm": lambda x, y: torch.addmm(x[0], y[0], y[0]),
    "baddbmm": lambda x, y: torch.baddbmm(x, y, y, alpha=0.5),
    "einsum": lambda x, y: torch.einsum("bij,bjk->bik", x, y),
    "einsum of a list": lambda x, y: torch.einsum("bij,bjk->bik", [x, y]),
    "tensordot": lambda x, y: torch.tensordot(x, y, ([2], [1])),
    "mv": lambda x, y: torch.mv(x[0], y[0, 0]),
    "inner": torch.inner,
    "conv1d": lambda x, y: functional.conv1d(x, y[:, :, :1].transpose(0, 1).repeat(1, 2, 1)),
    "conv2d": lambda x, y: functional.conv2d(x[None, :1], y[:1, None, :2, :2]),
    "bilinear": lambda x, y: functional.bilinear(x, y, y.repeat(2, 1, 1)),
    "attention": lambda x, y: functional.scaled_dot_product_attention(x, x, y),
    "attention by name": lambda x, y: functional.scaled_dot_product_attention(query=y, key=y, value=x),
    "a layer norm's weight": lambda x, y: functional.layer_norm(x, (4,), y[0, 0], y[0, 0]),
}
WRITES = {
    "index": index_put,
    "index_put": lambda x, y: x.index_put((ROW,), y[:1]),
    "index_add": lambda x, y: x.index_add_(0, ROW, y[:1]),
    "index_copy": lambda x, y: torch.index_copy(x, 0, ROW, y[:1]),
    "scatter": lambda x, y: x.scatter(0, torch.zeros(1, 4, 4, dtype=torch.long), y[:1]),
    "scatter_add": lambda x, y: x.scatter_add_(0, torch.zeros(1, 4, 4, dtype=torch.long), y[:1]),
    "masked_scatter": lambda x, y: x.masked_scatter(x > 0, y),
    "addmm_": lambda x, y: x[0].addmm_(y[0], y[1]),
}


class Calling(nn.Module):
    """Nothing but a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def both(function, *args):
    """What comes of it at the first call, when everything is looked at, and at the second."""
    model = Calling(function)
    FunctionCasts(ModuleAdapter(model), [])
    return [model(*(arg.clone() for arg in args)) for _ in range(2)]


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_half_and_fp32_are_those_of_what_is_rounded(name):
    function = PRODUCTS[name]
    for args in ((WIDE, HALF), (HALF, WIDE)):
        with suppress(RuntimeError):
            function(*args)  # torch may know a way of its own
            continue
        for found in both(function, *args):
            assert found.dtype is torch.bfloat16
            assert torch.equal(found, function(HALF, HALF))


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("into_half", [True, False])
def test_what_is_written_has_the_format_of_what_it_is_written_to(name, into_half):
    into, value = (HALF, WIDE * 2) if into_half else (WIDE, HALF * 2)
    for found in both(WRITES[name], into, value):
        assert found.dtype is into.dtype
        assert torch.equal(found, WRITES[name](into.clone(), value.to(into.dtype)))


def test_what_torch_takes_stays_as_it_is():
    mask = torch.full((4, 4), -1e9).triu(1)
    for function, args in (
        (functional.scaled_dot_product_attention, (HALF, HALF, HALF, mask)),
        (torch.add, (HALF, WIDE)),
        (torch.matmul, (WIDE, WIDE)),
        (torch.matmul, (HALF, HALF)),
        (torch.matmul, (WIDE.double(), WIDE.double())),
    ):
        for found in both(function, *args):
            expected = function(*args)
            assert found.dtype is expected.dtype
            assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: functional.linear(x, nn.Parameter(y[0])),  # that it is in fp32 was asked for
        lambda x, y: torch.matmul(x, y.double()),
        lambda x, y: torch.matmul(x, x.half()),
        lambda x, y: torch.matmul(x, y, out=torch.empty(1)),
    ],
)
def test_what_nobody_rounds_is_torchs_to_refuse(function):
    with pytest.raises(RuntimeError):
        both(function, HALF, WIDE)


def test_what_torch_converts_itself_is_nothing_to_look_out_for():
    def set_first(x, value):
        x[0] = value[0]
        return x

    def set_chosen(x, value):
        x[torch.tensor([0]), ..., 1] = value[:1, ..., 1]
        return x

    seen = []
    for function in (set_first, set_chosen):
        model = Calling(function)
        FunctionCasts(ModuleAdapter(model), [])
        assert torch.equal(model(HALF.clone(), 2 * WIDE), function(HALF.clone(), 2 * HALF))
        seen.append(model.forward.func.__self__._in_container_code)
    assert seen == [False, True]


def test_gradients_have_the_format_of_what_they_are_of():
    x, y = WIDE.clone().requires_grad_(), HALF.clone().requires_grad_()
    both(lambda: (x @ y).sum())[1].backward()
    assert (x.grad.dtype, y.grad.dtype) == (torch.float32, torch.bfloat16)


WITHOUT_HALF = {
    "a Fourier transform": lambda x: torch.fft.irfft(torch.fft.rfft(x), n=4),
    "one of two dimensions": lambda x: torch.fft.ifft2(torch.fft.fft2(x)).abs(),
    "a solver": lambda x: torch.linalg.solve(x @ x.mT + torch.eye(4, dtype=x.dtype), x),
    "a method": lambda x: (x @ x.mT + torch.eye(4, dtype=x.dtype)).inverse(),
    "a decomposition": lambda x: torch.linalg.svdvals(x),
    "distances": lambda x: torch.cdist(x, x),
    "a quantile": lambda x: x.quantile(0.5, dim=-1),
    "a complex view": lambda x: torch.view_as_complex(x.reshape(2, 4, 2, 2)).abs(),
    "short Fourier transforms": lambda x: torch.stft(
        x.flatten(), 8, return_complex=True, window=torch.ones(8).to(x)
    ).abs(),
}


@one_test_for("name", WITHOUT_HALF)
def test_what_has_no_kernel_for_half_precision_computes_in_fp32(name):
    function = WITHOUT_HALF[name]
    args = (HALF,)
    with pytest.raises(RuntimeError):
        function(*args)
    for found in both(function, *args):
        assert found.dtype is torch.float32
        torch.testing.assert_close(found, function(HALF.float()), rtol=2e-2, atol=2e-2)
