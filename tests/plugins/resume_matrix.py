"""Nine steps are three, a save, three in new processes, a save, and three in new ones, bit for bit.

PYTHONPATH=.:plugins:tests python tests/plugins/resume_matrix.py [--only "dp2 .* bf16"]

A case is a layout, a schedule, a precision and a stage of ZeRO. Losses, weights, moments, counts, learning rates and
the next random numbers are compared with those of a run that was not interrupted. Every process that resumes begins
with other seeds. In fp16, the first steps overflow. Saves are synchronous and asynchronous in turn.
"""

import argparse
import random
import re
import sys
import tempfile
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from plugins.test_training_state import Training, WithBatchNorm
from processes import run_ranks
from run_checkpoints import Run
from support import small_vit

NUM_STEPS = 3
MODELS = {"vit": small_vit, "batch norm": WithBatchNorm}


class Case(NamedTuple):
    """A run, and how it is resumed.

    Attributes:
        name: for people.
        num_ranks: of the job.
        settings: of the plugin.
        model: "tokens", or one that trains on images, augmented at random, and is saved in the middle of an epoch.
        workers: of the dataloader, in the processes before and after each save.
    """

    name: str
    num_ranks: int
    settings: dict[str, Any]
    model: str = "tokens"
    workers: tuple[int, ...] = (0, 0, 0)

    def make(self, process):
        """The run, in one set of processes after the other."""
        if self.model == "tokens":
            return Run(**self.settings)
        return Training(MODELS[self.model], batch_size=2, num_workers=self.workers[process], **self.settings)


def layouts():
    """Names, numbers of ranks and settings."""
    yield "one", 1, {}
    for schedule in ("1f1b", "gpipe", "zb-h1", "zb-h2", "zb-v", "interleaved"):
        chunks = {"num_model_chunks": 2} if schedule == "interleaved" else {}
        yield f"pp2 {schedule}", 2, {"pp_size": 2, "schedule": schedule, **chunks}
    yield "tp2", 2, {"tp_size": 2}
    for schedule in ("1f1b", "zb-h1"):
        yield f"tp2 pp2 {schedule}", 4, {"tp_size": 2, "pp_size": 2, "schedule": schedule}
    for stage in range(4):
        yield f"dp2 zero {stage}", 2, {"zero_stage": stage}
        yield f"pp2 dp2 zero {stage}", 4, {"pp_size": 2, "zero_stage": stage}
        yield f"tp2 dp2 zero {stage}", 4, {"tp_size": 2, "zero_stage": stage}


def cases():
    """All of the matrix."""
    for name, num_ranks, settings in layouts():
        for precision in ("fp32", "bf16", "fp16"):
            scale = {"initial_scale": 2.0**24} if precision == "fp16" else {}
            yield Case(f"{name} {precision}", num_ranks, {**settings, "precision": precision, **scale})
    for workers in ((0, 0, 0), (2, 2, 2), (0, 2, 0)):
        yield Case(f"one vit workers {workers}", 1, {}, "vit", workers)
        yield Case(f"dp2 vit workers {workers}", 2, {}, "vit", workers)
        yield Case(f"pp2 vit workers {workers}", 2, {"pp_size": 2, "num_microbatches": 2}, "vit", workers)
        yield Case(f"dp2 zero 2 vit bf16 workers {workers}", 2, {"zero_stage": 2, "precision": "bf16"}, "vit", workers)
        yield Case(f"dp2 batch norm workers {workers}", 2, {}, "batch norm", workers)
    yield Case("dp2 batch norm bf16", 2, {"precision": "bf16"}, "batch norm")
    yield Case("dp2 batch norm zero 3", 2, {"zero_stage": 3}, "batch norm")


def everything(run):
    """The tensors and the counts of this rank, and the next random numbers."""
    drawn = [random.random(), numpy.random.rand(), torch.rand(()).item()]
    if isinstance(run, Run):
        return *run.everything(), drawn
    with run.booster.unsharded(run.model):
        tensors = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    for index, state in enumerate(run.optimizer.unwrap().state.values()):
        tensors |= {f"{index} {key}": torch.as_tensor(value).clone() for key, value in state.items()}
    return tensors, (run.optimizer.counts, run.scheduler.get_last_lr(), run.epoch, run.batches), drawn


def seed(number):
    """Other random numbers for a run that does not bring its own."""
    random.seed(number)
    numpy.random.seed(number)
    torch.manual_seed(number)


def go_on(run, path, step):
    """Resume a run, and check where: what :meth:`Booster.resume` gives."""
    if isinstance(run, Training):
        done = run.resume(path)
        assert (done.epoch, done.batches) == divmod(step, len(run.loader)), done
    else:
        done = run.booster.resume(path)
    assert (done.step, done.extras["step"]) == (step, step), done
    return done


def train(run, first, last):
    """Losses, to the bit."""
    if isinstance(run, Training):
        return [loss.hex() for loss in run.run(last - first)]
    return run.steps(range(first, last))


def of_case(case, path, process):
    """Losses and what is there in the end: of the unbroken run, or of one of three sets of processes."""
    seed(0 if process is None else process)
    run = case.make(process or 0)
    if process is None:
        return train(run, 0, 3 * NUM_STEPS), everything(run)
    first = process * NUM_STEPS
    if process:
        done = go_on(run, path, first)
        assert done.extras["skipped"] or "fp16" not in case.name, "no step overflowed before the save"
    losses = train(run, first, first + NUM_STEPS)
    if process < 2:
        extras = {"step": first + NUM_STEPS, "skipped": run.optimizer.skipped_steps}
        run.booster.save(path, step=first + NUM_STEPS, extras=extras, asynchronous=bool(process), keep_last=1)
        run.booster.wait_for_save()
        return losses, None
    return losses, everything(run)


def of_cases(some, folder, process):
    """Results by name; where a case failed, its traceback. Starting a job for each would take longer."""
    results = {}
    for case in some:
        try:
            results[case.name] = of_case(case, Path(folder) / case.name, process)
        except Exception:
            results[case.name] = traceback.format_exc()
    return results


def differences(case, parts, whole):
    """What is not equal on a rank, in words; "": everything is."""
    failed = [result for result in (*parts, whole) if isinstance(result, str)]
    if failed:
        return failed[0]
    losses, ends = [loss for part, _ in parts for loss in part], (parts[-1][1], whole[1])
    if losses != whole[0]:
        return f"losses {losses} instead of {whole[0]}"
    if len(set(losses)) < len(losses):
        return f"the losses repeat: {losses}"
    (ours, counts, drawn), (expected, other_counts, other_drawn) = ends
    if counts != other_counts or drawn != other_drawn:
        return f"{counts}, {drawn} instead of {other_counts}, {other_drawn}"
    unequal = [name for name, tensor in expected.items() if not torch.equal(ours[name], tensor)]
    return f"{unequal} differ" if unequal or ours.keys() != expected.keys() else ""


def outcomes(some, timeout_s):
    """By name of a case, what is wrong with it; ``some`` have one number of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        parts = [
            run_ranks(partial(of_cases, some, folder, process), some[0].num_ranks, timeout_s)
            for process in (0, 1, 2, None)
        ]
    found = {}
    for case in some:
        of_ranks = [[rank[case.name] for rank in part] for part in parts]
        wrong = [differences(case, of_rank[:3], of_rank[3]) for of_rank in zip(*of_ranks, strict=True)]
        found[case.name] = next(filter(None, wrong), "")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a regular expression for names of cases")
    parser.add_argument("--together", type=int, default=6, help="how many cases a job runs")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for a job")
    options = parser.parse_args()
    chosen = [case for case in cases() if re.search(options.only, case.name)]
    wrong, start = 0, time.monotonic()
    for num_ranks in sorted({case.num_ranks for case in chosen}):
        same = [case for case in chosen if case.num_ranks == num_ranks]
        for first in range(0, len(same), options.together):
            for name, problem in outcomes(same[first : first + options.together], options.timeout).items():
                print(f"{name:40} {'WRONG: ' + problem if problem else 'equal, bit for bit'}", flush=True)
                wrong += bool(problem)
    print(f"{len(chosen)} cases, {wrong} wrong, {time.monotonic() - start:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
