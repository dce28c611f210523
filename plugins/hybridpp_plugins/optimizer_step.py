"""What a step does with gradients: passes are counted, the loss is scaled, gradients are clipped, weights updated."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hybridpp.cluster import Group, Progress, gather_numbers, gather_objects, name_ranks
from hybridpp.config import OptimizerConfig, Precision
from hybridpp.data_parallel import GradientReducer, UpdateTarget
from hybridpp.errors import ConfigError, DeadlockError, PeerError, UnequalRanksError, UnlikeCallsError
from hybridpp.nn import walk
from hybridpp.nn.torch_private import buffers_of, transient_buffers_of, version_of, version_or_none
from hybridpp.optim import GlobalGradNorm, can_divide, divided_in_kernel
from hybridpp.precision import LossScaler, MasterWeights
from hybridpp_plugins.interruption import Interruption
from hybridpp_plugins.manual_clipping import ManualClippingDetector, ManualScaling
from hybridpp_plugins.manual_forward import ManualCallRecorder
from hybridpp_plugins.nonfinite_steps import NonFiniteSteps
from hybridpp_plugins.optimizer_locality import StepWatch
from hybridpp_plugins.optimizer_state import OptimizerStateOwner
from hybridpp_plugins.replica_buffers import ReplicaBuffers
from hybridpp_plugins.set_alike import Facts, differences, group_facts, listed
from hybridpp_plugins.state_by_parameter import StateByParameter
from hybridpp_plugins.wrapped_optimizer import WrappedOptimizer

# What a group holds of this rank alone: its parameters, and the kernels for the device that these are on.
_OF_THE_RANK = frozenset({"params", "param_names", "fused", "foreach", "capturable"})
_PLAIN = frozenset({type(None), bool, int, float, str})
_IN_OPTIMIZER = "in the optimizer's step, get_grad_norm or clip_grad_by_norm"
# Attributes of modules that are probabilities of dropout; not what counts or measures what was dropped.
_RATE = re.compile(r"p|.*(dropout|drop_prob|drop_rate|drop_path|layerdrop).*")
_MAX_CALLS_TOLD = 8
_STEP = "step()"
_USED = ", as the last step has used it,"


class SharedModes:
    """Modes and dropout rates of what all stages have: the model, and modules that no stage holds a part of alone.

    A script may rightly set others by what it finds on a rank: a stage has no parameters of a module that another runs.

    Args:
        model: the user's, after boost.
        owners: the stages that hold each parameter, by its name.
        placement: the rank of every stage in its pipeline.
    """

    def __init__(self, model: nn.Module, owners: Mapping[str, Sequence[int]], placement: Sequence[int]):
        num_ranks, self._model = len(set(placement)), model
        divided: set[str] = set()
        for name, stages in owners.items():
            if len({placement[stage] for stage in stages}) < num_ranks:
                parts = name.split(".")[:-1]
                divided |= {".".join(parts[:number]) for number in range(1, len(parts) + 1)}
        held = [
            (name, vars(module))
            for name, module in (walk.named_modules(model) if num_ranks > 1 else ())
            if name and divided.isdisjoint(_with_parents(name))
        ]
        flags = [(name, one, "training") for name, one in held]
        rates = [
            (name, one, key)
            for name, one in held
            for key, value in one.items()
            if type(value) in (int, float) and _RATE.fullmatch(key)
        ]
        self._held = [("the model", vars(model), "training"), *flags, *rates]

    def values(self) -> list[Any]:
        """Those of now, in one order."""
        return [one.get(key) for _, one, key in self._held]

    def facts(self) -> Facts:
        """Those of now as texts."""
        facts: Facts = {}
        for name, one, key in self._held:
            facts.setdefault(name, {})[key] = repr(one.get(key))
        return facts

    def number(self) -> float:
        """A number that is equal on all ranks whose modes are, and odd where the model trains."""
        return float(crc32(repr(self.values()).encode()) << 1 | self._model.training)

    @staticmethod
    def check_evaluation(numbers: Sequence[float]) -> None:
        """Refuse an evaluation in unlike modes.

        Args:
            numbers: of :meth:`number`, by rank.

        Raises:
            UnequalRanksError: they differ.
        """
        ranks_of: dict[float, list[int]] = {}
        is_told = len({number % 2 for number in numbers}) > 1
        for rank, number in enumerate(numbers):
            ranks_of.setdefault(number % 2 if is_told else number, []).append(rank)
        if len(ranks_of) > 1:
            clauses = [
                f"{bool(number)} on {name_ranks(ranks)}" if is_told else name_ranks(ranks)
                for number, ranks in ranks_of.items()
            ]
            what = "training of the model is" if is_told else "modes or rates of dropout inside of it differ between"
            raise UnequalRanksError(
                f"all ranks must evaluate the model in the same modes: {what} {', '.join(clauses)}. Call model.eval() "
                "and model.train(), and set modes and rates of modules, on all ranks alike."
            )


def _with_parents(name: str) -> set[str]:
    parts = name.split(".")
    return {".".join(parts[:number]) for number in range(1, len(parts) + 1)}


class GroupSettings:
    """Learning rates and all other settings of an optimizer's groups, and modes of the model that all ranks have.

    A digest of them is part of messages that ranks send anyway; it takes microseconds, and no wait for a device. What
    the last step has used is in it, too: a script may have set it back since.

    Args:
        optimizer: that updates the weights.
        modes: of the model.
        control: all ranks.
    """

    def __init__(self, optimizer: Optimizer, modes: SharedModes, control: Group):
        self._optimizer, self._modes, self._control = optimizer, modes, control
        self._used: list[dict[str, Any]] = []

    def on_device(self) -> list[Tensor]:
        """Settings that are tensors on a device, as vectors of float64 there: rates for CUDA graphs, for example.

        The caller reads them with other numbers, and gives them to :meth:`digest`.
        """
        return [
            one.detach().reshape(-1).double()
            for value in self._values()
            for one in (value if isinstance(value, tuple | list) else (value,))
            if isinstance(one, Tensor) and not one.is_cpu
        ]

    def digest(self, on_device: Sequence[float] = (), *, with_modes: bool = True) -> float:
        """A number that is equal on all ranks whose settings are; ``on_device``: what was read of :meth:`on_device`."""
        held = [_plain(value) for value in self._values()]
        modes = self._modes.values() if with_modes else None
        return float(crc32(repr((modes, held, self._used, on_device)).encode()))

    def note_use(self) -> None:
        """Note what a step uses; tensors on a device are not looked at."""
        self._used = [
            {key: _plain(value) for key, value in group.items() if key not in _OF_THE_RANK}
            for group in self._optimizer.param_groups
        ]

    def _values(self) -> Iterable[Any]:
        for group in self._optimizer.param_groups:
            for key, value in group.items():
                if key not in _OF_THE_RANK:
                    yield value

    def facts(self) -> Facts:
        """The settings as texts."""
        groups = enumerate(self._optimizer.param_groups)
        facts = {
            f"parameter group {index}": {
                key: text for key, text in group_facts(group).items() if key not in _OF_THE_RANK
            }
            for index, group in groups
        }
        return {**facts, **self._modes.facts()}

    def _used_facts(self) -> Facts:
        used = enumerate(self._used)
        return {f"parameter group {index}{_USED}": {key: repr(one[key]) for key in one} for index, one in used}

    def check(self, digests: Sequence[float], call: str, consequence: str) -> None:
        """Refuse settings that differ between ranks. Collective, if the digests differ: all ranks.

        Args:
            digests: by rank.
            call: that this rank is in, see :mod:`hybridpp.cluster.gather_numbers`.
            consequence: a sentence on what has happened to the weights.

        Raises:
            UnequalRanksError: they differ; on every rank, with the group, the setting, its values and the ranks.
        """
        if len(set(digests)) == 1:
            return
        rows = gather_objects(self._control, call, (self.facts(), self._used_facts()))
        clauses, used = differences([now for now, _ in rows]), differences([before for _, before in rows])
        if used:
            consequence = "Their weights no longer fit together: load a checkpoint on all ranks."
        if clauses or used:
            raise UnequalRanksError(
                f"all ranks must update with the same settings: {listed(used or clauses)}. {consequence} Change "
                "settings on all ranks alike. A schedule that follows a loss (ReduceLROnPlateau) needs the same one "
                "everywhere: average it over the replicas first, with torch.distributed.all_reduce."
            )


def _plain(value: Any) -> Any:
    """What of a value is compared; an object by its class."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    if isinstance(value, Tensor):
        return value.tolist() if value.is_cpu else kind.__name__
    return float(value) if isinstance(value, float | int) else kind.__name__


class ScriptCalls:
    """What the script has called of an optimizer since ranks last compared it, if it changes gradients or weights.

    A digest of it is part of messages that ranks send anyway.

    Args:
        control: all ranks.

    Attributes:
        last: the last ones of the calls.
    """

    def __init__(self, control: Group):
        self._control = control
        self._digest = 0
        self._is_known = True
        self.last: tuple[str, ...] = ()
        self._compared: tuple[str, ...] = ()

    def note(self, call: str) -> None:
        """Note a call, with its arguments."""
        self._digest = crc32(call.encode(), self._digest)
        self.last = (*self.last, call)[-_MAX_CALLS_TOLD:]

    def miss(self) -> None:
        """Note that this rank cannot tell whether a call counts."""
        self._is_known = False

    @property
    def digest(self) -> float:
        """Of the calls in their order; -1: this rank cannot tell."""
        return float(self._digest) if self._is_known else -1.0

    def take(self) -> float:
        """The digest, which a message has; from now on, later calls count."""
        digest, self._compared = self.digest, self.last
        self._digest, self._is_known = 0, True
        self.last = ()
        return digest

    def check(self, digests: Sequence[float], call: str, *, taken: bool = True) -> None:
        """Refuse calls that differ between ranks. Collective, if the digests differ: all ranks.

        Args:
            digests: by rank.
            call: that this rank is in, see :mod:`hybridpp.cluster.gather_numbers`.
            taken: whether they are those of :meth:`take`, else those of now.

        Raises:
            UnlikeCallsError: they differ; on every rank, with the calls and the ranks.
        """
        if self.are_alike(digests):
            return
        own = self._compared if taken else self.last
        try:
            rows = gather_objects(self._control, call, list(own))
        except (PeerError, DeadlockError) as error:  # it waits for what these calls have begun
            raise self.unlike(digests, own) from error
        ranks_of: dict[tuple[str, ...], list[int]] = {}
        for rank, (digest, row) in enumerate(zip(digests, rows, strict=True)):
            if digest >= 0:
                ranks_of.setdefault(tuple(row), []).append(rank)
        raise _unlike_calls([f"{name_ranks(ranks)} has called {_called(calls)}" for calls, ranks in ranks_of.items()])

    @staticmethod
    def are_alike(digests: Sequence[float]) -> bool:
        """Whether the digests of ranks that can tell are equal."""
        return len({one for one in digests if one >= 0}) <= 1

    def unlike(self, digests: Sequence[float], own: tuple[str, ...] | None = None) -> UnlikeCallsError:
        """The error of a rank that the others do not answer, by what it has called itself: ``own``, or last taken."""
        here = self._control.rank
        others = [rank for rank, digest in enumerate(digests) if digest not in (digests[here], -1.0)]
        calls = _called(self._compared if own is None else own)
        return _unlike_calls([f"rank {here} has called {calls}", f"{name_ranks(others)} has called others"])


def _unlike_calls(clauses: Sequence[str]) -> UnlikeCallsError:
    return UnlikeCallsError(
        "all ranks must make the same calls of the optimizer in the same order: since the training step before, "
        f"{'; '.join(clauses)}. Make these calls on all ranks, with the same arguments. Their weights no longer fit "
        "together: load a checkpoint on all ranks."
    )


def _called(calls: Sequence[str]) -> str:
    return ", ".join(f"optimizer.{call}" for call in calls) or "nothing of it"


class ModelModes:
    """What a script may set on a model after boost, and ranks that hold the same parameters must set alike.

    It is which parameters are trained, the modes and dropout rates of modules, and to which buffers of the state dict
    the script has written between two steps; not the values that it wrote. The walk takes microseconds, its digest is
    part of messages that ranks send anyway, and nothing waits for a device.

    Args:
        model: the user's, after boost.
        trained: the parameters that the optimizer updates, by name.
        control: all ranks.
        alike: lists of ranks that hold the same parameters, or shards of the same.

    Attributes:
        digest: of what :meth:`look` found; 0: nothing has changed since boost.
    """

    def __init__(
        self, model: nn.Module, trained: Mapping[str, nn.Parameter], control: Group, alike: Sequence[Sequence[int]]
    ):
        self._control, self._alike = control, alike
        modules = walk.named_modules(model)
        held = [(name or "the model", vars(module)) for name, module in modules]
        rates = [
            (f"{key} of {name}", one, key)
            for name, one in held
            for key, value in one.items()
            if type(value) in (int, float) and _RATE.fullmatch(key)
        ]
        self._flags = [one for _, one in held]
        self._rates = [(one, key) for _, one, key in rates]
        self._trained = list(trained.values())
        self._names = [
            *(f"training of {name}" for name, _ in held),
            *(name for name, *_ in rates),
            *(f"requires_grad of {name}" for name in trained),
        ]
        self._buffers = [
            (f"{name}.{key}" if name else key, module, key)
            for name, module in modules
            if not isinstance(module, torch.jit.ScriptModule)  # its buffers are in no dict
            for key in buffers_of(module)
            if key not in transient_buffers_of(module)
        ]
        self._at_boost = self._now = self._set_now()
        self._versions: list[tuple[int, int | None]] | None = None
        self._written: tuple[str, ...] = ()
        self.digest = 0.0

    def _set_now(self) -> list[Any]:
        return [
            *[one.get("training") for one in self._flags],
            *[one.get(key) for one, key in self._rates],
            *[parameter.requires_grad for parameter in self._trained],
        ]

    def _versions_now(self) -> list[tuple[int, int | None]]:
        buffers = (buffers_of(module).get(key) for _, module, key in self._buffers)
        return [(id(buffer), None if buffer is None else version_or_none(buffer)) for buffer in buffers]

    def look(self) -> float:
        """Look at what is set now; returns :attr:`digest`. Call it before a step."""
        now, written = self._set_now(), self._written
        if self._versions is not None:
            pairs = zip(self._buffers, self._versions, self._versions_now(), strict=True)
            written = tuple(name for (name, *_), before, after in pairs if before != after)
        if now != self._now or written != self._written:
            self._now, self._written = now, written
            is_new = now != self._at_boost or bool(written)
            self.digest = float(crc32(repr((now, written)).encode())) if is_new else 0.0
        return self.digest

    def passed(self) -> None:
        """Note the buffers after what the library runs and may write to them."""
        self._versions = self._versions_now()

    def _changes(self) -> dict[str, list[str]]:
        """What differs from boost: its value now, and then."""
        sets = zip(self._names, self._now, self._at_boost, strict=True)
        found = {name: [repr(now), repr(then)] for name, now, then in sets if now != then}
        return found | {f"a write to {name} between two steps": ["made", "not made"] for name in self._written}

    def check(self, digests: Sequence[float], call: str, consequence: str) -> None:
        """Refuse what differs between ranks that hold the same parameters. Collective, if it does: all ranks.

        Args:
            digests: by rank.
            call: that this rank is in, see :mod:`hybridpp.cluster.gather_numbers`.
            consequence: a sentence on what has happened to the weights.

        Raises:
            UnequalRanksError: it differs; on every rank, with what it is, its values and the ranks.
        """
        if len(set(digests)) == 1:
            return
        unequal = [ranks for ranks in self._alike if len({digests[rank] for rank in ranks}) > 1]
        if not unequal:  # stages differ
            return
        rows = gather_objects(self._control, call, self._changes())
        clauses: dict[str, None] = {}
        for ranks in unequal:
            for what in dict.fromkeys(what for rank in ranks for what in rows[rank]):
                then = next(rows[rank][what][1] for rank in ranks if what in rows[rank])
                ranks_of: dict[str, list[int]] = {}
                for rank in ranks:
                    ranks_of.setdefault(rows[rank].get(what, [then])[0], []).append(rank)
                if len(ranks_of) > 1:
                    values = (f"{value} on {name_ranks(those)}" for value, those in ranks_of.items())
                    clauses[f"{what} is {', '.join(values)}"] = None
        if clauses:
            raise UnequalRanksError(
                f"ranks that hold the same parameters must train them in the same way: {listed(list(clauses))}. "
                f"{consequence} Freeze parameters, set modes and rates and write to buffers on all ranks alike. What "
                "follows a loss needs the same one everywhere: average it over the replicas first, with "
                "torch.distributed.all_reduce."
            )


class _UsedGradients:
    """What a step used, once it is cleared: the memory keeps it until the next backward pass.

    Args:
        norm: of the gradients; None: it is not known.
        gradients: by name.
    """

    def __init__(self, norm: float | None, gradients: Mapping[str, Tensor]):
        self.norm, self.gradients = norm, dict(gradients)
        self._versions = self._version()

    def _version(self) -> list[int]:
        return [version_of(gradient) for gradient in self.gradients.values()]

    @property
    def are_lost(self) -> bool:
        """Whether something was written over the gradients."""
        return self._version() != self._versions


_WRITTEN = (
    "the script has made gradients ({name}.grad) without booster.backward or booster.execute_pipeline. On one rank in "
    "fp32, they are those of the step; otherwise those of replicas and shards would not be put together, or are kept "
    "elsewhere. Let a backward pass make them: booster.backward(sum((p * g).sum() for p, g in zip(parameters, "
    "gradients)), optimizer, num_items=1) has the mean of the replicas' gradients g. With zero_stage=3, call it inside "
    "`with booster.unsharded(model):`."
)


class AccumulatedGradients:
    """The gradients that ``step`` will use.

    Args:
        reducer: holds the gradients.
        norm: computes their norm over all ranks.
        in_kernel: whether a fused optimizer may scale them.

    Attributes:
        scale: the factor that the gradients contain.
        cached_norm: their norm without the scale, the same on every rank; None: it is not known.
        round: number of the accumulation; a new one begins when gradients start from zero.
        num_passes: backward passes in this round.
        num_manual_passes: those of them that the script ran itself.
        clip_detector: detects clipping by the script; None where clipping is impossible or harmless: the gradients are
            not exposed, or the model is on one rank.
    """

    def __init__(self, reducer: GradientReducer, norm: GlobalGradNorm, in_kernel: bool = True):
        self.scale = 1.0
        self.cached_norm: float | None = None
        self.round = self.num_passes = self.num_manual_passes = 0
        is_split = len(norm.ranks) > 1
        self.clip_detector = ManualClippingDetector(reducer) if reducer.exposes_grad and is_split else None
        self._reducer = reducer
        self._norm = norm
        self._in_kernel = in_kernel
        self._is_unscaled = False
        # What the gradients were when the norm was cached.
        self._version: tuple[int, ...] | frozenset[str] = ()
        self._used: _UsedGradients | None = None

    def begin(self, loss_scale: float, manual: bool) -> None:
        """Prepare for backward passes of a loss times ``loss_scale``; ``manual``: the script runs them."""
        if self._reducer.is_consumed:
            self.start_round()
        else:
            if self.clip_detector is not None:
                self.clip_detector.detect()
            # The script has divided by the scale, or an earlier pass was of another model's loss, with its scale.
            before = 1.0 if self._is_unscaled else self.scale
            self._reducer.scale(loss_scale / before)
        self.num_passes += 1
        self.num_manual_passes += manual
        self._used = None
        self.scale, self.cached_norm, self._is_unscaled = loss_scale, None, False
        self._reducer.begin()

    def end(self) -> None:
        """Reduce the gradients after the backward passes. Collective: all replicas, unless inside ``no_sync``."""
        self._reducer.finish_grad_sync()
        self._record_for_detector()

    def _record_for_detector(self) -> None:
        """Note a change of the gradients by the library, so that it does not count as the script's."""
        if self.clip_detector is not None:
            self.clip_detector.record()

    def start_round(self) -> None:
        """Start a new round: the gradients so far are used, refused or cleared."""
        self.round += 1
        self.num_passes = self.num_manual_passes = 0

    def clear(self, set_to_none: bool) -> None:
        """Drop the gradients; exposed ``parameter.grad`` become None, or zeros unless ``set_to_none``."""
        if self._reducer.is_consumed:
            self._used = _UsedGradients(self.cached_norm, self._reducer.gradients if self.cached_norm is None else {})
        elif self.num_passes:
            self._used = None
        self._reducer.clear(set_to_none)
        self.start_round()
        self.cached_norm, self._is_unscaled = None, False

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Copies of the gradients without the scale, by name. Collective, if gradients are not reduced yet."""
        self.finalize()
        unused = set(self._reducer.unused_parameters())
        held = [(name, gradient) for name, gradient in self._reducer.whole_gradients().items() if name not in unused]
        return ((name, gradient / self.scale) for name, gradient in held)

    def take_written(self) -> None:
        """Take over gradients that the script has made without a backward pass of the library's.

        Raises:
            ConfigError: several ranks would have to put them together, or ``parameter.grad`` does not show gradients.
        """
        has_passes = self.num_passes and not self._reducer.is_consumed
        written = [] if has_passes else self._reducer.written()
        if not written:
            return
        if self.control.size > 1 or not self._reducer.exposes_grad:
            raise ConfigError(_WRITTEN.format(name=min(written)))
        self._reducer.take_written(written)
        self.start_round()
        self.num_passes, self.scale = 1, 1.0
        self._used, self.cached_norm, self._is_unscaled = None, None, False

    def finalize(self) -> None:
        """Complete the gradients for ``step``: take over what the script set, and reduce."""
        self.take_written()
        self._reducer.sync_from_grad()
        self._reducer.finish_grad_sync()
        if self.clip_detector is not None:
            self.clip_detector.detect()

    def finalize_for(self, caller: str) -> None:
        """:meth:`finalize` for the method ``caller``, which needs reduced gradients.

        Raises:
            ConfigError: it is called inside ``no_sync``.
        """
        if not self._reducer.is_syncing and not self._reducer.is_consumed:
            raise ConfigError(
                f"{caller} inside no_sync would use one replica's gradients only. Call it after the block."
            )
        self.finalize()

    def norm(self) -> float:
        """The norm of the complete model's current gradient, without the scale. Collective: all ranks.

        It is computed again if the script has written to gradients since it was cached.
        """
        if self.cached_norm is None or self._changed_anywhere():
            return self.set_norm(self._norm.gather(f"{_IN_OPTIMIZER} (norm of the gradients)", self._reducer.gradients))
        return self.cached_norm

    def norm_to_clip(self, max_norm: float) -> float:
        """:meth:`norm`, or where it has no effect that the script has dropped gradients, that with these.

        Collective: all ranks; in half precision and with ZeRO without a message, where the norm is finite.

        Raises:
            ConfigError: with pipelines, where other ranks have other parameters, it has dropped some on this rank.
        """
        norm = self.cached_norm
        if norm is not None and not self._reducer.exposes_grad and math.isfinite(norm):
            if clip_factor(norm, max_norm) == 1:
                return norm
            if self._norm.is_staged and self._version != self._version_now():
                raise ConfigError(
                    f"parameter.grad = None before optimizer.step() ({', '.join(sorted(self._reducer.cleared)[:3])}): "
                    f"the gradient norm that max_norm={max_norm:g} clips by is known to all pipeline stages by then. "
                    "Call parameter.requires_grad_(False) before the forward, or clip by optimizer.clip_grad_by_norm."
                )
            if self._norm.is_staged:
                return norm
        return self.norm()

    def norm_of_last_step(self) -> float | None:
        """The norm that the last step used, after :meth:`clear`; None: gradients were not cleared since.

        Collective: all ranks, where the step needed no norm.

        Raises:
            ConfigError: it was not known, and the gradients were overwritten.
        """
        used = self._used
        if used is None or used.norm is not None:
            return None if used is None else used.norm
        call = f"{_IN_OPTIMIZER} (norm of the last step)"
        if any(lost for (lost,) in gather_numbers(self.control, call, [float(used.are_lost)])):
            raise ConfigError(
                "the gradient norm of the last step is not known: the step did not need it, and its gradients are "
                "overwritten. Call get_grad_norm() before zero_grad(set_to_none=False) and gradients(), or set "
                "max_norm."
            )
        used.norm = self._norm.total(self._norm.gather(call, used.gradients)) / self.scale
        return used.norm

    def set_norm(self, messages: Sequence[Sequence[float]]) -> float:
        """Compute the norm from every rank's message, by rank."""
        return self._cache_norm(self._norm.total(messages) / self.scale)

    def _cache_norm(self, value: float) -> float:
        self.cached_norm, self._version = value, self._version_now()
        return value

    def _version_now(self) -> tuple[int, ...] | frozenset[str]:
        """Changes where the script changes gradients; where it cannot write to them, it may drop some."""
        return self._reducer.version if self._reducer.exposes_grad else frozenset(self._reducer.cleared)

    def _changed_anywhere(self) -> bool:
        """Whether the script has written to gradients since the norm was cached, on any rank, without a device wait."""
        if self._reducer.is_consumed:
            return False
        has_changed = float(self._version != self._version_now())
        if not self._reducer.exposes_grad and not self._norm.is_staged:
            return bool(has_changed)  # all ranks have the same parameters, and drop the same gradients
        rows = gather_numbers(self.control, f"{_IN_OPTIMIZER} (changes of gradients)", [has_changed])
        return any(has_changed for (has_changed,) in rows)

    @property
    def control(self) -> Group:
        """All ranks of the world."""
        return self._norm.control

    def nonfinite(self) -> list[str]:
        """This rank's parameters whose gradients are inf or NaN. Waits for the device."""
        return self._norm.not_finite(self._reducer.gradients)

    def unscale(self) -> None:
        """Divide the gradients by the scale."""
        if self.scale != 1.0:
            self._reducer.scale(1.0 / self.scale)
            self.scale, self._is_unscaled = 1.0, True

    def clip_by_norm(self, max_norm: float) -> float:
        """Scale the gradients to a norm of at most ``max_norm``, unless it is inf or NaN; returns the norm before."""
        norm = self.norm()
        if math.isfinite(norm):
            factor = clip_factor(norm, max_norm)
            self._reducer.scale(factor)
            self._cache_norm(norm * factor)
            self._record_for_detector()
        return norm

    def clip_by_value(self, limit: float) -> None:
        """Bring every element into ``[-limit, limit]``."""
        self._reducer.clamp(limit * self.scale)
        self.cached_norm = None
        self._record_for_detector()

    def used(self, factor: float, optimizer: Optimizer, target: UpdateTarget) -> AbstractContextManager[None]:
        """A context for a step, in or before which gradients are divided by the scale and multiplied by ``factor``.

        Args:
            factor: above 0.
            optimizer: if it is fused, its kernels divide while they read, which saves a pass over all gradients.
            target: what it updates, which holds its gradients.
        """
        scale, self.scale, self._is_unscaled, self._used = self.scale, 1.0, False, None
        is_fused = all(group.get("fused") for group in optimizer.param_groups)
        in_kernel = self._in_kernel and is_fused and not target.copies_gradients
        if in_kernel and factor != scale and can_divide(optimizer, target.tensors.values()):
            return divided_in_kernel(optimizer, scale / factor)
        self._reducer.scale(factor / scale)
        return nullcontext()

    def check_clipping(self) -> None:
        """Exchange and check what :attr:`clip_detector` found. Collective: all ranks, one all-gather."""
        if self.clip_detector is not None:
            rows = gather_numbers(
                self.control, "in the optimizer's step, after booster.backward", self.clip_detector.report()
            )
            self.clip_detector.check([ManualScaling(*row) for row in rows])


def clip_factor(norm: float, max_norm: float) -> float:
    """The factor that clips gradients of this norm."""
    # With the same small term as in torch.nn.utils.clip_grad_norm_, so that the results are equal.
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0


class SteppingOptimizer(WrappedOptimizer):
    """The part of a boosted optimizer that a step runs; the rest is what scripts call beside it.

    Attributes:
        target: the tensors that it updates.
        norm: computes the gradient norm over all ranks.
        accumulated: the gradients.
        nonfinite_steps: skips or refuses steps with inf or NaN gradients.
        manual_calls: the script's calls of the model, if they are recorded.
        replica_buffers: buffers that the first replica sends to the others; None: there are none.
        group_settings: what ranks compare of its groups; None: nothing.
        modes: what ranks compare of the model; None: nothing.
        calls: of the script, which ranks compare.
        rank_progress: told in which call this rank is.
        while_updating: a context to run :meth:`step` in.
        on_plain_weights: a context for what the library does with weights, see :class:`ScriptReads`.
        num_updates: since boost.
        step_watch: watches what hooks of its step compute; None: this rank has the complete model.
        interruption: notes an error that ends its communication in the middle.
        cleared_digest: of the names whose gradients the script had set to None at the last step; 0: there were none.
        held_before: parameters of this rank that had gradients when the model was boosted, by name.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        reducer: GradientReducer,
        target: UpdateTarget,
        masters: MasterWeights,
        norm: GlobalGradNorm,
        config: OptimizerConfig,
        precision: Precision,
        owner: OptimizerStateOwner,
    ):
        self._scales = precision is Precision.FP16
        super().__init__(optimizer, masters, LossScaler(config.loss_scale, self._scales), owner, norm.control)
        self._reducer = reducer
        self.target = target
        self.norm = norm
        self._max_norm = config.max_norm
        self._needs_norm = self._scales or config.max_norm > 0 or config.error_if_nonfinite is not None
        self.cleared_digest = 0.0
        self.held_before: Mapping[str, Tensor] = {}
        self.accumulated = AccumulatedGradients(reducer, norm, config.fused_optimizer is not False)
        self.nonfinite_steps = NonFiniteSteps(config, self._scales, self.loss_scaler, self.accumulated)
        self.manual_calls: ManualCallRecorder | None = None
        self.replica_buffers: ReplicaBuffers | None = None
        self.group_settings: GroupSettings | None = None
        self.modes: ModelModes | None = None
        self.calls = ScriptCalls(norm.control)
        self.rank_progress = Progress()
        self.while_updating: Callable[[], AbstractContextManager[None]] = nullcontext
        self.on_plain_weights: Callable[[], AbstractContextManager[None]] = nullcontext
        self.interruption = Interruption()
        self.step_watch: StepWatch | None = None
        self.num_updates = 0

    @property
    def state(self) -> Any:  # type: ignore[override]  # an attribute in torch's class
        """The wrapped optimizer's state; see :class:`StateByParameter`."""
        return StateByParameter(self._optimizer.state, self.target)

    def check_gradients_before_boost(self) -> None:
        """Refuse gradients that were there at boost, of which the script has dropped none before it trains.

        Raises:
            ConfigError: a parameter of this rank has one.
        """
        if not self.held_before:
            return
        name = next((name for name, parameter in self.held_before.items() if parameter.grad is not None), None)
        if name is not None:
            raise ConfigError(
                f"{name} had a gradient when the model was boosted, which torch would add to those of the first step. "
                "Call optimizer.step() before booster.boost, or drop it: optimizer.zero_grad() before booster.boost, "
                "or after it, before the first step."
            )
        self.held_before = {}

    @property
    def loss_scale(self) -> float:
        """Factor on the loss in the backward pass; 1 unless fp16."""
        return self.loss_scaler.state.scale

    @property
    def has_new_buffers(self) -> bool:
        """Whether a forward pass has written here to a buffer that was not written to before."""
        return self.replica_buffers is not None and self.replica_buffers.wants_agreement

    def begin_accumulation(self, manual: bool = False) -> None:
        """Prepare for the backward passes of a step; ``manual``: the script runs them."""
        if self._is_released:
            self._refuse_released()
        self.accumulated.begin(self.loss_scale, manual)

    def end_accumulation(self) -> None:
        """Reduce the gradients after the backward passes. Collective: all replicas, unless inside ``no_sync``."""
        self.accumulated.end()

    @property
    def sends_norm_with_loss(self) -> bool:
        """Whether ``step`` will need the norm: then it is exchanged together with the loss."""
        return self._needs_norm and self._reducer.is_syncing

    def norm_parts(self) -> Tensor:
        """The norms of the gradients that count on this rank, scaled, on the device."""
        return self.norm.parts(self._reducer.gradients)

    def unread_flags(self) -> Tensor:
        """What ``step`` will read of the device besides the norms, if anything, for the caller to read with them."""
        flags = self._reducer.unread_flags()
        return torch.empty(0, dtype=torch.float64) if flags is None else flags.double()

    def take_flags(self, flags: list[float]) -> None:
        """Take over the numbers of :meth:`unread_flags`, if there are any."""
        if flags:
            self._reducer.take_flags(flags)

    @property
    def wants_report(self) -> bool:
        """Whether a gradient is inf or NaN and will be reported; the same on every rank."""
        norm = self.accumulated.cached_norm
        return norm is not None and not math.isfinite(norm) and self.nonfinite_steps.wants_search(norm)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # no closure, no loss
        """Update the weights. If an fp16 gradient overflowed on any rank, all ranks skip the step and lower the scale.

        In other precisions, a gradient norm that is inf or NaN raises before any weight changes, if the norm is known:
        with ``max_norm``, after ``get_grad_norm`` or ``clip_grad_by_norm``, and always with
        ``error_if_nonfinite=True``. ``error_if_nonfinite=False`` skips such steps instead. In every case the gradients
        are consumed.

        Without a backward pass since the last step, it does nothing, unless the script has set gradients itself (on one
        rank in fp32).

        Collective: all ranks.

        Raises:
            ConfigError: a closure is given, it is called inside ``no_sync``, or the script has set gradients elsewhere.
            UnlikeCallsError: an error ended a step in the middle on this rank.
            NonFiniteGradientError: a gradient is inf or NaN on any rank; raised on all.
        """
        if closure is not None:
            raise ConfigError("step accepts no closure: the schedule runs forward and backward. Call step() alone.")
        if self._is_released:
            self._refuse_released()
        if not self._reducer.is_syncing:
            raise ConfigError("step inside no_sync would make the replicas diverge. Call it after the block.")
        self.check_gradients_before_boost()
        with self._communicating(_STEP), self.on_plain_weights():
            self.accumulated.take_written()
            if self._reducer.is_consumed:
                return
            with self.while_updating():
                self._update()

    @property
    def num_pending(self) -> int:
        """Backward passes whose gradients wait for a step."""
        return 0 if self._reducer.is_consumed else self.accumulated.num_passes

    @property
    def after_calls(self) -> str:
        """The script's calls that ranks have not compared yet, as the end of a sentence; empty: a step at most."""
        calls = self.calls.last
        return "" if calls in ((), (_STEP,)) else f", after {_called(calls)}"

    def _note_call(self, call: str) -> None:
        """Note a call of the script that changes gradients that wait for a step, if there are any."""
        if self.num_pending:
            self.calls.note(call)

    @contextmanager
    def _communicating(self, call: str) -> Iterator[None]:
        """A context for what ranks do together in ``call``. After an error that ends it in the middle, nothing follows.

        Errors of peers that do not come name the call, and those before it that ranks have not compared.
        """
        if self.interruption.cause is not None:
            self.interruption.refuse()
        try:
            with self.rank_progress.inside(self.rank_progress.section, lambda: f"optimizer.{call}{self.after_calls}"):
                yield
        except (PeerError, DeadlockError) as error:
            self.interruption.lost_peer(error)
            raise

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`WrappedOptimizer.state_dict`.

        Raises:
            ConfigError: the script has written to parts of weights since the last step, of which replicas do not know.
        """
        self.target.take_over()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See :meth:`WrappedOptimizer.load_state_dict`."""
        with self._communicating("load_state_dict()"):
            super().load_state_dict(state_dict)

    def _update(self) -> None:
        """Update the weights, or skip the step; the gradients are consumed. Collective: all ranks."""
        # Passes have refused what was written before them.
        self.target.pull(in_step=True, before_update=True)
        self.accumulated.finalize()
        if self.accumulated.num_manual_passes:
            self.accumulated.check_clipping()
        factor = 1.0
        if self._needs_norm or self.accumulated.cached_norm is not None:
            norm = self.accumulated.norm_to_clip(self._max_norm)
            if not math.isfinite(norm):
                self._skip(norm)
                return
            self._count_applied()
            factor = clip_factor(norm, self._max_norm)
        unused = set(self._reducer.unused_parameters())
        if self.group_settings is not None:
            self.group_settings.note_use()
        self.cleared_digest = float(crc32("\n".join(sorted(self._reducer.cleared)).encode()))
        with (
            self.target.lent(self._reducer.gradients, unused),
            self.accumulated.used(factor, self._optimizer, self.target),
        ):
            self.target.fetch()
            self.num_updates += 1
            with self._watched():
                self._optimizer.step()
        self.target.push()
        self._reducer.consume()
        self.applied_steps += 1
        self.calls.note(_STEP)

    def _watched(self) -> AbstractContextManager[None]:
        """A context for the optimizer's step, in which steps 1, 4, 8, 16 and so on are watched."""
        number = self.num_updates
        if self.step_watch is None or number & (number - 1) or number == 2:
            return nullcontext()
        return self.step_watch.around(number)

    def _count_applied(self) -> None:
        """Update the loss scale after a step with finite gradients."""
        before = self.loss_scaler.update(overflow=False)
        if self._scales and self.loss_scaler.skipped_steps and not before.settled:
            self.nonfinite_steps.report_found_scale(before.scale)
        self._forget_manual_calls()

    def _skip(self, norm: float) -> None:
        """Skip or refuse the step, and consume its gradients. Collective: all ranks, with the same norm."""
        search = None if self.manual_calls is None else self.manual_calls.diagnose
        self.nonfinite_steps.search_manual_calls(search, norm)
        self._forget_manual_calls()
        try:
            self.nonfinite_steps.skip(norm)
        finally:
            self._reducer.consume()
        if self.target.is_divided:  # what the script has written to parts before a step that is skipped
            self.target.push()

    def _forget_manual_calls(self) -> None:
        if self.manual_calls is not None and self.manual_calls.kept:
            self.manual_calls.forget()
