#!/bin/bash
# Builds the wheel, installs it into an environment of its own, and uses it in an empty folder. `make wheel` runs it.
# Arguments: constraints for pip, with paths from the checkout, none for the newest versions: --constraint
# constraints.txt keeps to the build of torch for the CPU, where torch itself would bring several gigabytes for CUDA.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$root"
python=${PYTHON:-python3}
"$python" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$work" . 2>/dev/null ||
    "$python" -m pip wheel --quiet --no-deps --wheel-dir "$work" .
rm -rf "$root/build"
"$python" -m venv "$work/venv"
bin=$work/venv/bin
"$bin/pip" install --quiet "$@" "$work"/hybridpp-*.whl
cp -r examples "$work/examples"
mkdir "$work/empty" && cd "$work/empty"
unset PYTHONPATH
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
"$bin/hybridpp" --version
"$bin/hybridpp" --help > /dev/null
"$bin/hybridpp" schedule 1f1b --stages 2 --microbatches 4
"$bin/hybridpp" doctor --ranks 2
cat > train.py <<'PY'
import torch
from torch import nn

from hybridpp import Booster, DistCoordinator, HybridParallelPlugin, launch_from_torch

launch_from_torch(seed=1)
coordinator = DistCoordinator()
model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
booster = Booster(plugin=HybridParallelPlugin(tp_size=1, pp_size=coordinator.world_size, num_microbatches=2))
sample = (torch.ones(4, 8), torch.zeros(4, 8))
parts = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), sample=sample)
loss = booster.execute_pipeline(iter([sample]), parts.model, parts.criterion, parts.optimizer)["loss"]
parts.optimizer.step()
coordinator.print_on_master(f"loss {loss.item():.6f} on {coordinator.world_size} ranks")
coordinator.destroy()
PY
"$bin/python" train.py
"$bin/hybridpp" run --standalone --nproc-per-node 2 train.py
if "$bin/python" -c "import sklearn" 2> /dev/null || (cd "$root" && "$bin/pip" install --quiet "$@" scikit-learn); then
    "$bin/hybridpp" run --standalone --nproc-per-node 4 "$work/examples/vit/train.py" --epochs 1
fi
echo "the wheel works"
