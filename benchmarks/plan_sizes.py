"""What the planning commands take for models as they are published: memory, processor time and the answer.

    OMP_NUM_THREADS=1 PYTHONPATH=.:plugins python benchmarks/plan_sizes.py
    OMP_NUM_THREADS=1 PYTHONPATH=.:plugins python benchmarks/plan_sizes.py --models flux,llama-3-405b --commands plan
    OMP_NUM_THREADS=1 PYTHONPATH=.:plugins python benchmarks/plan_sizes.py --published

Each command is a process of its own, with no weights and no device; a process that goes beyond ``--limit-gib`` or
``--limit-s`` is ended, and the table says so. Goals: 2 GiB and 60 s of processor time. ``--folders DIR`` only writes
the folders with the configurations, to run other commands on them. ``--published`` compares estimates of Llama 3 405B
with the TFLOPS that "The Llama 3 Herd of Models" reports in table 4, of which the third row needs context parallelism.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

GOAL_GIB, GOAL_S = 2.0, 60.0
_PAGE = os.sysconf("SC_PAGE_SIZE")

# As the models' own config.json has them; what is left out has the default of the configuration's class.
CONFIGS: Mapping[str, dict[str, Any]] = {
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "max_position_embeddings": 4096,
    },
    "mixtral-8x22b": {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "vocab_size": 32000,
        "hidden_size": 6144,
        "intermediate_size": 16384,
        "num_hidden_layers": 56,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 65536,
    },
    "qwen3-235b-a22b": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "max_position_embeddings": 40960,
    },
    "gpt-oss-120b": {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "max_position_embeddings": 131072,
    },
    "llama-3-70b": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
    "llama-3-405b": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
    "gemma-3-27b": {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "mm_tokens_per_image": 256,
        "image_token_index": 262144,
        "text_config": {
            "model_type": "gemma3_text",
            "vocab_size": 262208,
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_hidden_layers": 62,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "sliding_window": 1024,
            "query_pre_attn_scalar": 168,
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "image_size": 896,
            "patch_size": 14,
            "vision_use_head": False,
        },
    },
    "qwen2.5-vl-72b": {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "text_config": {
            "model_type": "qwen2_5_vl_text",
            "vocab_size": 152064,
            "hidden_size": 8192,
            "intermediate_size": 29568,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "max_position_embeddings": 128000,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]},
        },
        "vision_config": {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3456,
            "num_heads": 16,
            "out_hidden_size": 8192,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
    },
    "flux": {
        "_class_name": "FluxTransformer2DModel",
        "attention_head_dim": 128,
        "axes_dims_rope": [16, 56, 56],
        "guidance_embeds": True,
        "in_channels": 64,
        "joint_attention_dim": 4096,
        "num_attention_heads": 24,
        "num_layers": 19,
        "num_single_layers": 38,
        "patch_size": 1,
        "pooled_projection_dim": 768,
    },
}
# Of models of text; that of Flux follows from its images.
LENGTH = ("--sequence-length", "4096")
# Blocks of each model that a pipeline of eight ranks divides, within a host of eight devices for each place of it.
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "partition": ("--tp-size", "8", "--pp-size", "8", "--precision", "bf16"),
    "estimate": (
        "--tp-size",
        "8",
        "--pp-size",
        "8",
        "--world-size",
        "1024",
        "--zero-stage",
        "1",
        "--global-batch",
        "1024",
    ),
    "plan": ("--devices", "1024", "--global-batch", "1024"),
}


class Measured(NamedTuple):
    """What a command took, and what it printed."""

    peak_gib: float
    processor_s: float
    answer: str
    is_answered: bool


def run(command: list[str], limit_gib: float, limit_s: float) -> Measured:
    """Run a command in a process of its own, within limits."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err)
        ended = ""
        while True:
            pid, status, used = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            if not ended and (reason := _beyond(process.pid, limit_gib, limit_s)):
                ended = reason
                process.send_signal(signal.SIGKILL)
            time.sleep(0.1)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        text = ended or (out.read() if process.returncode == 0 else err.read())
    return Measured(
        used.ru_maxrss / 2**20,
        used.ru_utime + used.ru_stime,
        text,
        process.returncode == 0,
    )


def _beyond(pid: int, limit_gib: float, limit_s: float) -> str:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    ticks, pages = int(fields[11]) + int(fields[12]), int(fields[21])
    if pages * _PAGE / 2**30 > limit_gib:
        return f"ended above {limit_gib:g} GiB"
    if ticks / os.sysconf("SC_CLK_TCK") > limit_s:
        return f"ended after {limit_s:g} s of the processor"
    return ""


def first_line(command: str, text: str) -> str:
    """The line of an answer that says most."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    marks = {"estimate": "step on", "plan": r"1 *\|"}
    found = [line for line in lines if command in marks and re.match(marks[command], line)]
    return (found or lines or [""])[0]


def write_folders(where: Path, names: list[str]) -> dict[str, Path]:
    """A folder with a config.json for each model."""
    folders = {}
    for name in names:
        folders[name] = where / name
        folders[name].mkdir(parents=True, exist_ok=True)
        (folders[name] / "config.json").write_text(json.dumps(CONFIGS[name], indent=2))
    return folders


# Devices, micro-batches of a replica, and TFLOPS of each device, all with tp 8 x pp 16 and texts of 8192 tokens.
PUBLISHED = ((8192, 32, 430.0), (16384, 16, 400.0))
DEVICE = Path(__file__).parent.parent / "examples/devices/h100_fused.json"


def published(limit_gib: float, limit_s: float) -> None:
    """Print the table of published and of estimated speeds."""
    config, length = CONFIGS["llama-3-405b"], 8192
    width, layers, inner = config["hidden_size"], config["num_hidden_layers"], config["intermediate_size"]
    heads = 2 * width * (1 + config["num_key_value_heads"] / config["num_attention_heads"])
    matrices = layers * (width * heads + 3 * width * inner) + width * config["vocab_size"]
    # Of each token: two for each weight forwards and four backwards; and attention to half of the tokens.
    flops_per_token = 6 * matrices + 6 * layers * width * length
    print("| devices | micro-batches | device | sequence shards | published TFLOPS | estimated | ms | GiB | s |")
    print("|--:|--:|---|---|--:|--:|--:|--:|--:|", flush=True)
    with tempfile.TemporaryDirectory() as where:
        folder = write_folders(Path(where), ["llama-3-405b"])["llama-3-405b"]
        for devices, microbatches, tflops in PUBLISHED:
            for device, shards in ((str(DEVICE), True), ("h100", True), (str(DEVICE), False)):
                layout = ("--tp-size", "8", "--pp-size", "16", "--schedule", "interleaved", "--num-model-chunks", "4")
                sizes = ("--world-size", str(devices), "--num-microbatches", str(microbatches), "--zero-stage", "1")
                call = [sys.executable, "-m", "hybridpp", "estimate", "--model", str(folder), *layout, *sizes, "--json"]
                call += ["--sequence-length", str(length), "--device", device]
                found = run([*call, *(["--enable-sequence-parallelism"] if shards else [])], limit_gib, limit_s)
                names = Path(device).name, "yes" if shards else "no"
                row = f"| {devices:,} | {microbatches} | {' | '.join(names)} | {tflops:g} "
                if not found.is_answered:
                    print(f"{row}| {first_line('', found.answer)} |", flush=True)
                    continue
                step_s = json.loads(found.answer)["time"]["step_ms"] / 1e3
                tokens = devices // 128 * microbatches * length
                reached = flops_per_token * tokens / step_s / devices / 1e12
                print(
                    f"{row}| {reached:.0f} ({100 * (reached / tflops - 1):+.0f} %) | {1e3 * step_s:,.0f} | "
                    f"{found.peak_gib:.2f} | {found.processor_s:.0f} |",
                    flush=True,
                )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default=",".join(CONFIGS))
    parser.add_argument("--commands", default=",".join(COMMANDS))
    parser.add_argument("--flags", default="", help="more flags of the commands, separated by spaces")
    parser.add_argument("--limit-gib", type=float, default=4.0)
    parser.add_argument("--limit-s", type=float, default=300.0)
    parser.add_argument("--folders", type=Path)
    parser.add_argument("--published", action="store_true")
    arguments = parser.parse_args()
    if arguments.published:
        published(arguments.limit_gib, arguments.limit_s)
        return
    names = arguments.models.split(",")
    if arguments.folders is not None:
        write_folders(arguments.folders, names)
        return
    print("| model | command | GiB | s of the processor | | answer |\n|---|---|--:|--:|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as where:
        for name, folder in write_folders(Path(where), names).items():
            length = () if name == "flux" else LENGTH
            for command in arguments.commands.split(","):
                call = [sys.executable, "-m", "hybridpp", command, "--model", str(folder), *COMMANDS[command], *length]
                found = run([*call, *arguments.flags.split()], arguments.limit_gib, arguments.limit_s)
                is_met = found.is_answered and found.peak_gib <= GOAL_GIB and found.processor_s <= GOAL_S
                print(
                    f"| {name} | {command} | {found.peak_gib:.2f} | {found.processor_s:.0f} | "
                    f"{'' if is_met else 'missed'} | {first_line(command, found.answer)} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
