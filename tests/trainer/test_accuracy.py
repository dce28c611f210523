"""Right predictions of classifiers of every shape."""

import pytest
import torch

from hybridpp.errors import DataError
from hybridpp.trainer import Accuracy


@pytest.mark.parametrize(
    ("logits", "labels", "expected"),
    [
        (torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([1, 1]), (1, 2)),
        (torch.eye(3)[None], torch.tensor([[0, -100, 1]]), (1, 2)),
        (torch.eye(3).reshape(1, 3, 3, 1), torch.tensor([[[0], [1], [0]]]), (2, 3)),
    ],
)
def test_accuracy_counts_right_predictions(logits, labels, expected):
    accuracy = Accuracy()
    counts = [accuracy(logits, [None, labels]), accuracy({"logits": logits}, {"labels": labels})]
    assert [tuple(count.item() for count in pair) for pair in counts] == [expected] * 2


@pytest.mark.parametrize(
    ("outputs", "batch", "message"),
    [
        (torch.ones(2, 3), (None, torch.ones(3)), r"got \(2, 3\) and \(3,\). Pass AccuracyHook a function"),
        ({"loss": 1}, (None, torch.ones(3)), "accuracy reads 'logits' of the model's outputs: got dict without it"),
        (torch.ones(2, 3), {"label": torch.ones(2)}, "accuracy reads 'labels' of the batch"),
    ],
)
def test_accuracy_says_what_it_cannot_read(outputs, batch, message):
    with pytest.raises(DataError, match=message):
        Accuracy()(outputs, batch)
