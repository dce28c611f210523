"""The manifest of a checkpoint that is intact, on all ranks; each reads some of its files."""

from collections.abc import Callable

from hybridpp.checkpoint.manifest import Manifest
from hybridpp.checkpoint.reader import verify_file
from hybridpp.checkpoint.remote_path import AnyPath
from hybridpp.cluster import Group, gather_objects
from hybridpp.errors import CheckpointError


def verified(
    control: Group, call: str, folder: AnyPath, open_manifest: Callable[[], Manifest]
) -> tuple[Manifest | None, str]:
    """A checkpoint, and why it cannot be used, or "". Collective: all ranks.

    Args:
        control: all ranks.
        call: that this rank is in.
        folder: of the checkpoint.
        open_manifest: reads its manifest.
    """
    manifest, reason = None, ""
    try:
        manifest = open_manifest()
        for name in sorted(manifest.files)[control.rank :: control.size]:
            verify_file(folder, manifest, name)
    except CheckpointError as error:
        reason = str(error)
    rows = gather_objects(control, call, [reason, manifest.save_id if manifest else ""])
    reasons = [reason for reason, _ in rows if reason]
    if not reasons and len({save_id for _, save_id in rows}) > 1:
        reasons = ["the ranks find different manifests"]
    return manifest, reasons[0] if reasons else ""
