"""Six steps are three and a save in one set of processes, and three more in a new one, bit for bit."""

from functools import partial

import pytest
import torch
from plugins.test_training_state import Training
from processes import run_ranks
from run_checkpoints import Run
from support import assert_same

RUNS = {
    "pp2 fp32": {"pp_size": 2},
    "dp2 zero 1 fp16": {"zero_stage": 1, "precision": "fp16", "initial_scale": 2.0**24},  # the first steps overflow
    "dp2 zero 3 fp32": {"zero_stage": 3},
}


def steps_of(run, numbers):
    return run.run(len(numbers)) if isinstance(run, Training) else run.steps(numbers)


def everything(run):
    """The tensors and the counts of this rank."""
    if isinstance(run, Run):
        return run.everything()
    tensors = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    for index, state in enumerate(run.optimizer.unwrap().state.values()):
        tensors |= {f"{index} {key}": torch.as_tensor(value).clone() for key, value in state.items()}
    return tensors, (run.optimizer.counts, run.scheduler.get_last_lr())


def made(num_workers=0):
    """Every kind of run, one after the other: starting a job for each would take longer."""
    for name, settings in RUNS.items():
        yield name, Run(**settings)
    yield "dp2 in mid-epoch", Training(batch_size=2, num_workers=num_workers)


def six(folder):
    return {name: (steps_of(run, range(6)), everything(run)) for name, run in made()}


def three(folder):
    losses = {}
    for name, run in made():
        losses[name] = steps_of(run, range(3))
        run.booster.save(folder / name, step=3, extras={"skipped": run.optimizer.skipped_steps})
    return losses


def three_more(folder):
    torch.manual_seed(7)  # another seed of dropout, which the checkpoint's replaces
    results = {}
    for name, run in made(num_workers=2):
        done = run.booster.resume(folder / name)
        assert done.step == 3
        assert done.extras["skipped"] >= ("fp16" in name)
        if isinstance(run, Training):
            assert (done.epoch, done.batches) == (0, 3)
            assert len(run.loader) == 5
            run.batches = done.batches  # so that the loop knows the end of the epoch
        results[name] = (steps_of(run, range(3, 6)), everything(run))
    return results


@pytest.mark.timeout(280)
def test_new_processes_go_on_as_the_old_ones_would(tmp_path):
    before = run_ranks(partial(three, tmp_path), 2, timeout_s=100)
    actual = run_ranks(partial(three_more, tmp_path), 2, timeout_s=100)
    expected = run_ranks(partial(six, tmp_path), 2, timeout_s=100)
    for first, ours, whole in zip(before, actual, expected, strict=True):
        for name, (losses, (tensors, counts)) in whole.items():
            other_losses, (other_tensors, other_counts) = ours[name]
            assert len(set(losses)) == 6, name
            assert (first[name] + other_losses, other_counts) == (losses, counts), name
            assert_same(other_tensors, tensors)
