"""Find what a forward makes of several samples of a micro-batch and applies to each of them, as a batch's mean."""

import math
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hybridpp.nn.metadata_functions import METADATA_FUNCTIONS, writes_first_argument
from hybridpp.nn.torch_private import pytree
from hybridpp.nn.watcher import WatchingMode, function_name, with_lost_weight
from hybridpp.pipeline.batch_dims import Dims
from hybridpp.pipeline.sample_dims import guessed_samples, tensors_of
from hybridpp.pipeline.sample_tracker import SIZES, SampleTracker, input_leaves

# They give a script plain numbers.
_READS = frozenset(["item", "float", "tolist", "numpy", "array", "format"])
_COMPARING = frozenset(["gt", "lt", "ge", "le", "greater", "less", "greater_equal", "less_equal"])
# Of a number that was read, what scripts make of it before they apply it.
_FORMS: Sequence[Callable[[float], float]] = (
    lambda value: value,
    lambda value: -value,
    lambda value: 1 / value,
    lambda value: value * value,
    lambda value: math.sqrt(value),
    lambda value: 1 / math.sqrt(value),
)
_TOLERANCE = 1e-6
# They give a tensor of a shape of its own.
_NEW = frozenset(["new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"])
_ADDING = frozenset(["add", "radd", "iadd", "sub", "rsub", "isub", "subtract"])
# What inputs are divided by as weights of losses are.
_WEIGHING = frozenset(["sum", "mean", "nansum", "count_nonzero", "numel"])
_NORMS = frozenset(["layer_norm", "rms_norm"])
_ONE, _LOSS = "one of them", "the loss"
# Micro-batches whose plain numbers are compared.
_NUM_COMPARED = 2


class StatisticsWatch(WatchingMode):
    """Watches the forward of one stage for one micro-batch.

    A statistic is what a function makes of all samples: a tensor (``x - x.mean(0)``), or a number that Python reads of
    one and gives to functions of the samples (``x * (1 / float(x.std()))``) or branches by. Of inputs alone it counts
    where the result meets a parameter: masks and labels are divided by their sums in losses, which are looked at
    otherwise. What batch normalisation does is left alone.

    Args:
        trees: of the micro-batch's inputs: as they were given, and as the model gets them.
        num_samples: of the micro-batch.
        dims: the dimension of the samples in the inputs.
        received: what earlier stages sent.
        is_last: whether the model's loss may be made in this stage, where what couples samples is followed to it.

    Attributes:
        found: what the stage does with several samples, in words; empty: nothing, as far as known.
        read: of which statistic Python has read a number, which it may branch by, in words; empty: of none.
        numbers: plain numbers that functions of samples got after the script had read one of several samples.
        calls: names of these functions.
    """

    def __init__(
        self, trees: Sequence[Any], num_samples: int, dims: Dims, received: Sequence[Tensor], *, is_last: bool
    ):
        super().__init__()
        self.found = self.read = ""
        self.numbers: list[tuple[str, float]] = []
        self.calls: list[str] = []
        self._is_last = is_last
        self._read: list[float] = []
        self._reads_all = False
        self._origin: dict[int, tuple[Any, str]] = {}
        # What was made of several samples: by which function.
        self._over: dict[int, tuple[Any, str]] = {}
        # What was made of each sample and of such a statistic, of inputs alone.
        self._applied: dict[int, tuple[Any, str]] = {}
        # The same, where it is no weight as losses have them.
        self._standardised: dict[int, tuple[Any, str]] = {}
        # Elements of samples that a mask has chosen.
        self._chosen: dict[int, tuple[Any, str]] = {}
        self._tracker = SampleTracker(num_samples, weakref.proxy(self))
        for tree in trees:
            for path, leaf in input_leaves(tree):
                _put(self._origin, leaf, "inputs")
                self._tracker.begin(leaf, path, dims)
        for tensor, samples in zip(
            received, guessed_samples([one.shape for one in received], num_samples), strict=True
        ):
            _put(self._origin, tensor, "model")
            self._tracker.hold(tensor, samples)
        self._num_samples = num_samples

    def made(self, result: Any) -> None:
        """What a compiled block returned."""
        tensors = list(tensors_of(result))
        for tensor, samples in zip(
            tensors, guessed_samples([one.shape for one in tensors], self._num_samples), strict=True
        ):
            _put(self._origin, tensor, "model")
            if self._tracker.of(tensor) is None:
                self._tracker.hold(tensor, samples)

    def is_computed(self, tensor: Tensor) -> bool:
        """Whether the model computed it of samples, as far as known."""
        return self._origin_of(tensor) == "model"

    def is_of_inputs(self, tensor: Tensor) -> bool:
        """Whether it is made of the inputs alone, as far as known."""
        return self._origin_of(tensor) == "inputs"

    def is_made_of_parameters(self, tensor: Tensor) -> bool:
        """Whether it is made of parameters alone, as far as known."""
        return self._origin_of(tensor) == "parameters"

    def _origin_of(self, tensor: Tensor) -> str:
        found = _get(self._origin, tensor)
        if found:
            return found
        if isinstance(tensor, nn.Parameter) or (tensor.requires_grad and tensor.is_leaf):
            return "parameters"
        return "model" if tensor.requires_grad else ""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = with_lost_weight(function, kwargs or {})
        result = function(*args, **kwargs)
        name = function_name(function)
        if not self.found and function not in METADATA_FUNCTIONS and name not in SIZES:
            self._follow(function, name, args, kwargs, result)
        return result

    def _follow(self, function: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        given = list(tensors_of((args, kwargs)))
        self._tracker.follow(function, name, args, kwargs, result)
        made = list(tensors_of(result))
        if not given:
            return
        if name in _NEW:
            for one in made:
                self._tracker.hold(one, None)
            return
        origin = self._joined_origin(given)
        for one in made:
            _put(self._origin, one, origin)
        if function is torch.autograd.grad:
            return
        over = next(filter(None, (_get(self._over, one) for one in given)), "")
        held = [one for one in given if (samples := self._tracker.of(one)) is not None and samples.is_sure]
        has_values = [one for one in held if one.is_floating_point()]
        has_values += [one for one in given if _get(self._chosen, one)]
        if name in _READS or name == "bool":
            self._note_read(name, given[0], result, over)
            return
        if _is_loss(function):
            for one in made:
                if not one.dim():
                    _put(self._over, one, f"{_LOSS} {name}")
            return
        if has_values:
            self._note_numbers(name, args, kwargs)
        # A buffer that is written to, and then is a statistic itself.
        if args and writes_first_argument(function) and isinstance(args[0], Tensor):
            made.append(args[0])
        applied = next(filter(None, (_get(self._applied, one) for one in given)), "")
        standardised = next(filter(None, (_get(self._standardised, one) for one in given)), "")
        is_lost = over == _ONE and not any(self._tracker.of(one) for one in made)  # one row with others of its own
        if over and has_values and not is_lost:
            is_weight = name not in _ADDING and over.rpartition(" ")[2] in _WEIGHING
            self._note_applied(f"{name} of samples and of {over}", origin, given, made, is_weight=is_weight)
        elif applied:
            self._note_applied(applied, origin, given, made, is_weight=not standardised)
        elif len({samples.order for one in held if (samples := self._tracker.of(one)) is not None}) > 1:
            self._note_applied(f"{name} of samples and of others", origin, given, made, is_weight=False)
        elif has_values and self._spans_samples(name, args, kwargs):
            self._note_applied(f"{name} over the samples", origin, given, made, is_weight=False)
        for one in made:
            self._note_made(one, name, args, has_values, over if not held else "", origin)

    def _joined_origin(self, given: Sequence[Tensor]) -> str:
        """Of what is made of some tensors."""
        origins = {self._origin_of(one) for one in given}
        if "model" in origins or {"inputs", "parameters"} <= origins:
            return "model"
        return next((one for one in ("inputs", "parameters") if one in origins), "")

    def _note_made(
        self, made: Tensor, name: str, args: Any, has_values: Sequence[Tensor], over: str, origin: str
    ) -> None:
        """What a function has made of several samples; ``over``: of which statistic, where of nothing else."""
        how = self._tracker.made(made)
        if how.why and not self._is_last and origin == "model" and has_values:
            self.found = self.found or how.why
        if not made.is_floating_point():
            if over and name in _COMPARING:
                _put(self._over, made, f"{over} {name}")
            return
        is_indexed = name in ("getitem", "masked_select", "select") and bool(has_values)
        if is_indexed and self._tracker.of(made) is None:
            index = args[1] if name == "getitem" else ()
            if name == "masked_select" or (isinstance(index, Tensor) and index.dtype is torch.bool):
                _put(self._chosen, made, name)
                return
            samples = self._tracker.of(args[0])
            if samples is not None and samples.is_sure and samples.rows == 1 and samples.dim == 0:
                _put(self._over, made, _ONE)
                return
        is_of_all = (
            how.is_gone or how.is_over or (not made.dim() and any(_get(self._chosen, one) for one in has_values))
        )
        if is_of_all and has_values:
            _put(self._over, made, f"their {name}")
        elif over:
            _put(self._over, made, f"{over} {name}" if name in _COMPARING else over)
        elif has_values and any(_get(self._chosen, one) for one in has_values):
            _put(self._chosen, made, name)

    def _spans_samples(self, name: str, args: Any, kwargs: Any) -> bool:
        """Whether a function of torch.nn goes over dimensions of which one has the samples."""
        tensor = args[0] if args else kwargs.get("input")
        samples = self._tracker.of(tensor) if isinstance(tensor, Tensor) else None
        if samples is None or not samples.is_sure or samples.rows > 1 or not isinstance(tensor, Tensor):
            return False
        if name in _NORMS:
            shape = args[1] if len(args) > 1 else kwargs.get("normalized_shape", ())
            num_dims = len(shape) if isinstance(shape, tuple | list | torch.Size) else 1
        elif name == "instance_norm":
            num_dims = tensor.dim() - 2
        elif found := re.fullmatch(r"\w*(?:pool|conv)\w*(\d)d\w*", name):
            num_dims = int(found[1])
        else:
            return False
        return samples.dim >= tensor.dim() - num_dims

    def _note_applied(
        self, words: str, origin: str, given: Sequence[Tensor], made: Sequence[Tensor], *, is_weight: bool
    ) -> None:
        """A statistic of samples is applied to them: of what the model computed, or of inputs that meet a parameter.

        Inputs that are more than weighed (``is_weight``) count where they meet what the model computed.
        """
        meets = {self._origin_of(one) for one in given}
        is_of_model = any(_get(self._over, one) and self._origin_of(one) == "model" for one in given)
        is_mixed = words.endswith(("of others", "over the samples")) and "model" in meets
        if is_of_model or "parameters" in meets or is_mixed or (not is_weight and "model" in meets):
            self.found = self.found or words
            return
        if origin == "inputs":
            for one in made:
                _put(self._applied, one, words)
                if not is_weight:
                    _put(self._standardised, one, words)

    def _note_read(self, name: str, tensor: Tensor, result: Any, over: str) -> None:
        """Python gets a number of all samples, or the numbers of all."""
        if not self.is_computed(tensor):
            return
        if name == "bool":
            if over.rpartition(" ")[2] in _COMPARING:
                self.found = self.found or f"a branch by {over.rpartition(' ')[0]}"
            return
        if not tensor.is_floating_point():
            return
        samples = self._tracker.of(tensor)
        if over and not over.startswith(_LOSS):  # which scripts log
            self.read = self.read or f"{over}, which Python reads as a number; if that is only logged, all is right"
        if over and isinstance(result, float):
            self._read.append(result)
        elif over or (samples is not None and samples.is_sure):
            self._reads_all = True

    def _note_numbers(self, name: str, args: Any, kwargs: Any) -> None:
        if not self._read and not self._reads_all:
            return
        self.calls.append(name)
        for value in pytree.tree_leaves((args, kwargs)):
            if type(value) is not float or not math.isfinite(value) or value in (0.0, 1.0):
                continue
            self.numbers.append((name, value))
            if any(_is_made_of(value, one) for one in self._read):
                self.found = self.found or f"{name} of samples and of a number that is read of all of them"


def _is_made_of(value: float, read: float) -> bool:
    """Whether a number is one that was read, or a simple function of it."""
    if not math.isfinite(read) or not read:
        return False
    forms = _FORMS if read > 0 else _FORMS[:4]  # the others are roots
    return any(math.isclose(value, form(read), rel_tol=_TOLERANCE) for form in forms)


def _is_loss(function: Any) -> bool:
    return getattr(function, "__module__", "") == "torch.nn.functional" and "reduction" in getattr(
        getattr(function, "__code__", None), "co_varnames", ()
    )


def _put(known: dict[int, tuple[Any, str]], tensor: Tensor, words: str) -> None:
    known[id(tensor)] = weakref.ref(tensor), words


def _get(known: dict[int, tuple[Any, str]], tensor: Tensor) -> str:
    reference, words = known.get(id(tensor), (None, ""))
    return words if reference is not None and reference() is tensor else ""


class StatisticsLook:
    """Looks at the first micro-batches of a step, in every stage of this rank.

    Args:
        given: inputs and numbers of samples, by micro-batch.
        dims: the dimension of the samples in the inputs.
        report: called once, with what a stage does with several samples, in words.
    """

    def __init__(self, given: Sequence[tuple[Any, int]], dims: Dims, report: Callable[[str], None]):
        self._given, self._dims, self._report = given, dims, report
        self._first: dict[int, StatisticsWatch] = {}
        self._has_found = False

    @contextmanager
    def watching(
        self, stage: int, microbatch: int, inputs: Any, received: Sequence[Tensor], is_last: bool
    ) -> Iterator[None]:
        """A context for the forward of a stage for a micro-batch."""
        if microbatch >= _NUM_COMPARED or self._has_found:
            yield
            return
        tree, num_samples = self._given[microbatch]
        watch = StatisticsWatch([tree, inputs], num_samples, self._dims, received, is_last=is_last)
        with watch:
            yield
        found, before = watch.found, self._first.setdefault(stage, watch)
        if before.calls != watch.calls and before.calls and watch.calls:
            found = found or "a branch by a number that is read of all of them"
        elif [name for name, _ in before.numbers] == [name for name, _ in watch.numbers]:
            pairs = zip(before.numbers, watch.numbers, strict=True)
            others = [name for (name, one), (_, two) in pairs if not math.isclose(one, two, rel_tol=_TOLERANCE)]
            if others:
                # A constant, or a number that a script changes from step to step, would be the same in all of them.
                found = found or f"{others[0]} of samples and of a number that is read of all of them"
        if found := found or watch.read:
            self._has_found = True
            self._report(found)
