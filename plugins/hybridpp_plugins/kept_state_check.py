"""State that the model's forward keeps for its next call: it is updated by each micro-batch, and on each replica."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from hybridpp.cluster import gather_objects, get_dist_logger
from hybridpp.nn.torch_private import is_functorch_active
from hybridpp.partition import KeptState, KeptValue, StagedModel
from hybridpp_plugins.layout import Layout

_END = "at the end of a step, which tells what the forward keeps"
_MOST_NAMED = 4
_OWN = (
    "the forward reads what its last call has left in {names}, and each of the {num_replicas} replicas keeps its own. "
    "That is right for what depends on no data, and for state of samples that the replica's loader keeps in their "
    "places. Else all-reduce it over plugin.dp_group in the script, or make it a persistent buffer, of which replicas "
    "take the first one's."
)
# With one micro-batch, the second call is in the second step.
_MAX_STEPS = 2


class KeptStateCheck:
    """Looks, in the first training step with several micro-batches, at what the forward keeps from call to call.

    State of samples, with an entry for each of a micro-batch's, is refused there; of other state, a warning tells. With
    one micro-batch on each of several replicas, the first two steps show what each replica keeps for itself. A forward
    may begin to keep something later, so another one looks again from time to time.

    Args:
        staged: the model's stages on this rank.
        layout: the ranks.
        reported: the names of which a warning has told; more are added.

    Attributes:
        is_active: whether the step that runs is watched; the same on all ranks.
    """

    def __init__(self, staged: StagedModel, layout: Layout, reported: set[str]):
        self._staged, self._layout, self._reported = staged, layout, reported
        # The other replicas and the tensor-parallel ranks run the same code.
        self._is_watcher = not (layout.here.dp or layout.here.tp)
        self._alone: KeptState | None = self._state() if layout.dp.size > 1 else None
        self._num_steps = self._most = 0
        self._found: list[KeptValue] = []
        self.is_active = False

    def _state(self) -> KeptState:
        return KeptState(self._staged.model, moves_weights=self._staged.gather is not None)

    def begin(self, counts: Collection[int]) -> None:
        """Call before the passes of a training step, with the replicas' numbers of micro-batches."""
        self._most = max(counts)
        self.is_active = self._most > 1 or (self._alone is not None and self._num_steps < _MAX_STEPS)

    @contextmanager
    def watching(self, sizes: Collection[int]) -> Iterator[None]:
        """A context for the passes of a step; ``sizes``: the numbers of samples of this replica's micro-batches."""
        if not self.is_active or not self._is_watcher:
            yield
            return
        state = self._state() if self._most > 1 or self._alone is None else self._alone
        self._staged.around_stage = lambda stage, arguments: state.watching(stage, sizes, arguments)
        try:
            yield
        finally:
            self._staged.around_stage = None
        self._found, state.found = [one for one in dict.fromkeys(state.found) if one.name not in self._reported], []
        if self._most == 1:
            # Replicas take the first one's buffers and frozen parameters, of which another warning tells.
            self._found = [one for one in self._found if not one.is_shared]

    @property
    def has_found(self) -> bool:
        """Whether this rank has something to tell."""
        return bool(self._found)

    def refusal(self) -> str:
        """Why the step is refused, empty: it is not."""
        one = next((one for one in self._found if one.shape), None)
        if one is None or self._most == 1:
            return ""
        return (
            f"the forward keeps {one.name}, of shape {list(one.shape)}, for its next call and reads it there. It has "
            "an entry for each sample of a micro-batch, so that each micro-batch would go on from what other samples "
            "have left. Use num_microbatches=1: with replicas that is right as long as each one's loader keeps its "
            "samples in their places. Or pass it to the model with the batch and return it with the outputs."
        )

    def end(self) -> bool:
        """Call after a training step; returns whether no later one is watched."""
        self._num_steps += self.is_active
        self.is_active = False
        if self._num_steps == _MAX_STEPS:
            self._alone = None
        return self._most > 1

    def tell(self) -> None:
        """Warn of what any rank has found. Collective: all ranks."""
        rows = [[one.name, one.is_shared, one.is_set_once] for one in self._found]
        self._found = []
        # Stages find the same of the code around their blocks, which all of them run.
        found = {name: marks for row in gather_objects(self._layout.control, _END, rows) for name, *marks in row}
        self._reported.update(found)
        once = [name for name, (_, is_set_once) in found.items() if is_set_once]
        kept = [name for name, (_, is_set_once) in found.items() if not is_set_once]
        num_replicas = self._layout.dp.size
        if once:
            _warn(
                f"the first call of the forward has set the weights {_named(once)}, and the second has not: what "
                f"depends on samples is of the first of {self._most} micro-batches only. Set them with a whole batch "
                "before booster.boost, or use num_microbatches=1."
            )
        if kept and self._most > 1:
            _warn(
                f"the forward reads what its last call has left in {_named(kept)}, and changes it. It is called once "
                f"for each of {self._most} micro-batches{' of each replica' if num_replicas > 1 else ''}, parts of the "
                "batch, so that results depend on num_microbatches. Use num_microbatches=1, or make the change in the "
                "script, once in each step."
            )
        own = [name for name, (is_shared, _) in found.items() if not is_shared]
        if own and num_replicas > 1:
            _warn(_OWN.format(names=_named(own), num_replicas=num_replicas))


class KeptStateInCalls:
    """Looks at the script's own calls of a model in training: 1 and 2, 4 and 5, 8 and 9 and so on, with one warning.

    Args:
        model: the user's.
        num_replicas: more than one.
    """

    def __init__(self, model: nn.Module, num_replicas: int):
        self._model, self._num_replicas = model, num_replicas
        self._num_calls = 0
        self._state: KeptState | None = None
        self._reported: set[str] = set()

    def around(self, inner: Callable[..., Any] | None) -> Callable[..., Any]:
        """A wrapper of the script's own calls of the model; ``inner`` wraps them inside."""

        def run(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not torch.is_grad_enabled() or not self._model.training or is_functorch_active():
                return inner(forward, args, kwargs) if inner else forward(*args, **kwargs)
            self._num_calls = number = self._num_calls + 1
            if number != 2 and not number & (number - 1):
                self._state = KeptState(self._model)
            elif number != 2 and (number - 1) & (number - 2):
                self._state = None
            with nullcontext() if self._state is None else self._state.watching(0, (), (args, kwargs)):
                outputs = inner(forward, args, kwargs) if inner else forward(*args, **kwargs)
            if self._state is not None and self._state.found:
                self._tell(self._state.found)
                self._state = None
            return outputs

        return run

    def _tell(self, found: Collection[KeptValue]) -> None:
        # Of persistent buffers and frozen parameters another warning tells.
        own = [one.name for one in found if not one.is_shared and one.name not in self._reported]
        if own:
            self._reported.update(own)
            _warn(_OWN.format(names=_named(own), num_replicas=self._num_replicas))


def _warn(text: str) -> None:
    get_dist_logger().warning(text, ranks=[0])


def _named(names: list[str]) -> str:
    return f"{', '.join(names[:_MOST_NAMED])}{', …' if names[_MOST_NAMED:] else ''}"
