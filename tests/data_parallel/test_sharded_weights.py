"""Weights of which a replica holds one segment, except where they are used."""

import pytest
import torch
from data_parallel.replicas import make_model, on_replicas
from torch import nn

from hybridpp.cluster import current_world
from hybridpp.data_parallel import ShardedWeights, layout_of
from hybridpp.data_parallel.sharded_weights import FreedParameter
from hybridpp.errors import ConfigError

STAGES = {"0.weight": (0,), "0.bias": (0,), "2.weight": (0, 1), "3.weight": (1,), "3.bias": (1,)}


def copy(parameter, view):
    view.copy_(parameter.data)


def sharded(frozen=("0.bias",)):
    """A model whose weights are sharded by two stages, and a copy with all values."""
    model = make_model()
    group, stages = current_world().control(), STAGES
    parameters = dict(model.named_parameters())
    layouts = [
        {name: p for name, p in parameters.items() if (name in frozen) is is_frozen} for is_frozen in (False, True)
    ]
    trained, still = [layout_of(found, group, 1e-4, stages=stages) for found in layouts]
    with torch.no_grad():
        weights = ShardedWeights(trained, layouts[0], group, torch.device("cpu"), copy, still, layouts[1])
    return model, weights, dict(make_model().named_parameters())


def held_bytes(weights):
    return sum(bucket._flat.untyped_storage().nbytes() for bucket in weights._buckets)


def there(model):
    return {name for name, parameter in model.named_parameters() if not isinstance(parameter, FreedParameter)}


def test_weights_of_a_stage_are_there_while_it_uses_them():
    def run():
        model, weights, expected = sharded()
        assert (there(model), held_bytes(weights)) == (set(), 0)
        weights.unshard(0)
        weights.unshard(1)
        for stage in (0, 1):
            weights.wait(stage)
        for name, parameter in model.named_parameters():
            assert parameter.equal(expected[name])
        weights.reshard(0)
        assert there(model) == {"2.weight", "3.weight", "3.bias"}
        weights.reshard(1)
        assert (there(model), held_bytes(weights)) == (set(), 0)

    on_replicas(run)


def test_each_replica_keeps_its_part():
    def run():
        _, weights, _ = sharded()
        return sum(piece.numel() for piece in weights.own_parts().values())

    assert sum(on_replicas(run)) == sum(parameter.numel() for parameter in make_model().parameters())


def test_what_is_written_inside_unsharded_is_kept():
    def run():
        model, weights, expected = sharded()
        with torch.no_grad(), weights.unsharded():
            assert weights.is_readable
            state = {name: parameter.detach() for name, parameter in model.named_parameters()}
            for parameter in model.parameters():
                parameter.mul_(2)
        for name, tensor in state.items():
            # Memory of its own, which outlives the block.
            assert tensor.equal(2 * expected[name])
        weights.unshard(0)
        weights.wait(0)
        assert model[0].weight.equal(2 * expected["0.weight"])

    on_replicas(run)


def test_a_parameter_can_be_set_without_gathering_it():
    def run():
        model, weights, expected = sharded()
        for name in expected:
            weights.assign(name, torch.full_like(expected[name], 3.0))
        with weights.unsharded():
            assert all(bool((parameter == 3).all()) for parameter in model.parameters())

    on_replicas(run)


def test_absent_weights_cannot_be_written_to():
    def run():
        model, _, _ = sharded()
        with pytest.raises(ConfigError, match=r"^0\.weight was written"), torch.no_grad():
            model[0].weight.mul_(2)

    on_replicas(run)


def test_memory_from_the_script_is_noticed():
    def run():
        model, weights, _ = sharded()
        assert list(weights.moved()) == []
        with pytest.raises(ConfigError, match=r"^2\.weight was written while it was not there"):
            model[2].weight.data = torch.zeros(7, 5)
        weights.unshard(0)
        weights.wait(0)
        model[2].weight.data = torch.zeros(7, 5)
        with pytest.raises(ConfigError, match=r"2\.weight was given other memory after booster\.boost"):
            weights.reshard(0)

    on_replicas(run)


def test_uses_are_forgotten_after_an_error():
    def run():
        model, weights, expected = sharded()
        weights.unshard(0)
        weights.unshard(1)
        weights.wait(0)
        weights.cancel()
        assert there(model) == set()
        weights.unshard(1)
        weights.wait(1)
        assert model[3].weight.equal(expected["3.weight"])

    on_replicas(run)


def test_weights_of_integers_are_zero_while_they_are_not_there():
    def run():
        parameters = {"steps": nn.Parameter(torch.arange(5), requires_grad=False)}
        group = current_world().control()
        layouts = [layout_of(found, group, 1.0, stages={"steps": (0,)}) for found in ({}, parameters)]
        with torch.no_grad():
            weights = ShardedWeights(layouts[0], {}, group, torch.device("cpu"), copy, layouts[1], parameters)
        assert torch.count_nonzero(parameters["steps"]) == 0
        with weights.unsharded():
            assert parameters["steps"].tolist() == [0, 1, 2, 3, 4]

    on_replicas(run)
