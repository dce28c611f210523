"""Hooks on modules of a model that is cut: once per micro-batch, on the owner, with real values, never in a trace."""

import functools

import pytest
import torch
from partition.tracing import tracer
from support import assert_near, assert_same, boosted, gradients_of, sgd
from torch import nn
from torch.nn.modules.module import (
    _global_forward_hooks,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from hybridpp.cluster import Loopback
from hybridpp.partition.hooks import ModelHooks

ROWS = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
NUM_MICROBATCHES = 2


class Block(nn.Module):
    def __init__(self, *_):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, scale=1.0):
        return torch.tanh(self.linear(x)) * scale


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])

    def forward(self, x):
        for place, block in enumerate(self.blocks):
            x = block(x, scale=1.0 + place)
        return x


class Model(nn.Module):
    """A container with blocks, and a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = Body(), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.body(x).float())


def total(tensor):
    return tensor.detach().sum().item()


def square(output, inputs):
    return output.square().mean()


def run(pp_size, hook_up, after_boost=False, **settings):
    """What hooks noted, sorted, per rank; the loss and all gradients."""

    def rank():
        model, noted = Model(), []
        if not after_boost:
            hook_up(model, noted)
        booster, model, optimizer = boosted(
            model, sgd, (ROWS[:3],), pp_size=pp_size, num_microbatches=NUM_MICROBATCHES, **settings
        )
        if after_boost:
            hook_up(model, noted)
        loss = booster.execute_pipeline(iter([(ROWS,)]), model, square, optimizer)["loss"].item()
        return noted, loss, gradients_of(booster, model)

    ranks = Loopback(pp_size).run(rank)
    gradients = {name: gradient for _, _, found in ranks for name, gradient in found.items()}
    return [noted for noted, _, _ in ranks], ranks[0][1], gradients


def check(hook_up, **settings):
    """As in one process; every note is made on one rank."""
    (expected,), loss, gradients = run(1, hook_up, **settings)
    for pp_size in (2, 4):
        noted, actual_loss, actual = run(pp_size, hook_up, **settings)
        assert sorted(note for rank in noted for note in rank) == sorted(expected)
        assert actual_loss == loss
        assert_same(actual, gradients)
    return expected, noted


def on_units(model, noted):
    """Every kind, on every unit and on what is in it."""
    for name, module in model.named_modules():
        if name in ("", "body", "body.blocks"):
            continue

        def before(module, args, kwargs, name=name):
            noted.append((name, "before", total(args[0]), str(kwargs)))

        def behind(module, args, output, name=name):
            noted.append((name, "behind", total(output), ""))

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(behind)
        module.register_forward_hook(
            lambda module, args, kwargs, output, name=name: noted.append((name, "always", total(output), "")),
            with_kwargs=True,
            always_call=True,
        )
        module.register_full_backward_hook(
            lambda module, inputs, outputs, name=name: noted.append((name, "back", total(outputs[0]), ""))
        )


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("after_boost", [False, True])
def test_hooks_run_once_on_the_owner_with_real_values(after_boost):
    expected, by_rank = check(on_units, after_boost=after_boost)
    assert len(expected) == 9 * 4 * NUM_MICROBATCHES
    assert all(value == value for rank in by_rank for _, _, value, _ in rank)
    assert {name for name, *_ in by_rank[0]} == {"body.blocks.0", "body.blocks.0.linear"}


def test_hooks_of_a_recomputed_block_run_once_in_the_forward():
    def hook_up(model, noted):
        for block in model.body.blocks:
            block.register_forward_hook(lambda module, args, output: noted.append(total(output)))

    settings = {"gradient_checkpoint_config": {"gradient_checkpointing_ratio": 1.0}}
    assert len(check(hook_up, **settings)[0]) == 4 * NUM_MICROBATCHES


def test_hooks_on_containers_that_only_look_run_where_these_begin_and_end():
    def hook_up(model, noted):
        model.register_forward_pre_hook(lambda module, args: noted.append(("model", total(args[0]))))
        model.register_forward_hook(lambda module, args, output: noted.append(("end", total(output))))
        model.body.register_forward_pre_hook(lambda module, args: noted.append(("body", total(args[0]))))
        model.body.register_forward_hook(lambda module, args, output: noted.append(("body end", total(output))))

    _, by_rank = check(hook_up)
    assert [{name for name, _ in rank} for rank in by_rank] == [{"model", "body"}, set(), set(), {"end", "body end"}]


def test_a_hook_that_takes_itself_off_is_gone():
    def hook_up(model, noted):
        def once(module, args, output):
            noted.append(total(output))
            handle.remove()

        handle = model.body.register_forward_hook(once)

    assert len(check(hook_up)[0]) == 1


class Halving:
    """Changes the output, and counts."""

    def __init__(self, noted):
        self.noted, self.count, self.sizes = noted, 0, {}

    def __call__(self, module, args, output):
        self.count += 1
        self.sizes[self.count] = tuple(output.shape)
        self.noted.append(self.count)
        return output.double() / 2 if output.dtype == torch.float32 else output / 2


@pytest.mark.parametrize("name", ["body.blocks.0", "body.blocks.1", "body.blocks.3", "body"])
def test_a_hook_that_changes_an_output_dtype_counts_for_later_stages(name):
    def hook_up(model, noted):
        for block in model.body.blocks:
            block.register_forward_pre_hook(lambda module, args: (args[0].float(), *args[1:]))
        model.get_submodule(name).register_forward_hook(Halving(noted if name != "body" else []))

    expected, _ = check(hook_up)
    assert expected == ([1, 2] if name != "body" else [])


@pytest.mark.parametrize("after_boost", [False, True])
def test_a_hook_that_looks_at_values_may_change_them(after_boost):
    def clip(module, args, output):
        return output.clamp(max=output.detach().mean().item())

    def hook_up(model, noted):
        for block in model.body.blocks:
            block.register_forward_hook(clip)

    check(hook_up, after_boost=after_boost)
    assert run(2, hook_up)[1] != run(2, lambda model, noted: None)[1]


def test_a_hook_may_replace_keyword_arguments():
    def hook_up(model, noted):
        def other(module, args, kwargs):
            return args, {"scale": kwargs["scale"] * 2}

        model.body.blocks[1].register_forward_pre_hook(other, with_kwargs=True)

    check(hook_up)
    assert run(2, hook_up)[1] != run(2, lambda model, noted: None)[1]


def test_global_hooks_run_once_for_every_unit_and_what_is_in_it():
    def counts(pp_size):
        noted, inner = [], (Block, nn.Linear)

        def note(module, args, output=None):
            if isinstance(module, inner):
                noted.append(total(args[0] if output is None else output))

        handles = [register_module_forward_hook(note), register_module_forward_pre_hook(note)]
        try:
            run(pp_size, lambda model, _: None)
        finally:
            for handle in handles:
                handle.remove()
        return sorted(noted)

    expected = counts(1)
    assert len(expected) == 9 * 2 * NUM_MICROBATCHES
    assert counts(2) == counts(4) == expected


def test_what_hooks_do_to_python_objects_in_a_trace_is_undone():
    seen, count = [], 0

    def hook_up(model, noted):
        def hook(module, args, output):
            nonlocal count
            count += 1
            seen.append(count)
            return output * 1

        for block in model.body.blocks:
            block.register_forward_hook(hook)

    run(1, hook_up)
    assert (count, len(seen)) == (8, 8)
    run(4, hook_up)
    assert (count, seen) == (16, [*range(1, 17)])


class Features(Model):
    """Its forward uses what hooks on its blocks leave on it."""

    def __init__(self):
        super().__init__()
        self.kept = {}
        for name, block in self.body.blocks.named_children():
            block.register_forward_hook(functools.partial(self._keep, name))
        self.body.blocks[2].register_forward_pre_hook(lambda module, args: self.kept.update(given=args[0]))

    def _keep(self, name, module, args, output):
        self.kept[name] = output

    def forward(self, x):
        result = super().forward(x)
        return result + sum(kept.mean() for kept in self.kept.values())


def test_hooks_may_collect_what_the_forward_uses():
    def step(pp_size):
        def rank():
            booster, model, optimizer = boosted(
                Features(), sgd, (ROWS[:3],), pp_size=pp_size, num_microbatches=NUM_MICROBATCHES
            )
            loss = booster.execute_pipeline(iter([(ROWS,)]), model, square, optimizer)["loss"].item()
            return loss, gradients_of(booster, model)

        ranks = Loopback(pp_size).run(rank)
        return ranks[0][0], {name: gradient for _, found in ranks for name, gradient in found.items()}

    loss, gradients = step(1)
    for pp_size in (2, 4):
        actual_loss, actual = step(pp_size)
        assert actual_loss == pytest.approx(loss, rel=1e-6)
        assert_near(actual, gradients)


def test_global_hooks_added_and_removed_during_a_trace_stay_as_they_are():
    def stays(module, args, output):
        return output

    def goes(module, args, output):
        return output

    def comes(module, args, output):
        return output

    stay, go = register_module_forward_hook(stays), register_module_forward_hook(goes)
    try:
        with ModelHooks(nn.Linear(2, 2)).disabled_for_trace():
            go.remove()
            come = register_module_forward_hook(comes)
        assert list(_global_forward_hooks.values()) == [stays, comes]
        come.remove()
    finally:
        stay.remove()


def test_what_hooks_did_in_a_trace_classifies_those_of_an_equal_model():
    def looks(module, args, output):
        seen = {}
        seen["output"] = output  # from its code, it may have changed something

    def changes(module, args, output):
        return output.clone()

    def hooked_blocks():
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
        for block, hook in zip(model, (looks, changes, changes), strict=True):
            # An object of its own for each model.
            block.register_forward_hook(functools.partial(hook))
        return model

    found = tracer(hooked_blocks()).trace((torch.ones(1, 2),), {})
    assert found.hook_effects == {0: False, 1: True, 2: True}
    other = ModelHooks(hooked_blocks())
    assert not any(map(other.is_observer, other.registered()))
    other.learn(other.registered(), found.hook_effects)
    assert list(map(other.is_observer, other.registered())) == [True, False, False]
