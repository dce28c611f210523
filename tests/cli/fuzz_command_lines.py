"""Random command lines: each ends with a documented exit code, and what is refused is refused in two lines.

PYTHONPATH=.:plugins:tests python tests/cli/fuzz_command_lines.py [--count 10000] [--seed 0] [--only 17]

A case is a command line that works, with one to three changes: values, options and arguments that are replaced, left
out or added, among them files that are damaged, missing, binary, folders or full devices. It runs in this process, in a
new copy of a folder of files. Nothing is launched or measured. A case that takes more than 20 s of processor time
counts as endless.
"""

import argparse
import contextlib
import io
import json
import logging
import os
import random
import re
import resource
import shutil
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple, get_args, get_origin, get_type_hints
from unittest import mock

import torch
from config.fuzz_settings import MEMORY_BYTES, Endless, limited, typo
from recordings import recorded
from run_checkpoints import Run
from transformers import LlamaConfig
from typer.models import ArgumentInfo

from hybridpp.cli import main
from hybridpp.cli.app import COMMANDS
from hybridpp.cli.command import CommandGroup
from hybridpp.estimate import find_device
from hybridpp.schedule import SCHEDULES, make_schedule, save_schedule
from hybridpp.simulate import Costs, simulate

LIMIT_S = 20.0
LINES = {
    "schedule": (
        *(
            "1f1b --stages 2 --microbatches 4",
            "check plan.csv",
            "check plan.json",
            "--compare --stages 2 --microbatches 4",
        ),
        *("zb-v --stages 2 --microbatches 3 --draw out.svg --save out.csv", "plan.csv --draw out.png"),
        "interleaved --stages 2 --microbatches 4 --chunks 2 --save out.json",
    ),
    "simulate": (
        *("1f1b --stages 2 --microbatches 4 --forward-ms 2,2 --send-ms 0.1", "plan.csv --costs costs.json"),
        *(
            "zb-h1 --stages 2 --microbatches 4 --measured timeline.json",
            "1f1b --stages 2 --microbatches 4 --measured run",
        ),
        *("--search --stages 2 --microbatches 4 --activation-bytes 100 --memory 1KiB --save out.csv",),
        "gpipe --stages 3 --microbatches 2 --steps 3 --barrier --draw out.pdf --trace out.json",
    ),
    "report": ("recording --output out.html", "recording --estimate estimate.json --trace out.json", "recording"),
    "checkpoint": (
        *(
            "list run",
            "verify run",
            "verify run --step 1",
            "show run --tensors",
            "list run",
            "show run --step 3",
        ),
        *("export run out --to hf", "export run out.pt --to torch --dtype float32", "export run out --to dcp --step 1"),
        *("import weights out --step 2", "reshard run out --ranks 2 --file-size 1KiB", "import weights.pt out"),
    ),
    "partition": (
        "--model llama --pp-size 2 --sequence-length 8 --zero-stage 1 --world-size 4",
        "--model model.py:made --pp-size 2 --memory-limit 16GiB --balance parameters",
        "--model model.py:made --pp-size 2 --layers-per-stage 2,2 --precision bf16",
    ),
    "estimate": (
        "--model model.py:made --pp-size 2 --device device.json --memory 72GiB --json",
        "--model model.py:made --pp-size 2 --num-microbatches 4 --schedule zb-h1 --recompute",
        "--model model.py:made --zero-stage 2 --world-size 4 --global-batch 8 --links nvlink:8,ib:400",
    ),
    "plan": ("--model model.py:made --devices 2 --global-batch 4 --microbatch-sizes 1 --zero-stages 0 --top 1",),
    "profile": ("--output out.json --device cpu", "--output device.json --model model.py:made --recompute"),
    "doctor": ("--ranks 2 --json", "--ranks 2"),
    "run": (
        *("--nproc-per-node 2 train.py --lr 1", "--standalone --max-restarts 3 -m json.tool", "--nnodes 2 train.py"),
        "--nnodes 1:2 --rdzv-endpoint host0:29500 --rdzv-backend c10d --rdzv-conf timeout=3 train.py",
    ),
}
WEIGHTS = {"schedule": 20, "simulate": 24, "report": 12, "checkpoint": 24, "run": 10, "partition": 4, "estimate": 3}
FILES = [
    *(
        "empty",
        "binary",
        "text",
        "nested.json",
        "long.json",
        "list.json",
        "number.json",
        "plan.csv",
        "plan.json",
        "wrong.csv",
        "costs.json",
    ),
    *("timeline.json", "recording", "estimate.json", "device.json", "run", "weights", "weights.pt", "llama"),
    *(
        "model.py",
        "train.py",
        "broken.py",
        "folder",
        "closed",
        "loop",
        "missing",
        "missing.csv",
        "missing.json",
        "out.csv",
    ),
    *(
        "out",
        "out.svg",
        "folder/out.json",
        "missing/out.csv",
        "/dev/full",
        "/dev/null",
        "/proc/out.csv",
        "run/../run",
        ".",
    ),
    *("", " ", "ü€.csv", "\udcff.json", "a" * 300, "model.py:made", "model.py:missing", "broken.py:made", "text:made"),
]
TEXTS = [
    "0",
    "1",
    "2",
    "3",
    "-1",
    "1.5",
    "1e3",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "9" * 30,
    "9" * 5000,
    "1" * 9,
    "٣",
    "²",
    "0x10",
]
TEXTS += [
    "1,2",
    "1,,2",
    ",",
    "2,2",
    "1,1,1,1",
    "16GiB",
    "0GiB",
    "1e9GiB",
    "9" * 400 + "GiB",
    "1KiB,2KiB",
    "nvlink:8,ib:400",
]
TEXTS += [
    "nvlink:0",
    "nvlink",
    "ib:x",
    "fp16",
    "float16",
    "cpu",
    "cuda",
    "h100",
    "h200",
    "hf",
    "torch",
    "CausalLM",
    "x",
    "--",
]
TEXTS += [
    "host:1",
    ":",
    "host:99999",
    "[::1]:0",
    "a:before",
    "layers.1:after",
    "-h",
    "--help",
    "--version",
    "=",
    "%s",
]


NUMBERS = [one for one in TEXTS if one[:1].isdecimal() or one[:1] == "-"]


class Case(NamedTuple):
    """The arguments, and where the output goes."""

    arguments: list[str]
    output: str


def case(seed: int, number: int) -> Case:
    """The case of a number."""
    rng = random.Random(f"{seed}:{number}")
    if rng.random() < 0.02:
        return Case([rng.choice([*LINES, *TEXTS, *FILES]) for _ in range(rng.randrange(4))], "text")
    command = rng.choices(list(LINES), [WEIGHTS.get(name, 1) for name in LINES])[0]
    arguments = rng.choice(LINES[command]).split()
    options = OPTIONS[(command, arguments[0]) if command == "checkpoint" else (command,)]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        _change(rng, arguments, options)
    if rng.random() < 0.01:
        command = typo(rng, command)
    return Case([command, *arguments], "full" if rng.random() < 0.05 else "text")


def _change(rng: random.Random, arguments: list[str], options: dict[str, list[str] | None]) -> None:
    """Change one argument."""
    draw, at = rng.random(), rng.randrange(len(arguments) + 1)
    if draw < 0.45 and arguments:
        at = min(at, len(arguments) - 1)
        if not arguments[at].startswith("--"):
            arguments[at] = value(rng, arguments[at])
        elif rng.random() < 0.2:
            arguments[at] = typo(rng, arguments[at])
        elif at + 1 < len(arguments):
            arguments[at + 1] = value(rng, arguments[at + 1])
    elif draw < 0.6 and arguments:
        del arguments[min(at, len(arguments) - 1)]
    elif draw < 0.9 and options:
        name = rng.choice(sorted(options))
        values = options[name]
        arguments.append(name)
        if values is not None and rng.random() < 0.95:
            arguments.append(value(rng, rng.choice(values)) if values else value(rng))
    else:
        arguments.insert(at, value(rng))


def value(rng: random.Random, like: str = "") -> str:
    """Any text; most of them of the kind of another one, if it is given."""
    if like and rng.random() < 0.7:
        if like in FILES or "." in like:
            return rng.choice([one for one in FILES if Path(one).suffix == Path(like).suffix] or FILES)
        if like[0].isdecimal():
            return rng.choice(NUMBERS)
        return rng.choice([like, *SCHEDULES, *TEXTS])
    draw = rng.random()
    if draw < 0.4:
        return rng.choice(FILES)
    if draw < 0.9:
        return rng.choice([*TEXTS, *SCHEDULES])
    return typo(rng, rng.choice([*TEXTS, *FILES, *SCHEDULES]))


TORCHRUNS = (
    *("--nnodes", "--nproc-per-node", "--rdzv-conf", "--rdzv-id", "--max-restarts", "--tee", "--log-dir", "--role"),
    *("--monitor-interval", "--start-method", "--redirects", "--node-rank", "--master-port", "--local-addr"),
    *("--rdzv-endpoint", "--numa-binding", "--local-ranks-filter", "--shutdown-timeout", "--signals-to-handle"),
)


def _options() -> dict[tuple[str, ...], dict[str, list[str] | None]]:
    """The options of each command with their choices; None: a flag."""
    found: dict[tuple[str, ...], dict[str, list[str] | None]] = {}
    for entry in COMMANDS:
        for command in entry.commands if isinstance(entry, CommandGroup) else [entry]:
            path = (entry.name, command.name) if isinstance(entry, CommandGroup) else (command.name,)
            found[path] = {}
            lines, extras = LINES[entry.name], get_type_hints(command.arguments, include_extras=True)
            for name, hint in get_type_hints(command.arguments).items():
                option = f"--{name.replace('_', '-')}"
                if isinstance(extras[name].__metadata__[0], ArgumentInfo):
                    continue
                inner = [one for one in (hint, *get_args(hint)) if get_origin(one) is Literal]
                choices = [str(choice) for one in inner for choice in get_args(one)]
                known = [found for line in lines for found in re.findall(rf"{option} (\S+)", line)]
                numbers = ["2"] if {int, float} & {hint, *get_args(hint)} else ["out.csv"]
                found[path][option] = None if hint is bool else [*choices, *known] or numbers
    found["run",] = {name: [] for name in TORCHRUNS}
    found["run",] |= dict.fromkeys(["--standalone", "-m", "--no-python", "--run-path", "--virtual-local-rank"], None)
    return found


OPTIONS = _options()


def make_files(folder: Path) -> None:
    """The files of which each case gets a copy."""
    (folder / "folder").mkdir(parents=True)
    (folder / "empty").touch()
    (folder / "binary").write_bytes(bytes(range(256)) * 4)
    (folder / "text").write_text("some\ntext, and more\n")
    (folder / "nested.json").write_text("[" * 3000 + "]" * 3000)
    (folder / "long.json").write_text("9" * 5000)
    (folder / "list.json").write_text("[1, 2]")
    (folder / "number.json").write_text("1e999")
    (folder / "wrong.csv").write_text("0F0,0B0\n0F0,\n")
    (folder / "train.py").write_text("print(1)\n")
    (folder / "broken.py").write_text("def made(:\n")
    (folder / "loop").symlink_to("loop")
    (folder / "closed").mkdir(mode=0)
    (folder / "model.py").write_text(
        "import torch\nfrom torch import nn\n\n\ndef made():\n"
        "    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), torch.ones(2, 4)\n"
    )
    programs = make_schedule("1f1b", 2, 4)
    for suffix in ("csv", "json"):
        save_schedule(programs, folder / f"plan.{suffix}")
    costs = Costs(num_stages=2)
    (folder / "costs.json").write_text(costs.to_json())
    (folder / "timeline.json").write_text(simulate(programs, costs).timeline.to_json())
    (folder / "estimate.json").write_text("{}")
    (folder / "device.json").write_text(find_device("h100").to_json())
    recorded().save(folder / "recording")
    run = Run()
    for step in (1, 3):
        run.booster.save(folder / "run", step=step)
    run.booster.save_model(run.model, folder / "weights")
    torch.save(run.model.state_dict(), folder / "weights.pt")
    LlamaConfig(
        hidden_size=8, num_hidden_layers=4, num_attention_heads=2, intermediate_size=8, vocab_size=10,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder / "llama")  # fmt: skip


@contextlib.contextmanager
def inside(files: Path) -> Iterator[None]:
    """In a copy of the files, with nothing that launches, waits for other hosts or measures."""
    before = Path.cwd()
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        copy = Path(folder, "files")
        shutil.copytree(files, copy, symlinks=True)
        os.chdir(copy)
        try:
            with (
                mock.patch("torch.distributed.run.run"),
                mock.patch("hybridpp.cli.run.wait_for_endpoint", return_value=True),
                mock.patch("hybridpp.cli.run.STOP_SIGNALS", ()),
                mock.patch("hybridpp.cli.profile.measure_device", return_value=find_device("cpu")),
            ):
                yield
        finally:
            os.chdir(before)
            for name in os.environ.keys() - environment.keys():
                del os.environ[name]
            os.environ.update(environment)


def run(one: Case, files: Path) -> tuple[str, str]:
    """What became of a case: ``done``, ``problem``, ``refused``, ``raw`` or ``endless``, and what it printed."""
    errors = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(inside(files))
        output = stack.enter_context(open("/dev/full", "w")) if one.output == "full" else io.StringIO()
        stack.enter_context(contextlib.redirect_stdout(output))
        stack.enter_context(contextlib.redirect_stderr(errors))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        try:
            with limited(LIMIT_S):
                code = main(one.arguments)
        except Endless:
            return "endless", traceback.format_exc()
        except SystemExit as ended:  # of torchrun's own help, and of a reader that went away
            return ("done" if ended.code in (0, None) else "raw"), f"SystemExit: {ended.code}"
        except Exception:
            return "raw", traceback.format_exc()
        finally:
            with contextlib.suppress(OSError):
                output.close() if one.output == "full" else None
    told = errors.getvalue()
    if code == 2 and not re.fullmatch(r"hybridpp: [^\n]+\n[^\n]+\n", told):
        return "raw", f"exit code 2 and not two lines: {told}"
    if code not in (0, 1, 2) and one.arguments[:1] != ["run"]:
        return "raw", f"exit code {code}: {told}"
    return {0: "done", 1: "problem", 2: "refused"}.get(code, "done"), told


def arguments_of_tool() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run this case alone, with its traceback")
    return parser.parse_args()


def run_cases() -> int:
    """Run the cases; the exit code is 1 if one of them failed."""
    given = arguments_of_tool()
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    counts: Counter[str] = Counter()
    kinds: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, "files")
        make_files(files)
        for number in range(given.count) if given.only is None else [given.only]:
            one = case(given.seed, number)
            what, why = run(one, files)
            counts[what] += 1
            if given.only is not None:
                print(f"{what}: {json.dumps(one.arguments)} > {one.output}\n{why}")
            elif what in ("raw", "endless"):
                lines = [line.strip() for line in why.splitlines() if line.strip()]
                place = next((line for line in reversed(lines) if line.startswith("File ") and "hybridpp" in line), "")
                key = f"{what}: {lines[-1].partition(':')[0][:60] if lines else ''} {place}"
                if key not in kinds:
                    kinds.add(key)
                    print(f"{key}\n  {lines[-1][:200]}\n  {number}: {json.dumps(one.arguments)[:300]}", flush=True)
    print(", ".join(f"{counts[name]} {name}" for name in ("done", "problem", "refused", "raw", "endless")))
    return 1 if counts["raw"] + counts["endless"] else 0


if __name__ == "__main__":
    sys.exit(run_cases())
