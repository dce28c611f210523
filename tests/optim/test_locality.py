"""What an optimizer looks at is found out on made-up numbers, and nothing of the script's changes."""

import functools

import pytest
import torch
from sized_rules import FactoredFrom, FindsItsStepSize, FromTo, InBlocksOf256, MatricesOnly
from torch import nn, optim

from hybridpp.optim import FLAT, Cut, HybridAdam, Locality, LocalityUnknown, find_localities

CPU = torch.device("cpu")


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


def halves(parameter, dim):
    shape = tuple(parameter.shape)
    return Cut(shape, dim, -(-shape[dim] // 2)) if parameter.dim() > max(dim, 0) else Cut(shape)


def flat(parameter):
    return Cut(tuple(parameter.shape), FLAT if parameter.numel() > 1 else None)


def found(optimizer, *cuts):
    """What updates of each group depend on, if parameters are cut in each of some ways: along a dimension, or flat."""
    ways = cuts or [functools.partial(halves, dim=0), functools.partial(halves, dim=1), flat]
    tried = [
        find_localities(optimizer, [list(map(way, group["params"])) for group in optimizer.param_groups], CPU)
        for way in ways
    ]
    return [max((kind for of_way in tried for kind in of_way[n]), default=None) for n in range(len(tried[0]))]


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
    given = matrices() if name == "Muon" else parameters()
    assert found(make(given)) == [TABLE[name]]


@pytest.mark.parametrize("dim", [0, 1])
def test_an_optimizer_that_takes_matrices_only_is_given_matrices(dim):
    assert found(optim.Muon(matrices()), functools.partial(halves, dim=dim)) == [Locality.PARAMETERS]


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
    assert found_of == [Locality.ELEMENTS, Locality.PARAMETERS, None]


def test_of_many_groups_that_differ_in_numbers_one_is_tried():
    calls = []

    class Counting(optim.SGD):
        def step(self, closure=None):
            calls.append(sum(len(group["params"]) for group in self.param_groups))
            return super().step(closure)

    groups = [{"params": matrices(), "lr": 0.1 * 0.5**n, "weight_decay": 0.1} for n in range(50)]
    assert found(Counting(groups)) == [Locality.ELEMENTS] * 50
    assert max(calls) == 4  # two parts of two matrices


def of_shapes(make, *shapes, way=flat):
    """The locality of parameters of some shapes, which have no values."""
    parameters = [nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
    return [*find_localities(make(parameters), [list(map(way, parameters))], CPU)[0]]


E, P = Locality.ELEMENTS, Locality.PARAMETERS
LARGE = [(128256, 4096), (4096, 4096), (14336, 4096), (8, 4096, 14336), (4096,)]


@pytest.mark.parametrize(
    ("make", "shapes", "expected"),
    [
        (FactoredFrom, [(127, 300), (160, 144), (160,), (4, 128, 128)], [E, P, E, E]),
        (InBlocksOf256, [(160, 144), (4097,), (4351,), (64, 8), (8192,)], [P, P, P, E, P]),
        (MatricesOnly, [(7, 5), (160, 144)], [P, P]),
        (FactoredFrom, LARGE, [P, P, P, E, E]),
        # A threshold that no stand-in reaches: the operations on the parameter's own shape show it.
        (functools.partial(FactoredFrom, least=4000), LARGE, [P, P, P, E, E]),
        (functools.partial(FromTo, least=10**8), LARGE, [P, E, E, P, E]),
        (functools.partial(FromTo, least=2**19, most=2**21), LARGE, [P, P, P, P, E]),
        (optim.AdamW, LARGE, [E] * 5),
        (optim.ASGD, LARGE, [E] * 5),
        (functools.partial(optim.AdamW, fused=True), LARGE, [E] * 5),
    ],
)
def test_rules_that_depend_on_sizes_are_tried_at_those_sizes(make, shapes, expected):
    assert of_shapes(make, *shapes) == expected


def test_shards_are_tried_as_they_will_be_cut():
    in_four = lambda parameter: Cut(tuple(parameter.shape), 0, parameter.shape[0] // 4)  # noqa: E731
    assert of_shapes(functools.partial(FactoredFrom, least=1024), (1024, 2048), (1024, 512), way=in_four) == [P, E]
    # Quarters of the first are in the bounds, and halves would not be.
    in_bounds = functools.partial(FromTo, least=1000, most=1024)
    assert of_shapes(in_bounds, (16, 256), (16, 128), way=in_four) == [P, E]


def test_what_is_noted_about_all_parameters_counts_before_it_acts():
    assert found(FindsItsStepSize(parameters())) == [Locality.EVERYTHING]


class Projecting(optim.SGD):
    """As AdamP: does nothing more, unless a gradient is at a right angle to its parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if (parameter * parameter.grad).sum().abs() < 1e-9:
                parameter.grad -= parameter.grad.mean()
        return super().step(closure)


def test_what_is_computed_of_several_elements_counts_before_it_acts():
    assert found(Projecting(parameters(), lr=0.1)) == [Locality.PARAMETERS]


def test_parts_of_what_is_read_whole_are_not_tried():
    sizes = []

    class Normed(optim.SGD):
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                sizes.append(parameter.numel())
                parameter.grad /= parameter.grad.norm()
            return super().step(closure)

    assert found(Normed(matrices(), lr=0.1), flat) == [Locality.PARAMETERS]
    assert set(sizes) == {15, 27}


class InItsMode(optim.SGD):
    """As schedule-free optimizers: its step needs a call of train before."""

    is_training = False

    def train(self):
        self.is_training = True

    def step(self, closure=None):
        assert self.is_training, "call train() before"
        return super().step(closure)


def test_an_optimizer_with_modes_is_tried_in_the_one_that_trains():
    optimizer = InItsMode(parameters(), lr=0.1)
    assert (found(optimizer), optimizer.is_training) == ([Locality.ELEMENTS], False)


def test_an_optimizer_that_compiles_its_update_is_tried_as_it_is_written():
    compiled = []

    class Compiling(optim.SGD):
        def step(self, closure=None):
            run = torch.compile(super().step, backend=lambda graph, inputs: compiled.append(graph) or graph)
            return run()

    assert (found(Compiling(parameters(), lr=0.1)), compiled) == ([Locality.ELEMENTS], [])


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


class Later(WithTrustRatio):
    """Clips by a norm behind a warm-up of twelve steps: of each parameter, or of all of them."""

    def __init__(self, params, of_all):
        super().__init__(params)
        self.of_all = of_all

    @torch.no_grad()
    def step(self, closure=None):
        held = [p for group in self.param_groups for p in group["params"]]
        for parameter in held:
            state = self.state[parameter]
            state["step"] = state.get("step", 0) + 1
            if state["step"] > 12:
                parameter.grad.div_(torch.stack([p.grad.norm() for p in (held if self.of_all else [parameter])]).max())
            parameter.sub_(parameter.grad, alpha=0.1)


class Limited(optim.SGD):
    """Leaves out a step by a limit on gradients: of each parameter, or of all of them."""

    def __init__(self, params, is_beyond, of_all):
        super().__init__(params, lr=0.1)
        self.is_beyond, self.of_all, self.past = is_beyond, of_all, []

    @torch.no_grad()
    def step(self, closure=None):
        held = [p for group in self.param_groups for p in group["params"]]
        if self.of_all:
            if not self.is_beyond([p.grad for p in held], self.past):
                super().step()
            return
        for parameter in held:
            if not self.is_beyond([parameter.grad], self.state[parameter].setdefault("past", [])):
                parameter.sub_(parameter.grad, alpha=0.1)


def has_large_entry(gradients, past):
    return max(gradient.abs().max().item() for gradient in gradients) > 0.15


def is_longer_than_usual(gradients, past):
    past.append(torch.stack([gradient.norm() for gradient in gradients]).norm().item())
    return past[-1] > 2 * sum(past) / len(past)


def has_huge_norm(gradients, past):
    return bool(nn.utils.get_total_norm(gradients) > 100)


def is_long_behind_warm_up(gradients, past):
    past.append(0)
    return len(past) > 10 and has_large_entry(gradients, past)


def turns_back(gradients, past):
    past.append([gradient.clone() for gradient in gradients])
    return len(past) > 1 and sum((one * two).sum() for one, two in zip(past[-1], past[-2], strict=True)) < 0


def is_not_finite(gradients, past):
    return any(not torch.isfinite(gradient).all() for gradient in gradients)


def is_mostly_zero(gradients, past):
    return sum((gradient == 0).sum() for gradient in gradients) > 0.4 * sum(gradient.numel() for gradient in gradients)


def has_one_without(gradients, past):
    return any(not gradient.any() for gradient in gradients)


LIMITS = [
    has_large_entry,
    is_longer_than_usual,
    has_huge_norm,
    is_long_behind_warm_up,
    turns_back,
    is_not_finite,
    is_mostly_zero,
    has_one_without,
]


@pytest.mark.parametrize("of_all", [False, True])
@pytest.mark.parametrize("is_beyond", LIMITS, ids=lambda limit: limit.__name__)
def test_a_limit_on_all_gradients_is_found(is_beyond, of_all):
    expected = Locality.EVERYTHING if of_all else Locality.PARAMETERS
    one_kind = [nn.Parameter(torch.randn(5, 3)) for _ in range(2)]
    for given in (matrices(), one_kind, parameters()):
        assert found(Limited(given, is_beyond, of_all)) == [expected]


@pytest.mark.parametrize("of_all", [False, True])
def test_a_rule_that_changes_behind_a_warm_up_is_found(of_all):
    expected = Locality.EVERYTHING if of_all else Locality.PARAMETERS
    assert found(Later(matrices(), of_all)) == [expected]
