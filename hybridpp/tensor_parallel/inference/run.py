"""Run a block, or a rank's share of one, on made-up numbers, and keep what it gives."""

import copy
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from hybridpp.tensor_parallel.inference.numbers import Sketch, close, no_sketch, sketched_on_arrival


class Call:
    """Arguments of a block's forward, to be used again and again.

    Attributes:
        tensors: the tensors among them; they may require gradients.
        numbers: of these among the leaves of the arguments.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]):
        leaves, self._tree = pytree.tree_flatten((args, kwargs))
        self.numbers = [number for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.tensors: list[Tensor] = [leaves[number] for number in self.numbers]
        self._others = [None if isinstance(leaf, Tensor) or not _can_be_copied(leaf) else leaf for leaf in leaves]

    def arguments(self, tensors: list[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Of a forward, with these tensors in the places of its own."""
        leaves = [copy.deepcopy(leaf) for leaf in self._others]
        for number, tensor in zip(self.numbers, tensors, strict=True):
            leaves[number] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self._tree)
        return args, kwargs

    def run(self, block: nn.Module, tensors: list[Tensor]) -> Any:
        """What the block returns for these."""
        args, kwargs = self.arguments(tensors)
        return block(*args, **kwargs)


def _can_be_copied(leaf: Any) -> bool:
    """Not what holds tensors of a graph: a cache of keys and values. A block does without."""
    try:
        copy.deepcopy(leaf)
    except RuntimeError:
        return False
    return True


class Unlike(Exception):
    """A share of a block that gives other results than the whole one."""


class Outcome:
    """What a run of a block gave: the numbers that it returns, and the gradients of a made-up loss.

    Args:
        block: to run; a rank's share of one, if there is a whole one.
        call: its arguments.
        whole: what the whole block gives.

    Attributes:
        results: the floating-point tensors that it returns, by their number among the leaves.
        left: the floating-point tensors that are left on its modules, by module and attribute: a loss to be added, say.
        gradients: sketches of them, by parameter name, or by number of the argument; none where a result has not the
            whole one's shape.

    Raises:
        Unlike: a result of the whole one's shape has other numbers.
    """

    def __init__(self, block: nn.Module, call: Call, whole: "Outcome | None" = None):
        leaves = [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in call.tensors]
        output = pytree.tree_leaves(call.run(block, [leaf.clone() for leaf in leaves]))
        results = {n: x for n, x in enumerate(output) if isinstance(x, Tensor) and x.is_floating_point()}
        self.results: dict[int, Tensor] = {number: result.detach() for number, result in results.items()}
        self.left = _left_on(block)
        self.gradients: dict[str | int, Sketch] = {}
        if whole is not None:
            unlike = {n for n, result in whole.results.items() if results[n].shape != result.shape}
            if not all(close(self.results[n], result) for n, result in whole.results.items() if n not in unlike):
                raise Unlike
            if unlike:
                return
        generator = torch.Generator().manual_seed(1)
        losses = []
        for result in results.values():
            weights = torch.randn(result.shape, generator=generator).to(result)
            if result.requires_grad:
                losses.append((result * weights).sum())
        parameters = {name: held for name, held in block.named_parameters() if held.requires_grad}
        arguments = {number: leaf for number, leaf in enumerate(leaves) if leaf.requires_grad}
        with sketched_on_arrival(parameters) as arrived:
            torch.autograd.backward(torch.stack(losses).sum(), inputs=[*parameters.values(), *arguments.values()])
        self.gradients |= {name: arrived.get(name) or no_sketch(held) for name, held in parameters.items()}
        self.gradients |= {
            number: (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad,) for number, leaf in arguments.items()
        }


class Whole:
    """An undivided block on arguments of its own, and what it gives."""

    def __init__(self, block: nn.Module, call: Call):
        self.block = block
        self.call = call
        # Of a copy: what a run leaves on the block (a state that goes on to the next) is part of a graph.
        self.outcome = Outcome(copy_of(block), call)


def _left_on(block: nn.Module) -> dict[tuple[str, str], Tensor]:
    return {
        (name, key): value.detach()
        for name, module in block.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }


def copy_of(block: nn.Module) -> nn.Module:
    """A copy with parameters of its own that share their memory with the block's."""
    shared: dict[int, Any] = {id(held): nn.Parameter(held.detach(), held.requires_grad) for held in block.parameters()}
    return copy.deepcopy(block, shared)


def made_up(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Whole:
    """A copy of a block with weights in which no mistake can hide, in double precision where its kernels have it.

    A bias is zero when training begins, a gate may be closed: the numbers that a block has say little.
    """
    failure: Exception | None = None
    # There are kernels without double precision, and forwards that run in training alone.
    for training, dtype in product((False, True), (torch.float64, torch.float32)):
        try:
            made, call = _made_up(block, args, kwargs, dtype)
            return Whole(made.train(training), call)
        except Exception as error:  # whatever a block raises
            failure = failure or error
    assert failure is not None, "each try returned or raised"
    raise failure


def _made_up(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> tuple[nn.Module, Call]:
    generator = torch.Generator().manual_seed(0)
    # What is copied already: so no weight is read, and there need not be any.
    copies: dict[int, Any] = {id(held): _numbers(held, generator, dtype) for held in block.parameters()}
    # A state that the block keeps from one call to the next may be part of a graph, which cannot be copied.
    kept = [value for module in block.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    copies |= {id(value): value.detach().clone() for value in kept}
    copies |= {id(held): _filled(held) for held in block.buffers() if held.is_meta}
    made = copy.deepcopy(block, copies).to(dtype)

    def cast(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        own = leaf.detach().to(dtype) if leaf.is_floating_point() else leaf.detach()
        return own.clone().requires_grad_(leaf.requires_grad)

    args, kwargs = pytree.tree_map(cast, (args, kwargs))
    call = Call(args, kwargs)
    first = next((tensor for tensor in call.tensors if tensor.is_floating_point()), None)
    if first is not None:
        first.requires_grad_()
    return made, call


def _numbers(held: nn.Parameter, generator: torch.Generator, dtype: torch.dtype) -> nn.Parameter:
    numbers = torch.randn(held.shape, generator=generator)
    if held.dim() > 1:
        numbers /= max(held.shape[-1], 1) ** 0.5
    else:
        numbers = 0.2 * numbers + (1.0 if _is_scale(held) else 0.0)
    device = "cpu" if held.is_meta else held.device
    return nn.Parameter(numbers.to(device, dtype if held.is_floating_point() else held.dtype), held.is_floating_point())


def _filled(held: Tensor) -> Tensor:
    """A buffer that no file has filled yet: ones, which will do for a variance too; whole numbers may be places."""
    number = 1 if held.is_floating_point() or held.dtype == torch.bool else 0
    return torch.full(held.shape, number, dtype=held.dtype)


def _is_scale(held: nn.Parameter) -> bool:
    return not held.is_meta and not isinstance(held, FakeTensor) and bool((held == 1).all())
