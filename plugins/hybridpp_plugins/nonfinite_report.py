"""Find the first inf or NaN of a step by running the step again."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch

from hybridpp.cluster import gather_objects, preserved_random_state
from hybridpp.data_parallel import GradientReducer
from hybridpp.nn.force_eager import force_eager
from hybridpp.nn.snapshot import preserved_buffer_values
from hybridpp.partition import StagedModel
from hybridpp.pipeline import Executor, PipelineStep, RankProgram
from hybridpp.precision import Finding, NonFiniteDetector, StepPosition
from hybridpp_plugins.layout import Layout
from hybridpp_plugins.manual_forward import MAX_BYTES, ManualCall, NotRepeatable, RecordedCalls
from hybridpp_plugins.step_epilogue import BadLoss

# Dtypes in which a sum may overflow that is finite in fp32.
_NARROW = (torch.float16,)
_NOTHING_FOUND = "none in a second run of the step, so it depends on something that is not reproducible"


_FINITE_AGAIN = "a second run of the recorded calls is finite, so it depends on something that is not reproducible"
_WHOLE_BATCH = StepPosition(0, 0)
_SEARCHES = "in the search for the first inf or NaN of a step"
# More than the number of positions in a call.
_CALL = 2**34


class NonFiniteDiagnosis:
    """Diagnoses steps of one boosted model.

    Args:
        staged: the model.
        executor: runs it.
        reducer: its gradients.
        layout: the ranks.
        device: where this one computes.
        unsharded: a context in which all weights are there. Collective: all replicas.
    """

    def __init__(
        self,
        staged: StagedModel,
        executor: Executor,
        reducer: GradientReducer | None,
        layout: Layout,
        device: torch.device,
        unsharded: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        self._staged = staged
        self._executor = executor
        self._reducer = reducer
        self._layout = layout
        self._device = device
        self._unsharded = unsharded

    def diagnose(self, program: RankProgram, step: PipelineStep, bad_loss: BadLoss | None = None) -> str:
        """A description of the first inf or NaN of a step; the same on every rank.

        The step runs again with the same random numbers. Gradients, buffers and generators are restored afterwards.
        Collective: all ranks, for the same step.

        Args:
            program: of this rank.
            step: the step to run again.
            bad_loss: the loss to explain; None: any inf or NaN gradient.
        """
        detector = NonFiniteDetector(self._staged.model, self._staged.units, self._gradients, self._where)

        def run() -> None:
            result = self._executor.run(program, step, detector)
            losses = {n: result.losses[n].item() for n, has_loss in enumerate(result.has_loss) if has_loss}
            detector.losses(losses, self._staged.num_stages - 1)

        with self._unsharded():
            failure = self._again(run, detector, step.training)
        here = detector.findings if bad_loss is None else self._about(bad_loss, detector.findings)
        found, failure = self._first_of_all_ranks(here, failure)
        if not found and failure:
            return f"not found, because a second run of the step failed: {failure}"
        return found or ("" if bad_loss else self._rounded_on_the_way()) or _NOTHING_FOUND

    def diagnose_calls(self, kept: RecordedCalls) -> str:
        """The same for a step by :meth:`hybridpp.Booster.backward`. Collective: all ranks.

        Each recorded call runs again. Findings in forwards are ordered by the order of the calls, findings in backwards
        by the order in which the backward pass reached the calls.

        Raises:
            NotRepeatable: nothing was found, with the reason; on every rank.
        """
        # Tensor-parallel ranks run calls together: as many as each of them has recorded.
        counts = gather_objects(self._layout.control, f"{_SEARCHES} in calls of the model", len(kept.calls))
        calls = kept.last(min(counts[rank] for rank in self._layout.pipelines[self._layout.here.dp]))
        findings: list[Finding] = []
        failures = [] if calls else ["the loss does not depend on an output of the boosted model"]
        if calls and (num_gone := len(kept.numbers) - len(calls)):
            gone = "one is" if num_gone == 1 else f"{num_gone} are"
            failures.append(
                f"of {len(kept.numbers)} calls, {gone} not recorded beyond a limit of {MAX_BYTES >> 20} MiB"
            )
        with self._unsharded():
            for arrival, call in enumerate(calls):
                found, failure = self._run_again(call, kept.name(call))
                findings += [_of_call(finding, call, arrival, kept.name(call)) for finding in found]
                failures += [failure] if failure else []
        first, failure = self._first_of_all_ranks(findings, "; ".join(failures))
        if not first:
            raise NotRepeatable(failure or _FINITE_AGAIN)
        return f"{first}, as far as it was searched: {failure}" if failure else first

    def _run_again(self, call: ManualCall, name: str) -> tuple[list[Finding], str]:
        """The findings in one call, and its error; "" if it raises none."""
        detector = NonFiniteDetector(self._staged.model, self._staged.units, self._gradients, lambda: _WHOLE_BATCH)

        def run() -> None:
            if not call.is_as_it_was:
                raise NotRepeatable(f"the batch{' of' if name else ''}{name} was written to after the call")
            # The forward without the model's hooks, whose changes the recorded arguments contain already.
            call.again(self._staged.model.forward, self._device, detector.on_output_gradient)
            detector.end(_WHOLE_BATCH)

        failure = self._again(run, detector, training=True)
        return detector.findings, failure

    def _again(self, run: Callable[[], None], detector: NonFiniteDetector, training: bool) -> str:
        """Call ``run`` with all values checked, then restore all state; returns its error, or ""."""
        aside = self._reducer.stash() if self._reducer and training else nullcontext()
        with (
            preserved_random_state(self._device),
            preserved_buffer_values(self._staged.model),
            aside,
            # Compiled code has no modules to look at.
            force_eager(),
            detector.hooks(),
            self._staged.watched(detector.unit),
        ):
            try:
                run()
            except NotRepeatable as reason:
                return str(reason)
            except Exception as error:  # for example of a criterion that cannot be called twice; other replicas wait
                return repr(error)
            finally:
                if self._staged.gather is not None:
                    self._staged.gather.forget_backwards()
        return ""

    def _first_of_all_ranks(self, findings: list[Finding], failure: str) -> tuple[str, str]:
        """Descriptions of the first finding and the first failure of all ranks; "" if there is none. Collective."""
        rows = gather_objects(self._layout.control, _SEARCHES, [failure, list(min(findings, default=()))])
        found = sorted((Finding(*row), rank) for rank, (_, row) in enumerate(rows) if row)
        failures = [f"{text} on rank {rank}" for rank, (text, _) in enumerate(rows) if text]
        return f"{found[0][0]} on rank {found[0][1]}" if found else "", failures[0] if failures else ""

    def _rounded_on_the_way(self) -> str:
        """The parameter whose gradients are finite on all replicas, but overflow in the reduction's dtype; "": none."""
        dtype = self._reducer.communication_dtype if self._reducer else None
        bad = [name for name, gradient in self._gradients().items() if not bool(gradient.isfinite().all())]
        rows = gather_objects(self._layout.control, f"{_SEARCHES} in sums", bad if dtype in _NARROW else [])
        return next(
            (
                f"the sum over the replicas of the gradient of parameter {names[-1]!r}, which is reduced in {dtype}, "
                "on "
                f"rank {rank}; on each replica it is finite: leave communication_dtype out"
                for rank, names in enumerate(rows)
                if names
            ),
            "",
        )

    def _about(self, bad_loss: BadLoss, findings: list[Finding]) -> list[Finding]:
        own_pipeline = self._layout.pipelines[self._layout.here.dp]
        return [
            found for found in findings if bad_loss.rank in own_pipeline and found.microbatch == bad_loss.microbatch
        ]

    def _gradients(self) -> Mapping[str, torch.Tensor]:
        return self._reducer.gradients if self._reducer else {}

    def _where(self) -> StepPosition:
        action = self._executor.where
        assert action is not None, "modules run in actions only"
        return StepPosition(action.stage, action.microbatch or 0)


def _of_call(finding: Finding, call: ManualCall, arrival: int, name: str) -> Finding:
    """The finding, ordered after those of earlier calls: forwards by call, backwards by arrival of gradients."""
    before = arrival if finding.backward else call.number
    return finding._replace(order=finding.order + before * _CALL, what=f"{finding.what}{' in' if name else ''}{name}")
