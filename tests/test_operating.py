"""What docs/operating.md shows for clusters is whole: the manifest, the batch script."""

import re
import subprocess

import pytest
from support import ROOT

from hybridpp.cli.run import _parse

PAGE = (ROOT / "docs/operating.md").read_text()


def block(language, start):
    return next(text for text in re.findall(rf"```{language}\n(.*?)```", PAGE, re.S) if start in text)


def test_the_kubernetes_manifest_is_whole():
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load(block("yaml", "PyTorchJob"))
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    policy, worker = job["spec"]["elasticPolicy"], job["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert policy["minReplicas"] <= worker["replicas"] <= policy["maxReplicas"]
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"][:2] == ["hybridpp", "run"]
    assert int(job["spec"]["nprocPerNode"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert "/dev/shm" in [mount["mountPath"] for mount in container["volumeMounts"]]


def test_the_variables_of_the_operator_are_read(monkeypatch):
    given = {"NNODES": "1:2", "NPROC_PER_NODE": "8", "RDZV_BACKEND": "c10d", "RDZV_ENDPOINT": "host0:29400"}
    for name, value in (given | {"MAX_RESTARTS": "3", "RDZV_ID": "my-run"}).items():
        monkeypatch.setenv(f"PET_{name}", value)
    parsed = _parse(["/workspace/my_training.py"])
    assert (parsed.nnodes, parsed.nproc_per_node, parsed.rdzv_backend) == ("1:2", "8", "c10d")
    assert (parsed.rdzv_endpoint, parsed.rdzv_id, parsed.max_restarts) == ("host0:29400", "my-run", 3)


def test_the_batch_script_parses_and_its_options_are_torchruns(tmp_path):
    script = tmp_path / "job.sh"
    script.write_text(block("bash", "#SBATCH"))
    subprocess.run(["bash", "-n", str(script)], check=True)
    command = " ".join(re.search(r"hybridpp run (.*?)\ncode", script.read_text(), re.S)[1].replace("\\\n", "").split())
    parsed = _parse(command.replace('"', "").split())
    assert (parsed.training_script, parsed.max_restarts) == ("my_training.py", 3)
