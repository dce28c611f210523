"""What a plugin's groups take of a process: threads, descriptors."""

import gc
import os
import re
import time

import pytest
import torch
import torch.distributed as dist
from processes import run_ranks
from support import boosted, image_batch, model_loss, sgd, small_vit

from hybridpp import Booster, DistCoordinator, HybridParallelPlugin
from hybridpp.cluster import Loopback, current_world
from hybridpp.cluster.loopback import LoopbackWorld
from hybridpp.errors import ClosedError, ConfigError, LaunchError, PeerError

LAYOUTS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4)]


def taken():
    gc.collect()
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def assert_no_more(seen):
    """A plugin's groups take 12 threads and 18 descriptors; a thread that ends and memory for messages are allowed."""
    (threads, descriptors), *_, (last_threads, last_descriptors) = seen
    assert last_threads <= threads + 1, seen
    assert last_descriptors <= descriptors + 5, seen


def plugin(tp_size=1, pp_size=2, **settings):
    return HybridParallelPlugin(tp_size=tp_size, pp_size=pp_size, num_microbatches=2, precision="fp32", **settings)


def _twenty():
    seen = []
    for _ in range(20):
        plugin(schedule="zb-v")
        seen.append(taken())
    # Threads of the last ones may be about to end, on a busy machine for a while.
    end = time.monotonic() + 10
    while taken()[0] > seen[0][0] and time.monotonic() < end:
        time.sleep(0.05)
    return [*seen, taken()]


def test_twenty_plugins_take_no_more_than_one():
    for seen in run_ranks(_twenty, 2):
        assert_no_more(seen)


def test_twenty_plugins_on_one_process_take_no_more_than_one():
    def run():
        return [(plugin(pp_size=1), taken())[1] for _ in range(20)]

    assert_no_more(run_ranks(run, 1)[0])


def _forty_closed():
    seen = []
    for number in range(40):
        made = plugin()
        # Collecting garbage takes longer than all else here.
        held = taken() if number in (0, 39) else None
        made.close()
        if held is not None:
            seen.append((held, taken()))
    return seen


def test_forty_closed_plugins_take_no_more_than_the_first():
    for seen in run_ranks(_forty_closed, 2):
        assert_no_more([closed for _, closed in seen])
        # The pipeline's group has threads of gloo's, and descriptors.
        for held, closed in seen:
            assert closed[0] <= held[0] - 3
            assert closed[1] < held[1] - 5


def _closed_models():
    losses = []
    for _ in range(3):
        booster, model, optimizer = boosted(small_vit(), sgd, image_batch(2), pp_size=2, num_microbatches=2)
        loss = booster.execute_pipeline(iter([image_batch(4)]), model, model_loss, optimizer)["loss"].item()
        # The model and its engine still refer to the groups.
        booster.plugin.close()
        losses.append((loss, taken()))
    return losses


def test_a_closed_plugin_gives_groups_back_while_its_model_lives():
    for seen in run_ranks(_closed_models, 2):
        assert len({loss for loss, _ in seen}) == 1
        assert_no_more([counts for _, counts in seen])


def _closed_beside_another():
    first, second = plugin(), plugin()
    pipelines = first.pp_group, second.pp_group
    assert pipelines[0] is pipelines[1]
    before = taken()
    first.close()
    assert_no_more([before, taken()])
    total = torch.ones(1)
    second.layout.pp.all_reduce(total).wait()
    with pytest.raises(PeerError, match=r"^group pp was released: its plugin was closed, or the job"):
        first.layout.pp.all_reduce(torch.ones(1))
    with pytest.raises(PeerError, match="was released"):
        first.layout.pp.send(torch.ones(1), 1 - first.layout.here.pp)
    del pipelines
    second.close()
    return total.item(), first.pp_group, second.pp_group, taken()[0] <= before[0] - 3


def test_a_closed_plugin_leaves_groups_to_a_plugin_that_shares_them():
    assert run_ranks(_closed_beside_another, 2) == [(2.0, None, None, True)] * 2


def _closed_twice():
    made = plugin()
    made.close()
    made.close()
    again = plugin()
    DistCoordinator().destroy()
    again.close()
    return True


def test_a_plugin_may_be_closed_again_and_after_the_job_was_left():
    assert run_ranks(_closed_twice, 2) == [True, True]


def test_a_closed_plugin_refuses_to_be_used(tmp_path):
    def run():
        booster, model, optimizer = boosted(small_vit(), sgd, image_batch(2))
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        booster.plugin.close()
        uses = [
            lambda: booster.execute_pipeline(iter([image_batch(2)]), model, model_loss, optimizer),
            lambda: booster.boost(small_vit(), sample=image_batch(2)),
            lambda: booster.backward(torch.ones(1), optimizer),
            lambda: booster.no_sync(model),
            lambda: booster.record_timeline(model),
            lambda: booster.save_model(model, tmp_path / "model"),
            lambda: booster.load_model(model, tmp_path / "model"),
        ]
        for use in uses:
            with pytest.raises(ClosedError, match=r"^this plugin was closed: its process groups are gone\. Make"):
                use()
        assert all(map(torch.equal, weights, model.parameters()))

    Loopback(1).run(run)


def _trained():
    booster, model, optimizer = boosted(small_vit(), sgd, image_batch(2), pp_size=2, num_microbatches=2)
    loss = booster.execute_pipeline(iter([image_batch(4)]), model, model_loss, optimizer)["loss"].item()
    del booster, model, optimizer
    return loss


def test_models_trained_in_turn_use_the_groups_of_one_and_train_alike():
    def run():
        return [(_trained(), taken()) for _ in range(4)]

    for seen in run_ranks(run, 2):
        assert len({loss for loss, _ in seen}) == 1
        assert_no_more([counts for _, counts in seen])


def _layouts():
    seen = {}
    for tp_size, pp_size in [*LAYOUTS, *LAYOUTS, *LAYOUTS]:
        made = plugin(tp_size, pp_size)
        total = torch.ones(1)
        for group in (made.layout.tp, made.layout.pp, made.layout.dp):
            group.all_reduce(total).wait()
        assert total.item() == 4.0
        del made
        seen.setdefault((tp_size, pp_size), []).append(taken())
    return seen


def test_a_layout_that_is_no_more_is_given_back():
    for seen in run_ranks(_layouts, 4):
        # From the second time around, there is what the layout before it leaves.
        for counts in seen.values():
            assert_no_more(counts[1:])


def _kept():
    first = plugin(1, 2)
    second = plugin(2, 1)
    total = torch.ones(1)
    # Made after it and dropped since, another layout takes nothing away from one that lives.
    del second
    plugin(1, 1), plugin(2, 1)
    first.layout.pp.all_reduce(total).wait()
    return total.item()


def test_groups_in_use_are_kept():
    assert run_ranks(_kept, 2) == [2.0, 2.0]


def _halfway():
    first = plugin()
    # A message that nobody took, as an error in the middle of a step leaves it.
    if dist.get_rank() == 0:
        first.layout.pp.send(torch.full((1,), 13.0), 1)
    del first
    second = plugin()
    received = torch.zeros(1)
    if dist.get_rank() == 0:
        second.layout.pp.send(torch.ones(1), 1).wait()
    else:
        second.layout.pp.receive(received, 0).wait()
    return received.item()


def test_what_was_under_way_does_not_arrive_in_another_plugin():
    assert run_ranks(_halfway, 2) == [0.0, 1.0]


def _destroyed():
    made = plugin(schedule="zb-v")
    current_world().split([[0, 1]], "another").all_reduce(torch.ones(1)).wait()
    DistCoordinator().destroy()
    left = taken()
    with pytest.raises(LaunchError, match=r"^this job was left: destroy\(\) was called\. Launch again"):
        made.layout.group_of_copies(2)
    with pytest.raises(PeerError, match="group was released"):
        made.layout.pp.send(torch.ones(1), 1 - made.layout.here.pp)
    return left


def test_destroy_gives_back_everything():
    for threads, descriptors in run_ranks(_destroyed, 2):
        # Standard streams, the test's own pipes and files.
        assert (threads, descriptors) <= (2, 20)


def test_a_device_that_the_backend_does_not_carry_is_refused(monkeypatch):
    """As the CPU in a job over nccl."""
    monkeypatch.setattr(LoopbackWorld, "carries", lambda world, device: device.type == "cuda")
    monkeypatch.setattr(LoopbackWorld, "device", torch.device("cuda", 1))
    model = small_vit()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    text = (
        "the job's backend communicates tensors of other devices: got device='cpu' in a job of 2 ranks. Leave device "
        'out of Booster to compute on cuda:1, or join the job with backend="gloo".'
    )

    def run():
        booster = Booster(plugin=plugin(), device="cpu")
        with pytest.raises(ConfigError, match=f"^{re.escape(text)}$"):
            booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), sample=image_batch(2))

    Loopback(2).run(run)
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
