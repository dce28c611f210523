"""Every recipe runs as its page says; results are those of one process."""

import importlib.util
import json
import multiprocessing
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from contextlib import chdir

import pytest
import torch
from forked_jobs import forked_job
from processes import free_port, run_ranks
from safetensors.torch import load_file
from support import ROOT, assert_near
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hybridpp
from hybridpp.checkpoint.commit import committed_steps
from hybridpp.cluster import Loopback

FOLDER = ROOT / "docs/recipes"


@pytest.fixture
def recipe(monkeypatch, tmp_path):
    """What a script defines, and what its ``main`` returns on in-process ranks, which have joined."""
    monkeypatch.setattr(hybridpp, "launch_from_torch", lambda seed: torch.manual_seed(seed))
    monkeypatch.setattr(hybridpp.Booster, "__init__", _on_cpu(hybridpp.Booster.__init__))

    def run(name, num_ranks, **arguments):
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)  # where a compiler looks for it
        spec.loader.exec_module(module)
        with chdir(tmp_path):
            return vars(module), Loopback(num_ranks).run(lambda: module.main(**arguments))

    return run


def _on_cpu(init):
    return lambda self, plugin=None, *args, **settings: init(self, plugin, *args, **{"device": "cpu", **settings})


def test_the_index_lists_every_file_and_nothing_else():
    page = (FOLDER / "README.md").read_text()
    files = {path.name for path in FOLDER.iterdir() if path.is_file()} - {"README.md"}
    assert all(f"[{name}]({name})" in page for name in files)
    assert len(files) == 12


def test_a_gpt_of_ones_own_learns_alike_on_one_stage_and_on_two(recipe):
    _, ((one),) = recipe("own_gpt", 1, epochs=1)
    _, two = recipe("own_gpt", 2, epochs=1)
    assert two[0] == two[1] == pytest.approx(one, rel=1e-5)
    assert one[-1] < 0.8 * one[0]


def test_a_run_goes_on_in_another_layout_as_without_a_break(recipe, tmp_path):
    _, (straight,) = recipe("resume", 1, folder=str(tmp_path / "straight"))
    _, (first, _) = recipe("resume", 2, folder=str(tmp_path / "run"), max_steps=7)
    _, (second,) = recipe("resume", 1, folder=str(tmp_path / "run"))
    assert len(first) == 7
    # The last checkpoint was that of step 6.
    assert first[:6] + second == straight


def test_slurms_environment_is_read_on_two_processes(monkeypatch):
    # As srun: the environment of each process is its own, and the others join rank 0 at an address that all know.
    assert "srun python docs/recipes/slurm.py" in (FOLDER / "slurm.sh").read_text()
    subprocess.run(["bash", "-n", str(FOLDER / "slurm.sh")], check=True)
    _join_as_tasks(monkeypatch, "slurm", size="SLURM_NTASKS", ranks=("SLURM_PROCID", "SLURM_LOCALID"))


def test_open_mpis_environment_is_read_on_two_processes(monkeypatch):
    ranks = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
    _join_as_tasks(monkeypatch, "openmpi", size="OMPI_COMM_WORLD_SIZE", ranks=ranks)


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun is installed")
def test_open_mpis_launcher_starts_the_recipe():
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True).stdout
    if "Open MPI" not in version:
        pytest.skip("mpirun is another one's")
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    # To run as root, and more ranks than cores, is for hosts of tests.
    options = ["--allow-run-as-root", "--oversubscribe", "-n", "2"]
    done = _run(["mpirun", *options, sys.executable, str(FOLDER / "openmpi.py")], address)
    assert "on 2 ranks" in done.stdout


def test_accelerate_launch_starts_the_recipe():
    import accelerate.commands.launch

    options = ["--multi_gpu", "--num_processes", "2", "--main_process_port", str(free_port())]
    arguments = [*options, str(FOLDER / "accelerate_launch.py")]
    # Accelerate reads them from sys.argv.
    with forked_job(lambda _: accelerate.commands.launch.main(), *arguments) as job:
        assert job.end(110) == 0, job.stderr
        assert "on 2 ranks" in job.stdout


@pytest.mark.timeout(600)
def test_ray_train_starts_the_recipe(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'hybridpp[ray]'")
    command = [sys.executable, str(FOLDER / "ray_train.py")]
    done = _run(command, cwd=tmp_path, timeout_s=280)
    assert re.search(r"step 5: loss \d\.\d+ on 2 ranks", done.stdout + done.stderr)
    assert committed_steps(tmp_path / "outputs/ray") == [5, 4]
    # Started again, as Ray does with workers that failed: all steps are done.
    again = _run(command, cwd=tmp_path, timeout_s=280)
    assert not re.search(r"step \d: loss", again.stdout + again.stderr)


def _run(command, environment=(), cwd=ROOT, timeout_s=110):
    """The command of a recipe's docstring, from a checkout that is not installed."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "plugins"), os.environ.get("PYTHONPATH", "")])
    variables = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | dict(environment)
    done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr[-2000:]
    return done


def _join_as_tasks(monkeypatch, name, size, ranks):
    """Run a recipe on two processes, each with the variables of its launcher."""
    for variable, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), size: "2"}.items():
        monkeypatch.setenv(variable, value)
    context, results = multiprocessing.get_context("fork"), []
    for rank in "01":
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_task, args=(name, dict.fromkeys(ranks, rank), theirs))
        process.start()
        results.append((process, ours))
    for process, ours in results:
        assert ours.poll(60)
        process.join()
    first, second = (ours.recv() for _, ours in results)
    assert first == second < 2


def _task(name, variables, pipe):
    torch.set_num_threads(1)
    os.environ |= variables
    pipe.send(runpy.run_path(str(FOLDER / f"{name}.py"))["main"]())


# Of dynamo, which looks at the attributes of every input.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_blocks_compile_on_two_stages(recipe):
    _, ranks = recipe("compile_blocks", 2, compile_blocks={"backend": "eager"}, num_steps=2)
    _, (plain,) = recipe("compile_blocks", 1, compile_blocks=False, num_steps=2)
    assert ranks[0] == ranks[1] == pytest.approx(plain, rel=1e-6)


def test_hooks_see_what_they_see_in_one_process():
    ranks = run_ranks(_hooks, 2)
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(4)]
    value = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    expected = {}
    for number, block in enumerate(blocks):
        value = block(value)
        expected[str(number)] = value.detach().square().mean().sqrt().item()
        value = value * 0.5 if number == 2 else value
    assert ranks[0] == ranks[1]
    # Of the root of a mean over two micro-batches.
    assert ranks[0] == pytest.approx(expected, rel=1e-5)


def _hooks():
    hybridpp.launch_from_torch = lambda seed: torch.manual_seed(seed)
    return runpy.run_path(str(FOLDER / "hooks.py"))["main"]()


def test_an_average_goes_on_where_it_was_saved(recipe, tmp_path):
    recipe("ema", 2, folder=str(tmp_path), num_steps=3)
    names, _ = recipe("ema", 1, folder=str(tmp_path), num_steps=6)
    model = names["make_model"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(names["DECAY"]))
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        rows, labels = torch.randn(4, 8, generator=generator), torch.randint(3, (4,), generator=generator)
        torch.nn.functional.cross_entropy(model(rows), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    assert_near(load_file(tmp_path / "ema.safetensors"), average.module.state_dict())


def test_an_evaluation_counts_each_sample_once():
    ranks = run_ranks(_evaluated, 4)
    assert len({str(scores) for scores, _ in ranks}) == 1
    scores, expected = ranks[0]
    assert scores[-1] == pytest.approx(expected, rel=1e-5)
    assert scores[-1][1] > scores[0][1]


def _evaluated():
    """The recipe's scores, and that of the saved model in plain PyTorch; 21 rows on two replicas."""
    hybridpp.launch_from_torch = lambda seed: torch.manual_seed(seed)
    names = runpy.run_path(str(FOLDER / "evaluate_in_the_loop.py"))
    folder = [tempfile.mkdtemp() if torch.distributed.get_rank() == 0 else None]
    torch.distributed.broadcast_object_list(folder)
    with chdir(folder[0]):
        scores = names["main"]()
        nn = torch.nn
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))
        model.load_state_dict(load_file("outputs/evaluated.safetensors"))
    rows, labels = zip(*names["samples"](21, seed=1), strict=True)
    with torch.no_grad():
        logits = model(torch.stack(rows))
    labels = torch.tensor(labels)
    return scores, (
        nn.functional.cross_entropy(logits, labels).item(),
        (logits.argmax(1) == labels).float().mean().item(),
    )


def test_the_notebooks_cells_run_in_order():
    namespace = {}
    cells = json.loads((FOLDER / "notebook.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    for cell in code:
        exec(
            compile(cell.replace("num_microbatches=4))", 'num_microbatches=4), device="cpu")'), "cell", "exec"),
            namespace,
        )
    assert namespace["losses"][-1] < namespace["losses"][0]
    assert len(code) == 4
