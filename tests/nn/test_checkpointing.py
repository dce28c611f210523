import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from hybridpp.nn.checkpointing import (
    has_saved_tensor_hooks,
    in_checkpoint,
    in_reentrant_checkpoint,
    may_run_again,
    recomputes_saved_tensors,
)

QUESTIONS = (in_checkpoint, in_reentrant_checkpoint, may_run_again, has_saved_tensor_hooks, recomputes_saved_tensors)


def answers():
    return {question.__name__ for question in QUESTIONS if question()}


def test_outside_of_checkpoints_every_answer_is_no():
    assert answers() == set()


@pytest.mark.parametrize(
    ("use_reentrant", "expected"),
    [
        (False, {"in_checkpoint", "may_run_again", "has_saved_tensor_hooks", "recomputes_saved_tensors"}),
        (True, {"in_checkpoint", "in_reentrant_checkpoint", "may_run_again"}),
    ],
)
def test_each_kind_of_checkpoint_is_seen_in_its_first_run(use_reentrant, expected):
    found = []

    def run(x):
        found.append(answers())
        return x * 2

    checkpoint(run, torch.ones(1, requires_grad=True), use_reentrant=use_reentrant)
    assert found == [expected]


def test_a_users_hooks_are_no_checkpoint():
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        assert answers() == {"may_run_again", "has_saved_tensor_hooks"}


def test_a_stack_without_gradients_is_not_a_reentrant_checkpoint():
    with torch.no_grad():
        assert answers() == {"may_run_again"}
