"""Run a block, or one rank's shard of it, on random numbers, and keep its results and gradients."""

import copy
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import product
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from hybridpp.module_adapter import ModuleAdapter
from hybridpp.nn import walk
from hybridpp.nn.contents import is_empty
from hybridpp.nn.torch_private import FakeTensor, pytree
from hybridpp.plan_search.gradient_sketch import Sketch, close, no_sketch, sketched_on_arrival
from hybridpp.plan_search.run_formats import BlockFormats
from hybridpp.plan_search.training_mode import Operations, constant_draws
from hybridpp.plan_search.trial_errors import is_machine_failure

# Numbers of factors, of rows of weights and of activations, which are powers of two from the first one on: so weights
# become what they were again.
_SIZES_OF_WEIGHTS, _SIZES_OF_ACTIVATIONS, _FIRST_POWER = 7, 18, -3

SampleCall: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a block's forward."""

ResultKey: TypeAlias = tuple[str, int]
"""A module of a block (empty: the block itself), and a result's number among the leaves of what it returns."""


class BlockCall:
    """Arguments of a block's forward, for repeated calls.

    Args:
        args: positional ones.
        kwargs: others.
        dtypes: of the tensors among them, as the model passes them; None: they have these.

    Attributes:
        tensors: the tensors among them; they may require gradients.
        numbers: indices of these among the leaves of the arguments.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], dtypes: Sequence[torch.dtype] | None = None):
        leaves, self._tree = pytree.tree_flatten((args, kwargs))
        self.numbers = [number for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.tensors: list[Tensor] = [leaves[number] for number in self.numbers]
        self._dtypes = dtypes or [tensor.dtype for tensor in self.tensors]
        self._others = [None if isinstance(leaf, Tensor) or not _can_be_copied(leaf) else leaf for leaf in leaves]

    def arguments(self, tensors: list[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a forward, with other tensors instead of its own."""
        leaves = [copy.deepcopy(leaf) for leaf in self._others]
        for number, tensor in zip(self.numbers, tensors, strict=True):
            leaves[number] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self._tree)
        return args, kwargs

    def run(self, block: nn.Module, tensors: list[Tensor]) -> Any:
        """What the block returns for other tensors."""
        args, kwargs = self.arguments(tensors)
        return block(*args, **kwargs)

    def enlarged(self) -> "BlockCall":
        """The call with activations of many sizes; masks, and what is 0, stay as they are."""

        def larger(one: Tensor) -> Tensor:
            rows = one.detach().flatten(end_dim=-2) if one.dim() > 1 else one.detach()
            made = (rows * _sizes(rows, _SIZES_OF_ACTIVATIONS)).reshape(one.shape)
            return made.requires_grad_(one.requires_grad)

        made = [larger(one) if _may_be_larger(one) else one for one in self.tensors]
        return BlockCall(*self.arguments(made), self._dtypes)

    def in_formats(self, formats: BlockFormats) -> "BlockCall":
        """The call as it will be in a run."""
        converted = map(formats.of_argument, self.tensors, self._dtypes)
        return BlockCall(*self.arguments(list(converted)))


def _sizes(rows: Tensor, number: int) -> Tensor:
    """Factors for the rows of a tensor, as many as given. They grow, so that ranks have shards of unlike sizes."""
    if not rows.dim():
        return torch.full_like(rows, 2.0 ** (_FIRST_POWER + number - 1))
    powers = torch.arange(rows.shape[0], device=rows.device) * number // max(rows.shape[0], 1) + _FIRST_POWER
    return torch.pow(2.0, powers.to(rows.dtype)).view(-1, *[1] * (rows.dim() - 1))


def _may_be_larger(tensor: Tensor) -> bool:
    """Whether an argument is of activations: what needs a gradient, not angles, positions, masks or steps of time."""
    return tensor.is_floating_point() and tensor.requires_grad


def _can_be_copied(leaf: Any) -> bool:
    """Whether a leaf can be copied: a key-value cache that holds tensors of a graph cannot, and is left out."""
    try:
        copy.deepcopy(leaf)
    except Exception as error:  # an object may raise anything
        if is_machine_failure(error):
            raise
        return False
    return True


class ResultsDiffer(Exception):
    """One rank's shard of a block gives other results than the reference block."""


class BlockOutcome:
    """Results and gradients of one run of a block; the loss is a random projection of the results.

    Args:
        block: to run: the reference block, or one rank's shard of it.
        call: its arguments.
        reference: the outcome of the reference block, if this is a shard.
        watch: a context for the forward.
        collected: results of modules inside that hooks collect.

    Attributes:
        results: the floating-point tensors that the block returns, and those that are collected.
        left: the floating-point tensors that are attributes of its modules afterwards (an auxiliary loss), by module
            and attribute.
        gradients: sketches of them, by parameter name or number of the argument; empty where a result does not have the
            reference's shape.

    Raises:
        ResultsDiffer: a result has the reference's shape and other numbers.
    """

    def __init__(
        self,
        block: nn.Module,
        call: BlockCall,
        reference: "BlockOutcome | None" = None,
        watch: AbstractContextManager[Any] | None = None,
        collected: Collection[ResultKey] = (),
    ):
        with constant_draws() if block.training else nullcontext():
            self._run(block, call, reference, watch or nullcontext(), collected)

    def _run(
        self,
        block: nn.Module,
        call: BlockCall,
        reference: "BlockOutcome | None",
        watch: AbstractContextManager[Any],
        collected: Collection[ResultKey],
    ) -> None:
        leaves = [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in call.tensors]
        copies = [leaf.clone() for leaf in leaves]
        with watch, _results_inside(block, collected) as inside:
            own = _floating(call.run(block, copies))
        results = {("", number): result for number, result in own.items()} | inside
        self.results: dict[ResultKey, Tensor] = {key: result.detach() for key, result in results.items()}
        self.left = _left_on(block)
        self.gradients: dict[str | int, Sketch] = {}
        if reference is not None:
            unlike = {key for key, result in reference.results.items() if results[key].shape != result.shape}
            like = ((key, result) for key, result in reference.results.items() if key not in unlike)
            if not all(close(self.results[key], result) for key, result in like):
                raise ResultsDiffer
            if unlike:
                return
        generator = torch.Generator().manual_seed(1)
        losses = []
        for result in results.values():
            weights = torch.randn(result.shape, generator=generator).to(result)
            if result.requires_grad:
                losses.append((result * weights).sum())
        parameters = {name: held for name, held in walk.named_parameters(block) if held.requires_grad}
        arguments = {number: leaf for number, leaf in enumerate(leaves) if leaf.requires_grad}
        # Reentrant checkpointing, which may be on in training, computes all gradients or none.
        inputs = None if block.training else [*parameters.values(), *arguments.values()]
        with sketched_on_arrival(parameters) as arrived:
            torch.autograd.backward(torch.stack(losses).sum(), inputs=inputs)
        self.gradients |= {name: arrived.get(name) or no_sketch(held) for name, held in parameters.items()}
        self.gradients |= {
            number: (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad,) for number, leaf in arguments.items()
        }


class ReferenceBlock:
    """A complete block with its arguments and its outcome: what every candidate is compared with.

    Args:
        block: in evaluation, or in training.
        call: its arguments.
        written: the parameters that its forward writes to, by name.
        training_call: arguments that it gets in training; None: the same.
        formats: in which the block will run; None: these.
        collected: results of modules inside that hooks collect, and that must be complete like those of the block.

    Attributes:
        outcome: of the block.
        in_training: the same block in training, where it does something else there than in evaluation.
        others: the same block with other arguments.
        formats: in which the block will run; None: those of its outcome.
    """

    def __init__(
        self,
        block: nn.Module,
        call: BlockCall,
        written: Collection[str] = (),
        training_call: BlockCall | None = None,
        formats: BlockFormats | None = None,
        collected: Collection[ResultKey] = (),
    ):
        self.block = block
        self.call = call
        self._collected = collected
        self._written = written
        self.formats = formats
        self.in_training: ReferenceBlock | None = None
        self.others: list[ReferenceBlock] = []
        # Run on a copy: state that a run leaves on the block is part of a graph.
        tried = self.copy()
        operations = Operations(tried)
        self.outcome = BlockOutcome(tried, call, watch=operations, collected=collected)
        if not block.training:
            self.in_training = self._otherwise_in_training(operations, training_call or call)

    def add(self, calls: Iterable[BlockCall]) -> None:
        """Let these arguments be tried, too, if the block runs with them."""
        for call in calls:
            for training in dict.fromkeys((self.block.training, True)):
                try:
                    block = self.copy().train(training)
                    self.others.append(ReferenceBlock(block, call, self._written, collected=self._collected))
                    break
                except Exception as error:  # a block may raise anything
                    if is_machine_failure(error):
                        raise

    def other_ways(self) -> "Generator[ReferenceBlock, None, None]":
        """The ways to run the block in which a spec must hold, too: each is tried before the next is asked for.

        In training, with other arguments, and with weights and arguments of many sizes, so that limits on its numbers
        are reached, if it gives finite numbers for these. The weights are so until the generator goes on or is closed.
        """
        yield from filter(None, (self.in_training, *self.others))
        with self._enlarged() as large:
            if large is not None:
                yield large

    @contextmanager
    def _enlarged(self) -> "Iterator[ReferenceBlock | None]":
        """Inside, the weights, whose memory all copies share, are large."""
        weights = [held for held in walk.parameters(self.block) if held.dim() > 1 and held.is_floating_point()]
        if any(held.dtype is not torch.float64 for held in weights):
            yield None  # large logits leave too few digits
            return
        large: ReferenceBlock | None = None
        with torch.no_grad():
            for held in weights:
                held.mul_(_sizes(held, _SIZES_OF_WEIGHTS))
        try:
            try:
                large = ReferenceBlock(self.block, self.call.enlarged(), self._written, collected=self._collected)
            except Exception as error:  # a block may raise anything
                if is_machine_failure(error):
                    raise
            yield large if large is not None and large.is_finite else None
        finally:
            with torch.no_grad():
                for held in weights:
                    held.div_(_sizes(held, _SIZES_OF_WEIGHTS))

    @property
    def is_finite(self) -> bool:
        """Whether its results and gradients are."""
        gradients = (numbers for sketch in self.outcome.gradients.values() for numbers in sketch)
        return all(bool(one.isfinite().all()) for one in (*self.outcome.results.values(), *gradients))

    def outcome_of(self, shard: nn.Module) -> BlockOutcome:
        """The outcome of a rank's shard of the block, on the same arguments.

        Raises:
            ResultsDiffer: a result has the block's shape and other numbers.
        """
        return BlockOutcome(shard, self.call, self.outcome, collected=self._collected)

    def copy(self) -> nn.Module:
        """A copy that shares the memory of the parameters that the forward does not write to."""
        return copy_block(self.block, self._written)

    def _otherwise_in_training(self, evaluated: Operations, call: BlockCall) -> "ReferenceBlock | None":
        """The block in training, if it runs other operations there; one run of its forward shows that."""
        block = self.copy().train()
        trained = Operations(block)
        leaves = [leaf.detach().requires_grad_(leaf.requires_grad).clone() for leaf in call.tensors]
        try:
            with constant_draws(), trained:
                call.run(block, leaves)
        except Exception as error:  # a block may raise anything
            if is_machine_failure(error):
                raise
            return None
        finally:
            trained.put_back()
        if trained.run == evaluated.run:
            return None
        written = frozenset(trained.written)
        return ReferenceBlock(self.copy().train(), call, written, formats=self.formats, collected=self._collected)

    def runs_in_formats(self) -> bool:
        """Whether the complete block runs in the formats of a run, with arguments that are cast to them."""
        assert self.formats is not None, "asked where a shard did not"
        try:
            self.run_in_formats(ModuleAdapter(self.copy()))
        except Exception as error:  # a block may raise anything
            if is_machine_failure(error):
                raise
            return False
        return True

    def run_in_formats(self, adapter: ModuleAdapter) -> None:
        """Run a copy of the block, or a rank's shard of it, with its backward pass, in the formats of a run."""
        assert self.formats is not None, "there are such"
        self.formats.put_on(adapter)
        BlockOutcome(adapter.model, self.call.in_formats(self.formats))


def _floating(output: Any) -> dict[int, Tensor]:
    leaves = enumerate(pytree.tree_leaves(output))
    return {number: leaf for number, leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()}


@contextmanager
def _results_inside(block: nn.Module, collected: Collection[ResultKey]) -> Iterator[dict[ResultKey, Tensor]]:
    """Inside, what modules of a block return is noted, of each module's last call."""
    found: dict[ResultKey, Tensor] = {}

    def note(name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        own = {(name, number): leaf for number, leaf in _floating(output).items()}
        found.update({key: leaf for key, leaf in own.items() if key in collected})

    names = sorted({name for name, _ in collected})
    hooks = [walk.submodule(block, name).register_forward_hook(partial(note, name), prepend=True) for name in names]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _left_on(block: nn.Module) -> dict[tuple[str, str], Tensor]:
    return {
        (name, key): value.detach()
        for name, module in walk.named_modules(block)
        for key, value in vars(module).items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }


def copy_block(block: nn.Module, apart: Collection[str] = ()) -> nn.Module:
    """A copy whose parameters are new objects that share the block's memory, except for those named in ``apart``."""
    copies: dict[int, Any] = {
        id(held): nn.Parameter(held.detach().clone() if name in apart else held.detach(), held.requires_grad)
        for name, held in walk.named_parameters(block)
    }
    # A search makes hundreds of copies, and half of the time would go into a dozen empty dicts of hooks on each module.
    empty = (held for module in walk.modules(block) for held in vars(module).values() if is_empty(held))
    return copy.deepcopy(block, copies | {id(held): held.copy() for held in empty})


def randomized_copy(
    block: nn.Module,
    calls: Sequence[SampleCall | None],
    formats: BlockFormats | None = None,
    collected: Collection[ResultKey] = (),
) -> ReferenceBlock:
    """A copy of a block with random weights, in double precision where its kernels support it.

    Random, because the weights of a new model hide mistakes: biases are zero, gates may be closed.

    Args:
        block: is not changed.
        calls: arguments of its forward; then those in training, if they are others, else None; then those of other
            samples.
        formats: in which it will run; None: not known.
        collected: results of modules inside that hooks collect.
    """
    call, training_call, *others = [*calls, None] if len(calls) < 2 else calls
    assert call is not None, "a block that is tried is called"
    failure: Exception | None = None
    # Some kernels lack double precision, and some forwards run in training only.
    for training, dtype in product((False, True), (torch.float64, torch.float32)):
        try:
            copied = random_weights(block, dtype).train(training)
            other = None if training_call is None else call_in(dtype, training_call)
            in_run = None if formats is None or formats.are_of(copied) else formats
            reference = ReferenceBlock(
                copied, call_in(dtype, call), training_call=other, formats=in_run, collected=collected
            )
            reference.add([call_in(dtype, one) for one in others if one is not None])
            return reference
        except Exception as error:  # a block may raise anything
            if is_machine_failure(error):
                raise
            failure = failure or error
    assert failure is not None, "each attempt returned or raised"
    raise failure


def random_weights(block: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of a block, which may be on the meta device, with random weights in a dtype."""
    generator = torch.Generator().manual_seed(0)
    return filled_copy(block, lambda held: _numbers(held, generator, dtype), dtype)


def filled_copy(block: nn.Module, weight: Callable[[nn.Parameter], nn.Parameter], dtype: torch.dtype) -> nn.Module:
    """A copy of a block, which may be on the meta device, in a dtype, with other weights, made of its own."""
    # Copies made beforehand: weights are not read, so a block may be on the meta device.
    copies: dict[int, Any] = {id(held): weight(held) for held in walk.parameters(block)}
    # State that the block keeps between calls may be part of a graph, which cannot be copied.
    kept = [value for module in walk.modules(block) for value in vars(module).values() if isinstance(value, Tensor)]
    copies |= {id(value): value.detach().clone() for value in kept}
    copies |= {id(held): _filled(held) for held in walk.buffers(block) if held.is_meta}
    return copy.deepcopy(block, copies).to(dtype)


def call_in(dtype: torch.dtype, arguments: SampleCall) -> BlockCall:
    """A call with floating-point tensors in a dtype, of which the first needs a gradient."""

    def cast(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        cast_leaf = leaf.detach().to(dtype) if leaf.is_floating_point() else leaf.detach()
        return cast_leaf.clone().requires_grad_(leaf.requires_grad)

    args, kwargs = pytree.tree_map(cast, arguments)
    dtypes = [leaf.dtype for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
    call = BlockCall(args, kwargs, dtypes)
    first = next((tensor for tensor in call.tensors if tensor.is_floating_point()), None)
    if first is not None:
        first.requires_grad_()
    return call


def _numbers(held: nn.Parameter, generator: torch.Generator, dtype: torch.dtype) -> nn.Parameter:
    numbers = torch.randn(held.shape, generator=generator)
    if held.dim() > 1:
        numbers /= max(held.shape[-1], 1) ** 0.5
    else:
        numbers = 0.2 * numbers + (1.0 if _is_scale(held) else 0.0)
    device = "cpu" if held.is_meta else held.device
    return nn.Parameter(numbers.to(device, dtype if held.is_floating_point() else held.dtype), held.is_floating_point())


def _filled(held: Tensor) -> Tensor:
    """Values for a buffer on the meta device: ones (it may be a variance); zeros for integers (they may be indices)."""
    number = 1 if held.is_floating_point() or held.dtype == torch.bool else 0
    return torch.full(held.shape, number, dtype=held.dtype)


def _is_scale(held: nn.Parameter) -> bool:
    return not held.is_meta and not isinstance(held, FakeTensor) and bool((held == 1).all())
