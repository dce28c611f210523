import contextlib
import io
import re
import resource

import pytest
import torch
from processes import run_forked
from support import boosted, image_batch
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    ResNetConfig,
    T5Config,
    ViTConfig,
    ViTForImageClassification,
    Wav2Vec2Config,
    WhisperConfig,
)

from hybridpp.cli import main
from hybridpp.cli.meta_model import build
from hybridpp.cli.sharding_report import render_sharding
from hybridpp.cluster import Loopback
from hybridpp.partition import make_samples
from hybridpp.plugin import SequenceParallelBlock, TensorParallelPreview

TINY = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
VIT = ViTConfig(**TINY, image_size=8, patch_size=4, num_labels=5, architectures=["ViTForImageClassification"])
LLAMA = LlamaConfig(
    **TINY, num_key_value_heads=2, vocab_size=50, tie_word_embeddings=True, architectures=["LlamaForCausalLM"]
)


@pytest.fixture
def command():
    return "partition"


@pytest.fixture
def table(printed, tmp_path):
    """What the command prints for a configuration: its lines, and its cells by stage."""

    def run(config, *arguments):
        config.save_pretrained(tmp_path / "model")
        text = printed("--model", str(tmp_path / "model"), *arguments)
        rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if "|" in line]
        return text, {row[0]: row[1:] for row in rows[1:]}

    return run


@pytest.fixture
def refusal(refused, tmp_path):
    """The line on stderr that the command ends with for a configuration."""

    def run(config, *arguments):
        if config is not None:
            config.save_pretrained(tmp_path / "model")
        return refused("--model", str(tmp_path / "model"), *arguments).replace(str(tmp_path), "TMP")

    return run


def number(text):
    return float(text.replace(",", ""))


def test_the_table(table):
    text, _ = table(VIT, "--pp-size", "2", "--precision", "fp32")
    assert text == (
        "ViTForImageClassification, balanced by flops\n"
        "\n"
        "stage | modules                                   | parameters | GFLOPs | KiB sent "
        "| % parameters | % FLOPs | MiB to train\n"
        "------+-------------------------------------------+------------+--------+----------"
        "+--------------+---------+-------------\n"
        "    0 | vit.embeddings, vit.layers.0-1            |      5,328 |   0.00 |      0.3 "
        "|         53.9 |    53.2 |          0.1\n"
        "    1 | vit.layers.2-3, vit.layernorm, classifier |      4,565 |   0.00 |        - "
        "|         46.1 |    46.8 |          0.1\n"
        "------+-------------------------------------------+------------+--------+----------"
        "+--------------+---------+-------------\n"
        "total |                                           |      9,893 |   0.00 |      0.3 "
        "|              |         |          0.2\n"
    )


def test_a_limit_moves_the_cut_and_what_training_takes_is_told(table):
    # Blocks of one kind in depth, so that stages differ by what is at the ends.
    config = LlamaConfig(**{**TINY, "num_hidden_layers": 6}, num_key_value_heads=2, vocab_size=9000)
    config.architectures = ["LlamaForCausalLM"]
    config.tie_word_embeddings = False
    arguments = ["--pp-size", "2", "--precision", "bf16"]
    _, free = table(config, *arguments)
    # 2 bytes of weight, 4 each of gradient, master and two moments; norms' weights are fp32.
    assert [number(free[str(stage)][6]) for stage in (0, 1)] == [
        pytest.approx(18 * number(free[str(stage)][1]) / 2**20, abs=0.1) for stage in (0, 1)
    ]
    most = max(number(free[str(stage)][6]) for stage in (0, 1))
    _, limited = table(config, *arguments, "--memory-limit", f"{most - 0.03}MiB")
    assert max(number(limited[str(stage)][6]) for stage in (0, 1)) <= most
    assert limited["0"][0] != free["0"][0]


def test_what_a_rank_of_several_replicas_holds(table):
    arguments = ["--pp-size", "2", "--precision", "bf16", "--world-size", "8"]
    config = LlamaConfig(**{**TINY, "num_hidden_layers": 4}, num_key_value_heads=2, vocab_size=90_000)
    config.architectures = ["LlamaForCausalLM"]
    title = "MiB of each rank in training with Adam, 4 replicas, zero_stage={}\n\n"
    held = {}
    for stage, more in ((0, []), (1, []), (2, []), (3, []), ("3, zero_size=2", ["--zero-size", "2"])):
        text, _ = table(config, *arguments, "--zero-stage", str(stage)[0], *more)
        lines = text.partition(title.format(stage))[2].splitlines()
        assert [cell.strip() for cell in lines[0].split("|")] == [
            *("stage", "weights", "gradients", "masters", "moments", "total")
        ]
        held[stage] = [[number(cell) for cell in line.split("|")] for line in lines[2:4]]
        for_a_while = f", or {8 * 90_000 * config.hidden_size / 2**20:,.1f} in the update by torch's Adam without fused"
        assert for_a_while in text
    for plain, zero in zip(held[0], held[1], strict=True):
        assert zero[:3] == plain[:3]
        assert zero[3:5] == [pytest.approx(masters_or_moments / 4, abs=0.1) for masters_or_moments in plain[3:5]]
        assert zero[5] == pytest.approx(sum(zero[1:5]), abs=0.2)
    for plain, zero in zip(held[1], held[2], strict=True):
        assert [*zero[:2], *zero[3:5]] == [*plain[:2], *plain[3:5]]
        assert zero[2] == pytest.approx(plain[2] / 4, abs=0.1)
    for plain, zero in zip(held[2], held[3], strict=True):
        # The replica's part, and all that a step gathers.
        assert zero[1] == pytest.approx(plain[1] * 1.25, abs=0.2)
        assert zero[2:5] == plain[2:5]
    for plain, zero in zip(held[0], held["3, zero_size=2"], strict=True):
        assert zero[1] == pytest.approx(plain[1] * 1.5, abs=0.2)
        assert zero[2:5] == [pytest.approx(part / 2, abs=0.1) for part in plain[2:5]]


def test_what_lies_in_host_memory(table):
    config = LlamaConfig(**{**TINY, "num_hidden_layers": 4}, num_key_value_heads=2, vocab_size=90_000)
    config.architectures = ["LlamaForCausalLM"]

    def held(*arguments):
        text, _ = table(config, "--pp-size", "2", "--world-size", "4", "--zero-stage", "1", *arguments)
        lines = text.partition("zero_stage=1\n\n")[2].splitlines()
        return [[number(cell) for cell in line.split("|")] for line in lines[2:4]], lines[0]

    plain, _ = held("--precision", "bf16")
    half, titles = held("--precision", "bf16", "--offload-optimizer", "0.5")
    assert titles.split("|")[-1].strip() == "host memory"
    for before, after in zip(plain, half, strict=True):
        assert after[:3] == before[:3]
        assert after[3:5] == [pytest.approx(number / 2, abs=0.1) for number in before[3:5]]
        assert after[6] == pytest.approx(4 * before[3] / 2, abs=0.2), "master, two moments, and what passes"


def test_how_layers_are_divided(table):
    text, _ = table(VIT, "--pp-size", "2", "--tp-size", "2")
    assert text.partition("\n\neach")[2] == (
        " stage's layers over 2 ranks\n"
        "\n"
        "layer                                      |      style | parameters | per rank\n"
        "-------------------------------------------+------------+------------+---------\n"
        "vit.embeddings                             | replicated |         96 |       96\n"
        "vit.embeddings.patch_embeddings.projection | replicated |        784 |      784\n"
        "vit.layers.*.attention.q_proj x4           |     column |      1,088 |      544\n"
        "vit.layers.*.attention.k_proj x4           |     column |      1,088 |      544\n"
        "vit.layers.*.attention.v_proj x4           |     column |      1,088 |      544\n"
        "vit.layers.*.attention.o_proj x4           |        row |      1,088 |      576\n"
        "vit.layers.*.layernorm_before x4           | replicated |        128 |      128\n"
        "vit.layers.*.layernorm_after x4            | replicated |        128 |      128\n"
        "vit.layers.*.mlp.fc1 x4                    |     column |      2,176 |    1,088\n"
        "vit.layers.*.mlp.fc2 x4                    |        row |      2,112 |    1,088\n"
        "vit.layernorm                              | replicated |         32 |       32\n"
        "classifier                                 | replicated |         85 |       85\n"
        "\n"
        "replicated on every rank:\n"
        "  vit.embeddings, vit.embeddings.patch_embeddings.projection, vit.layernorm, classifier: "
        "outside of the blocks.\n"
        "  vit.layers.*.layernorm_before, vit.layers.*.layernorm_after: used on replicated activations.\n"
    )


def test_heads_that_the_ranks_do_not_divide_stay_whole_beside_what_they_do(table):
    text, _ = table(VIT, "--pp-size", "2", "--tp-size", "4")
    assert "vit.layers.*.mlp.fc1 x4                    |     column |      2,176 |      544\n" in text
    assert "vit.layers.*.attention.q_proj x4           | replicated |      1,088 |    1,088\n" in text
    assert "attention.num_attention_heads=2 is not divisible by tp_size=4 (sizes that work: 1 or 2)\n" in text


def test_how_sequences_are_divided(table):
    text, _ = table(VIT, "--pp-size", "2", "--tp-size", "2", "--enable-sequence-parallelism")
    assert text.endswith(
        "used on replicated activations.\n"
        "\n"
        "sequences sharded over 2 ranks, from block to block and from stage to stage:\n"
        "  vit.layers.* x4: gathered before attention, mlp.fc1; reduce-scattered after attention.o_proj, "
        "mlp.fc2.\n"
        "\n"
        "unsharded sequences on every rank:\n"
        "  the rest: outside of the blocks.\n"
    )


def test_what_the_models_own_plan_says_otherwise_is_listed():
    model = ViTForImageClassification(VIT)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    told = tuple(f"vit.layers.{n}.mlp.fc1: rowwise in the model's own plan, column here" for n in range(2))
    parts = render_sharding(model, TensorParallelPreview({}, {}, shapes, differences=told), 2)
    assert "\n".join(map(str, parts)).endswith(
        "\n\nthe model's own plan (_tp_plan) differs:\n"
        "  vit.layers.*.mlp.fc1: rowwise in the model's own plan, column here"
    )


def test_what_keeps_whole_sequences_is_named():
    model = ViTForImageClassification(VIT)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    block = SequenceParallelBlock(("attention",), ("attention.o_proj",), ("mlp",))
    division = TensorParallelPreview({}, {}, shapes, {"vit.layers.0": block}, {"vit.layers.1": "it mixes places"})
    assert "\n".join(map(str, render_sharding(model, division, 2))).endswith(
        "  vit.layers.*: gathered before attention; reduce-scattered after attention.o_proj; unsharded in mlp.\n"
        "\n"
        "unsharded sequences on every rank:\n"
        "  vit.layers.*: it mixes places.\n"
        "  the rest: outside of the blocks."
    )


@pytest.mark.parametrize("config", [VIT, LLAMA], ids=["vit", "llama"])
def test_shares_are_what_the_ranks_of_a_job_hold(table, config):
    _, cells = table(config, "--pp-size", "2", "--tp-size", "2", "--precision", "bf16")
    ids = {"input_ids": torch.ones(2, 8, dtype=torch.long)}

    def held():
        model = build(config)
        sample = image_batch(2) if config is VIT else ids
        booster, model, _ = boosted(model, None, sample, tp_size=2, pp_size=2, precision="bf16")
        parameters = list(model.parameters())
        return booster.plugin.layout.here.pp, sum(p.numel() for p in parameters), sum(p.nbytes for p in parameters)

    for stage, num_elements, num_bytes in Loopback(4).run(held):
        *_, per_rank, mib = cells[str(stage)]
        assert number(per_rank) == num_elements
        # Of each element also a sum of gradients, a master weight and two moments.
        assert number(mib) == pytest.approx((num_bytes + 16 * num_elements) / 2**20, abs=0.051)


def test_there_is_one_column_of_memory(table):
    """Of what a rank holds: a stage's, or its share of a stage."""
    for more, titles in (
        ([], ["% FLOPs", "MiB to train"]),
        (["--tp-size", "2"], ["% FLOPs", "parameters per rank", "MiB per rank to train"]),
    ):
        text, _ = table(VIT, "--pp-size", "2", *more)
        (line,) = (line for line in text.splitlines() if line.startswith("stage |"))
        assert [title.strip() for title in line.split("|")][6:] == titles


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_parameters_add_up_to_those_of_the_model(table, num_stages):
    _, cells = table(VIT, "--pp-size", str(num_stages))
    total = sum(parameter.numel() for parameter in ViTForImageClassification(VIT).parameters())
    assert sum(number(cells[str(stage)][1]) for stage in range(num_stages)) == number(cells["total"][1]) == total


def test_what_is_tied_is_held_by_both_stages_and_counted_once(table):
    text, cells = table(LLAMA, "--pp-size", "2")
    embedding = 50 * 16
    assert number(cells["0"][1]) + number(cells["1"][1]) == number(cells["total"][1]) + embedding
    assert text.endswith(
        "\nheld by several stages, which sum their gradients:\n  model.embed_tokens.weight (800): stages 0, 1\n"
    )


def test_flops_and_what_is_sent_are_per_sample(table):
    _, one = table(LLAMA, "--pp-size", "2", "--sequence-length", "512")
    _, four = table(LLAMA, "--pp-size", "2", "--sequence-length", "512", "--batch-size", "4")
    assert one["total"][2] == four["total"][2] != "0.00"
    # Hidden states in half precision, and the rotary embedding's cosines and sines, one for all samples.
    hidden, rotary = 512 * 16 * 2 / 1024, 2 * 512 * 8 * 2 / 1024
    assert number(one["0"][3]) == hidden + rotary
    assert number(four["0"][3]) == hidden + rotary / 4


@pytest.mark.parametrize(
    ("arguments", "first"),
    [
        (["--layers-per-stage", "1,3"], "vit.embeddings, vit.layers.0"),
        (["--split-points", "vit.layers.2:after"], "vit.embeddings, vit.layers.0-2"),
        (["--split-points", "vit.layers.0:before"], "vit.embeddings"),
        (["--balance", "parameters"], "vit.embeddings, vit.layers.0-1"),
    ],
)
def test_the_cut_is_where_the_flags_say(table, arguments, first):
    text, cells = table(VIT, "--pp-size", "2", *arguments)
    assert cells["0"][0] == first
    assert text.startswith(
        f"ViTForImageClassification, {'balanced by parameters' if '--balance' in arguments else 'cut as requested'}\n"
    )


def test_the_task_chooses_the_class(table):
    text, cells = table(LLAMA, "--pp-size", "2", "--task", "SequenceClassification")
    assert text.startswith("LlamaForSequenceClassification,")
    assert cells["1"][0].endswith("score")


def test_a_configuration_that_names_no_class_gives_the_bare_model(table):
    assert table(ViTConfig(**TINY, image_size=8, patch_size=4), "--pp-size", "2")[0].startswith("ViTModel,")


@pytest.mark.parametrize(
    ("config", "shapes"),
    [
        (ViTConfig(**TINY, image_size=(8, 16), patch_size=4), {"pixel_values": (2, 3, 8, 16)}),
        (
            BertConfig(**TINY, vocab_size=50, max_position_embeddings=24),
            {"input_ids": (2, 24), "attention_mask": (2, 24)},
        ),
        (
            T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2, vocab_size=50),
            {"input_ids": (2, 128), "attention_mask": (2, 128), "decoder_input_ids": (2, 128)},
        ),
        (
            WhisperConfig(
                d_model=16,
                encoder_layers=2,
                decoder_layers=2,
                encoder_attention_heads=2,
                decoder_attention_heads=2,
                encoder_ffn_dim=16,
                decoder_ffn_dim=16,
                vocab_size=50,
                max_source_positions=20,
                max_target_positions=8,
                pad_token_id=0,
            ),
            {"input_features": (2, 80, 40), "decoder_input_ids": (2, 8)},
        ),
        (Wav2Vec2Config(**TINY, num_conv_pos_embedding_groups=2), {"input_values": (2, 16000)}),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_a_sample_is_made_from_the_configuration(table, config, shapes):
    sample = make_samples(build(config), 2, None, torch.float32)[-1]
    assert {name: tuple(tensor.shape) for name, tensor in sample.items()} == shapes
    table(config, "--pp-size", "2", "--batch-size", "2")


def printed_and_taken(*arguments):
    """What a command prints, and the KiB by which this process has grown at most while it ran."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(arguments) == 0
    return printed.getvalue(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


def test_a_huge_model_takes_seconds_and_no_memory(tmp_path):
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "vocab_size": 128256}
    config = LlamaConfig(**sizes, num_attention_heads=64, num_key_value_heads=8, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path)
    text, taken_kib = run_forked(lambda: printed_and_taken("partition", "--model", str(tmp_path), "--pp-size", "8"))
    assert "| 70,553,706,496 |" in text
    assert "model.layers.10-19" in text
    assert taken_kib < 2**18


@pytest.mark.parametrize(
    ("config", "arguments", "line"),
    [
        (
            None,
            [],
            "hybridpp: no model 'TMP/model': neither a folder nor a model on the Hugging Face hub has that name. "
            "Check the name and the connection.",
        ),
        (
            VIT,
            ["--pp-size", "5"],
            "hybridpp: a pipeline stage needs at least one block: ViTForImageClassification runs 4 (vit.layers.0, "
            "vit.layers.1, vit.layers.2, vit.layers.3), for 5 stages (pp_size x num_model_chunks). Use 4 or fewer.",
        ),
        (
            VIT,
            ["--layers-per-stage", "1,2"],
            "hybridpp: layers_per_stage needs one count per stage, and all 4 blocks in the sum: got [1, 2] (sum 3) for "
            "2 stages. Balanced would be [2, 2].",
        ),
        (
            VIT,
            ["--split-points", "vit.layers.9:after"],
            "hybridpp: ViTForImageClassification has no module 'vit.layers.9'. Did you mean vit.layers.3 or "
            "vit.layers.2 or vit.layers.1?",
        ),
        (
            VIT,
            ["--tp-size", "3"],
            "hybridpp: tensor parallelism shards pairs of linear layers: none of ViTForImageClassification can be "
            "sharded over 3 ranks (vit.layers.*.attention.q_proj, vit.layers.*.attention.k_proj, "
            "vit.layers.*.attention.v_proj, vit.layers.*.attention.o_proj: attention.num_attention_heads=2 is not "
            "divisible by tp_size=3 (sizes that work: 1 or 2); vit.layers.*.mlp.fc1, vit.layers.*.mlp.fc2: its "
            "width=32 is not divisible by tp_size=3 (sizes that work: 1, 2, 4, 8, 16 or 32)). Remove --tp-size, or "
            "pass another size.",
        ),
        (
            VIT,
            ["--enable-sequence-parallelism"],
            "hybridpp: sequence parallelism shards sequences over the tensor-parallel ranks: got tp_size=1. "
            "Use "
            "tp_size=2 or more, or leave enable_sequence_parallelism out.",
        ),
        (
            VIT,
            ["--split-points", "vit.layers.1:behind"],
            "hybridpp: a side in split_points must be 'before' or 'after': got 'behind' for 'vit.layers.1'.",
        ),
        (
            VIT,
            ["--split-points", "vit.layers.1:after", "--layers-per-stage", "2,2"],
            "hybridpp: give layers_per_stage or split_points, not both: got [2, 2] and {'vit.layers.1': 'after'}.",
        ),
        (
            VIT,
            ["--memory-limit", "1KiB"],
            "hybridpp: no cut within the memory limit was found: got memory_limit=1.00 KiB, and in the one that "
            "needs least, stage 0 (rank 0 of the pipeline) needs 93.91 KiB for parameters, gradients and optimizer "
            "state. Use memory_limit='93.91KiB' or more, or raise pp_size or tp_size.",
        ),
        (
            VIT,
            ["--zero-stage", "1"],
            "hybridpp: zero_stage=1 divides over replicas, and there is one. Pass the ranks of the job as "
            "--world-size: a multiple of 2.",
        ),
        (
            VIT,
            ["--offload-optimizer", "1.5"],
            "hybridpp: offload_optimizer must be from 0 to 1: got offload_optimizer=1.5. Use 1.0 to keep all of the "
            "optimizer's state in host memory.",
        ),
        (
            VIT,
            ["--world-size", "5"],
            "hybridpp: world size must be a multiple of tp_size * pp_size: got world_size=5, tp_size=1, pp_size=2. "
            "Start 4 or 6 processes, or change the sizes.",
        ),
        (
            VIT,
            ["--memory-limit", "much"],
            "hybridpp: memory_limit must be a number of bytes above 0, or text with a unit (B, KB, KiB, MB, MiB, GB, "
            "GiB, TB, TiB), and at most 2**63: got memory_limit='much'. Write, for example, memory_limit='16GiB'.",
        ),
        (
            ViTConfig(architectures=["ViTForTea"]),
            [],
            "hybridpp: transformers has no class 'ViTForTea', which the configuration names. Choose one with --task.",
        ),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_2(refusal, config, arguments, line):
    if "--pp-size" not in arguments:
        arguments = ["--pp-size", "2", *arguments]
    assert refusal(config, *arguments) == line


def test_other_refusals_say_what_would_do(refusal, tmp_path):
    assert re.match(
        r"hybridpp: --task must be one of AudioClassification, .*CausalLM, .*: got 'Tea'\.",
        refusal(VIT, "--pp-size", "2", "--task", "Tea"),
    )
    assert refusal(VIT, "--pp-size", "2", "--task", "CausalLM").startswith(
        "hybridpp: no model can be built from this ViTConfig: Unrecognized configuration class"
    )
    broken = ViTConfig(**TINY, hidden_act="tea", architectures=["ViTForImageClassification"])
    assert refusal(broken, "--pp-size", "2") == "hybridpp: no model can be built from this ViTConfig: 'tea'"
    (tmp_path / "model/config.json").unlink()
    assert refusal(None, "--pp-size", "2") == (
        "hybridpp: TMP/model has no config.json. Pass a folder that save_pretrained wrote."
    )
    (tmp_path / "model/config.json").write_text('{"model_type": "tea"}')
    assert refusal(None, "--pp-size", "2").startswith(
        "hybridpp: transformers cannot read the configuration of 'TMP/model': "
    )


def test_a_model_of_which_nothing_can_be_divided_is_refused(refusal):
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], architectures=["ResNetModel"])
    assert refusal(config, "--pp-size", "2", "--tp-size", "2").startswith(
        "hybridpp: tensor parallelism shards pairs of linear layers: none of ResNetModel can be sharded over 2 ranks "
        "(its blocks have none). Remove --tp-size"
    )


def test_a_sample_that_does_not_fit_is_named(refusal, monkeypatch):
    def forward(self, input_ids, attention_mask):
        raise RuntimeError("sizes do not match")

    monkeypatch.setattr(BertModel, "forward", forward)
    config = BertConfig(**TINY, vocab_size=50, max_position_embeddings=24)
    assert refusal(config, "--pp-size", "2", "--sequence-length", "24").startswith(
        "hybridpp: BertModel does not run on the inputs generated from its configuration, "
        "input_ids [1, 24], attention_mask [1, 24]: RuntimeError: sizes do not match"
    )


def test_more_tokens_than_learned_positions_are_refused(refusal):
    config = BertConfig(**TINY, vocab_size=50, max_position_embeddings=24)
    text = "hybridpp: BertModel has 24 learned positions: got a sequence_length of 25. Use at most 24."
    assert refusal(config, "--pp-size", "2", "--sequence-length", "25") == text
