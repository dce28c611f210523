import re
from collections import UserDict, namedtuple

import numpy
import pytest
import torch
from torch.overrides import TorchFunctionMode

from hybridpp.errors import DataError
from hybridpp.pipeline import call_arguments, num_samples, resize_batch, split_batch, to_plain_containers


class HostReads(TorchFunctionMode):
    """Notes what takes numbers from tensors to the host."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if (name := getattr(function, "__name__", "")) in {"item", "tolist", "__float__", "__int__", "__bool__", "cpu"}:
            self.names.append(name)
        return function(*args, **(kwargs or {}))


def refused(text):
    return pytest.raises(DataError, match=f"^{re.escape(text)}$")


def split(batch, count=None, size=None, num_items=None):
    return split_batch(to_plain_containers(batch), num_microbatches=count, microbatch_size=size, num_items=num_items)


def sizes(batch):
    return [microbatch.num_samples for microbatch in batch.microbatches]


@pytest.mark.parametrize(
    ("samples", "count", "expected"),
    [(8, 4, [2, 2, 2, 2]), (10, 4, [3, 3, 2, 2]), (7, 1, [7]), (3, 8, [1, 1, 1]), (1, 1, [1]), (5, 5, [1] * 5)],
)
def test_by_count_sizes_differ_by_one_at_most_and_none_is_empty(samples, count, expected):
    assert sizes(split(torch.zeros(samples), count=count)) == expected


@pytest.mark.parametrize(
    ("samples", "size", "expected"), [(8, 4, [4, 4]), (10, 4, [4, 4, 2]), (3, 8, [3]), (3, 1, [1, 1, 1])]
)
def test_by_size_the_last_one_may_be_smaller(samples, size, expected):
    assert sizes(split(torch.zeros(samples), size=size)) == expected


def test_tensors_are_split_in_order_and_other_values_go_to_all():
    rows, ids = torch.arange(10.0).reshape(5, 2), torch.arange(5)
    scalar, table = torch.tensor(3.0), {"name": "x", "depth": 2, "none": None}
    batch = split({"a": rows, "nested": (ids, [scalar]), "table": table}, count=2)
    first, second = (microbatch.inputs for microbatch in batch.microbatches)
    assert torch.equal(first["a"], rows[:3])
    assert torch.equal(second["a"], rows[3:])
    assert [part["nested"][0].tolist() for part in (first, second)] == [[0, 1, 2], [3, 4]]
    for part in (first, second):
        assert part["nested"][1][0] is scalar
        assert part["table"] == table


BOXES = [{"boxes": torch.zeros(count, 4)} for count in (1, 0, 3)]


@pytest.mark.parametrize(
    ("entry", "dims", "expected"),
    [
        (["a", "b", "c"], 0, [["a", "b"], ["c"]]),
        (["a", "b", "c"], {"entry": None}, [["a", "b", "c"]] * 2),
        (["a", "b"], 0, [["a", "b"]] * 2),
        (("a", "b", "c"), 0, [("a", "b", "c")] * 2),
        ([1, 2, 3], 0, [[1, 2, 3]] * 2),
        ([1, 2, 3], {"entry": "list"}, [[1, 2], [3]]),
        (BOXES, {"entry": "list"}, [BOXES[:2], BOXES[2:]]),
        ([], 0, [[], []]),
        (None, 0, [None, None]),
    ],
)
def test_lists_are_split_where_they_have_an_entry_per_sample(entry, dims, expected):
    batch = split_batch({"x": torch.zeros(3), "entry": entry}, num_microbatches=2, microbatch_size=None, dims=dims)
    parts = [microbatch.inputs["entry"] for microbatch in batch.microbatches]
    assert str(parts) == str(expected)
    assert [type(part) for part in parts] == [type(part) for part in expected]


@pytest.mark.parametrize("batch", [{"x": torch.zeros(3), "y": numpy.zeros(3)}, {"y": numpy.zeros((3, 2))}])
def test_arrays_of_samples_are_asked_for_as_tensors(batch):
    with refused(
        "numpy arrays cannot be split into micro-batches: ['y'] is an array of 3 rows. "
        "Call torch.as_tensor on it in the collate_fn."
    ):
        split(batch, count=2)


def test_other_arrays_go_to_every_microbatch():
    table = numpy.zeros(7)
    batch = split({"x": torch.zeros(3), "table": table, "number": numpy.array(2)}, count=2)
    assert all(microbatch.inputs["table"] is table for microbatch in batch.microbatches)


def test_a_list_of_another_length_disagrees():
    with pytest.raises(DataError, match=re.escape("got ['x']: 3, ['entry']: 2.")):
        split_batch(
            {"x": torch.zeros(3), "entry": [1, 2]}, num_microbatches=2, microbatch_size=None, dims={"entry": "list"}
        )
    with pytest.raises(DataError, match="batch_dims is 'list' for a list with one entry per sample: got int"):
        split_batch({"entry": 1}, num_microbatches=2, microbatch_size=None, dims={"entry": "list"})


def test_microbatches_of_samples_weigh_by_their_size():
    batch = split(torch.zeros(10), size=4)
    assert [microbatch.share for microbatch in batch.microbatches] == [0.4, 0.4, 0.2]
    assert batch.num_items == 10


def test_a_criterion_that_counts_items_sets_the_weights():
    labels = torch.tensor([[1, 2, 3], [1, -100, -100], [-100, -100, -100]])
    batch = split({"labels": labels}, count=3, num_items=lambda inputs: (inputs["labels"] != -100).sum())
    assert [microbatch.share for microbatch in batch.microbatches] == [0.75, 0.25, 0.0]
    assert batch.num_items == 4


def test_a_batch_in_which_nothing_counts_has_no_shares():
    batch = split(torch.zeros(4), count=2, num_items=lambda inputs: 0)
    assert [microbatch.share for microbatch in batch.microbatches] == [0, 0]
    assert batch.num_items == 0


def test_counts_in_tensors_are_read_together():
    """Each read would wait for the device."""
    with HostReads() as reads:
        batch = split({"labels": torch.tensor([1, -100, 2])}, size=1, num_items=lambda x: (x["labels"] != -100).sum(0))
    assert [microbatch.share for microbatch in batch.microbatches] == [0.5, 0, 0.5]
    assert reads.names == ["tolist"]


@pytest.mark.parametrize("total", [7, torch.tensor(7)])
def test_with_num_items_in_batch_losses_are_parts_of_a_sum(total):
    batch = split({"x": torch.zeros(3), "num_items_in_batch": total}, count=3, num_items=lambda inputs: 100)
    assert [microbatch.share for microbatch in batch.microbatches] == [1, 1, 1]
    assert batch.num_items == 7
    assert all(microbatch.inputs["num_items_in_batch"] == total for microbatch in batch.microbatches)


def test_num_items_in_batch_that_is_none_says_nothing():
    assert split({"x": torch.zeros(3), "num_items_in_batch": None}, count=1).num_items == 3


def test_mappings_become_dicts_wherever_they_are():
    ids = torch.arange(4)
    batch = to_plain_containers(UserDict(ids=ids, rest=[UserDict(mask=UserDict(ids=ids))]))
    assert batch == {"ids": ids, "rest": [{"mask": {"ids": ids}}]}
    assert type(batch) is dict
    parts = [microbatch.inputs for microbatch in split((UserDict(ids=ids),), count=2).microbatches]
    assert [part[0]["ids"].tolist() for part in parts] == [[0, 1], [2, 3]]


def test_containers_that_torch_knows_keep_their_type():
    pair = namedtuple("pair", "a b")(torch.zeros(2), [1])
    assert type(to_plain_containers(pair)) is type(pair)
    assert to_plain_containers([pair]) == [pair]


@pytest.mark.parametrize("batch", [3, "text", None, {1, 2}])
def test_what_is_no_batch(batch):
    with refused(
        f"a batch must be a mapping, a tuple, a list or a tensor: got {type(batch).__name__}. "
        "Return one of these from the collate_fn."
    ):
        to_plain_containers(batch)


def test_tensors_that_disagree_are_listed():
    with refused(
        "all tensors of a batch must agree in dimension 0, the samples: got ['a']: 4, ['b'][1]: 3. "
        "Expand the others to one row per sample; 0-dimensional tensors and plain values go to every micro-batch. "
        "Or set the dimensions: HybridParallelPlugin(batch_dims={'x': 1, 'mask': None, 'boxes': 'list'}), with None "
        "for entries that all micro-batches share, and 'list' for a list with one entry per sample. For rows of which "
        "samples have unlike numbers, use {'patches': ('rows', 'grids')}, or a function of the batch that gives each "
        "sample's number; or num_microbatches=1."
    ):
        num_samples({"a": torch.zeros(4, 2), "b": [torch.tensor(1), torch.zeros(3)]})


@pytest.mark.parametrize("batch", [{}, (), {"a": 1}, torch.tensor(1.0), [torch.tensor(1.0)]])
def test_nothing_to_split(batch):
    with refused("a batch needs at least one tensor with a first dimension to split. Check the collate_fn."):
        split(batch, count=2)


@pytest.mark.parametrize("batch", [torch.zeros(0), (torch.zeros(0, 3), torch.zeros(0))])
def test_an_empty_batch(batch):
    with refused("a batch needs at least one sample: got 0. Drop empty batches in the dataloader."):
        split(batch, size=2)


def test_how_a_model_is_called():
    tensor = torch.zeros(2)
    assert call_arguments({"x": tensor}) == ((), {"x": tensor})
    assert call_arguments([tensor, 1]) == call_arguments((tensor, 1)) == ((tensor, 1), {})
    assert call_arguments(tensor) == ((tensor,), {})


def test_a_batch_is_resized_by_its_samples():
    batch = {"x": torch.arange(2), "mask": torch.tensor(1), "names": ["a", "b"]}
    found = resize_batch(batch, 5)
    assert found["x"].tolist() == [0, 1, 0, 1, 0]
    assert found["names"] == ["a", "b", "a", "b", "a"]
    assert found["mask"] is batch["mask"]
    assert [one.tolist() for one in resize_batch((torch.arange(3), torch.ones(3, 1)), 1)] == [[0], [[1.0]]]
    turned = resize_batch({"x": torch.zeros(7, 2), "y": torch.zeros(2)}, 3, {"x": 1})
    assert (turned["x"].shape, turned["y"].shape) == ((7, 3), (3,))


def test_rows_that_are_no_samples_are_resized_with_them_or_not_at_all():
    flux = {"hidden_states": torch.zeros(2, 16, 4), "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(8, 3)}
    found = resize_batch(flux, 3)
    assert {name: len(one) for name, one in found.items()} == {"hidden_states": 3, "img_ids": 16, "txt_ids": 8}
    images = {
        "input_ids": torch.tensor([[9, 9, 9, 9, 1], [9, 1, 1, 1, 1]]),
        "pixel_values": torch.arange(20)[:, None],
        "image_grid_thw": torch.tensor([[1, 4, 4], [1, 2, 2]]),
    }
    found = resize_batch(images, 3)
    assert found["image_grid_thw"].tolist() == [[1, 4, 4], [1, 2, 2], [1, 4, 4]]
    assert found["pixel_values"].flatten().tolist() == [*range(20), *range(16)]
    packed = {"input_ids": torch.arange(5)[None], "cu_seq_lens_q": torch.tensor([0, 2, 5], dtype=torch.int32)}
    found = resize_batch(packed, 3)
    assert found["cu_seq_lens_q"].tolist() == [0, 2, 5, 7]
    assert found["input_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1]]
    # As in one micro-batch: what disagrees is handed on.
    assert len(resize_batch({"x": torch.zeros(2, 3), "y": torch.zeros(2), "table": torch.zeros(7)}, 4)["table"]) == 7
