"""The manifest of a checkpoint that is intact, on all ranks; each reads some of its files."""

from collections.abc import Callable

from hybridpp.checkpoint.manifest import Manifest, NewerFormatError
from hybridpp.checkpoint.reader import verify_file
from hybridpp.checkpoint.remote_path import AnyPath
from hybridpp.cluster import Group, gather_objects
from hybridpp.errors import CheckpointError, text_of


def verified(
    control: Group, call: str, folder: AnyPath, open_manifest: Callable[[], Manifest]
) -> tuple[Manifest | None, str]:
    """A checkpoint, and why it cannot be used, or "". Collective: all ranks.

    Args:
        control: all ranks.
        call: that this rank is in.
        folder: of the checkpoint.
        open_manifest: reads its manifest.

    Raises:
        CheckpointError: a newer version wrote it; on every rank.
    """
    manifest, reason, is_newer = None, "", False
    try:
        manifest = open_manifest()
        for name in sorted(manifest.files)[control.rank :: control.size]:
            verify_file(folder, manifest, name)
    except CheckpointError as error:
        reason, is_newer = text_of(error), isinstance(error, NewerFormatError)
    rows = gather_objects(control, call, [reason, manifest.save_id if manifest else "", is_newer])
    for text, _, newer in rows:
        if newer:
            raise CheckpointError(f"{folder} cannot be read: {text}, or pass another folder.")
    reasons = [reason for reason, *_ in rows if reason]
    if not reasons and len({save_id for _, save_id, _ in rows}) > 1:
        reasons = ["the ranks find different manifests"]
    return manifest, reasons[0] if reasons else ""
