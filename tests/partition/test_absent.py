"""What a stage does not have stands for itself in the model's forward, and nowhere else."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from hybridpp.errors import ConfigError
from hybridpp.module_adapter import ModuleAdapter
from hybridpp.partition import StagedModel
from hybridpp.partition.absent import AbsentTensor, ParameterVisibility, absent_tensor, overwritten, refuse_absent

CPU = torch.device("cpu")
X = torch.arange(8.0).view(2, 4) / 8
NAMED = r"^{} is a parameter of another stage, and its values are read where the forward that was traced did not"


class Net(nn.Module):
    """Four blocks between an embedding and a head, and a count of the forwards."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.register_buffer("average", torch.zeros(3))
        self.count = 0

    def forward(self, x):
        self.count += 1
        x = self.before(x)
        for block in self.blocks:
            x = block(x)
        return self.after(self.head(x).sum())

    def before(self, x):
        return self.emb(x)

    def after(self, loss):
        return loss

    @property
    def is_late(self):
        return self.count > 2


def penalty_of_all(net, loss):
    return loss + sum(p.pow(2).sum() for p in net.parameters()) if net.is_late else loss


def penalty_in_place(net, loss):
    total = torch.zeros(())
    for parameter in net.parameters() if net.is_late else ():
        total += parameter.detach().abs().mean()
    return loss + total


def penalty_of_others(net, loss):
    return loss + net.blocks[{1: 3, 2: 2}.get(net.count, 0)].weight.norm()


def logged_number(net, loss):
    net.logged = net.emb.weight.norm().item() if net.is_late else 0.0
    return loss


def inner_gradients(net, loss):
    if net.is_late:
        net.emb.weight.sum().backward()
    return loss


def run(stages, forwards=3):
    """The results of forwards over stages, which are on a rank each or several on one."""
    results = []
    for step in range(forwards):
        values = []
        for stage in range(stages[0].num_stages):
            rank = next(rank for rank in stages if stage in rank.stages)
            values, result, context = rank.forward(rank.plans((X,), {})[stage], (X,), {}, values, step, False)
        results.append(result)
    return results, rank, context


def cut(make, ranks=((0,), (1,))):
    num_stages = sum(map(len, ranks))
    return [StagedModel(ModuleAdapter(make()), num_stages, rank, device=CPU, samples=[((X,), {})]) for rank in ranks]


@pytest.mark.parametrize("ranks", [((0,), (1,)), ((0, 3), (1, 2))])
@pytest.mark.parametrize("after", [penalty_of_all, penalty_in_place, penalty_of_others])
def test_a_penalty_that_begins_later_is_refused_by_name(after, ranks):
    stages = cut(type("Late", (Net,), {"after": after}), ranks)
    with pytest.raises(ConfigError, match=NAMED.format(r"(emb|blocks\.\d)\.weight")):
        run(stages)


@pytest.mark.parametrize("after", [logged_number, inner_gradients])
def test_numbers_and_gradients_of_a_weight_that_is_not_there_are_refused(after):
    stages = cut(type("Late", (Net,), {"after": after}))
    with pytest.raises(ConfigError, match=NAMED.format(r"emb\.weight")):
        run(stages)


def test_an_input_of_a_block_made_of_an_absent_weight_is_refused():
    def before(net, x):
        return net.emb(x + net.head.weight[0] if net.is_late else x)

    with pytest.raises(ConfigError, match=NAMED.format(r"head\.weight")):
        run(cut(type("Late", (Net,), {"before": before})))


def test_hooks_of_blocks_may_not_read_other_stages_weights():
    def hooked(register):
        net = Net()

        def forward_hook(block, inputs, output):
            return output + net.head.weight.sum() if net.is_late else output

        def backward_hook(block, inputs, outputs):
            return (inputs[0] * net.head.weight.sum(),) if net.is_late else None

        register(net.blocks[0], forward_hook, backward_hook)
        return net

    with pytest.raises(ConfigError, match=NAMED.format(r"head\.weight")):
        run(cut(lambda: hooked(lambda block, hook, _: block.register_forward_hook(hook))))
    first, _ = cut(lambda: hooked(lambda block, _, hook: block.register_full_backward_hook(hook)))
    (sent,), _, context = first.forward(first.plans((X,), {})[0], (X,), {}, [], 0, False)
    first.model.count = 3
    with first.recomputing(context), pytest.raises(ConfigError, match=NAMED.format(r"head\.weight")):
        sent.sum().backward()


def test_a_weight_of_this_stage_is_not_made_of_those_of_others():
    def before(net, x):
        with torch.no_grad():
            if net.is_late:
                net.emb.bias.copy_(net.blocks[3].bias)
        return net.emb(x)

    with pytest.raises(ConfigError, match=r"^blocks\.3\.bias is a parameter of .*own block only"):
        run(cut(type("Late", (Net,), {"before": before})))


def test_container_code_may_not_read_what_other_stages_write_to_buffers():
    class Counted(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x):
            self.mean.lerp_(x.detach().mean(0), 0.1)
            return super().forward(x)

    class Reader(Net):
        number = 0

        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Counted() for _ in range(4))

        def after(self, loss):
            return loss + self.blocks[self.number].mean.sum()

    with pytest.raises(ConfigError, match=r"^blocks\.0\.mean is a buffer of another stage"):
        run(cut(Reader))
    results, *_ = run(cut(type("OfItsStage", (Reader,), {"number": 3})))
    whole = type("OfItsStage", (Reader,), {"number": 3})()
    assert results == [whole(X) for _ in range(3)]


def test_a_weight_of_another_stage_is_not_written_by_a_forward():
    def before(net, x):
        with torch.no_grad():
            if net.is_late:
                net.blocks[3].bias.lerp_(net.emb.bias, 0.1)
        return net.emb(x)

    with pytest.raises(ConfigError, match=r"^blocks\.3\.bias is a parameter of .*own block only"):
        run(cut(type("Following", (Net,), {"before": before})))


class Container(Net):
    """Uses weights in many ways between blocks, where all stages run it."""

    def before(self, x):
        self.seen = sum(p.numel() * p.element_size() + len(p.stride()) for p in self.parameters() if p.requires_grad)
        assert all(isinstance(p, torch.Tensor) and p.is_contiguous() is not None for p in self.parameters())
        with torch.no_grad():
            self.average.lerp_(self.head.bias, 0.5)
        self.kept = self.blocks[3].weight.norm()
        x = x.to(self.head.weight).type_as(self.head.weight) + torch.zeros_like(self.head.weight)[0]
        return functional.linear(x, self.emb.weight) + torch.stack([self.emb.bias, self.emb.bias]).mean(0)

    def after(self, loss):
        hidden = torch.stack([self.emb.bias, self.emb.bias])
        hidden[0] = self.head.weight[0]

        def again(hidden):
            return self.head(self.blocks[3](hidden + self.blocks[0].bias)) + self.emb.weight.sum()

        return loss + checkpoint(again, hidden, use_reentrant=False).sum() + self.average.sum()


def test_container_code_may_use_weights_as_its_trace_shows():
    whole = Container()
    expected = [whole(X) for _ in range(3)]
    stages = cut(Container)
    results, last, context = run(stages)
    assert results == expected
    expected[-1].backward()
    with last.recomputing(context):
        results[-1].backward()
    own = dict(last.model.named_parameters())
    assert own.keys() >= {"emb.weight", "blocks.3.weight", "head.weight"}
    assert stages[0].owners["head.bias"] == (1,)
    gradients = {name: p.grad for name, p in whole.named_parameters() if name.startswith(("head", "blocks.3"))}
    assert all(torch.equal(own[name].grad, gradient) for name, gradient in gradients.items())
    first = stages[0].model
    assert first.seen == whole.seen
    # Not what this rank has, so nobody reads it there.
    assert first.state_dict().keys() >= {"average"}
    with pytest.raises(ConfigError, match=r"^blocks\.3\.weight is a parameter of another stage: with pp_size > 1"):
        first.kept + 1
    assert isinstance(copy.deepcopy(first.kept), AbsentTensor)


def test_what_is_computed_with_an_absent_tensor_is_absent():
    visibility = ParameterVisibility()
    weight = absent_tensor(torch.ones(2, 3, requires_grad=True), "w", visibility, CPU, torch.float32)
    own, target = torch.ones(2, 3), torch.zeros(2, 3)
    with visibility.showing_all():
        assert not visibility.has_computed
        for made in (weight * 2, weight.data, weight.sum(0), *weight.unbind(0)):
            assert type(made) is AbsentTensor
            assert made.isnan().numel() == made.numel()
        with torch.no_grad():
            torch.add(own, weight, out=target)
        assert type(target) is AbsentTensor
        assert visibility.has_computed
        for free in (torch.zeros_like(weight), weight.new_ones(2), own.view_as(weight), own.to(weight)):
            assert type(free) is torch.Tensor
        for read in (
            lambda: float(weight.detach().sum()),
            lambda: bool((weight > 0).all()),
            lambda: weight.tolist(),
            lambda: f"{weight.detach().norm():.2f}",
            lambda: torch.equal(weight, own),
            lambda: weight.detach().numpy(),
        ):
            with pytest.raises(ConfigError, match=NAMED.format("w")):
                read()
        with pytest.raises(ConfigError, match="writes to weights of its own block only"):
            weight.data.mul_(2)
    with pytest.raises(ConfigError, match=NAMED.format("w")):
        refuse_absent({"out": [target]})
    assert type(overwritten(target, own)) is torch.Tensor
    assert torch.equal(target, own)
