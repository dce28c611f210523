"""Mixed precision: fp32 masters of half-precision weights, what the optimizer updates, and the loss scale of fp16.

Micikevicius et al., "Mixed Precision Training", ICLR 2018, arXiv:1710.03740.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from hybridpp.cluster import get_dist_logger
from hybridpp.config import LossScaleConfig
from hybridpp.errors import ConfigError
from hybridpp.nn.counted_parameter import CountedParameter
from hybridpp.nn.torch_private import children_of, foreach_copy_, has_no_data, parameters_of, version_of
from hybridpp.precision.dtypes import bare_name
from hybridpp.precision.host_transfer import HostTransfer
from hybridpp.precision.write_watch import WriteWatch

PartOf: TypeAlias = Callable[[Tensor], Tensor]
"""A view of that part of a parameter, or of a tensor of its shape, that this rank updates."""


class MasterWeights:
    """A master in at least fp32 for every given parameter, or for the part of it that this rank updates.

    Args:
        parameters: the trainable parameters, by name.
        values: their values before they were cast to half precision; None: as they are now.
        parts: the part of each that has a master here, by name; those that are missing have none. None: all of each.
        on_host: the names of those whose masters lie in host memory.
        are_copies: whether masters hold nothing that the weights do not: they are there to be elsewhere.

    Attributes:
        masters: each parameter's master, by name: a leaf tensor that an optimizer can update.
        are_copies: as given.
        transfer: to and from masters in host memory; None: there are none.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        values: Mapping[str, Tensor] | None = None,
        parts: Mapping[str, PartOf] | None = None,
        on_host: Collection[str] = (),
        are_copies: bool = False,
    ):
        self._parts = dict.fromkeys(parameters, _all_of) if parts is None else parts
        self._model_weights: dict[str, Tensor] = {n: parameters[n] for n in parameters if n in self._parts}
        self._parts_of_weights = self._parts
        self.masters = {
            name: nn.Parameter(
                _wide_copy(self._parts[name]((values or parameters)[name].detach()), parameter.dtype, name in on_host),
                requires_grad=parameter.requires_grad,
            )
            for name, parameter in self._model_weights.items()
        }
        self.are_copies = are_copies
        hosted = {name: master for name, master in self.masters.items() if name in on_host}
        self.transfer = HostTransfer(hosted) if hosted else None
        # Of an optimizer's state, of weights that the model does not have.
        self._saved: dict[str, Tensor] = {}
        # Since the last update, masters of weights that the script has written to: it may put them back.
        self._replaced: dict[str, Tensor] = {}
        self._versions: dict[str, int] = {}
        self._versions_of_masters: dict[str, int] = {}
        # None: weights are there only where the library knows what is written to them.
        self._watch: WriteWatch | None = WriteWatch() if self.masters else None
        self._note_versions()

    def update_pieces(self, pieces: Mapping[str, Tensor]) -> None:
        """From now on, update these views of the parts, because parameters have no values between steps (ZeRO 3)."""
        self._model_weights = {name: pieces[name] for name in self._model_weights}
        self._parts_of_weights = dict.fromkeys(self._model_weights, _all_of)
        self._watch = None
        self._note_versions()

    def _note_versions(self) -> None:
        self._versions = {name: version_of(self._model_weights[name]) for name in self.masters}
        self._versions_of_masters = {name: version_of(master) for name, master in self.masters.items()}

    def written_by_script(self) -> list[str]:
        """The names of masters that are no longer what the weights were rounded from (``optimizer.param_groups``).

        Raises:
            ConfigError: the script has written to such a weight, too.
        """
        versions = self._versions_of_masters
        written = [name for name, master in self.masters.items() if version_of(master) != versions[name]]
        if not written:
            return []
        working = self._working()
        # What the library has written (a checkpoint), it has rounded, too.
        found = [
            name
            for name in written
            if not has_no_data(working[name])
            and not torch.equal(self.masters[name].to(working[name].device, working[name].dtype), working[name])
        ]
        # Pieces that lie in one buffer have one counter; there, no weights can be written beside them.
        watch = self._watch if found else None
        if watch is not None:
            both = {name for name in found if version_of(self._model_weights[name]) != self._versions[name]}
            if watch.is_known:
                both |= watch.written(working, both).intersection(found)
            for name in sorted(both):
                raise ConfigError(
                    f"{name}, or a weight beside it, and its fp32 copy (a tensor of optimizer.param_groups) were both "
                    "written since the last step or save, so which of the two is to be trained is not known. Write to "
                    "one of them only: best to the model's parameter, under torch.no_grad(), on every rank."
                )
        return found

    def _working(self) -> dict[str, Tensor]:
        """What masters are rounded into, by name."""
        return {name: self._parts_of_weights[name](self._model_weights[name]) for name in self.masters}

    @torch.no_grad()
    def copy_from_model(self, *, in_step: bool = False, before_update: bool = False) -> None:
        """Copy model weights that the script wrote since the last step (``load_state_dict``, say) to their masters.

        An element that equals its rounded master leaves the master unchanged: a run that resumes from masters is not
        rounded when the script loads the model's weights, too. One that equals what it was at the last update has its
        master of then: so weights that are swapped for a save or an evaluation, and put back, lose nothing.

        Args:
            in_step: whether to find what was written by the counters of versions, and of what these do not count by
                :class:`WriteWatch`. Else all weights are compared.
            before_update: whether an update follows, after which nothing can be put back.

        Raises:
            ConfigError: see :meth:`WriteWatch.check`.
        """
        weights, watch = self._model_weights, self._watch
        written = {name for name in self.masters if version_of(weights[name]) != self._versions[name]}
        is_watched = watch is not None and not any(has_no_data(weights[name]) for name in self.masters)
        if watch is not None and is_watched:
            if in_step and watch.is_known:
                written = watch.written(self._working(), written)
            else:
                if watch.is_known:
                    watch.check(self._working())
                written = set(self.masters)
        for name in written:
            master = self.masters[name]
            working = self._parts_of_weights[name](weights[name]).to(master.device)
            saved = self._saved[name].to(master.device) if name in self._saved else None
            if saved is not None and torch.equal(saved.to(working.dtype), working):
                master.copy_(self._saved.pop(name))
                continue
            new = torch.where(master.to(working.dtype) == working, master, working)
            if name in self._replaced:
                before = self._replaced[name]
                new = torch.where(before.to(working.dtype) == working, before, new)
            elif not (before_update or self.are_copies or torch.equal(new, master)):
                self._replaced[name] = master.detach().clone()
            master.copy_(new)
        if before_update:
            self._replaced.clear()
        self._note_versions()
        if watch is not None and is_watched and not in_step:
            watch.note(self._working())

    def take_saved(self, saved: Mapping[str, Tensor]) -> None:
        """Take saved masters where the model's weights are these masters, rounded: now, or once they have been loaded.

        A state of the optimizer does not change weights; see :meth:`drop_saved`.
        """
        self._saved = dict(saved)
        self._versions.update(dict.fromkeys(self.masters, -1))  # compare all
        self.copy_from_model()

    def drop_saved(self) -> list[str]:
        """Forget saved masters that were not taken; returns their names."""
        names, self._saved = list(self._saved), {}
        return names

    def rounds_to(self, name: str, value: Tensor) -> bool:
        """Whether the master is ``value``, apart from rounding to the dtype of ``value``."""
        return torch.equal(self.masters[name].to(value.device, value.dtype), self._parts[name](value))

    @torch.no_grad()
    def set(self, name: str, value: Tensor) -> None:
        """Set one master, and its weight to the rounded value, from a tensor of the parameter's shape.

        A saved master that rounds to the value is taken instead of it.
        """
        part, saved = self._parts[name](value), self._saved.pop(name, None)
        self._replaced.pop(name, None)
        is_saved = saved is not None and torch.equal(saved.to(part.device, part.dtype), part)
        self.masters[name].copy_(saved if saved is not None and is_saved else part)
        whole_or_piece = value if self._parts_of_weights is self._parts else self._parts[name](value)
        self._model_weights[name].copy_(whole_or_piece)
        self._versions[name] = version_of(self._model_weights[name])
        self._versions_of_masters[name] = version_of(self.masters[name])
        if self._watch is not None:
            self._watch.is_known = False

    @torch.no_grad()
    def round(self, names: Collection[str]) -> None:
        """Round these masters into the model's weights."""
        if not names:
            return
        working = self._working()
        for name in names:
            working[name].copy_(self.masters[name])
        # Not of the others, which the script may have written to.
        self._versions |= {name: version_of(self._model_weights[name]) for name in names}
        self._versions_of_masters |= {name: version_of(self.masters[name]) for name in names}
        if self._watch is not None:
            self._watch.is_known = False

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Round the masters into the model's weights."""
        # One dtype at a time: for mixed dtypes torch launches one kernel per tensor (pytorch #173383).
        pairs: defaultdict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
        for name, master in self.masters.items():
            if self.transfer is not None and name in self.transfer:
                self.transfer.to_device(name, self._parts_of_weights[name](self._model_weights[name]))
                continue
            targets, sources = pairs[self._model_weights[name].dtype]
            targets.append(self._parts_of_weights[name](self._model_weights[name]))
            sources.append(master)
        for targets, sources in pairs.values():
            foreach_copy_(targets, sources)
        self._note_versions()
        if self._watch is not None:
            self._watch.note(self._working())


def _wide_copy(value: Tensor, dtype: torch.dtype, on_host: bool) -> Tensor:
    """A copy in at least fp32, for weights of a dtype."""
    wide = torch.promote_types(dtype, torch.float32)
    if not on_host:
        return value.to(wide, copy=True)
    # Of a model on the meta device: its values are written later.
    return torch.empty_like(value, dtype=wide, device="cpu") if value.is_meta else value.to("cpu", wide, copy=True)


def _all_of(tensor: Tensor) -> Tensor:
    return tensor


class ReplicatedTarget:
    """What the optimizer updates where every replica holds all of its parameters: a master, or the parameter itself.

    Args:
        parameters: this rank's trainable ones, by name.
        masters: of those in half precision.
        frozen: the others.

    Attributes:
        tensors: what is updated, by the parameter's name.
        names: of the parameters, by their ``id``.
        is_divided: whether replicas update parts.
    """

    is_divided = False

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], masters: MasterWeights, frozen: Iterable[nn.Parameter] = ()
    ):
        self.tensors = {name: masters.masters.get(name, parameter) for name, parameter in parameters.items()}
        self._masters = masters
        self._parameters = dict(parameters)
        self._apart: list[nn.Parameter] = []
        self._lent: Mapping[str, Tensor] = {}
        self._on_device = any(parameter.device.type != "cpu" for parameter in self._parameters.values())
        self.names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._known = {id(parameter): parameter.dtype for parameter in self._parameters.values()}
        self._frozen = {id(parameter): parameter.dtype for parameter in frozen}
        self._accepted: Mapping[int, tuple[bool, torch.dtype]] = {}
        self._count_writes()

    def _count_writes(self) -> None:
        """Let torch count what is written through ``.data`` to tensors that are not the model's parameters."""
        self._apart = [one for one in self.tensors.values() if type(one) is nn.Parameter and id(one) not in self.names]
        self._become(CountedParameter)

    def _become(self, kind: type[nn.Parameter]) -> None:
        for tensor in self._apart:
            tensor.__class__ = kind

    def check(self, model: nn.Module) -> None:
        """Refuse parameters that require a gradient now and did not at boost, were not there, or had another dtype.

        Refuse also a model that has lost one: another took its place, be it one that was there before. What the script
        has written to fp32 copies (``optimizer.param_groups``) is rounded into the weights.

        Raises:
            ConfigError: there is one.
        """
        found = {id(one): (one.requires_grad, one.dtype) for one in _parameters(model)}
        if found != self._accepted:
            self._refuse_wrong(model, found)
            self._accepted = found
        self.take_over()

    def take_over(self, *, before_update: bool = False) -> None:
        """Bring what the script has written to the tensors into the model's weights; see :class:`UpdateTarget`."""
        written = self._masters.written_by_script()
        if written and not before_update:
            self._check_seen(written)
        self._masters.round(written)

    def _check_seen(self, written: Sequence[str]) -> None:
        """Refuse these writes where what computes would not have them."""

    def _refuse_wrong(self, model: nn.Module, found: Mapping[int, tuple[bool, torch.dtype]]) -> None:
        trained, frozen = self._known, self._frozen
        for name, parameter in self._parameters.items():
            # One that was frozen later, and is gone, is not missed.
            if parameter.requires_grad and id(parameter) not in found:
                raise ConfigError(
                    f"{name} was replaced by another parameter, or removed, after booster.boost: the optimizer still "
                    "has the old one, and files would get its values. Change weights in place, under "
                    "torch.no_grad(), and replace, tie or remove them before."
                )
        for name, parameter in model.named_parameters():
            before = trained.get(id(parameter)) or frozen.get(id(parameter))
            if before is not None and before is not parameter.dtype:
                raise ConfigError(
                    f"{name} is {bare_name(parameter.dtype)} and was {bare_name(before)} after "
                    f"booster.boost ({name}.data = ..., or half(), float(), to(dtype) of a module): gradients and what "
                    "the optimizer updates have not changed. Choose dtypes by precision= and fp32_modules= of the "
                    "plugin, and write values with parameter.copy_(...) under torch.no_grad()."
                )
            if not parameter.requires_grad or id(parameter) in trained:
                continue
            raise ConfigError(
                f"{name} was frozen when the model was boosted, or not there, and requires a gradient now. "
                "Unfreeze or add it before booster.boost; freezing later is fine."
            )

    def pull(self, *, in_step: bool = False, before_update: bool = False) -> None:
        """Take over weights of the model that the script has written to; see :meth:`MasterWeights.copy_from_model`."""
        self.take_over(before_update=before_update)
        self._masters.copy_from_model(in_step=in_step, before_update=before_update)
        if before_update and (others := self._masters.drop_saved()):
            get_dist_logger().warning(
                f"the optimizer's state was saved with other weights than the model has ({', '.join(others[:3])}"
                f"{', ...' if len(others) > 3 else ''}): the model's stay, with their fp32 copies. To go on with the "
                "weights of that time, load these, too (booster.load_model).",
                ranks=[0],
            )

    @contextmanager
    def lent(self, gradients: Mapping[str, Tensor], unused: Collection[str]) -> Iterator[None]:
        """Inside, ``grad`` of every tensor is its gradient; as in torch None of those that are ``unused``."""
        before = {name: tensor.grad for name, tensor in self.tensors.items()}
        used = {name: gradients[name] for name in self.tensors if name not in unused}
        transfer = self._masters.transfer
        for name, tensor in self.tensors.items():
            gradient = used.get(name)
            if transfer is not None and gradient is not None and name in transfer:
                gradient = transfer.beside(name, gradient)
            tensor.grad = gradient
        self._lent = used
        self._become(nn.Parameter)
        try:
            yield
        finally:
            self._lent = {}
            self._become(CountedParameter)
            for name, tensor in self.tensors.items():
                tensor.grad = before[name]

    @property
    def copies_gradients(self) -> bool:
        """Whether :meth:`fetch` copies gradients, which must be final by then."""
        return self._masters.transfer is not None and self._on_device

    def fetch(self) -> None:
        """Inside :meth:`lent`, bring the gradients to where the tensors are."""
        if self._masters.transfer is not None:
            self._masters.transfer.to_host(self._lent)

    def push(self) -> None:
        """Bring the updated values into the model's weights."""
        self._masters.copy_to_model()


def _parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    # At every step, so by hand: named_parameters() takes ten times as long.
    seen: set[int] = set()
    pending = [model]
    while pending:
        module = pending.pop()
        seen.add(id(module))
        for parameter in parameters_of(module).values():
            if parameter is not None:
                yield parameter
        pending += [child for child in children_of(module).values() if child is not None and id(child) not in seen]


@dataclass(frozen=True)
class LossScale:
    """The loss scale and its history: a state machine that reads no tensors and does not communicate.

    Attributes:
        scale: factor on the loss.
        clean_steps: consecutive steps without overflow.
        overflows: steps with overflow since the first step without one, or since the scale last grew.
        settled: whether there has been a step without overflow; before that, the initial scale is still searched.
    """

    scale: float
    clean_steps: int = 0
    overflows: int = 0
    settled: bool = False


def update_loss_scale(state: LossScale, overflow: bool, config: LossScaleConfig) -> LossScale:
    """The state for the next step (dynamic loss scaling).

    Until the first step without overflow, every overflow lowers the scale. After it, the first ``hysteresis - 1``
    overflows do not, and every further overflow does, until the scale grows and the count starts again. So many
    overflows in a short time lower the scale quickly, even with clean steps in between.

    Example:
        >>> update_loss_scale(LossScale(8.0), True, LossScaleConfig(initial_scale=8.0)).scale
        4.0
    """
    if overflow:
        overflows = state.overflows + 1 if state.settled else 0
        if state.settled and overflows < config.hysteresis:
            return LossScale(state.scale, 0, overflows, settled=True)
        scale = max(config.min_scale, state.scale * config.backoff_factor)
        return LossScale(scale, 0, overflows, state.settled)
    clean_steps = state.clean_steps + 1
    if clean_steps < config.growth_interval:
        return LossScale(state.scale, clean_steps, state.overflows, settled=True)
    return LossScale(min(config.max_scale, state.scale * config.growth_factor), settled=True)


class LossScaler:
    """The loss scale of one optimizer, and the steps that it skipped.

    Args:
        config: the settings.
        scales: whether there is a loss scale; without one it is always 1.

    Attributes:
        state: the scale and what led to it.
        skipped_steps: number of steps skipped so far.
        last_step_skipped: whether the last step was skipped.
    """

    def __init__(self, config: LossScaleConfig, scales: bool):
        self.state = LossScale(config.initial_scale if scales else 1.0)
        self.skipped_steps = 0
        self.last_step_skipped = False
        self._config = config
        self._scales = scales

    @property
    def is_active(self) -> bool:
        """Whether there is a loss scale."""
        return self._scales

    def update(self, overflow: bool) -> LossScale:
        """Count a step, which is skipped where a gradient overflowed; returns the state before it."""
        before = self.state
        if self._scales:
            self.state = update_loss_scale(before, overflow, self._config)
        self.last_step_skipped = overflow
        self.skipped_steps += overflow
        return before
