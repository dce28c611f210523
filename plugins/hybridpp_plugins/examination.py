"""Run a step that went wrong once more, and say where its first inf or NaN stood."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from hybridpp.checkpoint import gather_objects
from hybridpp.cluster import preserved_random_state
from hybridpp.data_parallel import GradientBuckets
from hybridpp.partition import StagedModel
from hybridpp.pipeline import Executor, RankProgram, Step
from hybridpp.precision import Finding, Place, Watch
from hybridpp_plugins.closing import BadLoss
from hybridpp_plugins.layout import Layout
from hybridpp_plugins.own_calls import MAX_BYTES, CannotRepeat, KeptCalls, OwnCall

# Formats in which a sum may overflow that fp32 holds.
_NARROW = (torch.float16,)
_NOTHING_FOUND = "none in a second run of the step, so it hangs on something that cannot be repeated"


_FINITE_AGAIN = "all that can be run again is finite then, so it hangs on something that cannot be repeated"
_WHOLE_BATCH = Place(0, 0)
# More than the places of a call.
_CALL = 2**34


class Examination:
    """Looks into the steps of one boosted model.

    Args:
        staged: the model.
        executor: runs it.
        buckets: its gradients.
        layout: the ranks.
        device: where this one computes.
    """

    def __init__(
        self,
        staged: StagedModel,
        executor: Executor,
        buckets: GradientBuckets | None,
        layout: Layout,
        device: torch.device,
    ):
        self._staged = staged
        self._executor = executor
        self._buckets = buckets
        self._layout = layout
        self._device = device

    def examine(self, program: RankProgram, step: Step, bad_loss: BadLoss | None = None) -> str:
        """Where the first inf or NaN of a step stands, in words; the same on every rank.

        The step is run again, with the same random numbers. Gradients, buffers and generators are as before behind it.
        Collective: all ranks, for the same step.

        Args:
            program: this rank's.
            step: what it was run on.
            bad_loss: the loss that is to be explained; None: any gradient that is not finite.
        """
        watch = Watch(self._staged.model, self._staged.units, self._gradients(), self._where)

        def run() -> None:
            result = self._executor.run(program, step, watch)
            losses = {n: result.losses[n].item() for n, has_loss in enumerate(result.has_loss) if has_loss}
            watch.losses(losses, self._staged.num_stages - 1)

        failure = self._again(run, watch, step.training)
        here = watch.findings if bad_loss is None else self._about(bad_loss, watch.findings)
        found, failure = self._told(here, failure)
        if not found and failure:
            return f"not found, because a second run of the step failed: {failure}"
        return found or ("" if bad_loss else self._rounded_on_the_way()) or _NOTHING_FOUND

    def examine_calls(self, kept: KeptCalls) -> str:
        """The same of a step by :meth:`hybridpp.Booster.backward`. Collective: all ranks.

        Each call that is kept is run again. The first finding is by the order in which the calls were made in forwards,
        and by that in which gradients came back in backwards.

        Raises:
            CannotRepeat: nothing was found, and why; on every rank alike.
        """
        # Those of ranks that share layers run together: of all, as many as each of them kept.
        counts = gather_objects(self._layout.control, len(kept.calls))
        calls = kept.last(min(counts[rank] for rank in self._layout.pipelines[self._layout.here.dp]))
        findings: list[Finding] = []
        failures = [] if calls else ["the loss was made of nothing that a call of the boosted model returned"]
        if calls and (num_gone := len(kept.numbers) - len(calls)):
            gone = "one is" if num_gone == 1 else f"{num_gone} are"
            failures.append(f"of {len(kept.numbers)} calls, {gone} not kept, for which there are {MAX_BYTES >> 20} MiB")
        for arrival, call in enumerate(calls):
            found, failure = self._run_again(call, kept.name(call))
            findings += [_of_call(finding, call, arrival, kept.name(call)) for finding in found]
            failures += [failure] if failure else []
        first, failure = self._told(findings, "; ".join(failures))
        if not first:
            raise CannotRepeat(failure or _FINITE_AGAIN)
        return f"{first}, as far as can be seen: {failure}" if failure else first

    def _run_again(self, call: OwnCall, name: str) -> tuple[list[Finding], str]:
        """What is found in one call, and the error that it ends with."""
        watch = Watch(self._staged.model, self._staged.units, self._gradients(), lambda: _WHOLE_BATCH)

        def run() -> None:
            if not call.is_as_it_was:
                raise CannotRepeat(f"the batch{' of' if name else ''}{name} was written to since")
            # The forward alone: what hooks of the model's change was changed before.
            call.again(self._staged.model.forward, self._device, watch.came_back)
            watch.end(_WHOLE_BATCH)

        failure = self._again(run, watch, training=True)
        return watch.findings, failure

    def _again(self, run: Callable[[], None], watch: Watch, training: bool) -> str:
        """Run something with everything looked at, and leave nothing behind; gives the error that it ends with."""
        aside = self._buckets.set_aside() if self._buckets and training else nullcontext()
        with (
            preserved_random_state(self._device),
            self._kept_buffers(),
            aside,
            watch.hooks(),
            self._staged.watched(watch.unit),
        ):
            try:
                run()
            except CannotRepeat as reason:
                return str(reason)
            except Exception as error:  # a criterion that cannot be called twice, say; other replicas wait below
                return repr(error)
        return ""

    def _told(self, findings: list[Finding], failure: str) -> tuple[str, str]:
        """The first finding and the first failure of all ranks, in words; "" where there is none. Collective."""
        rows = gather_objects(self._layout.control, [failure, list(min(findings, default=()))])
        found = sorted((Finding(*row), rank) for rank, (_, row) in enumerate(rows) if row)
        failures = [f"{text} on rank {rank}" for rank, (text, _) in enumerate(rows) if text]
        return f"{found[0][0]} on rank {found[0][1]}" if found else "", failures[0] if failures else ""

    def _rounded_on_the_way(self) -> str:
        """What replicas have finite gradients of, whose sum in the format it is sent in is not; "" if nothing."""
        dtype = self._buckets.communication_dtype if self._buckets else None
        bad = [name for name, gradient in self._gradients().items() if not bool(gradient.isfinite().all())]
        rows = gather_objects(self._layout.control, bad if dtype in _NARROW else [])
        return next(
            (
                f"the sum over the replicas of the gradient of parameter {names[-1]!r}, which travels in {dtype}, on "
                f"rank {rank}; on each replica it is finite: leave communication_dtype out"
                for rank, names in enumerate(rows)
                if names
            ),
            "",
        )

    def _about(self, bad_loss: BadLoss, findings: list[Finding]) -> list[Finding]:
        mine = self._layout.pipelines[self._layout.here.dp]
        return [found for found in findings if bad_loss.rank in mine and found.microbatch == bad_loss.microbatch]

    def _gradients(self) -> dict[str, torch.Tensor]:
        return self._buckets.gradients if self._buckets else {}

    def _where(self) -> Place:
        action = self._executor.where
        assert action is not None, "modules run in actions only"
        return Place(action.stage, action.microbatch or 0)

    @contextmanager
    def _kept_buffers(self) -> Iterator[None]:
        """Behind, running statistics are as before."""
        kept = [(buffer, buffer.clone()) for buffer in self._staged.model.buffers()]
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in kept:
                    buffer.copy_(before)


def _of_call(finding: Finding, call: OwnCall, arrival: int, name: str) -> Finding:
    """Behind those of the calls before it: forwards as they were made, backwards as gradients came back."""
    before = arrival if finding.backward else call.number
    return finding._replace(order=finding.order + before * _CALL, what=f"{finding.what}{' in' if name else ''}{name}")
