"""What an optimizer looks at is found out on made-up numbers, and nothing of the script's changes."""

import functools

import pytest
import torch
from torch import nn, optim

from hybridpp.optim import HybridAdam, Locality, LocalityUnknown, find_localities

CPU = torch.device("cpu")
VECTORS, MATRICES = {(1, 0)}, {(2, 0), (2, 1)}


def parameters():
    """A vector of odd size, a matrix, experts, a convolution and a scalar, in two precisions."""
    torch.manual_seed(0)
    shapes = [(7,), (5, 3), (2, 3, 5), (3, 1, 2, 2), ()]
    return [nn.Parameter(torch.randn(shape)) for shape in shapes] + [nn.Parameter(torch.randn(3).bfloat16())]


def hugging_face_adafactor(*arguments, **settings):
    # It imports half of transformers, and peft.
    from transformers.optimization import Adafactor

    return Adafactor(*arguments, **settings)


def matrices():
    return [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(3, 9))]


def found(optimizer, *cuts):
    return find_localities(
        optimizer, cuts or [VECTORS | MATRICES | {(3, 0), (4, 1)}] * len(optimizer.param_groups), CPU
    )


ELEMENTS = {
    "AdamW": optim.AdamW,
    "AdamW that is fused": functools.partial(optim.AdamW, fused=True),
    "AdamW in foreach": functools.partial(optim.AdamW, foreach=True, amsgrad=True),
    "AdamW with a tensor as its rate": functools.partial(optim.AdamW, lr=torch.tensor(1e-3)),
    "HybridAdam": HybridAdam,
    "SGD at the start of a warm-up": functools.partial(optim.SGD, lr=0.0, momentum=0.9),
    "SGD that is fused": functools.partial(optim.SGD, lr=0.1, fused=True),
    **{cls.__name__: cls for cls in (optim.Adagrad, optim.RMSprop, optim.NAdam, optim.RAdam, optim.Adamax)},
    **{cls.__name__: cls for cls in (optim.Adadelta, optim.Rprop, optim.ASGD)},
}


class WithTrustRatio(optim.Optimizer):
    """As LAMB: each parameter's step is as long as the parameter."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                parameter.sub_(gradient, alpha=group["lr"] * (parameter.norm() / gradient.norm()).item())


class WithSharedNorm(WithTrustRatio):
    """Scales all gradients by the norm of all of them."""

    @torch.no_grad()
    def step(self, closure=None):
        held = [p for group in self.param_groups for p in group["params"]]
        norm = torch.nn.utils.get_total_norm([p.grad for p in held])
        for parameter in held:
            parameter.sub_(parameter.grad / norm, alpha=self.param_groups[0]["lr"])


class Lamb(optim.Optimizer):
    """You et al., https://arxiv.org/abs/1904.00962: Adam's step, as long as the parameter."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state, (first, second) = self.state[parameter], group["betas"]
                if not state:
                    state |= {"step": 0, "mean": torch.zeros_like(parameter), "square": torch.zeros_like(parameter)}
                state["step"] += 1
                state["mean"].lerp_(parameter.grad, 1 - first)
                state["square"].lerp_(parameter.grad.square(), 1 - second)
                mean = state["mean"] / (1 - first ** state["step"])
                update = mean / ((state["square"] / (1 - second ** state["step"])).sqrt() + group["eps"])
                update = update.add(parameter, alpha=group["weight_decay"])
                length, size = update.norm(), parameter.norm()
                ratio = (size / length).item() if size > 0 and length > 0 else 1.0
                parameter.sub_(update, alpha=group["lr"] * ratio)


PARAMETERS = {
    "Adafactor": optim.Adafactor,
    "Adafactor of transformers": hugging_face_adafactor,
    "Muon": optim.Muon,
    "LAMB": Lamb,
    "one with a trust ratio": WithTrustRatio,
}
TABLE = {
    **dict.fromkeys(ELEMENTS, Locality.ELEMENTS),
    **dict.fromkeys(PARAMETERS, Locality.PARAMETERS),
    "one with a shared norm": Locality.EVERYTHING,
}


@pytest.mark.parametrize("name", TABLE)
def test_optimizers_have_the_locality_that_the_page_on_memory_says(name):
    make = {**ELEMENTS, **PARAMETERS, "one with a shared norm": WithSharedNorm}[name]
    given, where = (matrices(), {(2, 0)}) if name == "Muon" else (parameters(), None)
    assert found(make(given), *([where] if where else [])) == [TABLE[name]]


@pytest.mark.parametrize("dim", [0, 1])
def test_an_optimizer_that_takes_matrices_only_is_given_matrices(dim):
    assert found(optim.Muon(matrices()), {(2, dim)}) == [Locality.PARAMETERS]


def test_an_optimizer_that_looks_at_everything():
    assert found(WithSharedNorm(parameters())) == [Locality.EVERYTHING]


class ByGroup(WithTrustRatio):
    """Plain descent for groups that ask for it."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                norm = 1.0 if group["plain"] else parameter.norm()
                parameter.sub_(parameter.grad * norm, alpha=group["lr"])


def test_each_group_is_tried_with_its_own_settings():
    plain, other, empty = (
        {"params": parameters(), "plain": True},
        {"params": matrices(), "plain": False},
        {"params": []},
    )
    found_of = found(ByGroup([plain, other, empty | {"plain": False}]))
    assert found_of == [Locality.ELEMENTS, Locality.PARAMETERS, Locality.ELEMENTS]


def test_of_many_groups_that_differ_in_numbers_one_is_tried():
    calls = []

    class Counting(optim.SGD):
        def step(self, closure=None):
            calls.append(sum(len(group["params"]) for group in self.param_groups))
            return super().step(closure)

    groups = [{"params": matrices(), "lr": 0.1 * 0.5**n, "weight_decay": 0.1} for n in range(50)]
    assert found(Counting(groups)) == [Locality.ELEMENTS] * 50
    assert set(calls) == {1}


def test_the_script_notices_nothing():
    held = parameters()
    optimizer = optim.Adagrad(held, lr=0.5)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    before = [parameter.detach().clone() for parameter in held]
    state = {parameter: {key: value.clone() for key, value in optimizer.state[parameter].items()} for parameter in held}
    torch.manual_seed(3)
    generator = torch.get_rng_state()
    assert found(optimizer) == [Locality.ELEMENTS]
    assert torch.equal(torch.get_rng_state(), generator)
    assert calls == []
    assert all(map(torch.equal, held, before))
    assert all(parameter.grad is None for parameter in held)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert list(optimizer.state) == held
    for parameter in held:
        assert all(torch.equal(optimizer.state[parameter][key], value) for key, value in state[parameter].items())
    assert not scheduler.last_epoch


class Remembering(optim.SGD):
    """Keeps its parameters, and counts its steps, on the object."""

    def __init__(self, params):
        params = list(params)
        super().__init__(params, lr=0.1)
        self.kept, self.notes = params, {"steps": 0}

    def step(self, closure=None):
        self.notes["steps"] += 1
        for parameter in self.kept:
            parameter.data.mul_(0.5)
        return super().step(closure)


def test_what_an_optimizer_keeps_elsewhere_is_left_alone():
    optimizer = Remembering(parameters())
    before = [parameter.detach().clone() for parameter in optimizer.kept]
    found(optimizer)
    assert optimizer.notes == {"steps": 0}
    assert all(map(torch.equal, optimizer.kept, before))


class Raising(optim.SGD):
    def step(self, closure=None):
        raise RuntimeError("no step without the training data")


class Drawing(optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter.data.add_(torch.rand_like(parameter) * 1e-3)


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (Raising, "no step without the training data"),
        (Drawing, "it draws random numbers"),
        (optim.SparseAdam, "does not support dense gradients"),
        (functools.partial(optim.Adam, capturable=True), "capturable"),
    ],
)
def test_what_cannot_be_tried_says_why(cls, reason):
    optimizer = cls(parameters())
    with pytest.raises(LocalityUnknown, match=reason):
        found(optimizer)
