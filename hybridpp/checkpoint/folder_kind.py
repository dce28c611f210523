"""What a folder holds that a call cannot use, in words, and which call can."""

from pathlib import Path

from hybridpp.checkpoint.commit import committed_steps, steps
from hybridpp.checkpoint.manifest import DATA_FILE, MANIFEST, MOST_BYTES
from hybridpp.checkpoint.remote_path import AnyPath, dangling_link
from hybridpp.checkpoint.schema import read_json
from hybridpp.errors import CheckpointError, some_of
from hybridpp.saving import PICKLED_SUFFIXES, SAFE_SUFFIXES

# What the state of a manifest may hold, with the calls that write and read it.
KINDS = {
    "optimizer": ("the state of an optimizer", "booster.save_optimizer", "booster.load_optimizer"),
    "lr_scheduler": ("the state of an LR schedule", "booster.save_lr_scheduler", "booster.load_lr_scheduler"),
    "models": ("a checkpoint of a run", "booster.save", "booster.resume"),
}
_WEIGHTS = "It holds weights, for booster.load_model, and for hybridpp checkpoint import. "
# The file that makes a folder one of torch.distributed.checkpoint; its module imports all of that.
_DCP = ".metadata"


def has_weights(path: Path) -> bool:
    """Whether a folder has files that may be weights, and not those of a checkpoint of a run."""
    suffixes = (*SAFE_SUFFIXES, *PICKLED_SUFFIXES)
    return any(file.suffix in suffixes and DATA_FILE.fullmatch(file.name) is None for file in path.iterdir())


def why_no_checkpoint(path: AnyPath) -> str:
    """Why a path has no checkpoint of a run, in one sentence or two, each with a space after it."""
    if dangling := dangling_link(path):
        return f"{path} is not there: {dangling}. "
    if not path.exists():
        return f"there is no folder {path}. "
    if path.is_file():
        return f"{path} is a file, and checkpoints of runs are folders. {other_kind(path)}"
    if begun := steps(path):
        return (
            f"{path} holds no complete checkpoint, only what saves wrote that were killed or are still running, of the "
            f"steps {some_of(begun)}. "
        )
    if not any(True for _ in path.iterdir()):
        return f"{path} is empty. "
    return f"{path} holds no checkpoint. {other_kind(path)}"


def other_kind(path: AnyPath) -> str:
    """A sentence about what is at a path, with the call that reads it, and a space; "": nothing that is known."""
    if not isinstance(path, Path):
        return ""
    try:
        return _kind_of(path)
    except (OSError, CheckpointError):
        return ""


def _kind_of(path: Path) -> str:
    if path.is_file():
        return _WEIGHTS if path.suffix in (*SAFE_SUFFIXES, *PICKLED_SUFFIXES) else ""
    if (path / _DCP).is_file():
        return "It is a folder of torch.distributed.checkpoint, for hybridpp checkpoint import. "
    if (path / MANIFEST).is_file():
        kind = kind_of_manifest(path)
        if kind == "models":
            return f"It is one step: booster.resume and hybridpp checkpoint take the folder above, {path.parent}. "
        return f"It holds {KINDS[kind][0]}, for {KINDS[kind][2]}. " if kind else ""
    if committed_steps(path):
        return (
            "It holds checkpoints of a run, for booster.resume; hybridpp checkpoint export makes a folder of weights "
            "of one. "
        )
    if steps(path):
        return "It holds saves of a run that were killed or are still running. "
    if found := sorted(manifest.parent.name for manifest in path.glob(f"*/{MANIFEST}")):
        return f"There are saves in {some_of(found)} below it: use prefix= to load one of them. "
    return _WEIGHTS if has_weights(path) else ""


def kind_of_manifest(folder: AnyPath) -> str | None:
    """Of what the manifest in a folder is, which may be damaged or of another version; None: that is not known."""
    try:
        content = read_json(folder / MANIFEST, MOST_BYTES)
    except (OSError, ValueError):
        return None
    state = content.get("state") if isinstance(content, dict) else None
    return next((kind for kind in KINDS if isinstance(state, dict) and kind in state), None)
