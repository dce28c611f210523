import torch
from hybridpp_plugins.estimate_batch import BatchSource
from hybridpp_plugins.estimate_runs import EstimateRuns, RunKind
from transformers import GPT2Config, GPT2LMHeadModel

from hybridpp.config import Precision
from hybridpp.estimate import BASES, scaled_run


def gpt2():
    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=500, n_positions=32, bos_token_id=0, eos_token_id=0)
    config.use_cache, config.loss_type = False, "ForCausalLMLoss"
    return GPT2LMHeadModel(config).train()


def test_a_run_of_many_samples_follows_from_two_runs_of_few():
    with torch.device("meta"):
        model = gpt2()
    runs = EstimateRuns(model, precision=Precision.FP32, batches=BatchSource(sequence_length=32))
    units = runs.traced(1, False, 1, 2).found.units
    few, more, made = (runs.run(RunKind(microbatch_size=size), units) for size in (*BASES, 10))
    found = scaled_run(few, more, 10)
    assert found is not None
    assert found.sizes.tolist() == made.sizes.tolist()
    assert [(op.flops, op.num_bytes) for op in found.ops] == [(op.flops, op.num_bytes) for op in made.ops]


def test_runs_of_different_models_are_not_continued():
    with torch.device("meta"):
        small, large = gpt2(), gpt2()
        large.transformer.h.append(large.transformer.h[0])
    made = []
    for model, size in ((small, 2), (large, 4)):
        model.config.n_layer = len(model.transformer.h)
        runs = EstimateRuns(model, precision=Precision.FP32, batches=BatchSource(sequence_length=32))
        made.append(runs.run(RunKind(microbatch_size=size), runs.traced(1, False, 1, 2).found.units))
    assert scaled_run(*made, 8) is None
