"""Programs that readers of well-known tutorials write, in the layouts of these; losses are those of plain PyTorch."""

import runpy

import pytest
import torch
from support import ROOT
from torch import nn

import hybridpp
from hybridpp.cluster import Loopback


@pytest.fixture
def program(monkeypatch):
    """Runs a program on in-process ranks, which have joined; gives what it defines and what its ranks return."""
    monkeypatch.setattr(hybridpp, "launch_from_torch", lambda seed=1024: torch.manual_seed(seed))

    def run(name, num_ranks, **arguments):
        names = runpy.run_path(str(ROOT / f"tests/seeds/programs/{name}.py"))
        return names, Loopback(num_ranks).run(lambda: names["main"](**arguments))

    return run


def trained(model, optimizer, batches, loss):
    """The losses of plain PyTorch; a batch is a list of micro-batches, whose gradients add up."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        parts = [loss(model, *microbatch) for microbatch in batch]
        sum(parts).backward()
        optimizer.step()
        losses.append(sum(parts).item())
    return losses


def stacked(samples):
    return torch.stack([image for image, _ in samples]), torch.tensor([label for _, label in samples])


def microbatches(samples, count):
    return list(zip(*(tensor.chunk(count) for tensor in stacked(samples)), strict=True))


def test_a_sequence_is_trained_by_the_trainer_plain_and_interleaved(program):
    names, plain = program("resnet_trainer", 2, num_chunks=1)
    _, chunked = program("resnet_trainer", 2, num_chunks=2)
    assert plain == chunked == [plain[0]] * 2
    model, samples = names["make_model"](), names["samples"](16)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = hybridpp.optim.LinearWarmupLR(optimizer, total_steps=2, warmup_steps=1)
    expected = []
    for _ in range(2):
        batches = [microbatches(samples[start : start + 8], 4) for start in (0, 8)]
        expected += trained(model, optimizer, batches, lambda m, x, y: nn.functional.cross_entropy(m(x), y) / 4)
        scheduler.step()
    assert plain[0][0] == pytest.approx(expected, rel=1e-5)
    images, labels = stacked(names["samples"](8))
    assert plain[0][1] == (model.eval()(images).argmax(1) == labels).float().mean().item()


def test_stage_numbers_on_two_stages_and_four_replicas(program):
    names, ranks = program("annotated_network", 8)
    model = names["make_model"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images, labels = stacked(names["samples"]())
    # The replicas' losses are parts of one sum.
    expected = trained(
        model,
        optimizer,
        [[(images[step : step + 16], labels[step : step + 16])] for step in (0, 16)],
        lambda m, x, y: nn.functional.cross_entropy(m(x), y, reduction="sum"),
    )
    totals = [sum(losses) for losses in zip(*(losses for losses, _ in ranks[::2]), strict=True)]
    assert totals == pytest.approx(expected, rel=1e-5)
    for stage, (_, weights) in enumerate(ranks):
        assert ("head.weight" in weights, "fc.weight" in weights) == (stage % 2 == 0, stage % 2 == 1)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, model.get_parameter(name), atol=1e-5, rtol=1e-5)


def test_torchs_split_point_and_schedule_name(program):
    names, ranks = program("split_transformer", 2)
    model = names["make_model"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    expected = trained(
        model, optimizer, [[names["batch"]()]] * 2, lambda m, x, y: names["tokenwise_loss_fn"](m(x), (x, y))
    )
    for losses, _ in ranks:
        assert losses == pytest.approx(expected, rel=1e-5)
    layers = [{name.split(".")[1] for name in held if name.startswith("layers.")} for _, held in ranks]
    assert layers == [set("0123"), set("4567")]


def test_three_stages_forward_only_and_a_model_with_its_loss(program):
    names, ranks = program("split_layers", 3)
    x, target = names["data"]()
    torch.testing.assert_close(ranks[0][0], names["make_model"]()(x))
    assert [outputs is None for outputs, *_ in ranks] == [False, True, True]
    model = names["with_loss"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    expected = trained(model, optimizer, [[(x, target)]] * 2, lambda m, *inputs: m(*inputs))
    for stage, (_, losses, held) in enumerate(ranks):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert held == {f"module.layer{stage}.lin.{kind}" for kind in ("weight", "bias")}
