"""fused_optimizer: a boosted fused optimizer clips and unscales in its kernel."""

import pytest
import torch
from support import boosted, image_batch, model_loss, sgd, tiny_vit, train
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode

from hybridpp import HybridAdam, HybridParallelPlugin
from hybridpp.errors import ConfigError


def fused(parameters):
    return AdamW(parameters, lr=0.01, fused=True)


def undecided(parameters):
    return AdamW(parameters, lr=0.01)


def partly_fused(parameters):
    first, *rest = parameters
    return AdamW([{"params": [first]}, {"params": rest, "fused": False}], lr=0.01, fused=True)


class Multiplications(TorchDispatchMode):
    """Elementwise scalings of large tensors."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::")
        if name.startswith(("mul", "div", "_foreach_mul", "_foreach_div")):
            of = args[0][0] if isinstance(args[0], list) else args[0]
            # Sums of bits, by which writes are found, are of integers.
            self.count += of.numel() > 1000 and of.is_floating_point()
        return func(*args, **(kwargs or {}))


def passes(make_optimizer, **settings):
    booster, model, optimizer = boosted(tiny_vit(), make_optimizer, image_batch(2), max_norm=0.1, **settings)
    for _ in range(2):
        booster.execute_pipeline(iter([image_batch(2)]), model, model_loss, optimizer)
        with Multiplications() as found:
            optimizer.step()
    return found.count


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_fused_optimizer_makes_no_pass_over_the_gradients(precision):
    assert passes(fused, precision=precision) == 0
    assert passes(HybridAdam, precision=precision) == 0
    assert passes(undecided, precision=precision, fused_optimizer=True) == 0
    assert passes(fused, precision=precision, fused_optimizer=False) > 0
    assert passes(sgd, precision=precision) > 0
    assert passes(partly_fused, precision=precision) > 0


@pytest.mark.parametrize("settings", [{}, {"pp_size": 2}, {"tp_size": 2}, {"precision": "fp16"}], ids=str)
def test_the_weights_are_those_of_a_pass_to_rounding(settings):
    batches = [image_batch(4, seed) for seed in range(2)]
    options = {"num_microbatches": 2, "max_norm": 0.1, "make_optimizer": fused, **settings}
    expected = train(tiny_vit, batches, fused_optimizer=False, **options)
    actual = train(tiny_vit, batches, **options)
    half = "precision" in settings
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(actual["weights"][name], weight, atol=2e-3 if half else 1e-6, rtol=1e-5)


def test_the_layout_changes_no_bit():
    options = {"num_microbatches": 2, "max_norm": 0.1, "make_optimizer": fused}
    batches = [image_batch(4, seed) for seed in range(2)]
    one, two = (train(tiny_vit, batches, pp_size=size, **options)["weights"] for size in (1, 2))
    assert all(torch.equal(two[name], weight) for name, weight in one.items())


def test_gradients_after_the_step_are_those_it_used():
    booster, model, optimizer = boosted(tiny_vit(), fused, image_batch(2), precision="fp16", max_norm=0.1)
    booster.execute_pipeline(iter([image_batch(2)]), model, model_loss, optimizer)
    before = {name: gradient.clone() for name, gradient in optimizer.gradients()}
    norm = optimizer.get_grad_norm()
    optimizer.step()
    assert norm > 0.2
    for name, gradient in optimizer.gradients():
        torch.testing.assert_close(gradient, before[name] * (0.1 / norm))


def test_unboost_gives_back_an_optimizer_that_leaves_the_choice():
    booster, model, optimizer = boosted(tiny_vit(), undecided, image_batch(2), fused_optimizer=True)
    booster.execute_pipeline(iter([image_batch(2)]), model, model_loss, optimizer)
    optimizer.step()
    inner = optimizer.unwrap()
    assert inner.param_groups[0]["fused"] is True
    booster.unboost(model)
    assert inner.param_groups[0]["fused"] is None
    model(**image_batch(2)).loss.backward()
    inner.step()


def test_the_default_fuses_nothing_on_the_cpu():
    _, _, optimizer = boosted(tiny_vit(), undecided, image_batch(2))
    assert optimizer.param_groups[0]["fused"] is None


def test_the_switch_is_a_bool():
    with pytest.raises(ConfigError, match=r"^fused_optimizer must be True or False: got fused_optimizer='cuda'"):
        HybridParallelPlugin(fused_optimizer="cuda")
