"""Shards that are right in double precision, and that a kernel refuses in the format of the run."""

import pytest
import torch
from support import boosted, sgd
from torch import Tensor, nn
from torch.nn import functional

from hybridpp.cluster import Loopback
from hybridpp.config import Precision
from hybridpp.plan_search import RunFormats, infer_plan, infer_sequence
from hybridpp.sharding_plan import Plan

WIDTH, LENGTH = 8, 4


class Experts(nn.Module):
    """Stacked experts, of which each token takes one; torch's kernel wants rows of multiples of 16 bytes."""

    def __init__(self, inner: int):
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, inner, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(2, WIDTH, inner) / 4)

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor([len(x) // 2, len(x)], dtype=torch.int32, device=x.device)
        y = functional.grouped_mm(x, self.up.transpose(1, 2), offs=ends)
        return functional.grouped_mm(y.relu(), self.down.transpose(1, 2), offs=ends)


class Block(nn.Module):
    """Experts behind a norm, which is in fp32, and a layer that any format can divide."""

    def __init__(self, inner: int):
        super().__init__()
        self.norm, self.experts = nn.LayerNorm(WIDTH), Experts(inner)
        self.one, self.two = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.two(self.one(x).relu())
        return x + self.experts(self.norm(x).flatten(0, 1)).view_as(x)


def formats(precision: Precision, model: nn.Module) -> RunFormats:
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    dtypes = {} if precision is Precision.FP32 else dict.fromkeys(norms, torch.float32)
    return RunFormats(precision, dtypes, True, torch.device("cpu"))


def infer(inner: int, precision: Precision) -> Plan:
    model = nn.Sequential(Block(inner))
    calls = {"0": ((torch.randn(2, LENGTH, WIDTH),), {})}
    return infer_plan(model, ["0"], calls, 2, formats=formats(precision, model))


@pytest.mark.parametrize(
    ("inner", "precision", "refused_in"),
    [(16, "fp16", None), (24, "fp32", None), (24, "fp16", "float16"), (24, "bf16", "bfloat16")],
)
def test_experts_are_divided_where_the_kernel_of_the_run_takes_shards(inner, precision, refused_in):
    found = infer(inner, Precision(precision))
    assert ("0.experts.up" in found.spec.params) is (refused_in is None)
    assert {"0.one.weight", "0.two.weight"} <= found.spec.params.keys()
    reason = f"RuntimeError: strides should be multiple of 16 bytes (in {refused_in})"
    assert refused_in is None or reason in found.reasons["0.experts"]


class Narrow(nn.Module):
    """A kernel for any number of positions in double precision, and for multiples of 4 in others."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is not torch.float64 and x.shape[1] % 4:
            raise RuntimeError(f"{x.shape[1]} positions")
        return x


class Positions(nn.Module):
    """Two layers, and a kernel that a shard of sequences may not suit."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.kernel = nn.LayerNorm(WIDTH), Narrow()
        self.one, self.two = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(self.one(self.kernel(self.norm(x))).relu())


@pytest.mark.parametrize(
    ("length", "reasons"),
    [(8, {}), (12, {"0": "on sequence shards, it raises RuntimeError: 6 positions (in bfloat16)"})],
)
def test_so_are_sequences(length, reasons):
    model = nn.Sequential(Positions())
    calls = {"0": ((torch.randn(2, length, WIDTH),), {})}
    of_run = formats(Precision.BF16, model)
    spec = infer_plan(model, ["0"], calls, 2, formats=of_run).spec
    assert infer_sequence(model, ["0"], calls, spec, 2, formats=of_run).reasons == reasons


def test_a_model_whose_experts_stay_whole_trains_in_that_format():
    x = torch.randn(2, LENGTH, WIDTH)

    def losses(**settings):
        torch.manual_seed(0)
        booster, model, optimizer = boosted(nn.Sequential(Block(24), Block(24)), sgd, x, precision="bf16", **settings)
        found = []
        for _ in range(2):
            step = booster.execute_pipeline(iter([x]), model, lambda y, _: y.square().mean(), optimizer)
            found.append(step["loss"].item())
            optimizer.step()
        return found

    (alone,) = Loopback(1).run(losses)
    for divided in Loopback(2).run(lambda: losses(tp_size=2)):
        assert divided == pytest.approx(alone, rel=1e-2)
