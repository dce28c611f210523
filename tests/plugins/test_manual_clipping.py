"""What scripts do to gradients between backward and step: one run in every layout, or an error."""

import logging
import re

import pytest
import torch
from divided_models import VIT
from support import (
    assert_near,
    assert_same,
    boosted,
    image_batch,
    model_loss,
    replica_part,
    sgd,
    tiny_vit,
    whole_over_tp,
)
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import Loopback
from hybridpp.errors import ConfigError

BATCHES = [image_batch(4, seed) for seed in range(3)]
REFUSED = re.compile(
    r"the script multiplied gradients before the last step by different factors, as torch\.nn\.utils\.clip_grad_norm_ "
    r"does: (\S+) on rank 0, (\S+) on rank 1\. It uses the norm of one rank's gradients, not of the complete model's\. "
    r"Call optimizer\.clip_grad_by_norm\(max_norm\), or set HybridParallelPlugin\(max_norm=\.\.\.\)\."
)


def weights(change, *, evaluates=False, steps=3, dp_size=1, own_backward=False, **settings):
    """Of runs whose scripts do ``change(model)`` before each step."""
    num_ranks = dp_size * settings.get("pp_size", 1) * settings.get("tp_size", 1)

    def run():
        booster, model, optimizer = boosted(
            tiny_vit(), sgd, image_batch(2), tensor_parallel_plan=VIT, num_microbatches=2 // dp_size, **settings
        )
        for batch in BATCHES[:steps]:
            mine = replica_part(batch, booster.plugin.layout.here.dp, dp_size)
            if own_backward:
                booster.backward(model(**mine).loss, optimizer)
            else:
                booster.execute_pipeline(iter([mine]), model, model_loss, optimizer)
            change(model)
            optimizer.step()
        if evaluates:
            with torch.no_grad():
                booster.execute_pipeline(iter([BATCHES[0]]), model, model_loss)
        held = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        return whole_over_tp(booster, model, held)

    found = {}
    for rank in Loopback(num_ranks).run(run):
        found.update(rank)
    return found


def by_norm(max_norm):
    return lambda model: clip_grad_norm_(model.parameters(), max_norm)


LAYOUTS = [{"pp_size": 2}, {"tp_size": 2}, {"pp_size": 2, "schedule": "zb-v"}]


def clip_copies(parameters, max_norm, **options):
    """As torch does, by the norm of copies: of gradients that are shards, it is refused."""
    parameters = list(parameters)
    norm = get_total_norm([one.grad.clone() for one in parameters], **options)
    clip_grads_with_norm_(parameters, max_norm, norm, **options)


def test_clipping_of_single_parameters_is_refused_where_ranks_have_shards():
    refused = r"\.grad is a shard: with tp_size > 1 .* Call optimizer.clip_grad_by_norm\(max_norm\), .* is of the"
    with pytest.raises(ConfigError, match=refused):
        weights(lambda model: [clip_grad_norm_([one], 1e-3) for one in model.parameters()], tp_size=2)
    with pytest.raises(ConfigError, match="of shards of one parameter before the last step by different factors"):
        weights(lambda model: [clip_copies([one], 1e-3) for one in model.parameters()], tp_size=2)


def perturb(model):
    """SAM's first step, as scripts write it."""
    norm = torch.norm(torch.stack([one.grad.norm(p=2) for one in model.parameters()]), p=2)
    with torch.no_grad():
        for one in model.parameters():
            one.add_(one.grad * (0.05 / norm))


def test_a_norm_over_all_gradients_of_a_rank_is_told_or_refused(caplog):
    weights(perturb, pp_size=2)
    texts = [one.getMessage() for one in caplog.records if "all gradients of one rank" in one.getMessage()]
    assert len(texts) == 2  # one for each stage
    with pytest.raises(ConfigError, match=r"\.grad is a shard"):
        weights(perturb, tp_size=2)
    weights(perturb)


@pytest.mark.covering
@pytest.mark.parametrize("settings", LAYOUTS)
@pytest.mark.parametrize("foreach", [True, False])
def test_clipping_by_the_norm_of_each_rank_is_refused(settings, foreach):
    clip = clip_copies if "tp_size" in settings else clip_grad_norm_
    with pytest.raises(ConfigError) as error:
        weights(lambda model: clip(model.parameters(), 0.05, foreach=foreach), **settings)
    first, second = map(float, REFUSED.fullmatch(str(error.value)).groups())
    assert first < 1
    assert second < 1
    assert first != second


def norms_of_stages():
    norms = []
    weights(lambda model: norms.append(clip_grad_norm_(model.parameters(), 1e9).item()), steps=1, pp_size=2)
    return norms


def test_one_rank_that_is_clipped_is_enough():
    low, high = sorted(norms_of_stages())
    with pytest.raises(ConfigError) as error:
        weights(by_norm((low + high) / 2), steps=1, evaluates=True, pp_size=2)
    assert "1" in REFUSED.fullmatch(str(error.value)).groups()


def test_the_next_evaluation_tells_it_too():
    with pytest.raises(ConfigError, match="clip_grad_by_norm"):
        weights(by_norm(0.05), steps=1, evaluates=True, pp_size=2)


def test_behind_a_backward_by_hand_it_is_refused_before_a_weight_changes():
    def run():
        booster, model, optimizer = boosted(tiny_vit(), sgd, image_batch(2), tp_size=2, tensor_parallel_plan=VIT)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        booster.backward(model(**BATCHES[0]).loss, optimizer)
        clip_copies(model.parameters(), 0.05)
        with pytest.raises(ConfigError, match="clip_grad_by_norm"):
            optimizer.step()
        assert_same(model.state_dict(), before)

    Loopback(2).run(run)


@pytest.mark.parametrize("settings", LAYOUTS)
def test_clipping_that_leaves_everything_is_told_once(settings, caplog):
    with caplog.at_level(logging.WARNING, logger="hybridpp"):
        weights(lambda model: clip_copies(model.parameters(), 1e9), **settings)
    (message,) = [text for record in caplog.records if "wrote to gradients" in (text := record.getMessage())]
    assert message == (
        "[rank 0] the script wrote to gradients before the last step without changing their values. If that was "
        "torch.nn.utils.clip_grad_norm_: it uses the norm of one rank's gradients, not of the complete model's. Call "
        "optimizer.clip_grad_by_norm(max_norm), or set HybridParallelPlugin(max_norm=...)."
    )


def in_one_process(change):
    model = tiny_vit()
    optimizer = sgd(model.parameters())
    for batch in BATCHES:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        change(model)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("dp_size", [1, 2])
def test_replicas_of_one_rank_are_clipped_as_by_torch(dp_size, caplog):
    with caplog.at_level(logging.WARNING, logger="hybridpp"):
        assert_near(weights(by_norm(0.05), dp_size=dp_size), in_one_process(by_norm(0.05)))
    assert not caplog.records


def halve(model):
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)


def halve_some(model):
    for name, parameter in model.named_parameters():
        if "layers.0" in name or "layers.1" in name or "embeddings" in name:
            parameter.grad.mul_(0.1)


def halve_by_layer(model):
    for name, parameter in model.named_parameters():
        parameter.grad.mul_(0.5 if "weight" in name else 0.9)


def leave_out_biases(model):
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.grad = None


def replace(model):
    for parameter in model.parameters():
        parameter.grad = parameter.grad * 0.5 + 1e-3


def by_value(model):
    clip_grad_value_(model.parameters(), 1e-3)


@pytest.mark.covering
@pytest.mark.parametrize("change", [halve, halve_some, halve_by_layer, leave_out_biases, replace, by_value])
@pytest.mark.parametrize("settings", LAYOUTS[:2])
def test_other_changes_by_hand_do_what_they_do_in_one_process(change, settings, caplog):
    with caplog.at_level(logging.WARNING, logger="hybridpp"):
        assert_near(weights(change, **settings), in_one_process(change), 2e-6)
    assert not [record for record in caplog.records if "wrote to gradients" in record.getMessage()]


def test_a_stage_without_gradients_is_no_reason_to_complain():
    def run():
        model = tiny_vit()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.3" in name or "classifier" in name)
        booster, model, optimizer = boosted(model, sgd, image_batch(2), pp_size=2)
        for batch in BATCHES:
            booster.execute_pipeline(iter([batch]), model, model_loss, optimizer)
            clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
        return optimizer.applied_steps

    assert Loopback(2).run(run) == [3, 3]


@pytest.mark.parametrize("pp_size", [1, 2])
def test_the_optimizers_own_clipping_is_torchs_and_silent(pp_size, caplog):
    def run():
        booster, model, optimizer = boosted(tiny_vit(), sgd, image_batch(2), pp_size=pp_size)
        for batch in BATCHES:
            booster.execute_pipeline(iter([batch]), model, model_loss, optimizer)
            optimizer.clip_grad_by_norm(0.05)
            optimizer.step()
        return {name: parameter.detach() for name, parameter in model.named_parameters()}

    found = {}
    with caplog.at_level(logging.WARNING, logger="hybridpp"):
        for rank in Loopback(pp_size).run(run):
            found.update(rank)
    assert_near(found, in_one_process(by_norm(0.05)))
    assert not [record for record in caplog.records if "wrote to gradients" in record.getMessage()]


@pytest.mark.parametrize("own_backward", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_half_precision_it_is_refused_as_nothing_would_be_clipped(precision, own_backward):
    with pytest.raises(ConfigError, match=r"\.grad was read or written between .* Call optimizer\.clip_grad_by_norm"):
        weights(by_norm(0.05), precision=precision, own_backward=own_backward, initial_scale=8.0)


def test_in_half_precision_passes_evaluations_and_clipping_go_together():
    def run():
        booster, model, optimizer = boosted(tiny_vit(), sgd, image_batch(2), precision="bf16")
        for batch in BATCHES:
            booster.execute_pipeline(iter([batch]), model, model_loss, optimizer)
            booster.backward(model(**batch).loss, optimizer)
            booster.execute_pipeline(iter([image_batch(3)]), model, model_loss, optimizer)
            with torch.no_grad():
                model(**batch)
                booster.execute_pipeline(iter([batch]), model, model_loss)
            assert optimizer.clip_grad_by_norm(0.05) > 0
            optimizer.step()
            optimizer.zero_grad()
            assert all(parameter.grad is None for parameter in model.parameters())

    Loopback(1).run(run)


class ByTask(torch.nn.Module):
    """Two layers before and two after a common one, of which a step uses one each."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.common, self.left, self.right = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x, task):
        x = self.common((self.second if task else self.first)(x)).tanh()
        return (self.right if task else self.left)(x)


@pytest.mark.parametrize("pp_size", [1, 2])
def test_parameters_that_steps_leave_out_are_no_work_of_the_script(pp_size, caplog):
    x = torch.randn(4, 4)

    def run():
        samples = [{"x": x[:2], "task": task} for task in (0, 1)]
        booster = Booster(plugin=HybridParallelPlugin(pp_size=pp_size, num_microbatches=2, precision="fp32"))
        model = ByTask()
        parts = booster.boost(model, torch.optim.AdamW(model.parameters()), samples=samples)
        for task in (0, 1, 1, 0):
            batch = {"x": x, "task": task}
            booster.execute_pipeline(iter([batch]), parts.model, lambda y, _: y.square().mean(), parts.optimizer)
            parts.optimizer.step()
            parts.optimizer.zero_grad()

    Loopback(pp_size).run(run)
    assert not [one for one in caplog.records if "the script wrote to gradients" in one.getMessage()]
