"""Peak host memory of a rank that boosts a model on the meta device and loads what it owns.

Writes a Llama of random weights to a temporary folder, in several files, and starts fresh processes that load it: the
ranks of one replica each time, and one process with plain ``from_pretrained``. A process reports by how much its peak
resident memory (``ru_maxrss``) exceeds what was resident after the imports. Pages of mapped files count in that.

    PYTHONPATH=.:plugins python benchmarks/host_memory.py --markdown table.md
"""

import argparse
import json
import os
import platform
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from hybridpp import Booster, HybridParallelPlugin, launch

MIB = 2**20
NUM_LAYERS, HIDDEN, NUM_FILES = 20, 1024, 8
COLUMNS, ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
PLAN = {f"*.{name}": "column" for name in COLUMNS} | {f"*.{name}": "row" for name in ROWS}


def config() -> LlamaConfig:
    """About 1.1 GiB in fp32."""
    return LlamaConfig(
        vocab_size=16000,
        hidden_size=HIDDEN,
        intermediate_size=3072,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=16,
        num_key_value_heads=16,
    )


def write(folder: Path) -> None:
    """The folder that all others read."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(config())
    size = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(folder, max_shard_size=f"{size // 10**6 // (NUM_FILES - 1)}MB")


def resident_mib() -> float:
    """Resident memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / MIB


def peak_mib() -> float:
    """Most resident memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class AnonymousPeak:
    """The most resident memory of this process without pages of mapped files, looked at every millisecond."""

    def __init__(self) -> None:
        self.before = self.most = self._now()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self.most = max(self.most, self._now())
            time.sleep(1e-3)

    @staticmethod
    def _now() -> float:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) / 1024

    def grown_mib(self) -> float:
        """What it exceeds that at the start by, so far."""
        return max(self.most, self._now()) - self.before


def load_stage(folder: Path, rank: int, pp_size: int, tp_size: int, port: int, loader: str) -> dict[str, Any]:
    """Boost on the meta device, load, report."""
    launch(rank, pp_size * tp_size, "127.0.0.1", port, backend="gloo")
    plan = PLAN if loader == "told" else None
    plugin = HybridParallelPlugin(
        tp_size=tp_size, pp_size=pp_size, num_microbatches=1, precision="fp32", tensor_parallel_plan=plan
    )
    booster = Booster(plugin=plugin, device="cpu")
    ids = torch.zeros(2, 8, dtype=torch.long)
    sample = {"input_ids": ids, "labels": ids}
    before, start = resident_mib(), time.perf_counter()
    with torch.device("meta"):
        model = LlamaForCausalLM(config())
    model = booster.boost(model, sample=sample).model
    if loader != "whole":
        booster.load_model(model, folder)
    else:
        whole = LlamaForCausalLM.from_pretrained(folder).state_dict()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(whole[name])
    seconds = time.perf_counter() - start
    share = sum(parameter.nbytes for parameter in model.parameters()) / MIB
    used = peak_mib() - before
    torch.distributed.destroy_process_group()
    return {"used": used, "share": share, "seconds": seconds}


def load_whole(folder: Path) -> dict[str, Any]:
    """Plain ``from_pretrained``; every weight is read once, because it leaves them in mapped files, unread."""
    before, start = resident_mib(), time.perf_counter()
    model = LlamaForCausalLM.from_pretrained(folder)
    for parameter in model.parameters():
        parameter.sum()
    seconds = time.perf_counter() - start
    share = sum(parameter.nbytes for parameter in model.parameters()) / MIB
    return {"used": peak_mib() - before, "share": share, "seconds": seconds}


def measure(*roles: list[str]) -> list[dict[str, Any]]:
    """Run this script once per role, all at the same time; what each printed."""
    command = [sys.executable, __file__]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    running = [
        subprocess.Popen([*command, *role], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for role in roles
    ]
    reports = []
    for process in running:
        out, error = process.communicate(timeout=170)
        if process.returncode:
            raise RuntimeError(error)
        reports.append(json.loads(out.splitlines()[-1]) if out else {})
    return reports


def ranks(folder: Path, pp_size: int, loader: str = "own", tp_size: int = 1) -> list[dict[str, Any]]:
    """One replica's reports, by rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sizes = [str(pp_size), str(tp_size), str(port), loader]
    roles = [["--rank", str(rank), *sizes, "--folder", str(folder)] for rank in range(pp_size * tp_size)]
    return measure(*roles)


def table(folder: Path) -> str:
    """All measurements, as Markdown."""
    files = [path.stat().st_size / MIB for path in folder.glob("*.safetensors")]
    lines = [
        f"Llama, {NUM_LAYERS} layers of width {HIDDEN}, fp32: {sum(files):.0f} MiB in {len(files)} files, "
        f"the largest {max(files):.0f} MiB.",
        "",
        "| process | its share (MiB) | share + largest file | peak over baseline (MiB) | seconds |",
        "|---|--:|--:|--:|--:|",
    ]

    def row(name: str, report: dict[str, Any]) -> str:
        share = report["share"]
        return f"| {name} | {share:.0f} | {share + max(files):.0f} | {report['used']:.0f} | {report['seconds']:.1f} |"

    for pp_size in (2, 4):
        for rank, report in enumerate(ranks(folder, pp_size)):
            lines.append(row(f"pp={pp_size} rank {rank}, meta + `load_model`", report))
    for pp_size, loader, plan in ((1, "told", "plan given"), (1, "own", "plan found"), (2, "told", "plan given")):
        for rank, report in enumerate(ranks(folder, pp_size, loader, tp_size=2)):
            lines.append(row(f"tp=2 pp={pp_size} rank {rank}, meta + `load_model`, {plan}", report))
    for rank, report in enumerate(ranks(folder, 2, "whole")):
        lines.append(row(f"pp=2 rank {rank}, meta + whole `from_pretrained`, copied", report))
    lines.append(row("1 process, `from_pretrained`, weights read", measure(["--whole", "--folder", str(folder)])[0]))
    return "\n".join(lines)


def main() -> None:
    """Parse arguments and run one role, or all."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--markdown", type=Path, help="write the table to this file too")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--whole", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rank", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write:
        write(arguments.folder)
    elif arguments.whole:
        print(json.dumps(load_whole(arguments.folder)))
    elif arguments.rank:
        rank, pp_size, tp_size, port = map(int, arguments.rank[:4])
        print(json.dumps(load_stage(arguments.folder, rank, pp_size, tp_size, port, arguments.rank[4])))
    else:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            # By a process of its own: a child's ru_maxrss starts from what its parent holds.
            measure(["--write", "--folder", folder])
            text = table(Path(folder))
        print(text)
        print(
            f"\n{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, "
            f"transformers {transformers.__version__}; {time.perf_counter() - start:.0f} s"
        )
        if arguments.markdown:
            arguments.markdown.write_text(text + "\n")


if __name__ == "__main__":
    main()
