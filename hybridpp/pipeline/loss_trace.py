"""Follow the calls that make a loss: which numbers it is divided by, and whether it is linear in its items."""

import inspect
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybridpp.nn.deferred_tensor import MadeWhenRead
from hybridpp.nn.watcher import WatchingMode, function_name, with_lost_weight
from hybridpp.pipeline.batch_dims import Dims, is_sample_list
from hybridpp.pipeline.loss_items import (
    SAME_DEVICE,
    Constant,
    Count,
    Path,
    TracedFloat,
    TracedInt,
    at_least,
    count_of,
    counted_targets,
    entry,
    entry_path,
    num_rows,
    number,
    numel,
    of_row,
    row_of,
    single,
    size,
    sizes_of,
    traced,
    written,
)
from hybridpp.pipeline.sample_dims import (
    SampleDim,
    guessed_samples,
    lack_samples,
    samples_at,
    tensors_of,
)
from hybridpp.pipeline.sample_tracker import SIZES, SampleTracker, input_leaves

# Functions whose result is no function of their arguments.
_RANDOM = ("rand", "normal", "bernoulli", "multinomial", "dropout", "poisson", "exponential", "uniform")
# Linear in a tensor that holds sums over samples.
_KEEPING = frozenset(
    [
        "neg",
        "negative",
        "positive",
        "view",
        "reshape",
        "squeeze",
        "unsqueeze",
        "float",
        "double",
        "to",
        "half",
        "bfloat16",
        "type",
        "type_as",
        "clone",
        "contiguous",
        "flatten",
        "ravel",
        "getitem",
        "nan_to_num",
        "sum",
        "mean",
        "expand",
        "alias",
        "permute",
        "transpose",
        "t",
        "T",
        "mT",
        "cuda",
        "cpu",
        "detach",
        "requires_grad",
        "view_as",
        "select",
        "narrow",
        "unflatten",
        "data",
        "diagonal",
        "movedim",
        "swapaxes",
        "trace",
    ]
)
_ADDING = frozenset(["add", "radd", "iadd", "sub", "rsub", "isub", "subtract"])
_MULTIPLYING = frozenset(["mul", "rmul", "imul", "multiply"])
_DIVIDING = frozenset(["div", "truediv", "idiv", "itruediv", "divide", "true_divide"])
_JOINING = frozenset(["stack", "cat", "concat", "hstack", "vstack"])
_REDUCING = frozenset(["sum", "mean", "nansum"])
_PRODUCTS = frozenset(["matmul", "mm", "rmatmul", "linear"])
_DIVIDING_IN_PARTS = frozenset(["chunk", "split", "split_with_sizes", "tensor_split"])
_TO_SCALAR = frozenset(["dot", "vdot", "inner", "matmul"])
_PLAIN_NUMBERS = frozenset(["int", "float", "len", "index", "bool", "item"])
# What they return is not followed.
_PLAIN_ARRAYS = frozenset(["tolist", "numpy", "array"])
_FROM_PYTHON = frozenset(["as_tensor", "tensor", "from_numpy"])
# They choose or weigh samples by how their numbers are ordered, or leave some out. By chance, halves may agree.
_ORDERING = frozenset(
    [
        *("topk", "sort", "msort", "argsort", "median", "kthvalue", "mode", "quantile"),
        *("nanmean", "nanmedian", "nanquantile", "max", "min", "amax", "amin", "aminmax"),
    ]
)
# Of the different values of an input, they make some of these.
_VALUES = _PLAIN_NUMBERS | {"entry_of", "getitem", "to", "long", "cpu", "sort", "masked_select", "tensor", "detach"}
# Of each element of their first argument, they make the same, with others that are single numbers.
_LIMITING = frozenset(
    ["clamp", "clamp_min", "maximum", "add", "to", "float", "double", "long", "int", "type", "detach"]
)
# Larger tensors that are no inputs are not kept as constants of a count.
_MAX_CONSTANT = 2**20
# Sums that are divided by numbers of their own are looked at one by one, up to as many.
_MAX_APART = 1024
# A mean that is multiplied with a smaller number is weighted, though there may be as many samples.
_LEAST_ROWS = 3
# Python has one object for all that are equal.
_SHARED_INTS = -5, 256
_MAKING_ZERO = frozenset(["zeros", "new_zeros", "zeros_like"])
OF_EARLIER_STAGE = "a number of an earlier stage"
"""The reason of a term that this stage has received."""
# A head and its loss in one.
_FUSED_LOSS = "linear_cross_entropy"
_CLASS_LOSSES = frozenset(["cross_entropy", "nll_loss", _FUSED_LOSS])


@dataclass(frozen=True, eq=False)
class TermFactor:
    """A number that a term of a loss was divided by (power -1) or multiplied with (1).

    Attributes:
        count: of the micro-batch's inputs.
        power: 1 or -1.
        is_observed: the number itself depends on what the model computed; ``count`` is what it is taken for.
        observed: the number in the traced micro-batch, if ``is_observed``.
    """

    count: Count
    power: int
    is_observed: bool = False
    observed: Any = None


class Term(NamedTuple):
    """A part of a loss: a sum over samples, times factors.

    Attributes:
        factors: of the sum; None: the part does not depend on the batch.
        make: makes its value.
        why: why it is no such sum; "": it is one.
        natural: what the sum counts, where that is known.
        in_model: whether the model's forward made it.
        adds_up: whether a loss of torch's made it that was told to add up.
        is_of_parts: whether its elements were divided by a number of the batch before they were added up.
        row: the one sample that it is made of, of a criterion's; None: of several, as far as known.
        is_times_rows: whether the model has multiplied a mean with what is the number of samples, as far as known.
    """

    factors: tuple[TermFactor, ...] | None
    make: Callable[[], Any]
    why: str = ""
    natural: Count | None = None
    in_model: bool = False
    adds_up: bool = False
    is_of_parts: bool = False
    row: Count | None = None
    is_times_rows: bool = False


class _OfModel(NamedTuple):
    """What is known of a tensor that the model computed.

    Attributes:
        numel: a count that is proportional to its number of elements; None: proportional to the samples.
        is_observed: whether its number of elements depends on what the model computed.
        terms: of a tensor without samples; None: it has samples.
        is_stack: whether dimension 0 was made by stacking.
        why: why its samples are coupled; "": they are not, as far as known.
        divided: numbers of the batch that every element was divided by or multiplied with.
    """

    numel: Count | None = None
    is_observed: bool = False
    terms: tuple[Term, ...] | None = None
    is_stack: bool = False
    why: str = ""
    divided: tuple[TermFactor, ...] = ()


_ITEMS = _OfModel()


class LossTrace(WatchingMode):
    """A function mode around what makes a micro-batch's loss.

    Every tensor counts as one of three: made from the inputs alone, made with parameters or activations, or constant.

    Args:
        trees: of the micro-batch's inputs: as they were given, and as the model gets them.
        num_samples: of the micro-batch.
        dims: the dimension of the samples in the inputs.
        choice: which meaning a plain number has that may have several. As a divisor: by ``choice // 2`` the counts that
            it may be, the one that was read last first, then a constant. As a factor: by ``choice % 2`` the other of a
            count and a constant. In a sum it is a constant.

    Attributes:
        in_criterion: whether the model's forward is over.
        num_choices: the most meanings that a plain number may have.
        ambiguous: counts that one plain number may be.
        has_read: whether the script has read a value of the inputs, by which it may branch.
        has_branched: whether it was seen to do so, or has read all values.
        loops_over_values: whether it has taken one by one the different values that an input has.
        is_empty: whether the script has read a number of items that is 0, so that it may have taken another branch.
        guessed: the plain numbers that stand in the place of such a number, as ``max(int(count), 1)`` gives.
    """

    def __init__(self, trees: Sequence[Any], num_samples: int, dims: Dims = 0, choice: int = 0):
        super().__init__()
        self._choice, self.num_choices = choice, 1
        self.ambiguous: list[Sequence[Count]] = []
        self.in_criterion, self.is_empty, self.has_read, self.has_branched = False, False, False, False
        self.loops_over_values = False
        self.guessed: list[float] = []
        # Whether a plain number may be a sum of the lengths of a list of samples.
        self._counts_lists = True
        # A constant, before the call writes to it.
        self._overwritten: Tensor | None = None
        # Whether the script has taken numbers of what the model computed to where no call is followed.
        self._reads_model = False
        self._zeros: list[Count] = []
        self._zero: dict[int, Any] = {}
        self._tree = trees[0] if trees else None
        self._num_samples, self._dims = num_samples, dims
        self._known: dict[int, tuple[Any, Any]] = {}
        # No cycle: what a trace holds is freed with it.
        self._tracker = SampleTracker(num_samples, weakref.proxy(self))
        self._counts: dict[Any, Count] = {}
        # Those that are single numbers of the whole micro-batch.
        self._single: set[Count] = set()
        # Those of terms, by id, until they are written to.
        self._held: dict[int, list[list[Tensor]]] = {}
        # Plain numbers that the script has read, which are told apart by identity as far as it goes.
        self._numbers: list[tuple[float, Count]] = []
        self._applied: dict[Count, None] = {}
        self._given_to_losses: dict[Count, None] = {}
        self._rows = self._count(num_rows().function)
        self._entries: list[tuple[Tensor, Count]] = []
        for tree in trees:
            for path, leaf in input_leaves(tree):
                self._note(leaf, self._count(entry(path).function, path))
                self._entries.append((leaf, self._known[id(leaf)][1]))
                self._tracker.begin(leaf, path, dims)

    def received(self, tensors: Sequence[Tensor]) -> None:
        """Tensors that the model computed, as far as they are not known."""
        guessed = guessed_samples([tensor.shape for tensor in tensors], self._num_samples)
        for tensor, samples in zip(tensors, guessed, strict=True):
            known = self._of(tensor)
            if known is None:
                self._note(tensor, _ITEMS)
            is_unknown = known is None or (isinstance(known, _OfModel) and known.terms is None)
            if is_unknown and self.samples_of(tensor) is None:
                self._tracker.hold(tensor, samples)

    def of_parameters(self, tensors: Sequence[Tensor]) -> None:
        """Tensors that are made of parameters alone, as far as the script's calls do not show it."""
        for tensor in tensors:
            self._note(tensor, nn.Parameter)

    def of_earlier_stages(self, tensors: Sequence[Tensor]) -> None:
        """Tensors that earlier stages sent. How one makes numbers of all samples is not seen."""
        lack = lack_samples([tensor.shape for tensor in tensors], self._num_samples)
        for tensor, lacks in zip(tensors, lack, strict=True):
            if lacks and tensor.is_floating_point() and not isinstance(self._of(tensor), Count):
                term = self._term((TermFactor(self._rows, -1),), tensor, OF_EARLIER_STAGE)
                self._note(tensor, _OfModel(terms=(term,)))
        self.received(tensors)

    def made(self, result: Any) -> None:
        """What a compiled block returned."""
        self.received(list(tensors_of(result)))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context inside of it, whose calls are not followed."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch
        try:
            yield
        finally:
            self.__enter__()  # type: ignore[no-untyped-call]  # torch

    @property
    def rows(self) -> Count:
        """The number of samples."""
        return self._rows

    @property
    def applied(self) -> list[Count]:
        """What the criterion has applied to what the model computed, or read as plain numbers; sizes apart."""
        return [
            one for one in dict.fromkeys([*self._applied, *(one for _, one in self._numbers)]) if not one.is_of_sizes
        ]

    @property
    def given_to_losses(self) -> list[Count]:
        """What the model has given to losses, of the inputs alone: labels, and weights made of them."""
        return list(self._given_to_losses)

    def terms(self, loss: Any) -> tuple[Term, ...] | None:
        """The terms of a loss; None: it was not made by functions of torch's, or is no sum over samples."""
        known = self._of(loss)
        return known.terms or None if isinstance(known, _OfModel) else None

    def coupling_of(self, tensor: Tensor) -> str:
        """How samples were put together in what the model computed; "": they were not, as far as known."""
        known = self._of(tensor)
        return _why([(tensor, known)]) if isinstance(known, _OfModel) else ""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = with_lost_weight(function, kwargs or {})
        name = function_name(function)
        self._overwritten = None
        if args and _writes(name):
            self._keep_values(args[0])
            one = args[0]
            is_constant = isinstance(one, Tensor) and one.numel() <= _MAX_CONSTANT and self._of(one) is None
            self._overwritten = one.detach().clone() if is_constant else None
        result = function(*args, **kwargs)
        if name in _MAKING_ZERO and not result.dim():
            self._zero[id(result)] = weakref.ref(result)
            return result
        self._tracker.follow(function, name, args, kwargs, result)
        found = self._follow(function, name, args, kwargs, result)
        if args and _writes(name):
            self._zero.pop(id(args[0]), None)
        return result if found is None else found

    # Where tensors come from.

    def samples_of(self, tensor: Tensor) -> SampleDim | None:
        """Where a tensor holds samples; None: nowhere, or that is not known."""
        return self._tracker.of(tensor)

    def is_computed(self, tensor: Tensor) -> bool:
        """Whether a model computed it, as far as known."""
        return isinstance(self._of(tensor), _OfModel)

    def is_of_parameters(self, tensor: Tensor) -> bool:
        """Whether it is made of parameters alone, and not for each sample, as far as known."""
        return self.is_made_of_parameters(tensor) and self.samples_of(tensor) is None

    def of_inputs(self, tensor: Tensor) -> Count | None:
        """What makes a tensor of the inputs alone; None: it is made otherwise, as far as known."""
        known = self._of(tensor)
        return known if isinstance(known, Count) else None

    def is_of_inputs(self, tensor: Tensor) -> bool:
        """Whether it is made of the inputs alone, as far as known."""
        return isinstance(self._of(tensor), Count)

    def is_made_of_parameters(self, tensor: Tensor) -> bool:
        """Whether it is made of parameters alone, as far as known."""
        return self._of(tensor) is nn.Parameter

    # What is known of tensors.

    def _note(self, tensor: Any, what: Any) -> None:
        if isinstance(tensor, Tensor):
            self._known[id(tensor)] = weakref.ref(tensor), what
        elif isinstance(tensor, list | tuple):
            for one in tensor:
                self._note(one, what)

    def _of(self, tensor: Any) -> Any:
        """A :class:`Count`, an :class:`_OfModel`, ``nn.Parameter`` for what only depends on parameters, or None."""
        reference, what = self._known.get(id(tensor), (None, None))
        if reference is not None and reference() is tensor:
            return what
        if isinstance(tensor, MadeWhenRead):  # to ask it for more would make its values
            held = tensor.held()
            if held is None:
                return None
            known = self._of(held)
            if known is not None and held.shape[:-1] != tensor.shape[:-1]:
                # A shard of sequences has another number of elements on each rank.
                return _ITEMS._replace(why=known.why if isinstance(known, _OfModel) else "")
            return known
        if self._is_made_zero(tensor):
            return None
        if isinstance(tensor, nn.Parameter) or (tensor.requires_grad and tensor.is_leaf):
            return nn.Parameter
        for leaf, count in self._entries:
            # The values of an input that is copied when it is read.
            if isinstance(leaf, MadeWhenRead) and leaf.held() is tensor:
                return count
        if tensor.requires_grad and not tensor.is_leaf:
            return _ITEMS  # made by what is no function of torch's
        return None

    def _count(self, function: Any, *args: Any, **kwargs: Any) -> Count:
        """One object for equal counts."""
        try:
            key = function, _key(args), _key(kwargs)
            return self._counts.setdefault(key, Count(function, args, kwargs))
        except TypeError:  # an argument that cannot be hashed
            return Count(function, args, kwargs)

    # Calls.

    def _follow(self, function: Any, name: str, args: Any, kwargs: Any, result: Any) -> Any:
        given = list(tensors_of((args, kwargs)))
        known = [self._of(tensor) for tensor in given]
        models = [(tensor, what) for tensor, what in zip(given, known, strict=True) if isinstance(what, _OfModel)]
        if name in SIZES or (name == "len" and models):
            return self._sizes(name, args, kwargs, result, known[0] if known else None)
        if name in _FROM_PYTHON and not known and self._reads_model and not _has_traced((args, kwargs)):
            if result.dim() and not result.is_floating_point():
                # Indices that a script computes of outputs, by scipy's assignment of boxes for example.
                self._note(result, _OfModel(is_observed=True))
            return None
        if name == "iter":
            return iter(self._rows_of(args[0], list(result), known[0]))
        if name == "expand_as" and isinstance(known[0], Count) and len(given) == 2 and models:
            sizes = self._expanded(*given)
            if sizes is not None:
                self._note(result, self._count(Tensor.expand, known[0], *sizes))
                return None
        if name == _FUSED_LOSS and not models and isinstance(known[0], Count) and nn.Parameter in known:
            models = [(given[0], _OfModel(known[0]))]  # its logits are made with parameters
        if models:
            self._of_model(function, name, args, kwargs, result, models)
            return None
        counts = [what for what in known if isinstance(what, Count)]
        if any(what is nn.Parameter for what in known):
            self._note(result, _ITEMS if counts else nn.Parameter)
            return None
        if not counts and not _has_traced((args, kwargs)):
            return None
        big = any(tensor.numel() > _MAX_CONSTANT for tensor, what in zip(given, known, strict=True) if what is None)
        if big or name.startswith(_RANDOM):
            self._note(args[0] if name.endswith("_") and args else result, _ITEMS)
            return None
        return self._of_inputs(function, name, args, kwargs, result)

    def _expanded(self, tensor: Tensor, like: Tensor) -> list[int] | None:
        """The sizes to expand an input to, if its samples stay where they are; -1: as they are."""
        samples, extra = self.samples_of(tensor), like.dim() - tensor.dim()
        if samples is None or samples.dim + extra != getattr(self.samples_of(like), "dim", None):
            return None
        own = [0] * extra + list(tensor.shape)
        return [-1 if before == after else after for before, after in zip(own, like.shape, strict=True)]

    def _rows_of(self, tensor: Tensor, rows: list[Tensor], known: Any) -> list[Tensor]:
        """The rows of a tensor that is iterated over."""
        samples = self.samples_of(tensor)
        for index, row in enumerate(rows):
            is_inside = samples is not None and samples.dim
            self._tracker.hold(row, samples._replace(dim=samples.dim - 1) if samples and is_inside else None)
            if isinstance(known, Count):
                self._note(row, self._count(row_of, known, index))
            elif isinstance(known, _OfModel):
                self._note(row, self._row_of(tensor, known, index))
        return rows

    def _row_of(self, tensor: Tensor, what: _OfModel, index: int) -> _OfModel:
        """One row of a tensor: of one sample, if its rows are the samples."""
        samples = self.samples_of(tensor)
        if what.numel is not None and what.numel.function is single:
            return what
        are_rows = not what.is_stack if samples is None else samples.dim == 0
        if what.terms is not None or not are_rows or tensor.shape[0] != self._num_samples:
            return what
        return _OfModel(self._count(single, index % len(tensor)), why=what.why, divided=what.divided)

    def _sizes(self, name: str, args: Any, kwargs: Any, result: Any, known: Any) -> Any:
        tensor = args[0]
        is_chosen = isinstance(known, _OfModel) and known.numel is not None
        self.has_read |= name in ("len", "numel", "nelement") or is_chosen
        if isinstance(known, Count):
            if name in ("numel", "nelement"):
                return self._read(result, self._count(numel, known))
            if isinstance(result, int):
                dim = args[1] if len(args) > 1 else kwargs["dim"]
                return self._read(result, self._count(size, known, int(dim)))
            return torch.Size([self._read(one, self._count(size, known, dim)) for dim, one in enumerate(result)])
        chosen = self._chosen_rows(tensor, known) if isinstance(known, _OfModel) else None
        if chosen is not None:
            if name == "len":
                self._numbers.append((result, chosen))
                self._read(result, chosen)
                return None
            if isinstance(result, torch.Size):
                return torch.Size([self._read(result[0], chosen), *result[1:]])
            if name in ("numel", "nelement") and tensor.dim() == 1:
                return self._read(result, chosen)
            if isinstance(result, int) and name == "size" and (args[1:] or (kwargs["dim"],))[0] == 0:
                return self._read(result, chosen)
        if isinstance(known, _OfModel) and self.in_criterion and tensor.dim() and len(tensor) == self._num_samples:
            if name == "len":
                self._numbers.append((result, self._rows))
                return None
            if isinstance(result, int) and name == "size" and (args[1:] or (kwargs["dim"],))[0] == 0:
                return traced(result, self._rows)
            if isinstance(result, torch.Size):
                return torch.Size([traced(result[0], self._rows), *result[1:]])
            if name in ("numel", "nelement"):
                return traced(result, (known.numel and self._count(numel, known.numel)) or self._rows)
        return None

    def _chosen_rows(self, tensor: Tensor, known: _OfModel) -> Count | None:
        """How many rows a criterion has chosen by the inputs; None: that does not show."""
        if not self.in_criterion or known.numel is None or not tensor.dim() or known.numel.function is single:
            return None
        try:
            made = known.numel.of(self._tree, self._num_samples)
        except Exception:  # any operation of the script's, on inputs of another form
            return None
        is_alike = isinstance(made, Tensor) and made.dim() == 1 and len(made) == len(tensor)
        return self._count(size, known.numel, 0) if is_alike else None

    def _of_inputs(self, function: Any, name: str, args: Any, kwargs: Any, result: Any) -> Any:
        is_product = self.in_criterion and (name in _MULTIPLYING or name in _DIVIDING)
        args = self._open_sizes(name, args)
        spec = self._spec(tuple(map(self._read_before, args)) if is_product else args), self._spec(kwargs)
        writes = _writes(name)
        if writes and isinstance(args[0], Tensor):
            first = spec[0][0] if self._overwritten is None else Constant(self._overwritten, self._num_samples)
            self._note(args[0], self._count(written, function, first, *spec[0][1:], **spec[1]))
            return None
        is_number = name == "getitem" and isinstance(result, Tensor) and not result.dim()
        if (is_number or name == "unbind") and _is_of_values(spec[0][0]):
            # Each is a number, by which a script may loop over those that are there.
            self.has_read = self.has_branched = self.loops_over_values = True
            return None
        if name == "to" and any(isinstance(one, Tensor) for one in args[1:]):
            spec = (spec[0][0], args[1].dtype), {}
        count = self._count(function, *spec[0], **spec[1])
        if name in _PLAIN_NUMBERS and isinstance(result, int | float):
            self.has_read = True
            if isinstance(result, bool):
                self._branch(spec[0][0], result)
                return None
            what = self._count(number, spec[0][0]) if name != "len" else self._count(size, spec[0][0], 0)
            self._numbers.append((result, what))
            found = self._read(result, what)
            return found if name == "item" else None
        if isinstance(result, Tensor):
            self._note(result, count)
            if not result.dim():
                self._single.add(count)
        elif isinstance(result, list | tuple):
            for index, one in enumerate(result):
                if isinstance(one, Tensor):
                    self._note(one, self._count(_entry_of, count, index))
        else:
            if name in _PLAIN_ARRAYS and isinstance(spec[0][0], Count):
                self.has_read = self.has_branched = True
                self._applied[self._count(_in_order, spec[0][0])] = None
            return traced(result, count)
        return None

    def _open_sizes(self, name: str, args: Any) -> Any:
        """The arguments of a change of shape without a first size, which other samples, or longer ones, may not have.

        Plain numbers (``B, T, C = logits.shape``, ``len(out)``) carry no sign of what they are.
        """
        if name not in ("view", "reshape", "expand") or len(args) < 2:
            return args
        tensor, *sizes = args
        sizes = list(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else sizes
        if not sizes or not isinstance(sizes[0], int) or sizes[0] <= 0:
            return args
        if name == "expand":
            is_kept = len(sizes) == tensor.dim() and tensor.shape[:1] == (sizes[0],)
            return (tensor, -1, *sizes[1:]) if is_kept else args
        if -1 not in sizes:
            return tensor, -1, *sizes[1:]
        is_rows = type(sizes[0]) is int and sizes[0] == self._num_samples
        return (tensor, traced(sizes[0], self._rows), *sizes[1:]) if is_rows else args

    def _read_before(self, value: Any) -> Any:
        """A plain number with the count that it is taken for, as in ``w / w.sum() * len(w)``; else the value."""
        if (
            isinstance(value, TracedInt | TracedFloat)
            and function_name(value.count.function) in _MULTIPLYING | _DIVIDING
        ):
            parts = [count_of(self._read_before(one)) for one in value.count.args]
            return traced(value, self._count(value.count.function, *parts))
        is_constant = self._is_constant_factor(is_divisor=False)
        found = self._number_like(value, is_constant=is_constant) if type(value) in (int, float) else None
        return value if found is None else traced(value, found)

    def _read(self, value: Any, count: Count) -> Any:
        """A number that the script gets of a count."""
        count.is_read = True
        if value == 0:
            self._is_zero(count)
        return traced(value, count)

    def _is_zero(self, count: Count) -> None:
        self.is_empty = True
        if count not in self._zeros:
            self._zeros.append(count)

    def _branch(self, condition: Any, outcome: bool) -> None:
        """The script branches by a tensor: by a count that it compares with a number, or by whether there is any."""
        if not isinstance(condition, Count) or not condition.args or not isinstance(condition.args[0], Count):
            return
        name, inner = function_name(condition.function), condition.args[0]
        self.has_branched = True
        if name == "any":
            self.is_empty |= not outcome
        elif len(condition.args) == 2 and isinstance(condition.args[1], int | float):
            inner.compared(name, condition.args[1], outcome)
            inner.is_read = True
            value = inner.of(self._tree, self._num_samples)
            if isinstance(value, Tensor) and value.numel() == 1 and not bool(value):
                self._is_zero(inner)

    def _spec(self, value: Any) -> Any:
        """``value`` with counts in the place of what depends on the inputs."""
        if isinstance(value, Tensor):
            known = self._of(value)
            return known if isinstance(known, Count) else Constant(value, self._num_samples)
        if isinstance(value, torch.device):
            return SAME_DEVICE
        if isinstance(value, slice):
            return slice(*self._spec((value.start, value.stop, value.step)))
        if isinstance(value, dict):
            return {name: self._spec(one) for name, one in value.items()}
        if isinstance(value, list | tuple):
            return (tuple if isinstance(value, tuple) else list)(self._spec(one) for one in value)
        if isinstance(value, TracedInt | TracedFloat):
            self._single.add(value.count)
        return count_of(value)

    # Calls on what the model computed.

    def _of_model(
        self, function: Any, name: str, args: Any, kwargs: Any, result: Any, models: list[tuple[Tensor, _OfModel]]
    ) -> None:
        if self.in_criterion:
            self._note_applied(self._applied, args, kwargs)
        if function is torch.autograd.grad:
            self._derivatives(args, kwargs, result, models)
            return
        if not isinstance(result, Tensor):
            self._reads_model |= name in _PLAIN_ARRAYS
            if isinstance(result, list | tuple) and name not in _PLAIN_ARRAYS:
                tensor, what = models[0]
                samples, dim = self.samples_of(tensor), (args[1:] or (kwargs.get("dim", 0),))[0]
                if name == "unbind" and (dim == 0 or (samples is not None and dim % tensor.dim() == samples.dim)):
                    self._rows_of(tensor if dim == 0 else tensor.detach().movedim(dim, 0), list(result), what)
                elif what.terms is None:
                    for index, one in enumerate(tensors_of(result)):
                        self._note(one, self._one_of(name, tensor, index, one, what))
                else:
                    for one in result:
                        self._note(one, self._unlinear(name, models, one))
            return
        if writes_to := _writes(name):
            name = name.strip("_")
        reductions = _reduction_of(function, args, kwargs)
        with_samples = [(tensor, what) for tensor, what in models if what.terms is None]
        made = self._tracker.made(result)
        order = f"{name} over the samples" if self.in_criterion and made.is_over and name in _ORDERING else ""
        divided = self._divided_of(name, args, kwargs, result, with_samples) if reductions is None else ()
        if reductions is not None:
            found = self._loss(name, reductions, result, models)
            if not self.in_criterion:
                self._note_applied(self._given_to_losses, args, kwargs)
        elif not with_samples:
            found = self._without_samples(function, name, args, kwargs, result, models)
        elif made.is_gone and name not in _REDUCING and (made.is_sum or order or not self.in_criterion):
            # A criterion is also tried on halves of the samples.
            is_sum = made.is_sum and len(with_samples) == len(models)
            why = _why(models) or order or ("" if is_sum else f"{name} of the samples")
            found = _OfModel(terms=(self._term((), result, why, divided=divided),))
        elif len(with_samples) < len(models):
            mixed = not all(what.terms == () or what.terms is None for _, what in models)
            # In the model it is as in batch normalisation: each micro-batch has its own statistics.
            why = f"{name} of samples and of a sum over them" if mixed and self.in_criterion else ""
            found = self._items(name, args, result, with_samples)
            why = found.why or (_why(models) if self.in_criterion else "") or why
            found = found._replace(why=why or ("" if self.in_criterion else made.why))
        elif name in _REDUCING:
            found = self._reduced(name, args, kwargs, result, models[0][0], models[0][1]._replace(divided=divided))
        elif result.dim() == 0 and name in _TO_SCALAR:
            found = _OfModel(terms=(self._term((), result, _why(models), divided=divided),))
        else:
            found = self._items(name, args, result, with_samples)
            found = found._replace(why=found.why or order or ("" if self.in_criterion else made.why))
        if divided and found.terms is None:
            found = found._replace(divided=divided)
        row = self._row_alone(models) if self.in_criterion else None
        found = found if row is None else self._of_one_row(found, row, models, result)
        self._note(args[0] if writes_to and name == "setitem" else result, found)

    def _row_alone(self, models: list[tuple[Tensor, _OfModel]]) -> Count | None:
        """The one sample that tensors are of; None: they are of several."""
        rows = {
            id(row): row
            for _, what in models
            for row in ([what.numel] if what.terms is None else [term.row for term in what.terms] or [None])
        }
        (row, *others) = rows.values()
        return row if row is not None and row.function is single and not others else None

    def _of_one_row(
        self, found: _OfModel, row: Count, models: list[tuple[Tensor, _OfModel]], result: Tensor
    ) -> _OfModel:
        """What a function makes of one sample alone is of that sample, whatever it makes of it: an item, or its sum."""
        why = _why(models)
        is_other = not why and any(term.why for term in found.terms or ())
        if found.terms is None or (is_other and result.dim()):
            return found._replace(numel=row, is_observed=False, terms=None, why=why)
        terms = (self._term((), result, ""),) if is_other else found.terms
        return found._replace(terms=tuple(term._replace(row=row) for term in terms))

    def _note_applied(self, noted: dict[Count, None], args: Any, kwargs: Any) -> None:
        for value in (*tensors_of((args, kwargs)), *args, *kwargs.values()):
            known = self._of(value) if isinstance(value, Tensor) else count_of(value)
            if isinstance(known, Count):
                noted[known] = None

    def _divided_of(
        self, name: str, args: Any, kwargs: Any, result: Any, models: list[tuple[Tensor, _OfModel]]
    ) -> tuple[TermFactor, ...]:
        """The numbers of the batch that every element of a result was divided by or multiplied with.

        They are followed through functions that are linear in the elements, up to the sum over these.
        """
        carried = [what.divided for _, what in models]
        if not carried:
            return ()
        if name in _MULTIPLYING or name in _DIVIDING:
            operands = [*args[:2], *(kwargs[key] for key in ("other",) if key in kwargs)]
            if len(operands) != 2 or kwargs.get("rounding_mode"):
                return ()
            if name not in _DIVIDING:
                return _product(self._of_each(operands[0]), self._of_each(operands[1]))
            known = self._of(operands[1]) if isinstance(operands[1], Tensor) else None
            if isinstance(known, _OfModel) and known.divided:
                return ()
            return _product(self._of_each(operands[0]), self._of_each(operands[1], -1))
        if name in _PRODUCTS or name in _TO_SCALAR or name == "einsum":
            found: tuple[TermFactor, ...] = ()
            for tensor in tensors_of(args):
                found = _product(found, self._of_each(tensor))
            return found if len(carried) == 1 or not any(carried) else ()
        if name in _KEEPING or name in _REDUCING or name in ("masked_select", *_DIVIDING_IN_PARTS):
            return carried[0] if len(carried) == 1 else ()
        if name in _ADDING or name in _JOINING:
            parts = args[0] if name in _JOINING and args else args[:2]
            is_all = len(parts) == len(models) and len({_powers(one) for one in carried}) == 1
            return carried[0] if is_all else ()
        if name == "masked_fill":
            return carried[0] if len(carried) == 1 and args[2:] in ((0,), (0.0,)) else ()
        if name == "where":
            is_zero = len(args) == 3 and any(type(one) in (int, float) and one == 0 for one in args[1:])
            return carried[0] if len(carried) == 1 and is_zero else ()
        return ()

    def _of_each(self, value: Any, power: int = 1) -> tuple[TermFactor, ...]:
        """The same of what elements are multiplied with (power 1) or divided by (-1)."""
        if isinstance(value, TracedInt | TracedFloat):
            return (TermFactor(value.count, power),)
        if power < 0 and self.in_criterion and type(value) in (int, float):
            # In a model, where nothing tries again, it is taken for a constant.
            found = self._number_like(value, is_constant=False)
            return () if found is None else (TermFactor(found, power),)
        known = self._of(value) if isinstance(value, Tensor) else None
        if isinstance(known, _OfModel):
            return known.divided
        return self._factors_of(known, power) if isinstance(known, Count) else ()

    def _factors_of(self, count: Count, power: int) -> tuple[TermFactor, ...]:
        """The single numbers in a product of what depends on the inputs."""
        name, inner = function_name(count.function), count.args
        is_product = (name in _MULTIPLYING or name in _DIVIDING or name == "rdiv") and len(inner) == 2
        is_product &= not count.kwargs
        if count in self._single:
            self._single.update(one for one in inner if is_product and isinstance(one, Count))
            if name == "mean" and len(inner) == 1 and not count.kwargs and isinstance(inner[0], Count):
                both = self._count(torch.sum, inner[0]), self._count(numel, inner[0])
                return TermFactor(both[0], power), TermFactor(both[1], -power)
            if not is_product:
                return (TermFactor(count, power),)
        if name in _KEEPING and name not in _REDUCING and inner and isinstance(inner[0], Count):
            return self._factors_of(inner[0], power)
        if is_product:
            dividend, divisor = inner[::-1] if name == "rdiv" else inner
            powers = power, power if name in _MULTIPLYING else -power
            parts = zip((dividend, divisor), powers, strict=True)
            return _product(*(self._factors_of(one, own) if isinstance(one, Count) else () for one, own in parts))
        return ()

    def _one_of(self, name: str, tensor: Tensor, index: int, result: Tensor, what: _OfModel) -> _OfModel:
        """Of one of several tensors that a function made of one with samples."""
        made, samples = self._tracker.made(result), self.samples_of(tensor)
        if samples is not None and samples.rows == 1 and name in _DIVIDING_IN_PARTS:
            is_row = tensor.shape[samples.dim] == self._num_samples > 1 == result.shape[samples.dim]
            what = what._replace(numel=self._count(single, index)) if is_row else what
        if self.in_criterion:
            is_order = made.is_over and name in _ORDERING
            return what._replace(why=what.why or f"{name} over the samples") if is_order else what
        if made.is_gone:
            return _OfModel(terms=(self._term((), result, what.why or f"{name} of the samples"),))
        return what._replace(why=what.why or made.why)

    def _derivatives(self, args: Any, kwargs: Any, result: Any, models: list[tuple[Tensor, _OfModel]]) -> None:
        """Of ``torch.autograd.grad``.

        By what has samples, the derivative of a sum over them has samples, too: each one's own (forces, gradient
        penalties). That of a mean depends on their number, and that by parameters is a sum over them.
        """
        inputs = args[1] if len(args) > 1 else kwargs["inputs"]
        factors = [factor for _, what in models for term in what.terms or () for factor in term.factors or ()]
        why = _why(models) or ("derivative of a mean over samples" if factors else "")
        for tensor, made in zip(inputs if type(inputs) in (list, tuple) else [inputs], result, strict=True):
            known = self._of(tensor) if isinstance(tensor, Tensor) else None
            if isinstance(known, Count):
                self._note(made, _OfModel(known, why=why))
            elif isinstance(known, _OfModel) and known.terms is None:
                self._note(made, known._replace(why=why))
            else:
                self._note(made, self._unlinear("derivative by parameters", models, made))

    def _items(self, name: str, args: Any, result: Tensor, models: list[tuple[Tensor, _OfModel]]) -> _OfModel:
        """A tensor that still has samples."""
        why = _why(models)
        rows = self._num_samples
        apart = {id(what.numel) for _, what in models if what.numel is not None and what.numel.function is single}
        if len(apart) > 1 and name not in _JOINING and not self.in_criterion:
            why = why or f"{name} of samples with others"
        is_pair = self._tracker.made(result).samples is None and name in _PRODUCTS and len(models) == 2
        if is_pair and result.shape == (rows, rows):
            why = why or f"{name} of each sample with each other"
        if name == "getitem":
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if isinstance(index[0], int) and models[0][0] is args[0]:
                return self._row_of(args[0], models[0][1]._replace(why=why), index[0])
            if isinstance(index[0], slice) and models[0][0] is args[0] and result.dim() and len(result) == 1:
                samples, start = self.samples_of(args[0]), index[0].indices(len(args[0]))[0]
                if samples is not None and samples.dim == 0 and len(args[0]) > 1:
                    return self._row_of(args[0], models[0][1]._replace(why=why), start)
            for one in index:
                if isinstance(one, Tensor) and one.dim():
                    known = self._of(one)
                    if not isinstance(known, Count):
                        return _OfModel(is_observed=True, why=why)
                    chosen = self._count(_chosen, known) if one.dtype in (torch.bool, torch.uint8) else known
                    return _OfModel(chosen, why=why)
        if name == "masked_select":
            known = self._of(args[1])
            if isinstance(known, Count):
                return _OfModel(self._count(_chosen, known), why=why)
            return _OfModel(is_observed=True, why=why)
        if name in _JOINING:
            self._join_rows(name, args, result, models)
        is_all = name in _JOINING and len(list(tensors_of(args))) == len(models)
        joined = self._joined_items(models) if is_all else None
        if joined is not None:
            return _OfModel(joined, is_stack=True, why=why)
        numels = [what.numel for tensor, what in models if what.numel and tensor.numel() == result.numel()]
        for tensor in tensors_of(args):
            known = self._of(tensor)
            if isinstance(known, Count) and tensor.numel() == result.numel() and tensor.dim():
                numels.insert(0, known)
        is_observed = any(what.is_observed for _, what in models) and not numels
        numel_of_all = models[0][1].numel
        if numel_of_all and not numels and len(apart) == 1 and all(id(what.numel) in apart for _, what in models):
            numels.append(numel_of_all)  # of one sample
        return _OfModel(numels[0] if numels else None, is_observed, is_stack=name in _JOINING, why=why)

    def _join_rows(self, name: str, args: Any, result: Tensor, models: list[tuple[Tensor, _OfModel]]) -> None:
        """Note where a tensor has the samples that a script has put together again, one by one."""
        indices = [what.numel.args[0] if what.numel and what.numel.function is single else None for _, what in models]
        if name not in ("stack", "cat") or indices != list(range(self._num_samples)) or len(indices) != len(args[0]):
            return
        dim = (args[1] if len(args) > 1 else 0) % result.dim()
        self._tracker.hold(result, samples_at(dim, result.shape, self._num_samples))

    def _joined_items(self, models: list[tuple[Tensor, _OfModel]]) -> Count | None:
        """What is proportional to the elements of joined tensors, of which the inputs choose some samples' each."""
        counts = [what.numel for _, what in models if what.numel is not None and what.numel.function is not single]
        if len(counts) < len(models):
            return None
        try:
            sizes = [int(one.of(self._tree, self._num_samples).numel()) for one in counts]
        except Exception:  # any operation of the script's, on inputs of another form
            return None
        # A tensor may have several elements for each one that is counted; one without any, those of its rows.
        scales = [
            tensor.numel() // size if size else math.prod(tensor.shape[1:])
            for (tensor, _), size in zip(models, sizes, strict=True)
        ]
        return self._count(_room, [self._count(numel, one) for one in counts], scales)

    def _term(
        self,
        factors: tuple[TermFactor, ...],
        value: Tensor,
        why: str,
        natural: Count | None = None,
        divided: tuple[TermFactor, ...] = (),
    ) -> Term:
        """``divided``: what its elements were divided by before they were added up."""
        made = self._value_of(value)
        in_model = not self.in_criterion
        return Term(_product(divided, factors), made, why, natural, in_model=in_model, is_of_parts=bool(divided))

    def _value_of(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Gives what a tensor holds now, also when it was written to in place (``loss += other``)."""
        held = [tensor]
        self._held.setdefault(id(tensor), []).append(held)
        return lambda: held[0]

    def _keep_values(self, tensor: Any) -> None:
        """Keep what a tensor holds, before it is written to."""
        holders = self._held.pop(id(tensor), ())
        if holders:
            kept = tensor.clone()
            for held in holders:
                held[0] = kept

    def _num_items(self, tensor: Tensor, what: _OfModel) -> TermFactor:
        """The number of a tensor's elements, as what a mean divides by."""
        if what.is_observed:
            return TermFactor(self._rows, -1, True, tensor.numel())
        if what.numel is not None and what.numel.function is single:
            return TermFactor(what.numel, -1)
        return TermFactor(self._rows if what.numel is None else self._total_of(self._count(numel, what.numel)), -1)

    def _reduced(self, name: str, args: Any, kwargs: Any, result: Tensor, tensor: Tensor, what: _OfModel) -> _OfModel:
        dims = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else None))
        if isinstance(dims, torch.dtype):
            dims = None
        listed = range(tensor.dim()) if dims is None or dims == () else [dims] if isinstance(dims, int) else dims
        over = {dim % tensor.dim() for dim in listed} if tensor.dim() else {0}
        is_chosen = what.numel is not None and what.numel.function is _chosen
        if self.samples_of(tensor) is not None:
            if not self._tracker.made(result).is_gone:
                return _OfModel(what.numel if is_chosen else self._rows_in(tensor, what, over), why=what.why)
        elif len(over) < max(tensor.dim(), 1):
            rows = tensor.shape[0]
            # Rows are samples, or all tokens of all samples; of a tensor with more dimensions they may be experts.
            are_items = rows == self._num_samples or (tensor.dim() == 2 and rows % self._num_samples == 0)
            if 0 not in over or what.is_stack or not are_items:
                # Of rows that a mask selects, of which there may be none.
                kept = what.numel if is_chosen and 0 not in over else self._rows_in(tensor, what, over)
                return _OfModel(kept, what.is_observed and 0 not in over, why=what.why)
        factors = (self._num_items(tensor, what),) if name == "mean" else ()
        return _OfModel(terms=(self._term(factors, result, what.why, divided=what.divided),))

    def _rows_in(self, tensor: Tensor, what: _OfModel, over: set[int]) -> Count | None:
        """As many elements as the inputs have rows in what a tensor is made of, if they are others than samples."""
        rows = tensor.shape[0]
        if what.numel is None or 0 in over or rows == self._num_samples or what.numel.function is single:
            return None
        try:
            made = what.numel.of(self._tree, self._num_samples)
        except Exception:  # any operation of the script's, on inputs of another form
            return None
        if not isinstance(made, Tensor) or made.shape[:1] != (rows,):
            return None
        return self._count(_room, [self._count(size, what.numel, 0)], [1])

    def _loss(self, name: str, call: "_LossCall", result: Tensor, models: list[tuple[Tensor, _OfModel]]) -> _OfModel:
        """Of one of torch's losses."""
        why = _why(models)
        if call.head is not None and not self.in_criterion:
            why = why or self._tracker.made(result).why
        if any(what.terms is not None for _, what in models):
            why = why or f"{name} of a sum over samples"
        target, of_input = call.target, next((what for tensor, what in models if tensor is call.input), models[0][1])
        known = self._of(target) if isinstance(target, Tensor) else None
        factor = None
        is_classes = name in _CLASS_LOSSES and isinstance(target, Tensor) and not target.is_floating_point()
        is_of_row = of_input.numel is not None and of_input.numel.function is single
        if is_classes and isinstance(known, Count):
            weight = None if call.weight is None else self._spec(call.weight)
            counted = self._count(counted_targets, known, call.ignore_index, weight)
            factor = TermFactor(self._count(of_row, counted) if is_of_row else counted, -1)
        elif is_classes and isinstance(known, _OfModel):
            seen = counted_targets(target, call.ignore_index, call.weight)
            factor = TermFactor(self._rows, -1, True, seen)
        classes = call.input.shape[1:] if call.head is None else call.head.shape[:-1]
        if is_classes and target.dim() == 1 and len(target) > 1 and classes == target.shape:
            from_batch = isinstance(known, Count) and not known.is_of_sizes
            if not from_batch and torch.equal(target, torch.arange(len(target), device=target.device)):
                why = why or "classes that are the samples themselves"
        if call.reduction == "none":
            return self._items(name, (call.input, target), result, [(call.input, of_input._replace(why=why))])
        samples = self.samples_of(call.input)
        if call.is_batch_mean and samples is not None and samples.dim:
            # What it divides by is no number of samples.
            return _OfModel(terms=(self._term((), result, why)._replace(adds_up=True),))
        if call.reduction == "mean" and call.weight is not None and name in _OF_WEIGHTS:
            factor = self._weight_of(call.weight)
        if name == "ctc_loss" and not of_input.is_observed:
            factor = TermFactor(self._rows, -1)
        if factor is None:
            elementwise = isinstance(known, Count) and (not is_classes and name not in _OF_ROWS)
            if elementwise and target.numel() >= call.input.numel():
                elements = self._total_of(self._count(numel, known))
                factor = TermFactor(self._count(of_row, elements) if is_of_row else elements, -1)
            else:
                factor = self._num_items(call.input, of_input)
        if call.reduction == "sum":
            natural = factor.count if is_classes and not factor.is_observed else None
            return _OfModel(terms=(self._term((), result, why, natural)._replace(adds_up=True),))
        return _OfModel(terms=(self._term((factor,), result, why),))

    def _weight_of(self, weight: Any) -> TermFactor | None:
        """What a mean with weights of elements divides by."""
        known = self._of(weight)
        if isinstance(known, Count):
            return TermFactor(self._count(torch.sum, known), -1)
        return TermFactor(self._rows, -1, True, weight.detach().sum()) if isinstance(known, _OfModel) else None

    def _unlinear(self, name: str, models: list[tuple[Tensor, _OfModel]], result: Any) -> _OfModel:
        why = _why(models) or f"{name} of a sum over samples"
        in_model = any(term.in_model for _, what in models for term in what.terms or ())
        return _OfModel(terms=(Term((TermFactor(self._rows, -1),), self._value_of(result), why, in_model=in_model),))

    def _without_samples(
        self, function: Any, name: str, args: Any, kwargs: Any, result: Tensor, models: list[tuple[Tensor, _OfModel]]
    ) -> _OfModel:
        """Of tensors that are sums over samples."""
        tensor, what = models[0]
        terms = what.terms or ()
        # Means of each sample are averaged over samples.
        self._counts_lists = not any(term.row is not None and term.factors for term in terms)

        def keeps(of: Sequence[Term], factors: tuple[TermFactor, ...] = ()) -> _OfModel:
            """The function is linear in the tensor."""

            def term(one: Term) -> Term:
                made = _once(lambda: function(*_with(args, tensor, one.make()), **_with(kwargs, tensor, one.make())))
                all_factors = None if one.factors is None else _product(one.factors, factors)
                return one._replace(factors=all_factors, make=made)

            return _OfModel(terms=tuple(map(term, of)))

        if name == "getitem" and any(isinstance(self._of(one), Count) for one in tensors_of(args[1:])):
            return self._unlinear(name, models, result)  # as a mean over the tasks that have samples
        if name == "mean" and len(models) == 1 and self._may_lack_groups(terms):
            return self._unlinear("mean over the groups that are there,", models, result)
        if name in _KEEPING and len(models) == 1:
            is_mean = name == "mean" and tensor.numel() == self._num_samples and self._are_of_each_row(terms)
            return keeps(terms, (TermFactor(self._rows, -1),) if is_mean else ())
        are_weighted = all(one is tensor or self._is_constant(one) for one in tensors_of((args, kwargs)))
        if (name in _PRODUCTS | _TO_SCALAR or name == "einsum") and len(models) == 1 and are_weighted:
            return keeps(terms)  # that a script has stacked
        if name in _JOINING:
            return self._joined(function, args, kwargs, models)
        operands = [*args[:2], *(kwargs[key] for key in ("other",) if key in kwargs)]
        if len(operands) != 2 or any(key not in ("other", "alpha") for key in kwargs):
            return self._unlinear(name, models, result)
        others = [one for one in operands if one is not tensor]
        if name in _ADDING:
            return self._added(function, name, operands, kwargs, result, models)
        if len(models) == 1 and len(others) == 1:
            other = others[0]
            is_divisor = name in _DIVIDING
            limit = self._limited_by(other, terms) if is_divisor and operands[0] is tensor else None
            if limit is not None:
                return keeps(terms, (TermFactor(limit, -1),))
            if (name in _MULTIPLYING or (is_divisor and operands[0] is tensor)) and self._is_constant(
                other, is_divisor
            ):
                is_mean = is_divisor and self._may_be_rows(other) and not any(term.factors for term in terms)
                # What a script has counted unseen looks like any number.
                times_rows = not is_divisor and self._is_number_of_rows(other)
                kept = [
                    term._replace(
                        adds_up=term.adds_up and not is_divisor,
                        is_times_rows=(term.is_times_rows or (times_rows and bool(term.factors)))
                        and not (is_divisor and self._may_be_rows(other)),
                    )
                    for term in terms
                ]
                return keeps(kept, (TermFactor(self._rows, -1),) if is_mean else ())
            apart = self._divided_apart(terms, other) if is_divisor and operands[0] is tensor else None
            if apart is not None and result.shape == other.shape == tensor.shape:
                return apart
            factor = self._divisor(other) if is_divisor else self._factor(other, 1)
            if factor is not None and (name in _MULTIPLYING or (is_divisor and operands[0] is tensor)):
                return keeps(terms, (factor,))
        if name in _DIVIDING and len(models) == 2:
            divisor = models[1][0]
            if divisor is operands[1] and divisor.numel() == 1 and not divisor.requires_grad:
                return keeps(terms, (TermFactor(self._rows, -1, True, divisor.detach()),))
        return self._unlinear(name, models, result)

    def _may_lack_groups(self, terms: Sequence[Term]) -> bool:
        """Whether terms are of groups of samples, as of classes, which the script leaves out where there are none."""
        if len(terms) < 2 or not (self.has_branched or self.loops_over_values):
            return False
        divisors = [[one.count for one in term.factors or () if one.power < 0] for term in terms]
        families = {tuple(one.family for one in of_term) for of_term in divisors}
        signatures = {tuple(one.signature for one in of_term) for of_term in divisors}
        return all(divisors) and len(families) == 1 < len(signatures)

    def _are_of_each_row(self, terms: Sequence[Term]) -> bool:
        """Whether a criterion has made these terms of one sample each, of all in all."""
        rows = {id(term.row) for term in terms if term.row is not None}
        is_all = self.in_criterion and all(term.row is not None for term in terms)
        return is_all and len(rows) == self._num_samples > 1

    def _divided_apart(self, terms: Sequence[Term], divisors: Any) -> _OfModel | None:
        """Of a tensor of sums, each divided by a number of its own, as for tasks; None: that does not show."""
        known = self._of(divisors) if isinstance(divisors, Tensor) else None
        if not isinstance(known, Count) or not 1 < divisors.numel() <= _MAX_APART:
            return None
        apart: list[Term] = []
        for at in range(divisors.numel()):
            count = self._element_of(known, at)
            if count is None:
                return None

            def alone(sums: Any, at: int = at) -> Any:
                one = sums.flatten()[at : at + 1] / divisors.flatten()[at]
                return nn.functional.pad(one, (at, divisors.numel() - at - 1)).view(divisors.shape)

            for term in terms:
                factors = None if term.factors is None else _product(term.factors, (TermFactor(count, -1),))
                apart.append(term._replace(factors=factors, make=_once(partial(_apply, alone, term.make))))
        return _OfModel(terms=tuple(apart))

    def _element_of(self, count: Count, at: int) -> Count | None:
        """One of the numbers that sums of the inputs are, each with its lower limit; None: they are no such sums."""
        inner = count.args[0] if count.args and isinstance(count.args[0], Count) else None
        if function_name(count.function) == "sum":
            return self._count(_element, count, at)
        rest = (*count.args[1:], *count.kwargs.values())
        if (
            inner is None
            or function_name(count.function) not in _LIMITING
            or any(isinstance(one, Count) for one in rest)
        ):
            return None
        if any(isinstance(one, Constant) and one.signed(is_set=False)[2] == () for one in rest):
            return None  # of several elements
        element = self._element_of(inner, at)
        return None if element is None else self._count(count.function, element, *count.args[1:], **count.kwargs)

    def _is_constant(self, value: Any, is_divisor: bool = False, is_added: bool = False) -> bool:
        """Whether it does not depend on the batch. Nobody divides by 1, unless it is a count."""
        if isinstance(value, Tensor):
            return not isinstance(self._of(value), Count | _OfModel)
        return not isinstance(value, TracedInt | TracedFloat) and (
            (value == 1 and not is_divisor)
            or self._number_like(value, is_constant=is_added or self._is_constant_factor(is_divisor)) is None
        )

    def _number_like(self, value: Any, *, is_constant: bool) -> Count | None:
        """The count that gave a plain number, to which something small may have been added."""
        if not isinstance(value, int | float):
            return None
        is_own = isinstance(value, float) or not _SHARED_INTS[0] <= value <= _SHARED_INTS[1]
        newest = self._numbers[::-1]
        if is_own and (found := next((one for seen, one in newest if seen is value), None)) is not None:
            return found
        counts = dict.fromkeys(one for seen, one in newest if seen == value)
        if self._counts_lists and (total := self._total_like(value)) is not None:
            counts = {total: None} | (counts if self._num_samples > 1 else {})
        if not counts and isinstance(value, float):
            counts = dict.fromkeys(one for seen, one in newest if seen and abs(value - seen) <= 1e-4 * abs(seen))
        if not counts:
            return None
        if len(counts) > 1:
            self.ambiguous.append(list(counts))
        meanings = [*counts, None]
        self.num_choices = max(self.num_choices, 2 * len(meanings))
        return None if is_constant else meanings[min(self._choice // 2, len(meanings) - 1)]

    def _total_like(self, value: float) -> Count | None:
        """The sum of the lengths of tensors in a list of samples that a plain number equals; None: there is none."""
        return next((count for total, count in self._totals() if total == value), None)

    def _totals(self) -> list[tuple[float, Count]]:
        """The lengths of tensors in lists with an entry for each sample, added up, where the script has read all."""
        lengths: dict[tuple[Path, Path], dict[int, float]] = {}
        for seen, count in self._numbers:
            for (prefix, suffix, _), index in self._sizes_in(count):
                lengths.setdefault((prefix, suffix), {})[index] = seen
        totals: list[tuple[float, Count]] = []
        for source, found in lengths.items():
            if len(found) == self._num_samples:
                totals.append((sum(found.values()), self._sizes_of(*source, "size")))
        return totals

    def _sizes_in(self, count: Count) -> list[tuple[tuple[Path, Path, str], int]]:
        """Where a count may be the size of a tensor in a list of samples, and what size; and of which entry."""
        if count.function is not numel and (count.function is not size or count.args[1] != 0):
            return []
        kind = "numel" if count.function is numel else "size"
        path = entry_path(count.args[0]) if isinstance(count.args[0], Count) else None
        at_index = [] if path is None else [at for at, key in enumerate(path) if type(key) is int and at]
        lists = [at for at in at_index if path and is_sample_list(path[:at], self._dims)]
        return [((path[:at], path[at + 1 :], kind), path[at]) for at in lists if path]

    def _total_of(self, count: Count) -> Count:
        """The same number, where it adds up sizes of tensors in a list of samples, as that of any such list."""
        pending, found = [count], []
        for one in pending:
            name, inner = function_name(one.function), one.args[0] if one.args else None
            is_size = one.function is numel or (one.function is size and one.args[1] == 0)
            if name in _ADDING and not one.kwargs and not name.endswith("sub"):
                pending += [part for part in one.args if isinstance(part, Count)]
                if any(not isinstance(part, Count) and part for part in one.args):
                    return count
            elif is_size and isinstance(inner, Count) and function_name(inner.function) in ("cat", "concat"):
                if inner.args[1:] not in ((), (0,)) or inner.kwargs:
                    return count
                pending += [self._count(one.function, part, *one.args[1:]) for part in inner.args[0]]
            else:
                found.append(one)
        sources = [self._sizes_in(one) for one in found]
        shared = set.intersection(*({source for source, _ in one} for one in sources)) if sources else set()
        for source in shared:
            indices = [index for one in sources for own, index in one if own == source]
            if sorted(indices) == list(range(self._num_samples)):
                return self._sizes_of(*source)
        return count

    def _sizes_of(self, prefix: Path, suffix: Path, kind: str) -> Count:
        made = sizes_of(prefix, suffix, kind)
        count = self._count(made.function, *made.args)
        count.is_read = True  # a plain number, by which the script may branch
        return count

    def _is_constant_factor(self, is_divisor: bool) -> bool:
        """Whether a number is taken for a constant: as a factor first, as scripts weigh their terms with 2."""
        return not is_divisor and not self._choice % 2

    def choose(self, choice: int) -> None:
        """The criterion is called again, on the same outputs; see ``choice`` of the class."""
        self._choice, self._numbers, self.guessed, self._zeros = choice, [], [], []

    def _may_be_rows(self, value: Any) -> bool:
        """Whether a model may have made a number from the number of samples: its own sizes are not followed."""
        if self.in_criterion or not isinstance(value, int):
            return False
        return value == self._num_samples or (self._num_samples > 1 and value % self._num_samples == 0)

    def _is_number_of_rows(self, value: Any) -> bool:
        """Whether a model seems to multiply with the number of samples."""
        return self._may_be_rows(value) and value == self._num_samples >= _LEAST_ROWS

    def _factor(self, value: Any, power: int) -> TermFactor | None:
        if isinstance(value, TracedInt | TracedFloat):
            return TermFactor(self._total_of(value.count), power)
        if isinstance(value, Tensor) and value.numel() == 1 and isinstance(known := self._of(value), Count):
            return TermFactor(known, power)
        found = self._number_like(value, is_constant=self._is_constant_factor(power < 0))
        return None if found is None else TermFactor(self._total_of(found), power)

    def _divisor(self, value: Any) -> TermFactor | None:
        """What a term is divided by, with the lower limit that the script's branches give it."""
        factor = self._factor(value, -1)
        limits = factor.count.limits if factor is not None else {}
        # As max(count, 1) does.
        return (
            factor if factor is None or not limits else TermFactor(self._count(at_least, factor.count, max(limits)), -1)
        )

    def _limited_by(self, value: Any, terms: Sequence[Term]) -> Count | None:
        """The count in whose place a plain number is used, as in ``max(count, 1)``, because it is not above it."""
        if type(value) not in (int, float):
            return None
        counts = [one for one in self._counts.values() if one.limits.get(float(value))]
        if not counts and value > 0 and not any(term.factors for term in terms):
            # The script has compared a plain number, which is not seen.
            totals = [] if any(term.row for term in terms) else self._totals()
            if any(total == value for total, _ in totals):
                return None
            zeros = [count for total, count in totals if not total] or self._zeros
            if len(zeros) == 1:
                counts = zeros
                self.guessed.append(float(value))
        return self._count(at_least, counts[-1], float(value)) if counts else None

    def _added(
        self,
        function: Any,
        name: str,
        operands: Sequence[Any],
        kwargs: Any,
        result: Tensor,
        models: list[tuple[Tensor, _OfModel]],
    ) -> _OfModel:
        terms: list[Term] = []
        known = {id(tensor): what for tensor, what in models}
        for index, operand in enumerate(operands):

            def alone(value: Any, index: int = index) -> Any:
                pair = [torch.zeros((), dtype=result.dtype, device=result.device)] * 2
                pair[index] = value
                return function(*pair, **{key: one for key, one in kwargs.items() if key == "alpha"})

            if id(operand) in known:
                for term in known[id(operand)].terms or ():
                    terms.append(term._replace(make=_once(partial(_apply, alone, term.make))))
            elif not self._is_constant(operand, is_added=True):
                return self._unlinear(name, models, result)
            elif self._is_made_zero(operand):
                continue
            elif isinstance(operand, Tensor) or operand != 0:
                terms.append(Term(None, _once(partial(alone, operand))))
        return _OfModel(terms=tuple(terms))

    def _is_made_zero(self, value: Any) -> bool:
        """Whether it is a zero that a script adds its terms to."""
        reference = self._zero.get(id(value))
        return reference is not None and reference() is value

    def _joined(self, function: Any, args: Any, kwargs: Any, models: list[tuple[Tensor, _OfModel]]) -> _OfModel:
        terms: list[Term] = []
        parts = args[0] if args else kwargs["tensors"]
        known = {id(tensor): what for tensor, what in models}
        for index, part in enumerate(parts):

            def alone(value: Any, index: int = index) -> Any:
                row = [torch.zeros_like(one) for one in parts]
                row[index] = value
                return function(row, *args[1:], **{key: one for key, one in kwargs.items() if key != "tensors"})

            what = known.get(id(part))
            inner = what.terms or () if what is not None else (Term(None, partial(_same, part)),)
            for term in inner:
                terms.append(term._replace(make=_once(partial(_apply, alone, term.make))))
        return _OfModel(terms=tuple(terms))


class _LossCall(NamedTuple):
    """A call of one of torch's losses; ``head``: the weight that makes logits of its input, where it does so."""

    input: Any
    target: Any
    weight: Any
    ignore_index: int
    reduction: str
    is_batch_mean: bool = False
    head: Any = None


_WRITING = frozenset(["iadd", "isub", "imul", "idiv", "itruediv", "ior", "iand"])


def _writes(name: str) -> bool:
    """Whether a function writes to its first argument."""
    return name == "setitem" or name in _WRITING or (name.endswith("_") and not name.endswith("__"))


# Losses whose mean is over rows, not over elements.
_OF_ROWS = frozenset(
    [
        "cosine_embedding_loss",
        "margin_ranking_loss",
        "multi_margin_loss",
        "multilabel_margin_loss",
        "multilabel_soft_margin_loss",
        "triplet_margin_loss",
        "triplet_margin_with_distance_loss",
        "ctc_loss",
        *_CLASS_LOSSES,
    ]
)


# Losses whose mean is divided by the weights of elements, which it gets.
_OF_WEIGHTS = frozenset(["mse_loss", "l1_loss"])


@cache
def _parameters_of(function: Any) -> inspect.Signature | None:
    """The signature of one of torch's losses; None of any other function."""
    if getattr(function, "__module__", None) != "torch.nn.functional" and function is not torch.ctc_loss:
        return None
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    return signature if "reduction" in signature.parameters else None


def _reduction_of(function: Any, args: Any, kwargs: Any) -> _LossCall | None:
    """The call of one of torch's losses; None: it is another function."""
    try:
        signature = _parameters_of(function)
    except TypeError:
        return None
    if signature is None:
        return None
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    named = next((given[name] for name in ("input", "input1", "log_probs", "anchor") if name in given), None)
    reduction = given["reduction"]
    averages, reduces = given.get("size_average"), given.get("reduce")
    if averages is not None or reduces is not None:  # torch's former arguments
        reduction = "none" if reduces is False else "sum" if averages is False else "mean"
    is_batch_mean = reduction == "batchmean"
    if is_batch_mean or reduction == "elementwise_mean":
        reduction = "mean"
    target = None if is_batch_mean else given.get("target")
    ignored = given.get("ignore_index")
    return _LossCall(
        input=named,
        target=target,
        weight=given.get("weight"),
        ignore_index=-100 if ignored is None else ignored,
        reduction=reduction,
        is_batch_mean=is_batch_mean,
        head=given.get("linear_weight"),
    )


def _is_of_values(count: Any) -> bool:
    """Whether it holds the different values of an input, as ``unique`` gives them, or some of these."""
    while isinstance(count, Count):
        name = function_name(count.function)
        if "unique" in name:
            return True
        if name not in _VALUES or not count.args:
            return False
        count = count.args[0]
    return False


def _once(make: Callable[[], Any]) -> Callable[[], Any]:
    made: list[Any] = []

    def value() -> Any:
        if not made:
            made.append(make())
        return made[0]

    return value


def _apply(function: Callable[[Any], Any], make: Callable[[], Any]) -> Any:
    return function(make())


def _same(value: Any) -> Any:
    return value


def _why(models: Sequence[tuple[Tensor, _OfModel]]) -> str:
    for _, what in models:
        if what.why:
            return what.why
        for term in what.terms or ():
            if term.why:
                return term.why
    return ""


def _product(factors: tuple[TermFactor, ...], more: tuple[TermFactor, ...]) -> tuple[TermFactor, ...]:
    """All factors, without those that cancel."""
    left = list(factors)
    for one in more:
        inverse = next((f for f in left if f.count is one.count and f.power == -one.power and not f.is_observed), None)
        if inverse is not None and not one.is_observed:
            left.remove(inverse)
        else:
            left.append(one)
    return tuple(left)


def _powers(factors: tuple[TermFactor, ...]) -> frozenset[tuple[Count, int]]:
    return frozenset((one.count, one.power) for one in factors)


def _with(value: Any, old: Tensor, new: Any) -> Any:
    """``value`` with another tensor in the place of one."""
    if value is old:
        return new
    if isinstance(value, dict):
        return {name: _with(one, old, new) for name, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with(one, old, new) for one in value)
    return value


def _entry_of(values: Any, index: int) -> Any:
    return values[index]


def _room(sizes: list[int], scales: list[int]) -> Tensor:
    """As many elements as tensors of some sizes have together; ``scales``: for each one that is counted."""
    return torch.empty(sum(size * scale for size, scale in zip(sizes, scales, strict=True)))


def _in_order(tensor: Tensor) -> Tensor:
    """A number that depends on all elements, of which it is not seen what the script makes."""
    return tensor.double().flatten() @ torch.arange(1.0, tensor.numel() + 1, dtype=torch.double, device=tensor.device)


def _element(values: Tensor, at: int) -> Tensor:
    """One number of several."""
    return values.flatten()[at]


def _chosen(mask: Tensor) -> Tensor:
    """As many elements as a mask selects."""
    return mask[mask.bool()]


def _has_traced(value: Any) -> bool:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        return any(map(_has_traced, value))
    return isinstance(value, TracedInt | TracedFloat)


def _key(value: Any) -> Any:
    """Equal for equal arguments; hashable."""
    if isinstance(value, Count):
        return id(value)
    if isinstance(value, dict):
        return tuple((name, _key(one)) for name, one in value.items())
    if isinstance(value, slice):
        return "slice", _key((value.start, value.stop, value.step))
    if isinstance(value, list | tuple):
        return type(value).__name__, *map(_key, value)
    hash(value)
    return type(value).__name__, value
