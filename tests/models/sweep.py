"""Examine architectures of transformers' registry, of other libraries, or with images, and write the page of it."""

import argparse
import json
import math
from fnmatch import fnmatch
from pathlib import Path

from models import cuts, divided, features, sequences, table, tp_table
from models.others import page as others_page
from models.others import study as others_study
from models.others.zoo import everything
from models.pool import sweep
from models.zoo import architectures

PARTS = {
    "cuts": (cuts.study, table.part),
    "layers": (divided.study, tp_table.part),
    "sequences": (sequences.study, sequences.part),
    "others": (others_study.study, others_page.part),
    "features": (features.study, features.part),
}
# Where all but the first begin.
_HEADINGS = {
    "layers": tp_table.HEADING,
    "sequences": sequences.HEADING,
    "others": others_page.HEADING,
    "features": features.HEADING,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS, help="of the page")
    parser.add_argument("names", nargs="*", help="architectures, or patterns of their names; all without")
    parser.add_argument("--cache", type=Path, default=Path("/tmp/hybridpp-models"), help="folder of the results")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no other architecture after so long")
    parser.add_argument("--again", action="store_true", help="examine also what the folder holds")
    parser.add_argument("--page", type=Path, help="file of which this part is written, from all results of the folder")
    options = parser.parse_args()
    study, part = PARTS[options.part]
    specimens, folder = options.cache / "specimens", options.cache / options.part
    for made in (specimens, folder):
        made.mkdir(parents=True, exist_ok=True)
    known = {path.name.removesuffix(".json") for path in folder.glob("*.json")}
    every = list({"others": everything, "features": lambda: features.CASES}.get(options.part, architectures)())
    asked = [a for a in every if not options.names or any(fnmatch(a.name, name) for name in options.names)]
    todo = [a for a in asked if options.again or a.name not in known]
    sweep(study(specimens), todo, folder, options.jobs, options.seconds)
    if options.page:
        files = [folder / f"{architecture.name}.json" for architecture in every]
        text = part([json.loads(file.read_text()) for file in files if file.exists()])
        options.page.parent.mkdir(exist_ok=True)
        before = options.page.read_text() if options.page.exists() else ""
        options.page.write_text(with_part(before, options.part, text))


def with_part(page: str, name: str, text: str) -> str:
    """The page with one of its parts, which begin with headings of the first level, written anew."""
    parts = dict.fromkeys(PARTS, "")
    for key in reversed(_HEADINGS):
        page, bar, rest = page.partition(f"\n{_HEADINGS[key]}\n")
        parts[key] = f"{bar}{rest}".lstrip()
    parts |= {"cuts": page, name: text}
    return "\n".join(part for part in parts.values() if part)


if __name__ == "__main__":
    main()
