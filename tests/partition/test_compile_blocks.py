"""compile_blocks: one graph for equal blocks, and the numbers of the uncompiled run."""

import copy
import re
import shutil

import pytest
import torch
from compiled_blocks import ROWS, Block, Blocks, mean_square, run, run_compiled
from support import assert_near, assert_same, boosted, sgd, tiny_vit
from torch import nn
from torch._dynamo.utils import counters
from transformers import ViTForImageClassification

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.errors import ConfigError, PartitionError

# The compiler looks at it of every tensor.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_checkpoint_config": {}},
        {"precision": "bf16", "pp_size": 2, "schedule": "zb-v"},
    ],
    ids=str,
)
def test_twelve_equal_blocks_are_one_graph_with_the_same_numbers(settings):
    expected = run(lambda: Blocks(12), **settings)
    actual, graphs = run_compiled(lambda: Blocks(12), **settings)
    # Each rank compiles.
    assert len(graphs) == settings.get("pp_size", 1)
    assert sum(counters["graph_break"].values()) == 0
    assert actual["losses"] == expected["losses"]
    for kind in ("gradients", "weights"):
        assert_near(actual[kind], expected[kind], 1e-6)


class WithLoss(Block):
    """Computes a loss and mixes formats inside, for which the library casts."""

    def forward(self, x):
        y = super().forward(x)
        table = torch.eye(8, dtype=torch.float32) * 2
        return y + nn.functional.mse_loss(y, x).to(y.dtype) + y @ table


def blocks_with_losses():
    model = Blocks()
    model.blocks = nn.ModuleList(WithLoss() for _ in range(4))
    return model


@pytest.mark.covering
@pytest.mark.parametrize("make_model", [Blocks, blocks_with_losses])
@pytest.mark.parametrize("settings", [{}, {"gradient_checkpoint_config": {}}], ids=str)
def test_in_half_precision_one_stage_has_one_graph(make_model, settings):
    # Its first forward runs with a function mode on, to look for loss functions.
    expected = run(make_model, precision="bf16", **settings)
    actual, graphs = run_compiled(make_model, precision="bf16", **settings)
    assert len(graphs) == 1
    assert actual["losses"] == expected["losses"]


def test_dropout_does_not_depend_on_the_layout():
    expected, _ = run_compiled(lambda: Blocks(4, 0.5))
    assert expected["losses"] != run(lambda: Blocks(4, 0.0))["losses"] * 2
    for settings in (
        {"pp_size": 2, "schedule": "interleaved", "gradient_checkpoint_config": {}},
        {"pp_size": 2, "schedule": "zb-h1"},
    ):
        actual, _ = run_compiled(lambda: Blocks(4, 0.5), **settings)
        assert actual["losses"][0] == expected["losses"][0], settings
        assert_near(actual["gradients"], expected["gradients"], 1e-6)


class Dropped(nn.Module):
    """Compiles fast."""

    def __init__(self):
        super().__init__()
        self.layer, self.dropout = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x):
        return x + self.dropout(self.layer(x))


def dropped_blocks():
    torch.manual_seed(0)
    model = Blocks(0)
    model.blocks = nn.ModuleList(Dropped() for _ in range(2))
    return model


@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.skipif(" " in torch.__file__, reason="inductor needs torch under a path without blanks")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_dropout_of_inductor_does_not_depend_on_the_layout(monkeypatch):
    """Its generated code draws by a seed that it takes from torch's generator."""
    # Else it starts an interpreter for each core.
    monkeypatch.setattr(torch._inductor.config, "compile_threads", 1)
    # For three kernels, neither headers need be compiled first nor programs that try vector instructions.
    monkeypatch.setattr(torch._inductor.config, "cpp_cache_precompile_headers", False)
    monkeypatch.setattr(torch._inductor.config.cpp, "vec_isa_ok", False)
    expected = run(dropped_blocks, compile_blocks=True)
    assert expected["losses"] != run(dropped_blocks)["losses"], "with other masks than uncompiled"
    # The compiled code of the first run is found on disk.
    actual = run(dropped_blocks, compile_blocks=True, pp_size=2, gradient_checkpoint_config={})
    assert actual["losses"][0] == expected["losses"][0]
    assert_same(actual["gradients"], expected["gradients"])


def test_inductor_needs_torch_under_a_path_without_blanks(monkeypatch):
    monkeypatch.setattr(torch, "__file__", "/home/a user/lib/torch/__init__.py")
    with pytest.raises(ConfigError) as error:
        run(Blocks, compile_blocks=True)
    assert str(error.value) == (
        "compile_blocks needs torch and Python in folders without blanks or quotes, as inductor does not quote them "
        "for its C++ compiler: got '/home/a user/lib/torch'. Make the environment elsewhere, pass "
        "compile_blocks={'backend': 'aot_eager'}, or leave compile_blocks out."
    )
    run(Blocks, compile_blocks={"backend": "eager"})


def test_replicas_and_evaluation():
    expected = run(dp_size=1)
    actual, _ = run_compiled(dp_size=2, pp_size=2, schedule="zb-h1")
    assert_near(actual["gradients"], expected["gradients"], 1e-6)
    booster, model, _ = boosted(Blocks(), sgd, ROWS, compile_blocks={"backend": "eager"})
    model.eval()
    with torch.no_grad():
        outputs = booster.execute_pipeline(iter([ROWS]), model, mean_square, return_outputs=True)["outputs"]
    torch.testing.assert_close(outputs, Blocks().eval()(ROWS))


class Breaks(Block):
    """Not one graph."""

    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x)


def broken_blocks():
    model = Blocks()
    model.blocks = nn.ModuleList(Breaks() for _ in range(2))
    return model


def test_a_block_that_is_not_one_graph_is_an_error_that_says_what_to_do():
    with pytest.raises(Exception, match=r"graph_break") as error:
        run(broken_blocks, compile_blocks={"backend": "eager"})
    assert "compile_blocks={'fullgraph': False}" in "".join(error.value.__notes__)
    expected = run(broken_blocks)
    actual = run(broken_blocks, compile_blocks={"backend": "eager", "fullgraph": False})
    assert actual["losses"] == expected["losses"]


def test_what_the_script_compiled_stays_as_it_is():
    theirs = []

    def make_model():
        model = Blocks()
        model.blocks[1].compile(backend=lambda graph, _: theirs.append(graph) or graph.forward)
        return model

    expected = run()
    actual, ours = run_compiled(make_model, backend="eager")
    assert (len(theirs), len(ours)) == (1, 1)
    assert actual["losses"] == expected["losses"]
    assert_same(actual["gradients"], expected["gradients"])


def test_blocks_that_the_script_compiled_are_one_graph_in_half_precision():
    def make_model():
        model = Blocks(12)
        for block in model.blocks:
            block.compile(backend="eager", fullgraph=True)
        return model

    run(make_model, precision="bf16", pp_size=2)
    assert counters["stats"]["unique_graphs"] == 1


def test_describe_shows_it_and_unboost_takes_it_off():
    booster, model, _ = boosted(Blocks(), sgd, ROWS, compile_blocks={"backend": "eager"})
    table = booster.plugin.describe(model)
    assert re.search(r"blocks\.\* +\| +4 \| Block +\| stage, .*compiled forward", table)
    booster.unboost(model)
    assert "forward" not in vars(model.blocks[0])
    torch.testing.assert_close(model(ROWS), Blocks()(ROWS))


def test_a_copy_of_the_model_runs_compiled_with_its_own_weights():
    booster, model, optimizer = boosted(Blocks(), sgd, ROWS, compile_blocks={"backend": "eager"}, precision="bf16")
    copied = copy.deepcopy(model)
    booster.execute_pipeline(iter([ROWS]), model, mean_square, optimizer)
    optimizer.step()
    with torch.no_grad():
        expected = Blocks()(ROWS)
        torch.testing.assert_close(copied(ROWS).float(), expected, atol=0.05, rtol=0.05)
        assert (model(ROWS).float() - expected).abs().max() > 0.1


def test_a_nan_is_found_where_it_is():
    def make_model():
        model = Blocks()
        with torch.no_grad():
            model.blocks[2].wide.bias[3] = torch.nan
        return model

    with pytest.raises(Exception, match=r"parameter 'blocks\.2\.wide\.bias' holds NaN"):
        run(make_model, compile_blocks={"backend": "eager"}, pp_size=2)


def test_a_model_without_blocks_is_refused():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    with pytest.raises(
        PartitionError, match=r"^compile_blocks found no block in Sequential: every module of a ModuleList"
    ):
        run(lambda: model, compile_blocks=True)


PLAN = {"tp_size": 2, "tensor_parallel_plan": {"*.wide": "column", "*.narrow": "row"}}


@pytest.mark.parametrize(
    ("settings", "backend"),
    [
        ({}, "aot_eager"),
        ({"pp_size": 2, "schedule": "zb-h1", "precision": "bf16"}, "eager"),
        pytest.param({"gradient_checkpoint_config": {}}, "eager", marks=pytest.mark.matrix),
        pytest.param({"precision": "bf16", "dp_size": 2}, "eager", marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_between_sharded_layers_blocks_are_compiled(settings, backend):
    expected = run(lambda: Blocks(2), **PLAN, **settings)
    actual, graphs = run_compiled(lambda: Blocks(2), backend, **PLAN, **settings)
    # Three parts of a block on each rank (four, as two kinds of inputs meet one), for all blocks.
    num_ranks = 2 * settings.get("pp_size", 1) * settings.get("dp_size", 1)
    assert 3 * num_ranks <= len(graphs) <= 4 * num_ranks
    assert all("torch.compiler.disable()" in reason for reason in counters["graph_break"])
    assert actual["losses"] == expected["losses"]
    for kind in ("gradients", "weights"):
        assert_near(actual[kind], expected[kind], 1e-6)


def test_dropout_between_sharded_layers_does_not_depend_on_stages():
    expected, _ = run_compiled(lambda: Blocks(2, 0.5), **PLAN)
    settings = {"pp_size": 2, "schedule": "zb-h1", "gradient_checkpoint_config": {}}
    actual, _ = run_compiled(lambda: Blocks(2, 0.5), **PLAN, **settings)
    assert actual["losses"][0] == expected["losses"][0]
    assert_near(actual["gradients"], expected["gradients"], 1e-6)


def test_a_search_for_a_plan_compiles_nothing():
    expected = run(lambda: Blocks(2), tp_size=2)
    actual, graphs = run_compiled(lambda: Blocks(2), tp_size=2)
    assert len(graphs) <= 8
    assert actual["losses"] == expected["losses"]


def test_settings_that_sharded_layers_exclude_are_refused_early():
    text = (
        "compile_blocks cannot make one graph of a block whose layers are sharded, as they communicate between graphs"
    )
    with pytest.raises(ConfigError, match=f"^{text}: got fullgraph=True with tp_size=2. Leave fullgraph out.$"):
        HybridParallelPlugin(tp_size=2, compile_blocks={"fullgraph": True})
    text = (
        "compile_blocks leaves out modules that communicate, which under sequence parallelism are nearly all of a block"
    )
    with pytest.raises(ConfigError, match=f"^{text}: got enable_sequence_parallelism=True. Leave out one of the two.$"):
        HybridParallelPlugin(tp_size=2, compile_blocks=True, enable_sequence_parallelism=True)


@pytest.mark.parametrize(
    "given", [{"mode": "max-autotune"}, {"options": {"triton.cudagraphs": True}}, {"backend": "cudagraphs"}]
)
def test_a_compiler_that_reuses_what_w_needs_is_refused_early(given):
    with pytest.raises(ConfigError, match=r"^compile_blocks under a schedule that splits backward passes keeps"):
        HybridParallelPlugin(pp_size=1, schedule="zb-h1", num_microbatches=2, compile_blocks=given)
    HybridParallelPlugin(pp_size=1, compile_blocks=given)


def test_the_model_stays_what_it_is():
    booster = Booster(plugin=HybridParallelPlugin(compile_blocks={"backend": "eager"}), device="cpu")
    assert isinstance(booster.boost(tiny_vit()).model, ViTForImageClassification)
