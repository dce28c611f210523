"""Entries of a batch whose rows are not its samples: patches and grids of images, and sequences packed into one row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from hybridpp.errors import DataError
from hybridpp.nn.torch_private import pytree
from hybridpp.pipeline.batch_dims import Dims

# Grids of patches, one a row for each image; their patches; the number of such tokens in `mm_token_type_ids`.
_KINDS = (("image_grid_thw", "pixel_values", 1), ("video_grid_thw", "pixel_values_videos", 2))
_TOKEN_TYPES = "mm_token_type_ids"
_PER_IMAGE = ("pixel_values", "pixel_attention_mask", "image_sizes")
_PER_VIDEO = ("second_per_grid_ts",)
# Entries whose first dimension is the batch's samples, the first there is.
_SAMPLES = ("input_ids", "inputs_embeds", "labels", "attention_mask")
# Positions of tokens that all samples share (diffusers' transformers), where they have two dimensions.
_SHARED = ("img_ids", "txt_ids")
_LENGTHS = ("cu_seq_lens", "cu_seqlens")
# The largest number of patches along each side of an image that become one token.
_MOST_MERGED = 8


@dataclass(frozen=True)
class Rows:
    """An entry of a batch of which a sample has any number of rows, also none; one leaf of the batch.

    Attributes:
        values: a tensor, or a list with an entry for each row.
        counts: rows of each sample, in order.
        dim: which rows.
    """

    values: Any
    counts: tuple[int, ...]
    dim: int = 0

    def parts(self, sizes: Sequence[int]) -> list[Any]:
        """Those of micro-batches of so many samples; None, as if it were left out, where these have no rows."""
        parts, start = [], 0
        for size, end in zip(sizes, accumulate(sizes), strict=True):
            count = sum(self.counts[end - size : end])
            rows = slice(start, start + count)
            part = self.values.narrow(self.dim, start, count) if isinstance(self.values, Tensor) else self.values[rows]
            parts.append(part if count else None)
            start += count
        return parts


@dataclass(frozen=True)
class Lengths:
    """Where the sequences of a packed row begin and end; each is a sample.

    Attributes:
        ends: ``[num_samples + 1]``, from 0.
    """

    ends: Tensor

    def parts(self, sizes: Sequence[int]) -> list[Tensor]:
        """Those of micro-batches of so many samples, each from 0."""
        return [
            self.ends[end - size : end + 1] - self.ends[end - size]
            for size, end in zip(sizes, accumulate(sizes), strict=True)
        ]


def mark_rows(batch: Any, dims: Dims) -> Any:
    """``batch`` with :class:`Rows` and :class:`Lengths` for its entries whose rows are not its samples.

    What ``dims`` says of an entry counts; else names that are the same in many models do.

    Raises:
        DataError: it cannot be told how many rows a sample has.
    """
    if type(batch) is not dict or (isinstance(dims, int) and dims != 0):
        return batch
    settings: Mapping[str, Any] = (
        {name: dims[name] for name in batch if name in dims} if isinstance(dims, Mapping) else {}
    )
    marked = _packed_sequences(batch, settings) | _single_images(batch, settings) | _images(batch, settings)
    for name, rule in settings.items():
        if _is_rule(rule):
            marked[name] = Rows(batch[name], _counts(batch, name, rule, marked))
    return batch | marked if marked else batch


def shared_entries(batch: Any, dims: Dims) -> frozenset[str]:
    """The names of entries that all samples share, and of which ``dims`` says nothing."""
    if type(batch) is not dict or (isinstance(dims, int) and dims != 0):
        return frozenset()
    settings = dims if isinstance(dims, Mapping) else {}
    return frozenset(
        name
        for name in _SHARED
        if name not in settings and isinstance(batch.get(name), Tensor) and batch[name].dim() == 2
    )


def size_of_samples(batch: Any, sizes: Mapping[str, int]) -> int:
    """How many samples a batch probably has whose tensors disagree: those of its texts, or what most tensors say.

    What lists hold (the boxes of each image) says less than the tensors beside them.
    """
    for name in _SAMPLES if isinstance(batch, dict) else ():
        if isinstance(batch.get(name), Tensor) and batch[name].dim():
            return len(batch[name])
    entries = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, tuple) else ()
    beside = {len(one) for one in entries if isinstance(one, Tensor) and one.dim()}
    if len(beside) == 1:
        return beside.pop()
    counted = list(sizes.values())
    return max(sorted(set(counted)), key=counted.count)


def _is_rule(rule: Any) -> bool:
    return callable(rule) or (isinstance(rule, tuple) and rule[:1] == ("rows",))


def _counts(batch: Mapping[str, Any], name: str, rule: Any, marked: Mapping[str, Any]) -> tuple[int, ...]:
    """The rows of each sample in an entry, by the user's rule."""
    if callable(rule):
        counts = tuple(int(count) for count in rule(batch))
    else:
        of = rule[1]
        if not isinstance(batch.get(of), Tensor):
            raise DataError(f"batch_dims takes the rows of {name!r} from {of!r}: the batch has no such tensor.")
        items = _products(batch[of])
        if isinstance(marked.get(of), Rows):
            ends = list(accumulate(marked[of].counts))
            counts = tuple(sum(items[end - n : end]) for n, end in zip(marked[of].counts, ends, strict=True))
        else:
            counts = tuple(items)
    if sum(counts) != len(batch[name]):
        raise DataError(
            f"batch_dims divides {name!r} into {sum(counts)} rows: it has {len(batch[name])}. Correct the rule, which "
            "must give the number of rows of each sample."
        )
    return counts


def _products(grids: Tensor) -> list[int]:
    """How many patches each grid has."""
    return [int(number) for number in (grids.prod(-1) if grids.dim() > 1 else grids).tolist()]


def _images(batch: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Rows]:
    """The entries of images and videos, divided by the samples that hold their tokens."""
    found: dict[str, Rows] = {}
    texts = batch.get("input_ids")
    for grid_name, pixels_name, token_type in _KINDS:
        grids = batch.get(grid_name)
        if not isinstance(grids, Tensor) or grids.dim() != 2 or grid_name in settings:
            continue
        if not isinstance(texts, Tensor) or texts.dim() != 2:
            continue
        patches = _products(grids)
        owned = _grids_per_sample(batch, texts, token_type, patches)
        if owned is None:
            continue
        found[grid_name] = Rows(grids, owned)
        ends = list(accumulate(owned))
        rows = tuple(sum(patches[end - n : end]) for n, end in zip(owned, ends, strict=True))
        pixels = batch.get(pixels_name)
        if isinstance(pixels, Tensor) and pixels.dim() and pixels_name not in settings:
            if len(pixels) == sum(rows):
                found[pixels_name] = Rows(pixels, rows)
            elif len(pixels) == len(grids):
                found[pixels_name] = Rows(pixels, owned)
        for name in _PER_VIDEO if token_type == 2 else ():
            values = batch.get(name)
            if name not in settings and isinstance(values, Tensor | list) and len(values) == len(grids):
                found[name] = Rows(values, owned)
    return found


def _single_images(batch: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Rows]:
    """The entries with a row for each image, where the samples' tokens say how many images each has."""
    pixels = batch.get("pixel_values")
    if not isinstance(pixels, Tensor) or pixels.dim() != 4 or not len(pixels):
        return {}
    owned = _images_per_sample(batch, len(pixels))
    if owned is None:
        return {}
    return {
        name: Rows(batch[name], owned)
        for name in _PER_IMAGE
        if name not in settings and isinstance(batch.get(name), Tensor) and len(batch[name]) == len(pixels)
    }


def _images_per_sample(batch: Mapping[str, Any], num_images: int) -> tuple[int, ...] | None:
    """How many images each sample has, all of which are as many tokens; None: not known."""
    types, texts = batch.get(_TOKEN_TYPES), batch.get("input_ids")
    if isinstance(types, Tensor):
        return _shared_out((types == 1).sum(1).tolist(), num_images)
    if not isinstance(texts, Tensor) or texts.dim() != 2 or len(texts) == num_images:
        return None
    # Without types, the token of images is the one that follows itself most often in runs as long as the images are.
    texts, mask = texts.cpu(), batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == texts.shape:
        texts = texts.masked_fill(mask.cpu() == 0, -1)  # a token that pads is none of them
    runs = [row.unique_consecutive(return_counts=True) for row in texts]
    answers: dict[int, set[tuple[int, ...]]] = {}
    for token in {token for tokens, _ in runs for token in tokens.tolist() if token >= 0}:
        lengths = [counts[tokens == token] for tokens, counts in runs]
        owned = _shared_out([int(one.sum()) for one in lengths], num_images)
        length = sum(int(one.sum()) for one in lengths) // num_images
        if owned is not None and length > 1 and not any(bool((one % length).any()) for one in lengths):
            answers.setdefault(length, set()).add(owned)
    longest = answers[max(answers)] if answers else set()
    return longest.pop() if len(longest) == 1 else None


def _shared_out(tokens: list[int], num_images: int) -> tuple[int, ...] | None:
    """How many of the images each sample has, by its number of tokens; None: they do not go together."""
    if not sum(tokens) or any(count * num_images % sum(tokens) for count in tokens):
        return None
    return tuple(count * num_images // sum(tokens) for count in tokens)


def _grids_per_sample(
    batch: Mapping[str, Any], texts: Tensor, token_type: int, patches: list[int]
) -> tuple[int, ...] | None:
    """How many images each sample has, in order: its tokens are as many as those of its images; None: not known."""
    types = batch.get(_TOKEN_TYPES)
    if isinstance(types, Tensor) and types.shape == texts.shape:
        return _divided(patches, (types == token_type).sum(1).tolist())
    # Without types, the token of images is one whose numbers in the samples go with the images.
    answers = {
        owned
        for token in sorted(set(texts.flatten().tolist()))
        if (owned := _divided(patches, (texts == token).sum(1).tolist())) is not None
    }
    return answers.pop() if len(answers) == 1 else None


def _divided(patches: list[int], tokens: list[int]) -> tuple[int, ...] | None:
    """How many of the images, in order, make up each sample's tokens, where one token is a square of patches."""
    total = sum(tokens)
    merged = sum(patches) / total if total else 0
    if merged not in {side * side for side in range(1, _MOST_MERGED + 1)}:
        return None
    ends = list(accumulate(patches, initial=0))
    indices = {end: index for index, end in enumerate(ends)}
    owned, before = [], 0
    for end in accumulate(tokens):
        index = indices.get(int(end * merged))
        if index is None:
            return None
        owned.append(index - before)
        before = index
    return tuple(owned)


def is_packed(batch: Any) -> bool:
    """Whether a batch says where the sequences of a packed row begin."""
    names = [name for name in batch if isinstance(name, str)] if isinstance(batch, Mapping) else []
    return any(name.startswith(_LENGTHS) and isinstance(batch[name], Tensor) for name in names)


def _packed_sequences(batch: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of sequences that are packed into one row, and the tensors that say where each begins."""
    lengths = {
        name: value
        for name, value in batch.items()
        if isinstance(name, str) and name.startswith(_LENGTHS) and isinstance(value, Tensor) and value.dim() == 1
    }
    if not lengths or any(name in settings for name in lengths):
        return {}
    ends = next(iter(lengths.values()))
    if any(len(other) != len(ends) for other in lengths.values()):
        return {}
    counts = tuple(ends.diff().tolist())
    found: dict[str, Any] = {name: Lengths(value) for name, value in lengths.items()}
    for name, value in batch.items():
        if name in lengths or name in settings or not isinstance(value, Tensor):
            continue
        dim = _dim_of_tokens(value, sum(counts))
        if dim is not None:
            found[name] = Rows(value, counts, dim)
    return found


def _dim_of_tokens(tensor: Tensor, num_tokens: int) -> int | None:
    """Which dimension has the tokens of a packed row."""
    along = (dim for dim, size in enumerate(tensor.shape) if size == num_tokens and set(tensor.shape[:dim]) <= {1, 3})
    return next(along, None)


def packed_lengths(batch: Any, dims: Dims) -> tuple[int, ...] | None:
    """How many tokens each sequence of a packed row has; None: the batch is none."""
    if type(batch) is not dict or (isinstance(dims, int) and dims != 0):
        return None
    marked = _packed_sequences(batch, dims if isinstance(dims, Mapping) else {})
    return next((one.counts for one in marked.values() if isinstance(one, Rows)), None)


def some_sequences(tree: Any, lengths: Sequence[int], chosen: Sequence[int]) -> Any:
    """Some of the sequences of a packed row, in any order, of a batch or of what a model makes of it.

    Args:
        tree: in whose tensors one dimension has the tokens.
        lengths: of all sequences.
        chosen: indices of sequences.
    """
    ends = list(accumulate(lengths))
    tokens = [token for one in chosen for token in range(ends[one] - lengths[one], ends[one])]
    own_ends = [0, *accumulate(lengths[one] for one in chosen)]

    def part(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if path and str(getattr(path[-1], "key", "")).startswith(_LENGTHS) and leaf.shape == (len(lengths) + 1,):
            return leaf.new_tensor(own_ends)
        dim = _dim_of_tokens(leaf, ends[-1])
        if dim is None:
            return leaf
        # An index keeps logits in parts that are sharded by vocabulary.
        before: list[slice | Tensor] = [slice(None)] * dim
        return leaf[(*before, torch.tensor(tokens, device=leaf.device))]

    return pytree.tree_map_with_path(part, tree)


def joined_sequences(trees: Sequence[Any], num_tokens: int) -> Any:
    """What a model makes of several packed rows of as many tokens each, as of one row."""
    leaves, structure = pytree.tree_flatten(trees[0])
    flat = [pytree.tree_leaves(tree) for tree in trees]
    for index, leaf in enumerate(leaves):
        dim = _dim_of_tokens(leaf, num_tokens) if isinstance(leaf, Tensor) else None
        if dim is not None:
            leaves[index] = torch.cat([one[index] for one in flat], dim)
    return pytree.tree_unflatten(leaves, structure)
