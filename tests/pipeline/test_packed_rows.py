"""Batches whose rows are not their samples: a sample keeps its images and its part of a packed row."""

import pytest
import torch

from hybridpp.config import PipelineConfig
from hybridpp.errors import ConfigError, DataError
from hybridpp.pipeline import split_batch
from hybridpp.pipeline.packed_rows import packed_lengths, some_sequences

IMAGE, LENGTH = 60, 16
# Samples with one image, none, two (a large one first), and none.
OWNED = ((1,), (), (2, 1), ())


def processed(owned=OWNED):
    """As the processors of Qwen's models make it: one token for 2 x 2 patches; the images' patches number its rows."""
    rows, grids = [], []
    for images in owned:
        row = []
        for size in images:
            grids.append((1, 2, 4 * size))
            row += [5, *[IMAGE] * (2 * size), 6]
        rows.append(row + [7] * (LENGTH - len(row)))
    ids = torch.tensor(rows)
    count = sum(t * h * w for t, h, w in grids)
    return {
        "input_ids": ids,
        "mm_token_type_ids": (ids == IMAGE).long(),
        "pixel_values": torch.arange(count)[:, None].expand(count, 3).float(),
        "image_grid_thw": torch.tensor(grids),
    }


def parts_of(batch, num_microbatches, dims=0):
    return [
        part.inputs
        for part in split_batch(batch, num_microbatches=num_microbatches, microbatch_size=None, dims=dims).microbatches
    ]


@pytest.mark.parametrize("leaves_out", [(), ("mm_token_type_ids",)], ids=["types", "tokens"])
def test_images_go_with_the_samples_that_hold_their_tokens(leaves_out):
    batch = {name: value for name, value in processed().items() if name not in leaves_out}
    first, none, both, last = parts_of(batch, 4)
    assert first["pixel_values"][:, 0].tolist() == list(range(8))
    assert both["pixel_values"][:, 0].tolist() == list(range(8, 32))
    assert both["image_grid_thw"].tolist() == [[1, 2, 8], [1, 2, 4]]
    # As if they were left out: a text-only micro-batch.
    assert none["pixel_values"] is None
    assert last["image_grid_thw"] is None


def test_as_many_images_as_samples_are_not_taken_for_one_each():
    halves = parts_of(processed(((1, 1, 1), (), (1,), ())), 2)
    assert [len(half["image_grid_thw"]) for half in halves] == [3, 1]


def with_single_images(owned, text=range(10, 10 + LENGTH)):
    """As the processors of Llava and Gemma make it: a row of pixels for each image, of three tokens."""
    rows = []
    for count in owned:
        row = [IMAGE] * (3 * count)
        rows.append([*row, *text][:LENGTH])
    ids = torch.tensor(rows)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.arange(sum(owned))[:, None, None, None].expand(-1, 3, 2, 2).float(),
    }


def test_images_of_one_size_go_with_the_samples_that_repeat_their_token():
    parts = parts_of(with_single_images((0, 2, 0, 1)), 4)
    assert [None if part["pixel_values"] is None else len(part["pixel_values"]) for part in parts] == [None, 2, None, 1]
    assert parts[3]["pixel_values"][:, 0, 0, 0].tolist() == [2.0]


def test_a_token_that_is_repeated_as_often_as_that_of_images_is_refused():
    batch = with_single_images((1, 0))
    batch["input_ids"][1, :2] = 7
    assert parts_of(batch, 2)[1]["pixel_values"] is None
    batch["input_ids"][1, :3] = 7
    with pytest.raises(DataError, match="all tensors of a batch must agree"):
        parts_of(batch, 2)


def test_one_micro_batch_is_never_refused():
    batch = {"input_ids": torch.zeros(4, 6), "patches": torch.zeros(7, 2), "grids": torch.zeros(3, 2)}
    (whole,) = split_batch(batch, num_microbatches=1, microbatch_size=None).microbatches
    assert whole.inputs == batch
    assert whole.num_samples == 4
    with pytest.raises(DataError, match=r"use \{'patches': \('rows', 'grids'\)\}, or a function of the batch"):
        parts_of(batch, 2)


def test_rows_are_divided_as_the_user_says():
    batch = {"x": torch.arange(2), "patches": torch.arange(7), "grids": torch.tensor([[1, 3], [2, 2]])}
    by_grid, by_function = ("rows", "grids"), lambda batch: [3, 4]
    for rule in (by_grid, by_function):
        assert [part["patches"].tolist() for part in parts_of(batch, 2, {"patches": rule})] == [[0, 1, 2], [3, 4, 5, 6]]
    with pytest.raises(DataError, match=r"^batch_dims divides 'patches' into 9 rows: it has 7\. "):
        parts_of(batch, 2, {"patches": lambda batch: [4, 5]})
    PipelineConfig(num_microbatches=2, batch_dims={"patches": by_grid, "others": by_function})
    with pytest.raises(ConfigError, match=r"^batch_dims must be"):
        PipelineConfig(num_microbatches=2, batch_dims={"patches": "rows"})


def test_a_packed_row_is_cut_between_its_sequences():
    ends = torch.tensor([0, 3, 7, 10], dtype=torch.int32)
    row = torch.arange(10)[None]
    batch = {"input_ids": row, "position_ids": row.expand(3, 1, 10), "cu_seq_lens_q": ends, "max_length_q": 4}
    one, other = split_batch(batch, num_microbatches=2, microbatch_size=None).microbatches
    assert one.inputs["input_ids"].tolist() == [list(range(7))]
    assert one.num_samples == 2
    assert other.inputs["position_ids"].shape == (3, 1, 3)
    assert one.inputs["cu_seq_lens_q"].tolist() == [0, 3, 7]
    assert other.inputs["cu_seq_lens_q"].tolist() == [0, 3]


def test_some_sequences_of_a_packed_row_are_a_packed_row():
    batch = {"input_ids": torch.arange(6)[None], "cu_seq_lens_q": torch.tensor([0, 1, 4, 6]), "max_length_q": 3}
    lengths = packed_lengths(batch, 0)
    assert lengths == (1, 3, 2)
    part = some_sequences(batch, lengths, [2, 0, 2])
    assert part["input_ids"].tolist() == [[4, 5, 0, 4, 5]]
    assert part["cu_seq_lens_q"].tolist() == [0, 2, 3, 5]
    assert some_sequences(torch.arange(12).view(1, 6, 2), lengths, [1])[0, :, 0].tolist() == [2, 4, 6]
    assert packed_lengths({"input_ids": torch.zeros(2, 3)}, 0) is None


def test_positions_that_all_samples_share_are_not_split():
    batch = {"hidden_states": torch.zeros(4, 6, 8), "img_ids": torch.zeros(6, 3), "timestep": torch.zeros(4)}
    assert [len(part["img_ids"]) for part in parts_of(batch, 2)] == [6, 6]
