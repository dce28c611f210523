"""Weights reach rank 0 one tensor at a time, each element sent once, from every layout."""

import weakref

import pytest
from hybridpp_plugins.weight_stream import WeightStream
from plugins.zero_models import TiedModel
from run_checkpoints import on_layout
from safetensors.torch import load_file
from support import assert_same

from hybridpp.checkpoint import folder as checkpoint_folder
from hybridpp.errors import CheckpointError

LAYOUTS = [
    {"tp_size": 2, "dp_size": 2},
    {"pp_size": 2, "dp_size": 2, "zero_stage": 1, "precision": "bf16"},
    {"tp_size": 2, "dp_size": 2, "zero_stage": 2},
    {"dp_size": 3, "zero_stage": 3, "precision": "bf16"},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_one_full_tensor_is_alive_and_each_element_is_sent_once(layout, tmp_path, monkeypatch):
    alive, most, sent = weakref.WeakSet(), [], []
    read, received = WeightStream._read, WeightStream._received

    def reading(stream, name):
        tensor = read(stream, name)
        alive.add(tensor)
        most.append(len(alive))
        return tensor

    def receiving(stream, rank, dtype, boxes):
        sent.append(sum(box.size for box in boxes))
        return received(stream, rank, dtype, boxes)

    monkeypatch.setattr(WeightStream, "_read", reading)
    monkeypatch.setattr(WeightStream, "_received", receiving)

    def save(make):
        run = make()
        run.steps([0])
        run.booster.save_model(run.model, tmp_path / "x.safetensors")

    on_layout(save, **layout)
    stored = load_file(tmp_path / "x.safetensors")
    model = TiedModel()
    assert {name: t.shape for name, t in stored.items()} == {name: t.shape for name, t in model.state_dict().items()}
    assert max(most) <= 2, "that which is written, and the next one"
    assert 0 < sum(sent) < sum(parameter.numel() for parameter in model.parameters())


def test_every_layout_writes_the_weights_of_one_process(tmp_path):
    def save(make, path):
        run = make()
        run.booster.save_model(run.model, path)

    for number, layout in enumerate([{}, *LAYOUTS]):
        on_layout(lambda make, number=number: save(make, tmp_path / f"{number}.safetensors"), **layout)
        found, expected = (load_file(tmp_path / f"{n}.safetensors") for n in (number, 0))
        if "precision" in layout:  # frozen weights have no masters
            expected |= {name: tensor.bfloat16().float() for name, tensor in expected.items() if "blocks.1." in name}
        assert_same(found, expected)


def test_a_full_disk_between_files_leaves_the_old_weights_on_all_ranks(tmp_path, monkeypatch):
    write, files = checkpoint_folder.StreamedFolder.write, []

    def full(folder, path, file, tensors, written=None):
        files.append(path.name)
        if len(files) > 2:
            next(iter(tensors))
            raise OSError(28, "No space left on device")
        write(folder, path, file, tensors, written)

    def save(make):
        run = make()
        run.booster.save_model(run.model, tmp_path)
        run.steps([0])
        if run.booster.plugin.layout.world.rank == 0:
            monkeypatch.setattr(checkpoint_folder.StreamedFolder, "write", full)
        with pytest.raises(CheckpointError, match=r"cannot be written: No space left on device. Free disk"):
            run.booster.save_model(run.model, tmp_path, size_per_shard=0.004)
        return run.steps([1])

    losses = on_layout(save, tp_size=2, pp_size=2)
    assert len(files) == 3, "the files after it are not written"
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert_same(load_file(tmp_path / "model.safetensors"), TiedModel().state_dict())
    assert len(set(map(tuple, losses))) == 1
