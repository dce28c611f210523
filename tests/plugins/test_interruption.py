"""A call of the optimizer or the booster that ends for want of a peer, and whose error the script catches."""

import os
import re
import signal
import time

import pytest
import torch
from hybridpp_plugins import folder_save
from plugins.zero_models import SAMPLE, batches, cross_entropy, on_layout, step, without_dropout
from processes import RankFailed, run_ranks
from support import boosted, image_batch, model_loss, sgd, tiny_vit
from torch import nn

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import current_world
from hybridpp.errors import DeadlockError, PeerTimeoutError, RefusedByPeerError, UnlikeCallsError

REFUSED = r"^{} ended in the middle on this rank, by {}: .*[^.]\. Other ranks may still be in that {}, and its messages"

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
            with pytest.raises(UnlikeCallsError, match=REFUSED.format("a step", "DeadlockError", "step")):
                following()

    on_layout(run, dp_size=2, zero_stage=1, max_norm=0.0)


def wait_in(layout, group):
    """Be in a call of this group until all ranks wait."""
    with pytest.raises(DeadlockError):
        getattr(layout, group).all_gather(torch.zeros(1))


def unsharded(booster, model):
    with booster.unsharded(model):
        pass


# Each meets other ranks; and what it is called afterwards.
OTHER_CALLS = {
    "save": ("booster.save", lambda booster, model, optimizer, path: booster.save(path, step=1)),
    "save_model": ("booster.save_model", lambda booster, model, optimizer, path: booster.save_model(model, path)),
    "resume": ("booster.resume", lambda booster, model, optimizer, path: booster.resume(path, missing="fresh")),
    "init_model": ("booster.init_model", lambda booster, model, optimizer, path: booster.init_model(model)),
    "unsharded": ("booster.unsharded", lambda booster, model, optimizer, path: unsharded(booster, model)),
    "boost": ("booster.boost", lambda booster, model, optimizer, path: booster.boost(without_dropout(), sample=SAMPLE)),
    "load_state_dict": (
        "a step",
        lambda booster, model, optimizer, path: optimizer.load_state_dict(optimizer.state_dict()),
    ),
    "backward": (
        "a pass",
        lambda booster, model, optimizer, path: booster.backward(model(batches(1, 8)[0]).sum(), optimizer),
    ),
}


@pytest.mark.parametrize("call", OTHER_CALLS)
def test_nothing_follows_what_the_booster_did_not_get_through(call, tmp_path):
    name, waiting = OTHER_CALLS[call]

    def run(booster, model, optimizer):
        [batch] = batches(1, 8)
        if current_world().rank == 1:
            wait_in(booster.plugin.layout, "control" if call in ("unsharded", "backward") else "dp")
            return
        with pytest.raises(DeadlockError):
            waiting(booster, model, optimizer, tmp_path)
        refused = REFUSED.format(name, "DeadlockError", "step" if name == "a step" else "call")
        for following in (
            lambda: step(booster, model, optimizer, batch),
            lambda: optimizer.step(),
            lambda: optimizer.get_grad_norm(),
            lambda: optimizer.load_state_dict(optimizer.state_dict()),
            lambda: booster.save(tmp_path, step=2),
        ):
            with pytest.raises(UnlikeCallsError, match=refused):
                following()
        booster.plugin.close()  # nobody else does

    on_layout(run, dp_size=2, zero_stage=3 if call == "unsharded" else 1)


def test_a_save_in_the_background_is_not_waited_for_after_it(tmp_path):
    def run(booster, model, optimizer):
        [batch] = batches(1, 8)
        step(booster, model, optimizer, batch)
        optimizer.step()
        booster.save(tmp_path, step=1, asynchronous=True)
        if current_world().rank == 1:
            wait_in(booster.plugin.layout, "dp")
            return
        with pytest.raises(DeadlockError):
            step(booster, model, optimizer, batch)
        for following in (
            lambda: booster.save(tmp_path, step=2),
            lambda: booster.load_model(model, tmp_path),
            lambda: booster.resume(tmp_path),
            lambda: booster.load_optimizer(optimizer, tmp_path),
        ):
            with pytest.raises(UnlikeCallsError, match=REFUSED.format("a step", "DeadlockError", "step")):
                following()
        booster.plugin.close()

    on_layout(run, dp_size=2)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_that_failed_on_one_rank_is_over_on_all(asynchronous, tmp_path, monkeypatch):
    fails = [True]
    name = "file_images" if asynchronous else "write_holdings"
    write = getattr(folder_save, name)

    def writing(*arguments):
        if fails and current_world().rank == 1:
            fails.clear()
            raise LookupError("no such thing")
        return write(*arguments)

    monkeypatch.setattr(folder_save, name, writing)

    def run(booster, model, optimizer):
        [batch] = batches(1, 8)
        step(booster, model, optimizer, batch)
        optimizer.step()
        error = LookupError if current_world().rank == 1 else RefusedByPeerError
        with pytest.raises(error, match="no such thing"):
            booster.save(tmp_path, step=1, asynchronous=asynchronous)
        step(booster, model, optimizer, batch)
        optimizer.step()
        booster.save(tmp_path, step=2)
        return booster.resume(tmp_path).step

    assert on_layout(run, dp_size=2) == [2, 2]


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
    assert all(re.match(REFUSED.format("a step", "PeerTimeoutError", "step"), text) for text in texts)


class DiesInside(nn.Module):
    """A layer in which a rank is killed, in its third step."""

    calls = -1_000  # while boost tries plans, whose ranks are in one process

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        DiesInside.calls += 1
        if current_world().rank == 1 and DiesInside.calls > 20:
            os.kill(os.getpid(), signal.SIGKILL)
        return x + self.down(torch.tanh(self.up(x)))


def test_ranks_that_need_each_other_end_at_once_when_a_peer_is_killed(tmp_path):
    def run():
        rank, plan = current_world().rank, {"*.up": "column", "*.down": "row"}
        plugin = HybridParallelPlugin(tp_size=2, pp_size=2, num_microbatches=4, tensor_parallel_plan=plan)
        torch.manual_seed(0)
        booster, model = Booster(plugin=plugin, device="cpu"), nn.Sequential(*(DiesInside() for _ in range(4)))
        batch = torch.randn(8, 8), torch.randn(8, 8)
        model, optimizer, loss, *_ = booster.boost(model, sgd(model.parameters()), nn.MSELoss(), sample=batch)
        DiesInside.calls = 0
        try:
            for _ in range(20):
                began = time.monotonic()
                booster.execute_pipeline(iter([batch]), model, loss, optimizer)
                optimizer.step()
        finally:
            (tmp_path / f"{rank}").write_text(str(time.monotonic() - began))

    with pytest.raises(RankFailed):
        run_ranks(run, 4, wait_s=40.0)
    # Rank 2 waits for what rank 0 has no more.
    assert float((tmp_path / "0").read_text()) < 20
