import logging
from collections.abc import Callable

import pytest
import torch
from container_code_models import Blocks
from support import train
from torch import nn

from hybridpp.errors import PartitionError
from hybridpp.module_adapter import AdapterLayer, ModuleAdapter
from hybridpp.partition import Tracer, UntraceableUnitError, find_units
from hybridpp.partition.blocks import finest_units
from hybridpp.partition.calls import Same, TensorSpec
from hybridpp.partition.intercept import Interceptor
from hybridpp.partition.traced_units import first_traceable_sample

CPU = torch.device("cpu")


class Aside(Blocks):
    """What its second block returns is not looked at."""

    def forward(self, x):
        h = self.blocks[0](self.embed(x))
        self.blocks[1](h)
        return self.head(self.blocks[3](self.blocks[2](h)))


def second_block_call(block, dtype=torch.float32):
    model = Aside().to(dtype)
    model.blocks[1] = block
    finest, units = (
        Interceptor(ModuleAdapter(model), AdapterLayer.UNIT_RNG, finest_units(model)),
        Interceptor(ModuleAdapter(model), AdapterLayer.STAGE, find_units(model, 2).units),
    )
    return Tracer(model, units, finest, CPU).trace((torch.ones(2, 4, dtype=dtype),), {}).calls[2]


class Looking(nn.Linear):
    """Looks at values, which fakes do not have."""

    def __init__(self, then: Callable):
        super().__init__(4, 4)
        self.register_buffer("step", torch.tensor(2))
        self.then = then

    def forward(self, h):
        assert h.sum().item() != 0.5
        return self.then(self, h)


STREAM = TensorSpec((2, 4), torch.float32, True)


@pytest.mark.parametrize(
    ("then", "leaves", "arguments"),
    [
        (lambda self, h: nn.Linear.forward(self, h), (STREAM,), {}),
        (lambda self, h: (h, h.argmax(1)), (STREAM, TensorSpec((2,), torch.int64, False)), {0: 0}),
        (lambda self, h: {"out": h @ self.weight, "size": h.shape[1]}, (STREAM, 4), {}),
        # Buffers keep their numbers: shapes may follow from them.
        (lambda self, h: h[:, :: self.step.item()], (TensorSpec((2, 2), torch.float32, True),), {}),
        (lambda self, h: h.mul_(2), (STREAM,), {0: 0}),
        (lambda self, h: (h.mul_(2), None)[1], (None, STREAM), {1: 0}),
    ],
)
def test_a_unit_that_looks_at_values_shows_what_it_returns(then, leaves, arguments):
    call = second_block_call(Looking(then))
    assert call.leaves == leaves
    assert call.arguments == arguments


def test_its_parameters_and_buffers_are_left_alone():
    block = Looking(lambda self, h: nn.Linear.forward(self, h + self.step.add_(1)))
    before = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    second_block_call(block)
    assert all(torch.equal(tensor, before[name]) for name, tensor in block.state_dict().items())
    assert type(block.weight) is nn.Parameter


def test_its_own_error_comes_through():
    with pytest.raises(RuntimeError, match="must have same reduction dim"):
        second_block_call(nn.Linear(3, 3))


class Picky(Looking):
    """Looks at values, and takes no made-up ones."""

    def __init__(self):
        super().__init__(nn.Linear.forward)

    def forward(self, h):
        if h.sum().item() < 1:
            raise ValueError("numbers  like these\nare none")
        return super().forward(h)


def test_a_model_that_fails_concretely_and_on_fakes_reports_both_errors():
    text = (
        r"unit 'blocks.1' \(Picky\) of Aside failed while the model was traced: on placeholder values, "
        r"ValueError: numbers like these are none; on fake tensors, DataDependentOutputException: .*; if it "
        r"does not, use pp_size=1\."
    )
    with pytest.raises(UntraceableUnitError, match=text) as raised:
        second_block_call(Picky())
    assert isinstance(raised.value.__cause__, ValueError)


def test_a_kernel_that_takes_neither_tells_why():
    block = Experts().bfloat16()
    with pytest.raises(UntraceableUnitError, match=r"on placeholder values, RuntimeError: (?s:.)*; on fake tensors, "):
        second_block_call(block, dtype=torch.bfloat16)


@pytest.mark.parametrize("error", [MemoryError("full"), torch.OutOfMemoryError("full"), PartitionError("told already")])
def test_what_says_enough_by_itself_is_raised_as_it_is(error):
    def fail(self, h):
        raise error

    with pytest.raises(type(error), match=f"^{error}$"):
        second_block_call(Looking(fail))


class Choosy(nn.Module):
    """Runs on wide samples only; fakes run on none."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Looking(nn.Linear.forward) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_another_sample_is_tried_then():
    model = Choosy()
    finest = Interceptor(ModuleAdapter(model), AdapterLayer.UNIT_RNG, finest_units(model))
    samples = [((torch.ones(2, 3),), {}), ((torch.ones(2, 4),), {})]
    sample, found = first_traceable_sample(
        ModuleAdapter(model), 2, samples, lambda args, kwargs: (args, kwargs), finest, device=CPU
    )
    assert sample is not samples[0]
    assert len(found.trace.calls) == 4


def test_a_model_on_the_meta_device_is_rehearsed_alike():
    with torch.device("meta"):
        block = Looking(lambda self, h: nn.Linear.forward(self, h))
    assert second_block_call(block).leaves == (STREAM,)


class Experts(nn.Module):
    """Groups of rows with a matrix each, for which torch has no kernel in bf16: the rows are too short."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0)))

    def forward(self, h):
        return torch.nn.functional.grouped_mm(h, self.weight, offs=torch.tensor([1, len(h)], dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_products_in_groups_need_no_values_in_other_formats_than_torchs(monkeypatch, dtype):
    def fail(*_):
        raise AssertionError

    monkeypatch.setattr("hybridpp.partition.call_recorder.run_on_concrete_values", fail)
    assert second_block_call(Experts().to(dtype), dtype=dtype).leaves == (TensorSpec((2, 4), dtype, True),)


def without_fake(tensor):
    raise RuntimeError("no fake is made of this")


OPERATORS = torch.library.Library("tests_of_concrete_fallback", "DEF")
OPERATORS.define("copied(Tensor tensor) -> Tensor")
OPERATORS.impl("copied", torch.clone, "CPU")
OPERATORS.impl("copied", without_fake, "Meta")


class Copying(nn.Linear):
    """Calls an operator whose fake raises."""

    def forward(self, h):
        return super().forward(h) + torch.ops.tests_of_concrete_fallback.copied(h)


def test_torch_does_not_log_what_its_fakes_cannot_do(caplog):
    log = logging.getLogger("torch._subclasses.fake_tensor")
    assert second_block_call(Copying(4, 4)).leaves == (STREAM,)
    assert caplog.records == []
    assert not log.filters


class Cache:
    """Holds what blocks leave in it."""

    def __init__(self):
        self.layers = []


class Caching(nn.Linear):
    """Keeps its result in a cache, then looks at values of what is in there."""

    def forward(self, h, cache):
        cache.layers.append({"keys": super().forward(h)})
        assert cache.layers[-1]["keys"].sum().item() != 0.5
        return cache.layers[-1]["keys"], len(cache.layers)


class Cached(Blocks):
    """Hands a cache to a block."""

    def __init__(self):
        super().__init__()
        self.blocks[1] = Caching(4, 4)

    def forward(self, x):
        h, _ = self.blocks[1](self.blocks[0](self.embed(x)), Cache())
        return self.head(self.blocks[3](self.blocks[2](h)))


def test_a_unit_that_is_run_twice_writes_to_its_objects_once():
    finest, units = (
        Interceptor(ModuleAdapter(model := Cached()), AdapterLayer.UNIT_RNG, finest_units(model)),
        Interceptor(ModuleAdapter(model), AdapterLayer.STAGE, find_units(model, 2).units),
    )
    calls = Tracer(model, units, finest, CPU).trace((torch.ones(2, 4),), {}).calls
    # What it put into the cache is what it returned.
    assert calls[2].leaves == (STREAM, 1, Same(0))


class Asking(Blocks):
    """Its container code asks a part for its dtype, as Hugging Face models do, wherever the part is."""

    def forward(self, x):
        h = x.to(next(self.embed.parameters()).dtype)
        h = self.embed(h)
        for block in self.blocks:
            h = block(h.to(next(self.head.parameters()).dtype))
        return self.head(h.to(next(self.embed.parameters()).dtype))


def test_a_part_that_is_elsewhere_tells_its_dtype():
    def run(**settings):
        # Two sizes: the second is traced on the stripped model.
        batches = [torch.ones(4, 4), torch.ones(6, 4)]
        return train(Asking, batches, criterion=lambda outputs, inputs: outputs.square().mean(), **settings)

    expected, actual = run(), run(pp_size=2)
    assert actual["losses"] == expected["losses"] * 2
    torch.testing.assert_close(actual["weights"], expected["weights"], rtol=0, atol=0)
    # And no rank holds more for it.
    assert actual["names"][0] & actual["names"][1] == set()
