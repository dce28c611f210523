"""Where tensors hold the samples of a micro-batch, followed through the calls of torch's functions."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor


class SampleDim(NamedTuple):
    """Where a tensor holds the samples.

    Attributes:
        dim: the dimension, whose index runs over all samples, or over all samples several times.
        rows: consecutive indices that belong to one sample, such as its tokens.
        is_sure: whether that is known; False: a tensor of unknown origin has such a size.
        order: of the samples, where an index has put them in another one; empty: theirs.
    """

    dim: int
    rows: int = 1
    is_sure: bool = True
    order: tuple[int, ...] = ()


class Found(NamedTuple):
    """What a function made of the samples.

    Attributes:
        samples: where the result holds them; None: nowhere, or that is not known.
        is_gone: whether the result has none: the function went over all of them.
        is_sum: whether it only added them up, then.
        why: how it coupled samples that the result still has; "": it did not, as far as known.
        is_over: whether it surely went along the samples otherwise than by adding them up.
    """

    samples: SampleDim | None = None
    is_gone: bool = False
    is_sum: bool = False
    why: str = ""
    is_over: bool = False


@dataclass(frozen=True)
class Call:
    """A call of a function.

    Attributes:
        function: of torch's.
        name: of the function.
        args: positional arguments.
        kwargs: keyword arguments.
        result: one tensor that it returned.
        samples_of: where a tensor holds samples, or None.
        is_computed: whether a model computed a tensor.
        is_choice: whether an index has numbers that neither come from the inputs or the model, nor count up.
        num_samples: of the micro-batch.
        position: of the tensor in the tuple that the function returned.
    """

    function: Callable[..., Any]
    name: str
    args: Sequence[Any]
    kwargs: dict[str, Any]
    result: Tensor
    samples_of: Callable[[Tensor], SampleDim | None]
    is_computed: Callable[[Tensor], bool]
    is_choice: Callable[[Tensor], bool]
    num_samples: int
    position: int = 0

    @cached_property
    def held(self) -> list[tuple[Tensor, SampleDim]]:
        """The arguments with samples; those of which that is sure and that a model computed, if there are any."""
        return self.trusted(list(tensors_of((self.args, self.kwargs))))

    def trusted(self, tensors: Sequence[Tensor]) -> list[tuple[Tensor, SampleDim]]:
        """The same of some tensors."""
        pairs = [(tensor, self.samples_of(tensor)) for tensor in tensors]
        known = [(tensor, samples) for tensor, samples in pairs if samples is not None]
        known = [one for one in known if one[1].is_sure] or known[:1]
        return [one for one in known if self.is_computed(one[0])] or known

    def argument(self, position: int, *names: str) -> Any:
        """An argument by its position or by one of its names; None: it is not given."""
        for name in names:
            if name in self.kwargs:
                return self.kwargs[name]
        return self.args[position] if len(self.args) > position else None

    def same(self, dim: int, rows: int) -> Found:
        """The result has the samples there."""
        size = self.result.shape[dim] if 0 <= dim < self.result.dim() else 0
        return Found(SampleDim(dim, rows)) if size and size % (rows * self.num_samples) == 0 else Found()


def samples_at(dim: int, shape: Sequence[int], num_samples: int) -> SampleDim | None:
    """Samples in a dimension, as far as its size fits."""
    fits = -len(shape) <= dim < len(shape) and shape[dim] and shape[dim] % num_samples == 0
    return SampleDim(dim % len(shape), shape[dim] // num_samples) if fits else None


def guessed_samples(shapes: Sequence[Sequence[int]], num_samples: int) -> list[SampleDim | None]:
    """Where tensors hold samples that came together, by their sizes: sure of the largest, which are activations.

    Where some begin with the samples, those that begin with one row are broadcast to them, as biases of positions are.
    """
    leading = [shape for shape in shapes if shape and shape[0] == num_samples]
    largest = max(map(math.prod, leading or shapes), default=0)
    guessed: list[SampleDim | None] = []
    for shape in shapes:
        dim = next((dim for dim, size in enumerate(shape) if size == num_samples), 0)
        is_broadcast = bool(leading) and bool(shape) and shape[0] == 1 != num_samples
        found = None if is_broadcast else samples_at(dim, shape, num_samples)
        guessed.append(found and found._replace(is_sure=math.prod(shape) >= largest))
    return guessed


def lack_samples(shapes: Sequence[Sequence[int]], num_samples: int) -> list[bool]:
    """Whether tensors that came together are too small for a row of each sample, or for one of each token."""
    largest = max(shapes, key=math.prod, default=())
    rows = {math.prod(largest[:count]) for count in range(1, len(largest) + 1)} | {num_samples}
    return [
        not shape or (shape[0] not in rows if len(shape) == 1 else all(size % num_samples for size in shape))
        for shape in shapes
    ]


def samples_in(call: Call) -> Found:
    """Where the result of a call holds samples, and what the call did with them."""
    if not call.held:
        return Found()
    rule = _RULES.get(call.name.strip("_"), _alike)
    try:
        return rule(call)
    except (TypeError, ValueError, IndexError, RuntimeError, NotImplementedError):  # arguments of a form unforeseen
        return Found()


# Of one or several tensors that are broadcast, and of any other function.


def _alike(call: Call) -> Found:
    """The samples stay in their dimension, counted from the last one or by its size."""
    found = [_kept(call, tensor, samples) for tensor, samples in call.held]
    known = [one for one in found if one is not None]
    if not known:
        is_single = call.result.dim() == 0
        return Found(is_gone=is_single)
    if any(one != known[0] for one in known) and all(call.is_computed(tensor) for tensor, _ in call.held):
        return Found(why=f"{call.name} of each sample with each other")
    return Found(known[0])


def _kept(call: Call, tensor: Tensor, samples: SampleDim) -> SampleDim | None:
    shape, size = call.result.shape, tensor.shape[samples.dim]
    extra = len(shape) - tensor.dim()
    is_broadcast = extra >= 0 and all(one in (1, two) for one, two in zip(tensor.shape, shape[extra:], strict=True))
    for dim in ([samples.dim + extra] if is_broadcast else []) + ([samples.dim] if not extra else []):
        if shape[dim] == size:
            return samples._replace(dim=dim)
    fitting = [dim for dim, one in enumerate(shape) if one == size]
    return samples._replace(dim=fitting[0]) if len(fitting) == 1 else None


# Experts that a router chooses for a token.
_MAX_CHOSEN = 8

# What moves dimensions, or goes over them.

# Sizes of dimensions that are told apart by them.
_TAGS = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049, 1051, 1061)
_probed: dict[Any, tuple[tuple[int, ...], ...]] = {}


def _probe(call: Call) -> tuple[int, ...]:
    """The shape of the result for a first argument whose dimensions have the sizes ``_TAGS``."""
    tensor = call.args[0]
    key = call.function, tensor.dim(), repr(call.args[1:]), repr(call.kwargs)
    if key not in _probed:
        # With other dimensions than those of one that was made before, a shape is a few numbers.
        made = call.function(
            torch.empty(_TAGS[: tensor.dim()], dtype=tensor.dtype, device="meta"), *call.args[1:], **call.kwargs
        )
        _probed[key] = tuple(tuple(one.shape) for one in tensors_of(made))
        while len(_probed) > 1000:
            _probed.pop(next(iter(_probed)), None)
    return _probed[key][call.position]


def _moved(call: Call) -> Found:
    samples = call.samples_of(call.args[0])
    if samples is None:
        return Found()
    tags = _probe(call)
    tag = _TAGS[samples.dim]
    return Found(samples._replace(dim=tags.index(tag))) if tag in tags else Found()


def _summed(call: Call) -> Found:
    return _gone_over(call, is_sum=True)


def _reduced(call: Call) -> Found:
    if isinstance(call.argument(1, "other"), Tensor):  # the larger one of two tensors
        return _alike(call)
    return _gone_over(call, is_sum=False)


def _gone_over(call: Call, is_sum: bool) -> Found:
    tensor = call.args[0] if call.args else call.kwargs["input"]
    samples = call.samples_of(tensor)
    if samples is None:
        return Found()
    if call.result.dim() == 0:
        return Found(is_gone=True, is_sum=is_sum, is_over=samples.is_sure and not is_sum)
    found = _moved(call)
    if found.samples is not None:
        return found
    return Found(is_gone=True, is_sum=is_sum, is_over=samples.is_sure and not is_sum)


def _along(position: int, default: int | None) -> Callable[[Call], Found]:
    """Of functions that make each number along a dimension from the others there."""

    def rule(call: Call) -> Found:
        tensor = call.args[0] if call.args else call.kwargs["input"]
        samples = call.samples_of(tensor)
        dims = call.argument(position, "dim", "dims", "axis")
        dims = default if dims is None else dims
        over = range(tensor.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
        if samples is None or samples.dim not in {dim % tensor.dim() for dim in over}:
            return _alike(call)
        # Indices say which rows are chosen, as routers do.
        is_coupled = samples.rows == 1 and call.result.is_floating_point()
        why = f"{call.name} over the samples" if is_coupled else ""
        return _alike(call)._replace(why=why, is_over=samples.is_sure)

    return rule


def _flipped(call: Call) -> Found:
    dims = call.kwargs.get("dims", call.args[1:])
    dims = dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims
    samples = call.samples_of(call.args[0])
    is_over = samples is not None and samples.dim in {dim % call.args[0].dim() for dim in dims}
    return Found(samples, why=f"{call.name} over the samples" if is_over else "")


def _reshaped(call: Call) -> Found:
    tensor = call.args[0]
    samples = call.samples_of(tensor)
    if samples is None:
        return Found()
    if isinstance(call.argument(1, "dtype"), torch.dtype) or tensor.numel() != call.result.numel():
        return _alike(call)
    if call.name == "flatten":
        start = (call.argument(1, "start_dim") or 0) % tensor.dim()
        end = call.argument(2, "end_dim")
        last = (-1 if end is None else end) % tensor.dim()
        if samples.dim == start:  # of a single sample, sizes do not tell
            return Found(samples._replace(rows=samples.rows * math.prod(tensor.shape[start + 1 : last + 1])))
    return Found(_in_shape(samples, tensor.shape, call.result.shape, call.num_samples))


def _in_shape(samples: SampleDim, before: Sequence[int], after: Sequence[int], num_samples: int) -> SampleDim | None:
    """Where samples are after the dimensions were divided or joined; None: in several."""
    stride = samples.rows * math.prod(before[samples.dim + 1 :])
    if not stride:
        return None
    fitting: list[SampleDim] = []
    inner = 1
    for dim in reversed(range(len(after))):
        outer = inner * after[dim]
        if inner <= stride and stride % inner == 0 and outer and outer % (stride * num_samples) == 0:
            fitting.append(samples._replace(dim=dim, rows=stride // inner))
        inner = outer
    if len(fitting) < 2:
        return fitting[0] if fitting else None
    # A single sample fits in several.
    leading = samples.dim + 1
    if tuple(before[:leading]) == tuple(after[:leading]) and samples in fitting:
        return samples
    for one in fitting:
        if after[one.dim] == 1 and one.rows == 1:
            return one
    kept = 0
    while kept < min(len(before) - samples.dim - 1, len(after) - 1) and before[-1 - kept] == after[-1 - kept]:
        kept += 1
    return next((one for one in fitting if one.dim < len(after) - kept), fitting[-1])


def _repeated(call: Call) -> Found:
    tensor = call.args[0]
    samples = call.samples_of(tensor)
    return Found() if samples is None else call.same(samples.dim + call.result.dim() - tensor.dim(), samples.rows)


def _repeated_each(call: Call) -> Found:
    tensor, repeats, dim = call.args[0], call.argument(1, "repeats"), call.argument(2, "dim")
    samples = call.samples_of(tensor)
    if samples is None or dim is None:
        return Found()
    if dim % tensor.dim() != samples.dim:
        return Found(samples)
    return call.same(samples.dim, samples.rows * repeats) if isinstance(repeats, int) else Found()


def _stacked(call: Call) -> Found:
    return _joined_along(call, True)


def _concatenated(call: Call) -> Found:
    return _joined_along(call, False)


def _joined_along(call: Call, is_new: bool) -> Found:
    dim = (call.argument(1, "dim", "axis") or 0) % call.result.dim()
    parts = list(call.args[0] if call.args else call.kwargs["tensors"])
    known = [samples for _, samples in call.trusted(parts)]
    placed = set(known)
    if len(placed) != 1:
        return Found()
    (samples,) = placed
    if is_new:
        return Found(samples._replace(dim=samples.dim + (dim <= samples.dim)))
    if dim == samples.dim and len(known) < len(parts):
        return Found()  # with other rows between them
    return call.same(samples.dim, samples.rows)


def _indexed(call: Call) -> Found:
    """Of ``tensor[index]``."""
    tensor, index = call.args[0], call.args[1]
    samples = call.samples_of(tensor)
    if samples is None:
        return Found()
    entries = list(index) if isinstance(index, tuple) else [index]
    taken = sum(_taken(one) for one in entries)
    if not any(one is Ellipsis for one in entries):
        entries.append(Ellipsis)
    at = next(position for position, one in enumerate(entries) if one is Ellipsis)
    entries[at : at + 1] = [slice(None)] * (tensor.dim() - taken)
    before, dim, chosen_before = 0, 0, 0
    blocks: list[int] = []
    found: tuple[int, slice] | None = None
    for position, one in enumerate(entries):
        if one is None:
            before += 1
            continue
        is_chosen = not isinstance(one, int | slice) or isinstance(one, bool)
        if is_chosen:
            blocks.append(position)
            chosen_before = before if len(blocks) == 1 else chosen_before
        if dim <= samples.dim < dim + _taken(one):
            if not isinstance(one, slice):
                kept = _all_rows(call, one, samples) if dim == samples.dim else None
                return Found(kept._replace(dim=_advanced_at(entries))) if kept else _chosen(call, one, samples)
            found = before, one
        before += isinstance(one, slice)
        dim += _taken(one)
    assert found is not None
    position, part = found
    if blocks:
        width = call.result.dim() - before
        is_apart = blocks[-1] - blocks[0] >= len(blocks)
        position += width if is_apart or chosen_before <= position else 0
    start, stop, step = part.indices(tensor.shape[samples.dim])
    count, block = len(range(start, stop, step)), samples.rows * call.num_samples
    if step == 1 and start % block == 0 and count and count % block == 0:
        return Found(samples._replace(dim=position))
    return _part(samples, count)


def _part(samples: SampleDim, size: int) -> Found:
    """Of some indices of the dimension with the samples. Single ones may be looked at in turn."""
    return Found(why="a part of the samples" if samples.rows == 1 and size > 1 else "")


def _advanced_at(entries: Sequence[Any]) -> int:
    """The dimension of the result that tensors make which index along others."""
    at = [position for position, one in enumerate(entries) if isinstance(one, Tensor | list)]
    is_apart = at[-1] - at[0] >= len(at)
    return 0 if is_apart else sum(one is None or isinstance(one, slice) for one in entries[: at[0]])


def _all_rows(call: Call, index: Any, samples: SampleDim) -> SampleDim | None:
    """The samples, of which an index along them takes equally many rows each, in any order; None: it does not.

    So it does where it takes the last token of each, or sorts them. The numbers are read.
    """
    if not isinstance(index, Tensor) or call.is_computed(index):
        return None
    others = [one for one in tensors_of(call.args[1:]) if one is not index]
    if index.dtype in (torch.bool, torch.uint8):
        rows = index.nonzero()[:, 0] if not others else None
    else:
        # All in its first dimension, which is the first of the result's.
        is_first = index.dim() > 0 and index.numel() == len(index) and all(one.dim() <= index.dim() for one in others)
        rows = index.flatten() if is_first else None
    count = call.num_samples
    if rows is None or not len(rows) or len(rows) % count:
        return None
    each = (rows % call.args[0].shape[samples.dim] // samples.rows % count).view(count, -1)
    order = each[:, 0].tolist()
    is_natural = order == list(range(count))
    if sorted(order) != list(range(count)) or bool((each != each[:, :1]).any()):
        return None
    if not is_natural and call.is_choice(index):
        return None
    placed = tuple(samples.order[one] for one in order) if samples.order else tuple(order)
    return samples._replace(rows=each.shape[1], order=() if placed == tuple(range(count)) else placed)


def _chosen(call: Call, index: Any, samples: SampleDim) -> Found:
    """Of indices into the dimension with the samples."""
    is_choice = isinstance(index, Tensor) and not index.is_floating_point() and call.is_choice(index)
    if isinstance(index, list):
        is_choice = all(type(one) is int for one in index) and index != list(range(call.num_samples))
    is_several = samples.rows == 1 and call.result.dim() > 0
    return Found(why=f"{call.name} of chosen samples" if is_choice and is_several else "")


def _selected(call: Call) -> Found:
    """Of ``index_select``."""
    tensor, dim, index = call.args[0], call.argument(1, "dim"), call.argument(2, "index")
    samples = call.samples_of(tensor)
    if samples is None or dim % tensor.dim() != samples.dim:
        return Found(samples)
    kept = _all_rows(call, index, samples)
    return Found(kept) if kept else _chosen(call, index, samples)


def _taken(one: Any) -> int:
    """Dimensions that an entry of an index takes."""
    if one is None or one is Ellipsis:
        return 0
    is_mask = isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8)
    return one.dim() if is_mask else 1


def _divided(call: Call) -> Found:
    """Of parts along a dimension."""
    tensor = call.args[0]
    samples, dim = call.samples_of(tensor), (call.argument(2, "dim") or 0) % tensor.dim()
    if samples is None or dim != samples.dim:
        return Found(samples)
    size, block = call.result.shape[dim], samples.rows * call.num_samples
    return Found(samples) if size and size % block == 0 else _part(samples, size)


def _unbound(call: Call) -> Found:
    tensor = call.args[0]
    samples, dim = call.samples_of(tensor), (call.argument(1, "dim") or 0) % tensor.dim()
    if samples is None or dim == samples.dim:
        return Found()
    return Found(samples._replace(dim=samples.dim - (dim < samples.dim)))


# Products.


def _contracted(call: Call, operands: Sequence[tuple[Tensor, str]], made: str) -> Found:
    """Of a product whose operands' and result's dimensions have letters."""
    trusted = {id(tensor): samples for tensor, samples in call.trusted([tensor for tensor, _ in operands])}
    letters = {
        letters[trusted[id(tensor)].dim]: trusted[id(tensor)].rows
        for tensor, letters in operands
        if id(tensor) in trusted
    }
    if len(letters) > 1:
        return Found(why=f"{call.name} of each sample with each other")
    for letter, rows in letters.items():
        return Found(SampleDim(made.index(letter), rows)) if letter in made else Found(is_gone=True, is_sum=True)
    return Found()


def _product(call: Call) -> Found:
    one, two = call.args[:2] if call.name.strip("_") != "rmatmul" else (call.args[1], call.args[0])
    if call.name in ("addmm", "baddbmm", "addmv", "addbmm"):
        one, two = call.args[1], call.args[2]
    batch = "abcdefghijklmnopqrstuvw"[: max(one.dim(), two.dim(), 2) - 2]
    of_one = batch[len(batch) - max(one.dim() - 2, 0) :] + ("xy" if one.dim() > 1 else "y")
    of_two = batch[len(batch) - max(two.dim() - 2, 0) :] + ("yz" if two.dim() > 1 else "y")
    made = batch + ("x" if one.dim() > 1 else "") + ("z" if two.dim() > 1 else "")
    return _contracted(call, [(one, of_one), (two, of_two)], made if call.name != "addbmm" else made[1:])


def _linear(call: Call) -> Found:
    one, two = call.argument(0, "input"), call.argument(1, "weight")
    batch = "abcdefghijklmnopqrstuvw"[: one.dim() - 1]
    return _contracted(call, [(one, batch + "y"), (two, "zy" if two.dim() > 1 else "y")], batch + "z"[: two.dim() - 1])


def _paired(call: Call) -> Found:
    """Of the distances of all rows of one tensor to all of another."""
    one, two = call.args[:2]
    batch = "abcdefghijklmnopqrstuvw"[: max(one.dim(), two.dim()) - 2]
    return _contracted(call, [(one, batch[: one.dim() - 2] + "xy"), (two, batch[: two.dim() - 2] + "zy")], batch + "xz")


def _outer(call: Call) -> Found:
    return _contracted(call, [(call.args[0], "x"), (call.args[1], "z")], "xz")


def _einsum(call: Call) -> Found:
    equation = call.args[0]
    operands = call.args[1] if len(call.args) == 2 and isinstance(call.args[1], list | tuple) else call.args[1:]
    given, arrow, made = equation.replace(" ", "").partition("->")
    listed = given.split(",")
    widths = [one.dim() - len(names.replace("...", "")) for one, names in zip(operands, listed, strict=True)]
    rest = "0123456789"[: max(widths)]
    listed = [names.replace("...", rest[len(rest) - width :]) for names, width in zip(listed, widths, strict=True)]
    if not arrow:
        flat = "".join(listed)
        made = "..." + "".join(sorted(one for one in set(flat) if flat.count(one) == 1 and one.isalpha()))
    return _contracted(call, list(zip(operands, listed, strict=True)), made.replace("...", rest))


def _tensordot(call: Call) -> Found:
    one, two, dims = call.args[0], call.args[1], call.argument(2, "dims")
    if isinstance(dims, int):
        dims = list(range(one.dim() - dims, one.dim())), list(range(dims))
    elif dims is None:
        dims = list(range(one.dim() - 2, one.dim())), [0, 1]
    letters = "abcdefghijklmnopqrstuvwxyz"
    of_one, of_two = list(letters[: one.dim()]), list(letters[one.dim() : one.dim() + two.dim()])
    for first, second in zip(*dims, strict=True):
        of_two[second] = of_one[first]
    made = "".join(letter for letter in (*of_one, *of_two) if (letter in of_one) is not (letter in of_two))
    return _contracted(call, [(one, "".join(of_one)), (two, "".join(of_two))], made)


def _attention(call: Call) -> Found:
    query, samples = call.args[0], call.samples_of(call.args[0])
    if samples is not None and samples.dim == query.dim() - 2 and samples.rows == 1:
        return Found(samples, why="attention over the samples")
    return _alike(call)


def _over_pairs(call: Call) -> Found:
    return Found(why=f"{call.name} of the samples")


# Others.


def _looked_up(call: Call) -> Found:
    """One more dimension, behind those of the indices."""
    samples = call.samples_of(call.argument(0, "input"))
    return Found(samples)


def _recurrent(call: Call) -> Found:
    """Of sequences, and of their last states, layer by layer."""
    samples = call.samples_of(call.args[0])
    if call.position == 0 or samples is None:
        return Found(samples)
    return call.same(1, samples.rows) if call.args[0].dim() == 3 else Found()


def _of_classes(call: Call) -> Found:
    """Losses of the classes in dimension 1, one by one."""
    samples = call.samples_of(call.argument(0, "input"))
    if samples is None or call.result.dim() == 0:
        return Found()
    return call.same(samples.dim - (samples.dim > 1), samples.rows)


def _of_fused_head(call: Call) -> Found:
    """The same of the logits that the loss itself makes."""
    pairs = call.trusted([call.argument(0, "input"), call.argument(1, "linear_weight")])
    if len(pairs) > 1:
        return Found(why=f"{call.name} of each sample with each other")
    return _of_classes(call)


def _written_into(call: Call) -> Found:
    """Of what writes to the places along a dimension that an index says: the index says nothing of other dimensions."""
    own = call.samples_of(call.args[0])
    if own is not None:
        return Found(own)
    dim = call.argument(1, "dim") % call.result.dim()
    others = [one for one in tensors_of((call.args[2:], call.kwargs)) if one.dim() == call.result.dim()]
    known = [(one, samples) for one, samples in call.trusted(others)]
    apart = [samples for _, samples in known if samples.dim != dim]
    if apart or not known or call.name.strip("_") not in ("scatter_add", "index_add"):
        return Found(apart[0]) if apart else Found()
    # Numbers of tokens per expert, unless the result has one for each token that has several experts.
    index, samples = known[0]
    size = call.result.shape[dim]
    is_of_tokens = any(size * most == index.shape[dim] for most in range(1, _MAX_CHOSEN + 1))
    is_counted = call.result.dim() == 1 and call.is_computed(index) and samples.is_sure and not is_of_tokens
    return Found(is_gone=True, is_sum=True) if is_counted else Found()


def _filled(call: Call) -> Found:
    """Of what writes rows to places in another tensor, as images to those of their tokens."""
    return Found(call.samples_of(call.args[0]))


def _counted(call: Call) -> Found:
    """Of functions that count values."""
    return Found(is_gone=call.samples_of(call.args[0]) is not None, is_sum=True)


_RULES: dict[str, Callable[[Call], Found]] = {
    **dict.fromkeys(
        ["T", "mT", "H", "mH", "t", "adjoint", "transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis"],
        _moved,
    ),
    **dict.fromkeys(["unsqueeze", "select", "diagonal"], _moved),
    **dict.fromkeys(["sum", "mean", "nansum"], _summed),
    **dict.fromkeys(["max", "min", "amax", "amin", "aminmax", "prod", "median", "nanmedian", "mode"], _reduced),
    **dict.fromkeys(["var", "std", "var_mean", "std_mean", "logsumexp", "quantile", "nanquantile"], _reduced),
    **dict.fromkeys(["norm", "linalg_norm", "linalg_vector_norm", "linalg_matrix_norm", "nanmean"], _reduced),
    **dict.fromkeys(["all", "any", "argmax", "argmin", "count_nonzero", "kthvalue"], _reduced),
    **dict.fromkeys(["softmax", "log_softmax", "softmin", "cumsum", "cumprod", "logcumsumexp"], _along(1, None)),
    **dict.fromkeys(["cummax", "cummin"], _along(1, None)),
    **dict.fromkeys(["sort", "argsort"], _along(1, -1)),
    **dict.fromkeys(["topk", "renorm"], _along(2, -1)),
    "normalize": _along(2, 1),
    "roll": _along(2, None),
    **dict.fromkeys(["flip", "fliplr", "flipud"], _flipped),
    **dict.fromkeys(["view", "reshape", "flatten", "unflatten", "ravel", "squeeze"], _reshaped),
    **dict.fromkeys(["view_as", "reshape_as", "contiguous"], _reshaped),
    **dict.fromkeys(["repeat", "tile"], _repeated),
    "repeat_interleave": _repeated_each,
    "stack": _stacked,
    **dict.fromkeys(["cat", "concat", "concatenate"], _concatenated),
    "getitem": _indexed,
    **dict.fromkeys(["chunk", "split", "split_with_sizes", "tensor_split"], _divided),
    "unbind": _unbound,
    "index_select": _selected,
    **dict.fromkeys(["index_add", "index_copy", "index_fill", "index_reduce"], _written_into),
    **dict.fromkeys(["scatter", "scatter_add", "scatter_reduce"], _written_into),
    **dict.fromkeys(["masked_scatter", "index_put"], _filled),
    **dict.fromkeys(["bincount", "histc"], _counted),
    **dict.fromkeys(["matmul", "rmatmul", "mm", "bmm", "mv", "addmm", "baddbmm", "addmv", "addbmm"], _product),
    **dict.fromkeys(["dot", "vdot"], _product),
    "linear": _linear,
    **dict.fromkeys(["cdist", "inner"], _paired),
    **dict.fromkeys(["outer", "ger"], _outer),
    "einsum": _einsum,
    "tensordot": _tensordot,
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(["pdist", "cov", "corrcoef"], _over_pairs),
    **dict.fromkeys(["embedding", "one_hot"], _looked_up),
    **dict.fromkeys(["lstm", "gru", "rnn_tanh", "rnn_relu"], _recurrent),
    **dict.fromkeys(["cross_entropy", "nll_loss"], _of_classes),
    "linear_cross_entropy": _of_fused_head,
}


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors_of(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_of(one)
