"""The training loop that people bring along works with this library's imports."""

import pytest
import torch
from processes import run_script
from support import IMAGE, ROOT, tiny_vit

from hybridpp import HybridAdam, HybridParallelPlugin
from hybridpp.optim import CosineAnnealingWarmupLR


def by_one_process():
    """The losses in plain PyTorch, in fp32."""
    torch.manual_seed(42)
    model = tiny_vit()
    images = torch.randn(12, 3, IMAGE, IMAGE)
    dataset = [{"pixel_values": image, "labels": number % 5} for number, image in enumerate(images)]
    dataloader = HybridParallelPlugin().prepare_dataloader(dataset, batch_size=4, shuffle=True)
    optimizer = HybridAdam(model.parameters(), lr=4 * 1e-3)
    scheduler = CosineAnnealingWarmupLR(optimizer, total_steps=18, warmup_steps=5)
    losses = []
    for _ in range(6):
        for batch in dataloader:
            loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
    return losses


# In fp32, the layout is compared with one process in test_apply_tp.py.
@pytest.mark.parametrize(
    ("precision", "tolerance"), [("fp16", 0.02), pytest.param("fp32", 1e-4, marks=pytest.mark.matrix)]
)
def test_the_tutorials_loop_learns_on_two_stages_of_two_shards(precision, tolerance):
    job = run_script(4, ROOT / "tests/scripts/tutorial.py", precision)
    assert job.returncode == 0, job.stderr
    losses = [float(line) for line in job.stdout.split()]
    assert losses == pytest.approx(by_one_process(), rel=tolerance)
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
    assert "Epoch [6]: 100%" in job.stderr
    assert "Warning" not in job.stderr
