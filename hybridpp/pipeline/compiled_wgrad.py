"""Linear layers in compiled blocks, whose backward pass gives the weights' gradients to a queue.

A compiler must not look at the queue, so the forward and the input's gradient are operators. They know the layer by a
tensor that holds its number: a number itself would be a constant, and each layer another graph.

Under a schedule that splits backward passes, the input and the gradient of the output are kept beyond the operator's
call. So the compiler must not write to memory that it takes for free (``compile_keywords``). Under others, the operator
adds the weights' gradients to their sums (``nn/fp32_products.py``) before it returns.
"""

from collections.abc import Mapping
from functools import cache
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import functional

from hybridpp.errors import ConfigError
from hybridpp.pipeline.deferred_wgrad import LayerBinding, WgradTask

# Inductor's: memory of a tensor that the graph needs no more goes back to the allocator, and is not written to before.
_KEEPS_MEMORY = {"allow_buffer_reuse": False, "inplace_buffers": False}
_RUNS_AS_WRITTEN = ("eager", "aot_eager")

_BINDINGS: WeakValueDictionary[int, LayerBinding] = WeakValueDictionary()
_numbers = count()


def compile_keywords(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of ``torch.compile`` for blocks that run :func:`separated_linear`.

    Args:
        keywords: the user's.

    Raises:
        ConfigError: they let a compiler write to memory that is still needed.
    """
    backend = keywords.get("backend", "inductor")
    if callable(backend) or backend in _RUNS_AS_WRITTEN:
        return dict(keywords)
    if backend != "inductor" or makes_cuda_graphs(keywords):
        raise ConfigError(
            "compile_blocks under a schedule that splits backward passes keeps tensors of compiled code for W, which "
            f"needs inductor without CUDA graphs and without a mode: got compile_blocks={dict(keywords)!r}. Leave "
            "these keywords out, or use a schedule that splits nothing, such as '1f1b'."
        )
    return {**keywords, "options": {**(keywords.get("options") or {}), **_KEEPS_MEMORY}}


def makes_cuda_graphs(keywords: Mapping[str, Any]) -> bool:
    """Whether keywords of ``torch.compile`` ask for CUDA graphs, or for a mode, of which some do."""
    options = keywords.get("options") or {}
    is_asked = "mode" in keywords or bool(options.get("triton.cudagraphs"))
    return is_asked or keywords.get("backend") == "cudagraphs"


def number_of(binding: LayerBinding) -> Tensor:
    """A tensor by which the operators know a layer, as long as somebody holds the binding.

    The operators are there from then on.
    """
    _operators()
    number = next(_numbers)
    _BINDINGS[number] = binding
    return torch.tensor(number)


def separated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, number: Tensor) -> Tensor:
    """``functional.linear`` on an input of rows, whose weights' gradients are left to the queue of a layer.

    Args:
        x: shape ``[rows, inputs]``; requires a gradient.
        weight: the layer's.
        bias: the layer's.
        number: of :func:`number_of`.
    """
    result: Tensor = torch.ops.hybridpp.separated_linear(x, weight, bias, number)
    return result


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, number: Tensor) -> Tensor:
    return functional.linear(x, weight, bias)


def _input_gradient(dy: Tensor, x: Tensor, weight: Tensor, number: Tensor) -> Tensor:
    binding = _BINDINGS[int(number)]
    dx = binding.ops.input_gradient(binding.module, dy, x, weight)
    task = WgradTask(binding, dy, x, None)
    if not binding.queue.try_defer(task, False):
        binding.queue.add([task])
    return dx


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, number = inputs
    ctx.save_for_backward(x, weight, number)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
    x, weight, number = ctx.saved_tensors
    return torch.ops.hybridpp.separated_input_gradient(dy, x, weight, number), None, None, None


@cache
def _operators() -> Any:
    """Registers the operators, once; they stay as long as what this returns.

    Not on import: it takes a tenth of the time to import all of the library, and few jobs compile blocks.
    """
    library: Any = torch.library.Library("hybridpp", "DEF")  # type: ignore[no-untyped-call]  # torch
    library.define("separated_linear(Tensor x, Tensor weight, Tensor? bias, Tensor number) -> Tensor")
    library.define("separated_input_gradient(Tensor dy, Tensor x, Tensor weight, Tensor number) -> Tensor")
    for kind in ("CPU", "CUDA"):
        library.impl("separated_linear", _forward, kind)
        library.impl("separated_input_gradient", _input_gradient, kind)
    torch.library.register_fake("hybridpp::separated_linear", _forward, lib=library)
    torch.library.register_fake(
        "hybridpp::separated_input_gradient", lambda dy, x, weight, number: x.new_empty(x.shape), lib=library
    )
    torch.library.register_autograd("hybridpp::separated_linear", _backward, setup_context=_save, lib=library)
    return library
