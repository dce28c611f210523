"""An optimizer's collective that ends for want of a peer, where the script catches the error: nothing follows it."""

import re
import time

import pytest
from plugins.zero_models import batches, cross_entropy, on_layout, step
from processes import run_ranks
from support import boosted, image_batch, model_loss, sgd, tiny_vit

from hybridpp.cluster import current_world
from hybridpp.errors import DeadlockError, PeerTimeoutError, UnlikeCallsError

REFUSED = "^a step ended in the middle on this rank, by {}: .* Other ranks may still be in that step, and its messages"

# Each meets other ranks: the update's weights, the norm, sums of gradients that no_sync left.
CALLS = {
    "step": lambda optimizer: optimizer.step(),
    "norm": lambda optimizer: optimizer.get_grad_norm(),
    "clip": lambda optimizer: optimizer.clip_grad_by_norm(1.0),
    "value": lambda optimizer: optimizer.clip_grad_by_value(1.0),
    "unscale": lambda optimizer: optimizer.unscale_grad(),
    "gradients": lambda optimizer: list(optimizer.gradients()),
}


@pytest.mark.parametrize("call", CALLS)
def test_nothing_follows_what_an_optimizer_did_not_get_through(call, tmp_path):
    def run(booster, model, optimizer):
        [batch] = batches(1, 8)
        with booster.no_sync(model):
            step(booster, model, optimizer, batch)
        if current_world().rank == 1:
            # It is in another call until all ranks wait.
            with pytest.raises(DeadlockError):
                step(booster, model, optimizer, batch)
            return
        with pytest.raises(DeadlockError):
            CALLS[call](optimizer)
        for following in (
            lambda: step(booster, model, optimizer, batch),
            lambda: optimizer.step(),
            lambda: optimizer.get_grad_norm(),
            lambda: booster.backward(cross_entropy(model(batch), batch), optimizer),
            lambda: booster.save_model(model, tmp_path),
        ):
            with pytest.raises(UnlikeCallsError, match=REFUSED.format("DeadlockError")):
                following()

    on_layout(run, dp_size=2, zero_stage=1, max_norm=0.0)


WAIT_S = 5


def _peer_is_stuck(path):
    """Rank 1 is slower in its update than rank 0 waits for the weights that it updates."""
    rank = current_world().rank
    booster, model, optimizer = boosted(tiny_vit(), sgd, image_batch(2), num_microbatches=1, zero_stage=1)

    def run():
        return booster.execute_pipeline(iter([image_batch(4)]), model, model_loss, optimizer)

    run()
    if rank == 1:
        optimizer.unwrap().register_step_pre_hook(lambda *_: wait_for(path))
        optimizer.step()  # rank 0 has sent what this needs
        return None
    with pytest.raises(PeerTimeoutError):
        optimizer.step()
    path.touch()
    texts = []
    for following in (run, optimizer.step):
        with pytest.raises(UnlikeCallsError) as raised:
            following()
        texts.append(str(raised.value))
    return texts


def wait_for(path):
    while not path.exists():
        time.sleep(0.02)


def test_nothing_follows_an_update_in_which_a_peer_was_stuck(tmp_path):
    texts, _ = run_ranks(lambda: _peer_is_stuck(tmp_path / "gone"), 2, wait_s=WAIT_S)
    assert len(texts) == 2
    assert all(re.match(REFUSED.format("PeerTimeoutError"), text) for text in texts)
