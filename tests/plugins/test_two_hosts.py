"""A job of two hosts: pipelines and replicas across them, and a cable that is pulled in the middle of a step."""

import re
import sys

import pytest
from processes import run_ranks, run_script
from support import (
    ROOT,
    assert_near,
    assert_same,
    boosted,
    gradients_of,
    image_batch,
    model_loss,
    replica_part,
    sgd,
    tiny_vit,
    train,
)
from two_hosts import hosts_or_skip, on_hosts

from hybridpp.cluster import current_world

SCRIPT, FOREIGN_BYTES = (ROOT / f"tests/scripts/{name}.py" for name in ("hanging", "foreign_bytes"))
BATCHES = [image_batch(8, seed) for seed in range(2)]
# Of four ranks on two hosts: replicas on a host each, and a pipeline of which the middle is the cable.
LAYOUTS = {"dp": {"pp_size": 2, "num_microbatches": 2}, "pp": {"pp_size": 4, "num_microbatches": 4}}


def _trained(settings):
    booster, model, optimizer = boosted(tiny_vit(), sgd, image_batch(2), **settings)
    layout = booster.plugin.layout
    data = iter([replica_part(batch, layout.here.dp, layout.dp.size) for batch in BATCHES])
    losses, gradients = [], {}
    for step in range(len(BATCHES)):
        losses.append(booster.execute_pipeline(data, model, model_loss, optimizer)["loss"].item())
        if step == 0:
            gradients = gradients_of(booster, model)
        optimizer.step()
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    transports = {axis: not getattr(layout, axis).overlaps for axis in ("pp", "dp")}
    return losses, gradients, weights, transports


def _on_four_ranks():
    world = current_world()
    ways = {
        name: not world.split(groups).overlaps
        for name, groups in (("host", [[0, 1], [2, 3]]), ("cable", [[0, 2], [1, 3]]))
    }
    return ways, {name: _trained(settings) for name, settings in LAYOUTS.items()}


@pytest.mark.timeout(180)
def test_pipelines_and_replicas_across_hosts_equal_one_process():
    with hosts_or_skip() as hosts:
        ranks = run_ranks(_on_four_ranks, 4, timeout_s=150, **on_hosts(hosts, ranks_per_host=2))
    # Shared memory is for the ranks of one host.
    assert [ways for ways, _ in ranks] == [{"host": True, "cable": False}] * 4
    transports = {name: [results[name][3] for _, results in ranks] for name in LAYOUTS}
    assert transports["dp"] == [{"pp": True, "dp": False}] * 4
    assert [one["pp"] for one in transports["pp"]] == [False] * 4
    whole = train(tiny_vit, BATCHES, num_microbatches=4)
    for name, compare in (("dp", assert_near), ("pp", assert_same)):
        gradients, weights = {}, {}
        # The last ranks of two replicas, or twice the last one.
        losses = [ranks[rank][1][name][0] for rank in ((1, 3) if name == "dp" else (3, 3))]
        assert [sum(step) / 2 for step in zip(*losses, strict=True)] == pytest.approx(whole["losses"][0], abs=1e-6)
        for _, results in ranks:
            _, own_gradients, own_weights, _ = results[name]
            gradients |= own_gradients
            weights |= own_weights
        compare(gradients, whole["gradients"])
        compare(weights, whole["weights"])


@pytest.mark.timeout(150)
def test_a_cable_pulled_in_a_step_ends_both_hosts_and_each_says_who_went():
    with hosts_or_skip() as hosts:
        job = run_script(2, SCRIPT, "cut", "1", "1F2", "limit=5", until_all_end=True, **on_hosts(hosts))
    assert job.returncode == 75, job.stderr
    # Rank 0 has the store.
    assert re.findall(r"The first suspect is rank (\d) \(process \d+ on (\w+)\)", job.stderr) == [("1", "host1")]
    assert "Nobody sees its process: its host may be down, or cut off." in job.stderr
    silent = re.findall(r"rank (\d) is in training step 3 of Model.*store has not answered (\w+) for", job.stderr)
    assert silent == [("1", "host1")]
    assert job.stderr.count("this job hangs") == 2, job.stderr


@pytest.mark.timeout(150)
def test_a_job_goes_on_while_foreign_bytes_reach_all_its_ports(tmp_path):
    with hosts_or_skip() as hosts:
        senders = [host.start(sys.executable, FOREIGN_BYTES, "4", cwd=tmp_path) for host in hosts]
        job = run_script(2, SCRIPT, "none", "0", "script", "limit=30", "steps=100", **on_hosts(hosts))
        sent = [sender.communicate(timeout=60) for sender in senders]
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("DONE") == 2
    assert not any(error for _, error in sent), sent
    # The store's port, and one of gloo's at least.
    counts = [list(map(int, re.findall(r"\d+", text))) for text, _ in sent]
    assert all(num_connections and num_ports > 1 for num_connections, num_ports, _ in counts), counts
    assert not list(tmp_path.iterdir())
