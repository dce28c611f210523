"""Every example of docs/cutting.md cuts a model where it says."""

import pytest
import torch
from support import ROOT, image_batch
from test_readme import blocks

from hybridpp import Booster
from hybridpp.cluster import Loopback

SHARED, *EXAMPLES = blocks("docs/cutting.md", "python")
# The last block of the first of two stages.
ENDS = ["vit.layers.1", "vit.layers.0", "vit.layers.2", "layer1", "layer1", None]


@pytest.mark.parametrize(("example", "end"), list(zip(EXAMPLES, ENDS, strict=True)))
def test_the_example_cuts_where_it_says(example, end):
    def boost():
        torch.manual_seed(0)
        namespace = {}
        exec(SHARED + example, namespace)
        sample = {"pixel_values": image_batch(2)["pixel_values"]}
        if "Network()" in example:
            sample = sample["pixel_values"]
        booster = Booster(plugin=namespace["plugin"], device="cpu")
        return {
            name.rpartition(".")[0]
            for name, _ in booster.boost(namespace["model"], sample=sample).model.named_parameters()
        }

    first, last = Loopback(2).run(boost)
    assert first
    assert last
    assert not first & last
    if end is not None:
        found = [part for part in first if part.startswith(end)]
        following = end[:-1] + str(int(end[-1]) + 1)
        assert found
        assert not any(part.startswith(following) for part in first)


def test_the_command_it_names_exists():
    assert "`hybridpp partition --model FOLDER --pp-size 4`" in (ROOT / "docs/cutting.md").read_text()
