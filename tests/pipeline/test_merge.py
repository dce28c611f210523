import numpy
import pytest
import torch
from transformers.modeling_outputs import ImageClassifierOutput

from hybridpp.pipeline import Microbatch, merge_outputs

MICROBATCHES = [Microbatch(None, 2, 0.5), Microbatch(None, 1, 0.25), Microbatch(None, 1, 0.25)]


ONES, ARRAY = torch.ones(2), numpy.ones(2)


def merge(*outputs):
    return merge_outputs(list(outputs), MICROBATCHES)


def per_sample(*width):
    return [torch.rand(microbatch.num_samples, *width) for microbatch in MICROBATCHES]


def test_tensors_of_samples_are_put_together():
    parts = per_sample(3)
    assert torch.equal(merge(*parts), torch.cat(parts))


def test_scalars_become_their_weighted_mean():
    assert merge(torch.tensor(1.0), torch.tensor(2.0), torch.tensor(4.0)).item() == 2.0


def test_a_scalar_of_a_microbatch_without_items_does_not_count():
    microbatches = [Microbatch(None, 1, 1.0), Microbatch(None, 1, 0.0)]
    assert merge_outputs([torch.tensor(3.0), torch.tensor(float("nan"))], microbatches).item() == 3.0


def test_structure_stays():
    logits, states = per_sample(4), [(part, {"x": part}) for part in per_sample(2)]
    merged = merge(
        *(
            ImageClassifierOutput(loss=torch.tensor(float(place)), logits=logits[place], hidden_states=states[place])
            for place in range(3)
        )
    )
    assert isinstance(merged, ImageClassifierOutput)
    assert merged.loss.item() == 0.75
    assert torch.equal(merged.logits, torch.cat(logits))
    assert torch.equal(merged.hidden_states[1]["x"], torch.cat([state[0] for state in states]))
    assert merged.attentions is None


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (["a", "a", "a"], "a"),
        ([None, None, None], None),
        ([1, 2, 1], [1, 2, 1]),
        # What compares element by element has no truth of its own.
        ([1, ONES, 1], [1, ONES, 1]),
        ([None, ONES, None], [None, ONES, None]),
        ([ARRAY, ARRAY.copy(), ARRAY], [ARRAY, ARRAY, ARRAY]),
    ],
)
def test_other_leaves_are_kept_where_they_agree(parts, expected):
    merged = merge(*({"x": part} for part in parts))["x"]
    assert type(merged) is type(expected)
    assert str(merged) == str(expected)


def test_tensors_without_a_dimension_of_samples_are_given_as_a_list():
    parts = [torch.rand(5), torch.rand(5), torch.rand(5)]
    merged = merge(*parts)
    assert all(mine is part for mine, part in zip(merged, parts, strict=True))


def test_outputs_of_different_structure_are_given_as_a_list():
    outputs = [(1,), (1, 2), [1]]
    assert merge(*outputs) == outputs


def test_one_microbatch_gives_its_output():
    logits = torch.rand(3, 2)
    merged = merge_outputs([(logits, torch.tensor(2.0))], [Microbatch(None, 3, 1.0)])
    assert torch.equal(merged[0], logits)
    assert merged[1].item() == 2.0
