"""Random edits of saved folders: each gives an error of the library, or a right load, and nothing outside changes.

PYTHONPATH=.:plugins:tests python tests/plugins/random_edits.py [--edits 2000] [--seed 0] [--only "run pp2"] [--verbose]

An edit changes one file of a folder that the library, or one that it reads, has saved: manifests, indices, notes and
headers as JSON (other types, huge and negative numbers, other names, keys that are gone or there twice, swapped and
nested entries), all files as bytes (flipped bits, other lengths). Of a run, manifest and data mostly get digests that
fit the edit, as whoever edits on purpose would give them. Then it is loaded, by ranks that hold other values:

- an error must be a HybridppError, on all ranks, that leaves weights, optimizer, schedule and generators as they were
- a load must be of what the files say, by a reader that shares nothing with the library: for most edits that load, what
  was saved

Then the ranks save to the folder. Files beside it must be as they were after each of these.
"""

import argparse
import contextlib
import copy
import hashlib
import json
import logging
import os
import random
import re
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy
import torch
import torch.distributed.checkpoint as dcp
from checkpoint.test_manifest import signed_text
from run_checkpoints import on_layout
from safetensors.torch import load_file
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.checkpoint.digest import new_digest, written_as
from hybridpp.checkpoint.export_run import one_process
from hybridpp.checkpoint.import_run import import_run
from hybridpp.checkpoint.import_sources import open_source
from hybridpp.cluster import gather_objects
from hybridpp.errors import HybridppError

LIMIT_S = 30.0
MOST_GROWTH_MIB = 1024


class Pairs(list):
    """An object of JSON whose keys may be there twice."""


class Raw(str):
    """Text that is no value."""


def dumps(value):
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, Pairs):
        return "{" + ", ".join(f"{json.dumps(key)}: {dumps(entry)}" for key, entry in value) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(dumps, value)) + "]"
    return json.dumps(value)


ATOMS = (
    *(None, True, False, "", "x", "../outside", "/etc/passwd", "sub/file", "a\0b", "$tensor"),
    *(-1, 0, 1, 2, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, 10**400, -(2**63), 0.5, 1e308, 1e-320),
    *(Raw("NaN"), Raw("-Infinity"), Raw("1e999"), Raw("[" * 3000 + "]" * 3000), Raw("[" * 100_000), Raw('{"a": ')),
    *(Raw("[]"), Raw("{}"), Raw("[[]]"), Raw('{"$tensor": ["float32", [4], ""]}'), Raw('{"$tuple": 3}')),
    *(Raw('{"$numpy": ["O", [1], "AAAAAAAAAAA="]}'), Raw('{"$tensor": ["float32", [1000000000000], "AAAA"]}')),
)


def places(root, dice):
    """A container somewhere, and an index in it."""
    container, ends = root, dice.choice([0.2, 0.02])
    while True:
        index = dice.randrange(len(container))
        inner = container[index][1] if isinstance(container, Pairs) else container[index]
        if not (isinstance(inner, list) and inner) or dice.random() < ends:
            return container, index
        container = inner


def put(container, index, value):
    container[index] = (container[index][0], value) if isinstance(container, Pairs) else value


def got(container, index):
    return container[index][1] if isinstance(container, Pairs) else container[index]


def near(value, dice):
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        return dice.choice(
            [value + 1, value - 1, -value, value * 2, value + 2**32, value + 2**63, str(value), float(value)]
        )
    if isinstance(value, float):
        return dice.choice([-value, value * 2, 0.0, str(value), [value]])
    if isinstance(value, str):
        cut = dice.randrange(len(value) + 1)
        return dice.choice([value[:cut], value + "x", value.upper(), "../" + value, "/" + value, value[::-1], [value]])
    return dice.choice([value + value[:1], value[1:], value[:-1], value[::-1], list(map(str, value))])


def edit_json(text, dice, inside=""):
    """A text, edited, and what was done; ``inside``: the entry that is edited."""
    whole = json.loads(text, object_pairs_hook=Pairs)
    root, done = dict(whole).get(inside) or whole, []
    for _ in range(dice.choice([1, 1, 1, 2, 4])):
        container, index = places(root, dice)
        value = got(container, index)
        what = dice.choice(["atom", "near", "near", "delete", "twice", "swap", "nest", "rename", "far"])
        if what == "atom":
            put(container, index, dice.choice(ATOMS))
        elif what == "near":
            edited = near(value, dice)
            put(
                container,
                index,
                Pairs(edited)
                if isinstance(value, Pairs)
                and isinstance(edited, list)
                and all(isinstance(each, tuple) for each in edited)
                else edited,
            )
        elif what == "delete":
            del container[index]
        elif what == "twice":
            container.insert(index, copy.deepcopy(container[dice.randrange(len(container))]))
        elif what == "swap":
            other = dice.randrange(len(container))
            mine, its = got(container, index), got(container, other)
            put(container, index, its)
            put(container, other, mine)
        elif what == "nest":
            depth = dice.choice([1, 2, 50, 300, 5000])
            put(container, index, Raw("[" * depth + dumps(value) + "]" * depth))
        elif what == "rename" and isinstance(container, Pairs):
            container[index] = (near(container[index][0], dice), value)
            container[index] = (str(container[index][0]), value)
        else:
            there, place = places(root, dice)
            put(container, index, copy.deepcopy(got(there, place)))
        done.append(what)
        if not root:
            break
    return dumps(whole), "+".join(done)


def edit_bytes(data, dice):
    kind = dice.choice(["flip", "flip", "flip", "cut", "longer", "empty", "hole"])
    if kind == "flip" and data:
        changed = bytearray(data)
        for _ in range(dice.choice([1, 1, 3])):
            at = dice.randrange(min(len(changed), dice.choice([64, 2048, 10**9])))
            changed[at] ^= 1 << dice.randrange(8)
        return bytes(changed), kind
    if kind == "cut":
        return data[: dice.randrange(len(data) + 1)], kind
    if kind == "hole" and data:
        at = dice.randrange(len(data))
        return data[:at] + data[at + dice.choice([1, 8, 100]) :], kind
    return (data + bytes(dice.choice([1, 8, 1000])), "longer") if kind == "longer" else (b"", "empty")


def edit_header(data, dice):
    """A safetensors file with another header, or another length of it."""
    length = int.from_bytes(data[:8], "little")
    if dice.random() < 0.1:
        other = dice.choice([0, 1, length + 8, length - 8, 2**31, 2**63 - 1, 2**64 - 1, 10**8])
        return other.to_bytes(8, "little") + data[8:], "length"
    text, what = edit_json(data[8 : 8 + length], dice)
    header = text.encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data[8 + length :], what


def edit_manifest(data, dice):
    rest = data.partition(b"\n")[2]
    text, what = edit_json(b"{" + rest, dice, dice.choice(["", "state", "state", "tensors"]))
    if not text.startswith("{"):
        return text.encode(), what
    return signed_text(text), what


def edited(folder, dice):
    """Edit one file of a folder; returns which, and how."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    texts = [path for path in files if path.suffix == ".json" and path.name != "config.json"]
    file = dice.choice([*texts, *texts, *files])
    data, way = file.read_bytes(), dice.random()
    if file.name == "manifest.json" and way < 0.9:
        data, what = edit_manifest(data, dice)
    elif file.suffix == ".json" and way < 0.8:
        text, what = edit_json(data, dice)
        data = text.encode()
    elif file.suffix == ".safetensors" and way < 0.7:
        data, what = edit_header(data, dice)
    else:
        data, what = edit_bytes(data, dice)
    file.write_bytes(data)
    manifest = file.parent / "manifest.json"
    if file.suffix == ".safetensors" and manifest.is_file() and dice.random() < 0.8:
        _, _, rest = manifest.read_bytes().partition(b"\n")
        content = json.loads(b"{" + rest)
        digest = new_digest()
        digest.update(data)
        content["files"][file.name] = {"bytes": len(data), "digest": written_as(digest)}
        manifest.write_bytes(signed_text(json.dumps(content)))
        what += ", signed"
    return f"{file.relative_to(folder)}: {what}"


def listing(path):
    """All that is below a path, to the bit."""
    found = {}
    for one in sorted(path.rglob("*")):
        content = os.readlink(one) if one.is_symlink() else one.read_bytes() if one.is_file() else ""
        found[str(one.relative_to(path))] = content
    return found


def plant_around(scratch):
    """Files beside a folder that names in it could lead to."""
    for name in ("outside", "model.safetensors", "manifest.json", "sub/file"):
        (scratch / name).parent.mkdir(exist_ok=True, parents=True)
        (scratch / name).write_text("mine")
    return listing(scratch)


def around(scratch):
    return {name: data for name, data in listing(scratch).items() if name.partition("/")[0] not in ("folder", "out")}


class Outcome(NamedTuple):
    """What came of an edit: a word, and what went wrong, or nothing."""

    word: str
    problem: str = ""
    detail: str = ""


def attempt(call):
    """What a call gives, and how it failed."""
    try:
        return call(), "", ""
    except HybridppError as error:
        return None, "refused", f"{type(error).__name__}: {error}"
    except Exception as error:
        return None, "raw", f"{type(error).__name__}: {error}"


def fingerprint(value):
    digest = hashlib.sha256()

    def add(one):
        if isinstance(one, torch.Tensor):
            digest.update(f"{one.dtype} {tuple(one.shape)}".encode())
            digest.update(one.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(one, dict):
            for key, entry in one.items():
                digest.update(str(key).encode())
                add(entry)
        elif isinstance(one, list | tuple):
            for entry in one:
                add(entry)
        else:
            digest.update(repr(one).encode())

    add(value)
    return digest.hexdigest()


def generators():
    return [random.getstate(), numpy.random.get_state(), torch.get_rng_state()]


def checkpoint_of(folder):
    """Tensors and state of a step, by a reader that shares nothing with the library."""
    content = json.loads(b"{" + (folder / "manifest.json").read_bytes().partition(b"\n")[2])
    files = {name: load_file(folder / name) for name in content["files"]}
    tensors = {}
    for key, entry in content["tensors"].items():
        full = torch.zeros(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        for start, shape, file, name in entry["chunks"]:
            full[tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))] = files[file][name]
        tensors[key] = full
    models = content["state"].get("models", [content["state"]])
    names = ("progress", "extra_state", "optimizer", "lr_scheduler", "data")
    return tensors, [{name: model[name] for name in names if name in model} for model in models]


def difference(found, said, where="state"):
    """Where what was loaded is not what a file says; what it does not say may be anything."""
    if isinstance(said, dict) and isinstance(found, dict):
        for key, value in said.items():
            if key not in found:
                return f"{where} lacks {key!r}"
            if text := difference(found[key], value, f"{where}.{key}"):
                return text
        return ""
    if isinstance(said, list) and isinstance(found, list) and len(said) == len(found):
        return next(filter(None, (difference(*pair, where) for pair in zip(found, said, strict=True))), "")
    is_open = where.endswith("optimizer.class") and said is None  # of an import
    return "" if found == said or is_open else f"{where} is {found!r:.80} and not {said!r:.80}"


def other_checkpoint(found, said):
    """How a checkpoint is another one than was said, in words."""
    (tensors, state), (others, other_state) = found, said
    if tensors.keys() != others.keys() or not all(torch.equal(tensors[key], others[key]) for key in tensors):
        return "other tensors"
    return difference(state, other_state)


class Watch:
    """Ends the process if an edit takes too long."""

    def __init__(self):
        self.what, self.since, self.slowest = "", time.monotonic(), 0.0
        threading.Thread(target=self._run, daemon=True).start()

    def begin(self, what):
        if self.what:
            self.slowest = max(self.slowest, time.monotonic() - self.since)
        self.what, self.since = what, time.monotonic()

    def _run(self):
        while True:
            time.sleep(1)
            if self.what and time.monotonic() - self.since > LIMIT_S:
                print(f"took more than {LIMIT_S:.0f} s: {self.what}", flush=True)
                os._exit(3)


def edits(base, seeds, watch, name):
    """For each seed, an edited copy of what is in ``base / "right"``, and a function that ends it with its outcome."""
    for seed in seeds:
        scratch = base / str(seed)
        planted, folder = plant_around(scratch), scratch / "folder"
        shutil.copytree(base / "right", folder)
        what = edited(folder, random.Random(seed))
        watch.begin(f"{name}, seed {seed}: {what}")

        def ended(outcome, scratch=scratch, planted=planted, seed=seed, what=what):
            if around(scratch) != planted:
                outcome = Outcome(outcome.word, "files outside were changed")
            shutil.rmtree(scratch)
            return seed, what, outcome

        yield folder, ended


class OfRun:
    """Checkpoints of a run, or the state of its optimizer alone."""

    def __init__(self, name, alone=False, **layout):
        self.name, self._layout, self._alone = name, layout, alone

    def outcomes(self, base, seeds, watch):
        results = {}
        rows = on_layout(lambda make: self._rank(make(), base, seeds, watch, results), **self._layout)
        for number, seed in enumerate(seeds):
            words = [row[number] for row in rows]
            bad = next((one for one in words if one.problem), None)
            unlike = len({one.word for one in words}) > 1
            outcome = bad or (Outcome(words[0].word, f"ranks differ: {words}") if unlike else words[0])
            yield seed, results[seed], outcome

    def _save(self, run, folder, step):
        if self._alone:
            run.booster.save_optimizer(run.optimizer, folder)
        else:
            run.booster.save(folder, step=step, extras={"best": 1.5, "many": [1, (2, None)], "t": torch.ones(3)})

    def _load(self, run, folder):
        if self._alone:
            run.booster.load_optimizer(run.optimizer, folder)
        else:
            run.booster.resume(folder)

    def _step(self, folder):
        return folder if self._alone else folder / "step-00000001"

    def _rank(self, run, base, seeds, watch, results):
        is_first = run.booster.plugin.layout.world.rank == 0
        run.steps([0, 1])
        self._save(run, base / "right", 1)
        run.steps([2, 3])
        self._save(run, base / "other", 1)
        return [self._one(run, base, seed, watch, results, is_first) for seed in seeds]

    def _one(self, run, base, seed, watch, results, is_first):
        scratch = base / str(seed)
        folder, planted, control = scratch / "folder", {}, run.booster.plugin.layout.control
        if is_first:
            dice = random.Random(seed)
            planted = plant_around(scratch)
            shutil.copytree(base / "right", folder)
            results[seed] = edited(folder, dice)
            watch.begin(f"{self.name}, seed {seed}: {results[seed]}")
        gather_objects(control, "in an edit", None)
        before = fingerprint([run.everything(), generators()])
        _, word, detail = attempt(lambda: self._load(run, folder))
        changed = fingerprint([run.everything(), generators()]) != before
        rows = gather_objects(control, "in an edit", [word, detail, changed])
        raw = next((text for kind, text, _ in rows if kind == "raw"), "")
        problem = raw or ("ranks differ" if len({kind for kind, *_ in rows}) > 1 else "")
        if word == "refused" and any(row[-1] for row in rows):
            problem = problem or f"the run was changed, {detail}"
        if problem:
            self._load(run, base / "other")
            if is_first:
                shutil.rmtree(scratch)
            return Outcome("raw" if raw else word, problem, detail)
        problem, out = "", scratch / "out"
        if not word:
            self._save(run, out, 1)
            word, problem = self._judged(base, folder, out) if is_first else ("", "")
            self._load(run, base / "other")
        if not self._alone:
            _, failed, text = attempt(lambda: run.booster.save(folder, step=2, keep_last=1))
            problem = problem or (text if failed == "raw" else "")
        if is_first:
            if around(scratch) != planted:
                problem = problem or "files outside were changed"
            shutil.rmtree(scratch)
        return Outcome(word if word == "refused" or is_first else "loaded", problem, detail)

    def _judged(self, base, folder, out):
        loaded, right = checkpoint_of(self._step(out)), checkpoint_of(self._step(base / "right"))
        if not other_checkpoint(loaded, right):
            return "loaded", ""
        said, failed, detail = attempt(lambda: checkpoint_of(self._step(folder)))
        return "loaded", f"what no other reader reads: {detail}" if failed else other_checkpoint(loaded, said)


def many_layers():
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])


def vit():
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    return ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=3))


class OfWeights:
    """Folders and files of weights."""

    def __init__(self, name, make_model, file="", with_note=False, shard=True):
        self.name, self._make, self._file, self._with_note, self._shard = name, make_model, file, with_note, shard

    def outcomes(self, base, seeds, watch):
        torch.manual_seed(0)
        model = self._make()
        booster = Booster(plugin=HybridParallelPlugin(), device="cpu")
        model, *_ = booster.boost(model, None, None)
        self._save(booster, model, base / "right")
        right = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for folder, ended in edits(base, seeds, watch, self.name):
            other = {name: torch.full_like(tensor, 7) for name, tensor in right.items()}
            with torch.no_grad():
                model.load_state_dict(other)
            yield ended(self._one(booster, model, folder, right, other))

    def _save(self, booster, model, folder):
        folder.mkdir(exist_ok=True)
        booster.save_model(model, folder / self._file, shard=self._shard, size_per_shard=0.0006)
        if self._with_note:
            note = folder / ".hybridpp-save-01234567" / "unfinished.json"
            note.parent.mkdir()
            note.write_text(json.dumps({"stale": ["0" * 64], "files": ["model-01234567.safetensors"]}))

    def _one(self, booster, model, folder, right, other):
        _, word, detail = attempt(lambda: booster.load_model(model, folder / self._file))
        here = model.state_dict()
        if word == "raw":
            return Outcome(word, detail)
        if word == "refused" and fingerprint(dict(here)) != fingerprint(other):
            return Outcome(word, f"the weights were changed, {detail}")
        problem = ""
        if not word and fingerprint(dict(here)) != fingerprint(right):
            said, failed, text = attempt(lambda: self._reference(folder))
            problem = f"what no other reader reads: {text}" if failed else ""
            if not problem and any(not torch.equal(said[name], here[name]) for name in here):
                problem = "other weights than the files say"
        _, failed, text = attempt(lambda: booster.save_model(model, folder / self._file))
        if failed == "raw":
            problem = problem or text
        elif not failed:
            _, failed, text = attempt(lambda: booster.load_model(model, folder / self._file))
            problem = problem or (f"the save after it cannot be read: {text}" if failed else "")
        return Outcome(word or "loaded", problem, detail)

    def _reference(self, folder):
        path = folder / self._file
        if path.is_file():
            return load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
        if (folder / "config.json").is_file():
            return ViTForImageClassification.from_pretrained(folder).state_dict()
        index = folder / "model.safetensors.index.json"
        if not index.is_file():
            return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
        return {
            name: load_file(folder / file)[name] for name, file in json.loads(index.read_text())["weight_map"].items()
        }


class OfImport:
    """What is imported: folders of ``torch.distributed.checkpoint``, and files of ``torch.save``."""

    def __init__(self, name, is_dcp):
        self.name, self._is_dcp = name, is_dcp

    def outcomes(self, base, seeds, watch):
        torch.manual_seed(0)
        model = many_layers()
        optimizer = torch.optim.AdamW(model.named_parameters())
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        (base / "right").mkdir()
        if self._is_dcp:
            with one_process():
                dcp.save(state, checkpoint_id=base / "right", no_dist=True)
        else:
            torch.save(state, base / "right" / "model.pt")
        for folder, ended in edits(base, seeds, watch, self.name):
            yield ended(self._one(folder if self._is_dcp else folder / "model.pt", folder.parent / "out", state))

    def _one(self, source, out, state):
        _, word, detail = attempt(lambda: import_run(open_source(source), out, 1))
        if word:
            return Outcome(word, detail if word == "raw" else "", detail)
        tensors, _ = checkpoint_of(out / "step-00000001")
        found = {key.removeprefix("model0/weights/"): one for key, one in tensors.items() if "/weights/" in key}
        if fingerprint(found) == fingerprint(state["model"]):
            return Outcome("loaded", "", detail)
        said, failed, _ = attempt(lambda: self._reference(source, found))
        is_other = failed or fingerprint(found) != said
        return Outcome("loaded", "other weights than the files say" if is_other else "", detail)

    def _reference(self, source, found):
        target = {"model": {name: torch.zeros_like(tensor) for name, tensor in found.items()}}
        if self._is_dcp:
            with one_process():
                dcp.load(target, checkpoint_id=source, no_dist=True)
        else:
            target = torch.load(source, weights_only=True)
        return fingerprint({name: target["model"][name] for name in found})


KINDS = (
    (OfRun("run pp2", pp_size=2), 5),
    (OfRun("run dp2 zero 3", dp_size=2, zero_stage=3), 5),
    (OfRun("run tp2 bf16", tp_size=2, precision="bf16"), 2),
    (OfRun("optimizer dp2 zero 1", alone=True, dp_size=2, zero_stage=1), 2),
    (OfWeights("folder of transformers", vit), 1),
    (OfWeights("folder of weights", many_layers), 2),
    (OfWeights("folder with a note", many_layers, with_note=True), 1),
    (OfWeights("file of safetensors", many_layers, file="model.safetensors"), 1),
    (OfWeights("file of torch.save", many_layers, file="model.pt"), 0.5),
    (OfImport("import of DCP", is_dcp=True), 0.25),
    (OfImport("import of torch.save", is_dcp=False), 0.25),
)
"""What is edited, and how often."""


def results_of(num_edits, seed=0, only="", report=lambda *_: None):
    """By kind, how many edits had which outcome; and what went wrong."""
    table, problems, watch = {}, [], Watch()
    total = sum(weight for _, weight in KINDS)
    logging.disable(logging.WARNING)
    try:
        for number, (kind, weight) in enumerate(KINDS):
            if not re.search(only, kind.name):
                continue
            first = seed + 10**6 * number
            seeds = range(first, first + max(1, round(num_edits * weight / total)))
            counts = table[kind.name] = Counter()
            base = Path(tempfile.mkdtemp(prefix="edits-"))
            try:
                for one, what, outcome in kind.outcomes(base, seeds, watch):
                    counts[outcome.word] += 1
                    if outcome.problem:
                        counts["wrong"] += 1
                        problems.append(f"{kind.name}, seed {one}, {what}: {outcome.word}: {outcome.problem}")
                    report(kind.name, one, what, outcome)
            finally:
                watch.begin("")
                shutil.rmtree(base, ignore_errors=True)
    finally:
        logging.disable(logging.NOTSET)
    return table, problems, watch.slowest


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--edits", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="")
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    def report(*row):
        if arguments.verbose or row[-1].problem:
            print(*row, flush=True)

    begun, held = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with contextlib.redirect_stderr(sys.stdout):
        table, problems, slowest = results_of(arguments.edits, arguments.seed, arguments.only, report)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held) / 1024
    for name, counts in table.items():
        total = counts["refused"] + counts["loaded"] + counts["raw"]
        numbers = f"{counts['refused']:5} refused, {counts['loaded']:4} loaded, {counts['wrong']} wrong"
        print(f"{name:24} {total:5} edits: {numbers}")
    print(f"{time.process_time() - begun:.0f} s of the processor, slowest {slowest:.1f} s, {grown:.0f} MiB more memory")
    sys.exit(1 if problems or grown > MOST_GROWTH_MIB else 0)


if __name__ == "__main__":
    main()
