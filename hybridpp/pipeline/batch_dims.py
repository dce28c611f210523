"""The user's setting of the sample dimension of each tensor in a batch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from hybridpp.errors import DataError
from hybridpp.nn.torch_private import pytree
from hybridpp.pipeline.forward_signature import closest_name

Dims = Any
"""The dimension of the samples in all tensors; None: the tensors hold no samples and are not split. Or a mapping (by
name) or a sequence (by index) of such values for the entries of a dict, of an object with attributes, or of a tuple or
list, where ``"list"`` marks a list with one entry per sample. Entries that are not named have their samples in
dimension 0."""


class PerSample(list[Any]):
    """A list with one entry per sample, treated as one leaf of the batch."""


class Texts(PerSample):
    """A list of texts, as loaders collate one text per sample; it is split if its length is the number of samples."""


def mark_sample_lists(tree: Any, dims: Dims) -> Any:
    """``tree`` with its lists of one entry per sample marked as leaves.

    Raises:
        DataError: ``dims`` is ``"list"`` for an entry that is no list.
    """
    if dims == "list":
        if not isinstance(tree, list | tuple):
            raise DataError(
                f"batch_dims is 'list' for a list with one entry per sample: got {type(tree).__name__}. Use a number, "
                "or None."
            )
        return PerSample(tree)
    if type(tree) is dict:
        return {name: mark_sample_lists(value, _of_entry(dims, name)) for name, value in tree.items()}
    if type(tree) is list and tree and dims is not None and all(isinstance(entry, str | bytes) for entry in tree):
        return Texts(tree)
    if type(tree) in (list, tuple):
        return type(tree)(mark_sample_lists(value, _of_entry(dims, index)) for index, value in enumerate(tree))
    return tree


def map_sample_lists(tree: Any, dims: Dims, function: Callable[[list[Any]], list[Any]]) -> Any:
    """``tree`` with a function applied to its lists of one entry per sample; ``dims`` as for :func:`leaf_dims`."""
    if dims == "list" or (dims is not None and type(tree) is list and tree and all(isinstance(e, str) for e in tree)):
        return function(list(tree))
    if type(tree) is dict:
        return {name: map_sample_lists(value, _of_entry(dims, name), function) for name, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map_sample_lists(one, _of_entry(dims, n), function) for n, one in enumerate(tree))
    return tree


def leaf_dims(tree: Any, dims: Dims, setting: str = "batch_dims", count: int | None = None) -> list[int | None]:
    """The sample dimension of each leaf of ``tree``, in pytree's order; None: the leaf holds no samples.

    Args:
        tree: any nested container.
        dims: the setting for it.
        setting: the setting's name, for messages.
        count: the number of leaves, if known.

    Raises:
        DataError: a name in ``dims`` is probably a misspelled name in ``tree``.
    """
    if dims is None or isinstance(dims, int):
        return [dims] * (len(pytree.tree_leaves(tree)) if count is None else count)
    if isinstance(tree, Mapping) and isinstance(dims, Mapping):
        free = [name for name in tree if isinstance(name, str) and name not in dims]
        meant = {name: near for name in dims if name not in tree for near in closest_name(name, free)}
        if meant:
            listed = ", ".join(f"{near!r}, not {name!r}" for name, near in meant.items())
            raise DataError(
                f"{setting} must use the names of the batch's entries: there is {listed}. Correct the name."
            )
    paths, _ = pytree.tree_flatten_with_path(tree)
    return [_at(tree, path, dims) for path, _ in paths]


def _at(node: Any, path: Sequence[Any], dims: Dims) -> int | None:
    for entry in path:
        key = getattr(entry, "key", getattr(entry, "idx", getattr(entry, "name", None)))
        # The entries of a named tuple have an index, too.
        is_named_tuple = hasattr(node, "_fields") and not isinstance(dims, Mapping)
        dims, node = _of_entry(dims, node._fields.index(key) if is_named_tuple else key), entry.get(node)
    return dims if isinstance(dims, int) else None if dims is None or dims == "list" else 0


def dim_at(path: Sequence[Any], dims: Dims) -> int | None:
    """The sample dimension of the leaf at a path of keys and indices; None: it holds no samples."""
    for key in path:
        dims = _of_entry(dims, key)
    return dims if isinstance(dims, int) else None if dims is None or dims == "list" else 0


def is_sample_list(path: Sequence[Any], dims: Dims) -> bool:
    """Whether ``dims`` says that there is a list with one entry per sample at a path of keys and indices."""
    before: Dims = None
    for key in path:
        before, dims = dims, _of_entry(dims, key)
    return bool(dims == "list" and before != "list")


def with_sample_lists(batch: Any, dims: Dims) -> Dims:
    """``dims``, with the lists of one entry per sample that a batch shows: the boxes of each image, for example.

    That is a list of dicts that is as long as the tensors beside it, or one of tensors with other numbers of rows.
    """
    entries = dict(batch.items() if type(batch) is dict else enumerate(batch) if type(batch) is tuple else ())
    if not any(type(value) in (list, tuple) for value in entries.values()):
        return dims
    own = {key: _of_entry(dims, key) for key in entries}
    sizes = {
        value.shape[dim]
        for key, value in entries.items()
        if isinstance(value, Tensor) and isinstance(dim := own[key], int) and dim < value.dim()
    }
    if len(sizes) != 1:
        return dims
    given = dims if isinstance(dims, Mapping) else () if dims is None or isinstance(dims, int) else range(len(dims))
    found = [key for key, one in entries.items() if own[key] == 0 and key not in given and _is_of_samples(one, *sizes)]
    if not found:
        return dims
    shown = own | dict.fromkeys(found, "list")
    return shown if type(batch) is dict else [shown[key] for key in entries]


def _is_of_samples(value: Any, num_samples: int) -> bool:
    """Whether a list must be one with an entry for each sample."""
    if type(value) not in (list, tuple) or len(value) != num_samples:
        return False
    if all(isinstance(one, Mapping) for one in value):
        return any(isinstance(leaf, Tensor) for one in value for leaf in pytree.tree_leaves(dict(one)))
    return all(isinstance(one, Tensor) for one in value) and {one.shape[:1] for one in value} != {(num_samples,)}


def _of_entry(dims: Dims, key: Any) -> Dims:
    if isinstance(dims, Mapping):
        return dims.get(key, 0)
    if isinstance(dims, list | tuple):
        return dims[key] if isinstance(key, int) and key < len(dims) else 0
    return dims
