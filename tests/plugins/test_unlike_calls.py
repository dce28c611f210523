"""Ranks that make different calls all raise one error that says which rank is in which call; none hangs."""

import re

import pytest
import torch
from processes import run_ranks
from support import boosted, sgd

from hybridpp import DistCoordinator
from hybridpp.cluster import Loopback, current_world
from hybridpp.errors import HybridppError

TRAINS = "a training step of Net (execute_pipeline, gradients enabled)"
EVALUATES = "an evaluation of Net (execute_pipeline, gradients disabled)"
TAKES_NORM = "in the optimizer's step, get_grad_norm or clip_grad_by_norm (norm of the gradients)"


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def mean_square(outputs, inputs):
    return outputs.float().square().mean()


class Script:
    """One rank's calls; the iterator has four batches."""

    def __init__(self, **settings):
        self.rank = current_world().rank
        self.booster, self.model, self.optimizer = boosted(Net(), sgd, torch.zeros(1, 4), **settings)
        self.loader = self.booster.plugin.prepare_dataloader(torch.randn(8, 4), batch_size=1)
        self.data = iter(self.loader)

    def train(self):
        return self.booster.execute_pipeline(self.data, self.model, mean_square, self.optimizer)["loss"]

    def evaluate(self, data):
        with torch.no_grad():
            return self.booster.execute_pipeline(data, self.model, mean_square)["loss"]


def evaluates_the_same_data(script):
    script.train()
    script.train() if script.rank == 0 else script.evaluate(script.data)
    script.train()


def evaluates_other_data(script):
    script.train()
    if script.rank == 0:
        script.evaluate(iter(script.loader)).item()
    script.train()


def evaluates_from_the_beginning(script):
    script.train() if script.rank == 0 else script.evaluate(script.data)


def asks_for_the_norm(script):
    script.train()
    if script.rank == 0:
        script.optimizer.get_grad_norm()
    script.train()


def trains_once_more(script):
    script.train()
    if script.rank == 0:
        script.train()
    script.optimizer.get_grad_norm()


def takes_a_batch(script):
    script.train()
    if script.rank == 0:
        next(script.data)
    script.train()


def comes_to_a_barrier(script):
    script.train()
    if script.rank == 1:
        DistCoordinator().block_all()
    script.train()


def loads_a_state(script):
    script.train()
    script.optimizer.step()
    if script.rank == 0:
        script.optimizer.load_state_dict(script.optimizer.state_dict())
    script.train()


CALLS = {
    evaluates_the_same_data: (f"in {TRAINS}", f"at the start of {EVALUATES}"),
    evaluates_other_data: (f"at the start of {EVALUATES}", f"in {TRAINS}"),
    evaluates_from_the_beginning: (f"at the start of {TRAINS}", f"at the start of {EVALUATES}"),
    asks_for_the_norm: (TAKES_NORM, f"in {TRAINS}"),
    trains_once_more: (f"in {TRAINS}", TAKES_NORM),
    takes_a_batch: (f"at the start of {TRAINS}", f"in {TRAINS}"),
    comes_to_a_barrier: (f"in {TRAINS}", "in DistCoordinator.block_all"),
    loads_a_state: ("in optimizer.load_state_dict", f"in {TRAINS}"),
}
TP = {"tp_size": 2, "tensor_parallel_plan": {"layers.0": "column", "layers.1": "row"}}


def outcome(calls, **settings):
    """What this rank raises."""
    script = Script(**settings)
    try:
        calls(script)
    except HybridppError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def assert_all_name_the_calls(calls, outcomes):
    first, second = CALLS[calls]
    expected = (
        "UnlikeCallsError: all ranks must make the same calls in the same order: "
        f"rank 0 is {first} while rank 1 is {second}. Make these calls on all ranks, with gradients enabled on all or "
        "on none: put no `if coordinator.is_master()` around them, and read the same data iterators in the same way "
        "everywhere."
    )
    assert outcomes == [expected] * 2


@pytest.mark.parametrize("calls", CALLS, ids=lambda calls: calls.__name__)
def test_all_ranks_name_the_calls_that_differ(calls):
    assert_all_name_the_calls(calls, Loopback(2).run(lambda: outcome(calls, pp_size=2)))


@pytest.mark.parametrize("settings", [{}, {"max_norm": 1.0}, {"precision": "bf16", "max_norm": 1.0}, TP], ids=str)
@pytest.mark.parametrize("calls", [evaluates_the_same_data, takes_a_batch], ids=lambda calls: calls.__name__)
def test_calls_that_differ_between_replicas_or_shards(calls, settings):
    assert_all_name_the_calls(calls, Loopback(2).run(lambda: outcome(calls, **settings)))


@pytest.mark.covering
@pytest.mark.parametrize("shared_memory", ["1", "0"])
@pytest.mark.parametrize("calls", [evaluates_the_same_data, asks_for_the_norm], ids=lambda calls: calls.__name__)
def test_calls_that_differ_between_processes(monkeypatch, calls, shared_memory):
    monkeypatch.setenv("HYBRIDPP_SHARED_MEMORY", shared_memory)
    assert_all_name_the_calls(calls, run_ranks(lambda: outcome(calls, pp_size=2), 2))


def steps_on_one_rank(script):
    script.train()
    if script.rank == 0:
        script.optimizer.step()
    script.optimizer.zero_grad()
    script.train()


def clears_gradients_on_one_rank(script):
    script.train()
    if script.rank == 0:
        script.optimizer.zero_grad()
    script.train()


@pytest.mark.parametrize("settings", [{"precision": "bf16", "max_norm": 1.0}, {"pp_size": 2}], ids=str)
@pytest.mark.parametrize(
    ("calls", "counts"),
    [
        (steps_on_one_rank, [("1 step", "1 call"), ("0 steps", "1 call")]),
        (clears_gradients_on_one_rank, [("0 steps", "1 call"), ("0 steps", "2 calls")]),
    ],
    ids=["step", "zero_grad"],
)
def test_an_optimizer_that_is_called_on_one_rank_only(calls, counts, settings):
    clauses = [
        f"on rank {rank} the optimizer has taken {steps} and adds up the gradients of {passes}"
        for rank, (steps, passes) in enumerate(counts)
    ]
    expected = (
        f"UnlikeCallsError: all ranks must make the same calls in the same order: {', '.join(clauses)}. Call "
        "optimizer.step() and optimizer.zero_grad() on all ranks. Their weights no longer fit together: load a "
        "checkpoint on all ranks."
    )
    assert Loopback(2).run(lambda: outcome(calls, **settings)) == [expected] * 2


def test_a_batch_that_cannot_be_read_is_the_cause_of_the_error_on_its_rank():
    def run():
        script = Script()

        def broken():
            raise OSError("the disk is gone")
            yield

        with pytest.raises(HybridppError, match=re.escape(f"rank 1 is at the start of {EVALUATES}")) as caught:
            script.train() if script.rank == 0 else script.evaluate(broken())
        return repr(caught.value.__cause__)

    assert Loopback(2).run(run) == ["None", "OSError('the disk is gone')"]


def clips_by_value_on_one_rank(script):
    script.train()
    if script.rank == 0:
        script.optimizer.clip_grad_by_value(0.5)
    script.optimizer.step()


def clips_by_another_value(script):
    script.train()
    script.optimizer.clip_grad_by_value(0.5 + script.rank)
    script.optimizer.step()


def clears_before_the_step_on_one_rank(script):
    script.train()
    if script.rank == 0:
        script.optimizer.zero_grad()
    script.optimizer.step()


CLIPPED = "optimizer.clip_grad_by_value({}), optimizer.step()"
OTHER_CALLS = [
    (clips_by_value_on_one_rank, {}, CLIPPED.format(0.5), "optimizer.step()"),
    (clips_by_value_on_one_rank, {"zero_stage": 3}, CLIPPED.format(0.5), "optimizer.step()"),
    (clips_by_another_value, {"pp_size": 2}, CLIPPED.format(0.5), CLIPPED.format(1.5)),
    (clears_before_the_step_on_one_rank, {"pp_size": 2}, "optimizer.zero_grad(), optimizer.step()", "optimizer.step()"),
]


@pytest.mark.parametrize("next_call", ["train", "save"])
@pytest.mark.parametrize(
    ("calls", "settings", "first", "second"), OTHER_CALLS, ids=lambda one: getattr(one, "__name__", None)
)
def test_changes_of_gradients_on_one_rank_are_told(tmp_path, calls, settings, first, second, next_call):
    def run():
        def goes_on(script):
            calls(script)
            script.train() if next_call == "train" else script.booster.save_model(
                script.model, tmp_path / "m.safetensors"
            )

        return outcome(goes_on, **settings)

    expected = (
        "UnlikeCallsError: all ranks must make the same calls of the optimizer in the same order: since the training "
        f"step before, rank 0 has called {first}; rank 1 has called {second}. Make these calls on all ranks, with the "
        "same arguments. Their weights no longer fit together: load a checkpoint on all ranks."
    )
    assert Loopback(2).run(run) == [expected] * 2


@pytest.mark.parametrize("save", ["model", "optimizer", "run"])
def test_a_step_that_one_rank_leaves_out_is_told_by_a_save(tmp_path, save):
    def calls(script):
        script.train()
        if script.rank == 1:
            script.optimizer.step()
        if save == "model":
            script.booster.save_model(script.model, tmp_path / "m.safetensors")
        elif save == "optimizer":
            script.booster.save_optimizer(script.optimizer, tmp_path / "o")
        else:
            script.booster.save(tmp_path / "run", step=1)

    told = (
        "on rank 0 the optimizer has taken 0 steps and adds up the gradients of 1 call, on rank 1 the optimizer has "
        "taken 1 step and adds up the gradients of 0 calls. Call optimizer.step()"
    )
    assert all(told in text for text in Loopback(2).run(lambda: outcome(calls, pp_size=2)))


def test_calls_in_loops_of_backward_are_told_with_the_next_pass():
    def calls(script):
        for call in range(3):
            script.booster.backward(script.model(torch.ones(1, 4)).square().mean(), script.optimizer)
            if call == 0 and script.rank == 1:
                script.optimizer.clip_grad_by_value(0.5)
            script.optimizer.step()

    told = "rank 0 has called optimizer.step(); rank 1 has called optimizer.clip_grad_by_value(0.5), optimizer.step()."
    assert all(told in text for text in Loopback(2).run(lambda: outcome(calls)))


def steps_without_gradients_on_one_rank(script):
    script.train()
    if script.rank == 0:
        script.optimizer.zero_grad()
    script.optimizer.step()
    script.train()


def test_other_calls_are_told_though_ranks_wait_for_each_other():
    told = "since the training step before, rank 0 has called optimizer.zero_grad(), optimizer.step(); rank 1 has"
    with pytest.raises(HybridppError, match=re.escape(told)):
        Loopback(2).run(lambda: steps_without_gradients_on_one_rank(Script()))


def test_ranks_that_wait_in_other_calls_say_in_which():
    with pytest.raises(HybridppError) as caught:
        Loopback(2).run(lambda: steps_without_gradients_on_one_rank(Script(zero_stage=1)))
    assert re.search(
        r"rank 0 waits for [^;]* in optimizer.step of Net, after optimizer.zero_grad\(\);", str(caught.value)
    )
    assert re.search(r"rank 1 waits for [^;]* in optimizer.step of Net\.", str(caught.value))
