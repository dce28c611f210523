"""Programs that readers of well-known tutorials write, on as many processes as these; losses are plain PyTorch's."""

import runpy

import pytest
import torch
from processes import run_ranks
from support import ROOT
from torch import nn

import hybridpp


def program(name):
    """What a program defines."""
    return runpy.run_path(str(ROOT / f"tests/seeds/programs/{name}.py"))


def on_processes(main, num_ranks, **arguments):
    """What ``main`` returns on processes that have joined."""

    def run():
        hybridpp.launch_from_torch = lambda seed=1024: torch.manual_seed(seed)
        return main(**arguments)

    return run_ranks(run, num_ranks, timeout_s=100)


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


def test_a_sequence_is_trained_by_the_trainer_plain_and_interleaved():
    names = program("resnet_trainer")
    plain, chunked = (on_processes(names["main"], 2, num_chunks=chunks) for chunks in (1, 2))
    assert plain == chunked == [plain[0]] * 2
    losses, metrics = plain[0]
    model, samples = names["resnet50"](), names["samples"](16)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = hybridpp.optim.LinearWarmupLR(optimizer, total_steps=2, warmup_steps=1)
    expected = []
    for _ in range(2):
        batches = [microbatches(samples[start : start + 8], 4) for start in (0, 8)]
        expected += trained(model, optimizer, batches, lambda m, x, y: nn.functional.cross_entropy(m(x), y) / 4)
        scheduler.step()
    assert losses == pytest.approx(expected, rel=1e-5)
    images, labels = stacked(names["samples"](8))
    assert metrics["test/accuracy"] == (model.eval()(images).argmax(1) == labels).float().mean().item()
    assert metrics["train/loss"] == pytest.approx(sum(expected[2:]) / 2, rel=1e-5)


def test_stage_numbers_on_two_stages_and_four_replicas():
    names = program("annotated_network")
    ranks = on_processes(names["train_cifar"], 8)
    model = names["resnet50"](4, 3)
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


def test_torchs_split_point_and_schedule():
    names = program("split_transformer")
    ranks = on_processes(names["main"], 2)
    model = names["make_model"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=names["lr"], momentum=names["momentum"])
    expected = trained(model, optimizer, [[names["data"]()]] * 2, lambda m, x, y: names["tokenwise_loss_fn"](m(x), y))
    for losses, _ in ranks:
        assert losses == pytest.approx(expected, rel=1e-5)
    layers = [{name.split(".")[1] for name in held if name.startswith("layers.")} for _, held in ranks]
    assert layers == [set("0123"), set("4567")]


PRINTED = """\
MyNetwork, stages: 3

stage | rank of the pipeline | modules | parameters
------+----------------------+---------+-----------
    0 |                    0 | layer0  |    262,656
    1 |                    1 | layer1  |    525,312
    2 |                    2 | layer2  |    262,400
------+----------------------+---------+-----------
total |                      |         |  1,050,368"""


def test_three_stages_forward_only_and_a_model_with_its_loss():
    names = program("split_layers")
    # The program compares outputs and losses itself.
    ranks = on_processes(names["main"], 3)
    torch.manual_seed(0)
    network = names["MyNetwork"](512, [512, 1024, 256])
    names["MyNetwork"](512, [512, 1024, 256])
    x, target = torch.randn(512, 512), torch.randn(512, 256)
    model = names["ModelLossWrapper"](network, nn.MSELoss(reduction="sum"))
    trained(model, torch.optim.SGD(model.parameters(), lr=1e-6), [[(x, target)]], lambda m, *inputs: m(*inputs))
    for stage, (printed, weights) in enumerate(ranks):
        assert printed == PRINTED
        assert set(weights) == {f"module.layer{stage}.lin.{kind}" for kind in ("weight", "bias")}
        for name, weight in weights.items():
            # The step moves weights by 1e-5.
            torch.testing.assert_close(weight, model.get_parameter(name), atol=5e-8, rtol=0)
