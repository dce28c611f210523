"""Tests mirror the packages: hybridpp/pipeline/boundary.py is tested in tests/pipeline/test_boundary.py."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {"hybridpp": "tests", "plugins/hybridpp_plugins": "tests/plugins"}

# Modules without a test file of their name: the file that tests them through another module, or why there is none.
# Give a new module a test file instead of a line here.
TYPES_ONLY = "types only"
TESTED_THROUGH = {
    "hybridpp/boosted.py": TYPES_ONLY,
    "hybridpp/boosted_runs.py": "tests/plugins/test_run_saves.py",
    "hybridpp/booster.py": "tests/test_registry.py",
    "hybridpp/booster_adapters.py": "tests/plugins/test_adapters.py",
    "hybridpp/booster_saves.py": "tests/plugins/test_part_saves.py",
    "hybridpp/checkpoint/dcp_folder.py": "tests/checkpoint/test_import_run.py",
    "hybridpp/checkpoint/export_run.py": "tests/cli/test_checkpoint_formats.py",
    "hybridpp/checkpoint/find_tensors.py": "tests/plugins/test_weights.py",
    "hybridpp/checkpoint/gather.py": "tests/plugins/test_run_saves.py",
    "hybridpp/checkpoint/import_sources.py": "tests/checkpoint/test_import_run.py",
    "hybridpp/checkpoint/index.py": "tests/checkpoint/test_folder.py",
    "hybridpp/checkpoint/meta.py": "tests/plugins/test_uninitialized.py",
    "hybridpp/checkpoint/model_origin.py": "tests/cli/test_checkpoint_formats.py",
    "hybridpp/checkpoint/pretrained.py": "tests/plugins/test_weights.py",
    "hybridpp/checkpoint/ranged_file.py": "tests/checkpoint/test_remote_path.py",
    "hybridpp/checkpoint/read.py": "tests/plugins/test_tensor_parallel_folders.py",
    "hybridpp/checkpoint/reshard.py": "tests/cli/test_checkpoint_formats.py",
    "hybridpp/checkpoint/run_contents.py": "tests/cli/test_checkpoint_formats.py",
    "hybridpp/checkpoint/single_file.py": "tests/checkpoint/test_folder.py",
    "hybridpp/checkpoint/staging_folder.py": "tests/checkpoint/test_folder.py",
    "hybridpp/cli/cut_table.py": "tests/cli/test_partition.py",
    "hybridpp/cli/files.py": "tests/cli/test_schedule.py",
    "hybridpp/cli/memory_table.py": "tests/cli/test_partition.py",
    "hybridpp/cli/meta_model.py": "tests/cli/test_partition.py",
    "hybridpp/cli/schedule_source.py": "tests/cli/test_schedule.py",
    "hybridpp/cli/sharding_report.py": "tests/cli/test_partition.py",
    "hybridpp/cluster/current.py": "tests/cluster/test_loopback.py",
    "hybridpp/cluster/gather_objects.py": "tests/plugins/test_weights.py",
    "hybridpp/cluster/pending.py": "tests/cluster/test_torch_world.py",
    "hybridpp/cluster/shared_memory/group.py": "tests/cluster/shared_memory/test_connect.py",
    "hybridpp/cluster/shared_memory/linux.py": "tests/cluster/shared_memory/test_arena.py",
    "hybridpp/cluster/world.py": "tests/cluster/shared_memory/test_link.py",
    "hybridpp/data_parallel/bucket_reduction.py": "tests/data_parallel/test_buckets.py",
    "hybridpp/data_parallel/flat_weights.py": "tests/plugins/test_zero.py",
    "hybridpp/data_parallel/gradient_hooks.py": "tests/data_parallel/test_buckets.py",
    "hybridpp/data_parallel/reducer.py": TYPES_ONLY,
    "hybridpp/data_parallel/seeding.py": "tests/plugins/test_dataloader.py",
    "hybridpp/data_parallel/shared_gradients.py": "tests/data_parallel/test_buckets.py",
    "hybridpp/data_parallel/update_target.py": TYPES_ONLY,
    "hybridpp/module_adapter/call_router.py": "tests/module_adapter/test_seams.py",
    "hybridpp/module_adapter/changes.py": "tests/module_adapter/test_adapter.py",
    "hybridpp/module_adapter/describe.py": "tests/plugins/test_unboost.py",
    "hybridpp/module_adapter/wrapper.py": "tests/module_adapter/test_adapter.py",
    "hybridpp/nn/initialization.py": "tests/plugins/test_initialize.py",
    "hybridpp/nn/names.py": "tests/partition/test_blocks.py",
    "hybridpp/nn/peft_model.py": "tests/plugins/test_adapters.py",
    "hybridpp/partition/call_options.py": "tests/plugins/test_generate.py",
    "hybridpp/partition/block_calls.py": "tests/plugins/test_find_tp_plan.py",
    "hybridpp/partition/calls.py": "tests/partition/test_trace.py",
    "hybridpp/partition/fakes.py": "tests/partition/test_concrete_fallback.py",
    "hybridpp/partition/intercept.py": "tests/partition/test_trace.py",
    "hybridpp/partition/model_inputs.py": "tests/partition/test_staged_model.py",
    "hybridpp/partition/module_lists.py": "tests/partition/test_blocks.py",
    "hybridpp/partition/refine.py": "tests/partition/test_blocks.py",
    "hybridpp/partition/replay.py": "tests/partition/test_trace_cache.py",
    "hybridpp/partition/samples.py": "tests/plugins/test_sample.py",
    "hybridpp/partition/stage_run.py": "tests/partition/test_user_models.py",
    "hybridpp/partition/staging_options.py": "tests/partition/test_memory.py",
    "hybridpp/partition/traced_units.py": "tests/partition/test_concrete_fallback.py",
    "hybridpp/pipeline/class_weights.py": "tests/pipeline/test_criterion.py",
    "hybridpp/pipeline/deferred_wgrad.py": "tests/pipeline/test_weight_gradients.py",
    "hybridpp/pipeline/loss_reduction.py": "tests/pipeline/test_criterion.py",
    "hybridpp/pipeline/rank_program.py": "tests/pipeline/test_executor.py",
    "hybridpp/pipeline/recorder.py": "tests/plugins/test_schedule_planner.py",
    "hybridpp/pipeline/scheduled_wgrads.py": "tests/pipeline/test_weight_gradients.py",
    "hybridpp/pipeline/split_backward_ops.py": "tests/pipeline/test_weight_gradients.py",
    "hybridpp/pipeline/stage.py": "tests/pipeline/test_executor.py",
    "hybridpp/pipeline/stage_manager.py": "tests/plugins/test_engine_handle.py",
    "hybridpp/pipeline/step.py": "tests/pipeline/test_executor.py",
    "hybridpp/plan_search/block_run.py": "tests/plan_search/test_model_search.py",
    "hybridpp/plan_search/candidates.py": "tests/plan_search/test_auxiliary_params.py",
    "hybridpp/plan_search/dataflow.py": "tests/plan_search/test_model_search.py",
    "hybridpp/plan_search/embeddings_and_heads.py": "tests/plan_search/test_trial_errors.py",
    "hybridpp/plan_search/fused_layouts.py": "tests/plan_search/test_auxiliary_params.py",
    "hybridpp/plan_search/gradient_sketch.py": "tests/plan_search/test_model_search.py",
    "hybridpp/plan_search/layer_groups.py": "tests/plan_search/test_model_search.py",
    "hybridpp/plan_search/narrowed_arguments.py": "tests/plan_search/test_auxiliary_params.py",
    "hybridpp/plan_search/sequence_block_search.py": "tests/plugins/test_apply_sp.py",
    "hybridpp/plan_search/sequence_dataflow.py": "tests/plugins/test_apply_sp.py",
    "hybridpp/plan_search/sequence_search.py": "tests/plugins/test_apply_sp.py",
    "hybridpp/plan_search/sequence_verify.py": "tests/plugins/test_apply_sp.py",
    "hybridpp/plan_search/size_attributes.py": "tests/plan_search/test_auxiliary_params.py",
    "hybridpp/plan_search/stacked_experts.py": "tests/plan_search/test_auxiliary_params.py",
    "hybridpp/plan_search/verify.py": "tests/plan_search/test_model_search.py",
    "hybridpp/plugin.py": "tests/test_registry.py",
    "hybridpp/plugin_saves.py": TYPES_ONLY,
    "hybridpp/precision/function_casts.py": "tests/precision/test_mixed_dtype_rules.py",
    "hybridpp/precision/nonfinite.py": "tests/plugins/test_nonfinite_report.py",
    "hybridpp/precision/sharded_target.py": "tests/plugins/test_zero.py",
    "hybridpp/schedule/counts.py": "tests/schedule/test_one_f_one_b.py",
    "hybridpp/schedule/list_scheduler.py": "tests/schedule/test_zero_bubble.py",
    "hybridpp/sharding_plan/style_spec.py": "tests/sharding_plan/test_sharding_spec.py",
    "hybridpp/simulate/measured.py": "tests/simulate/test_costs.py",
    "hybridpp/tensor_parallel/apply_spec.py": "tests/tensor_parallel/test_gathered_modules.py",
    "hybridpp/tensor_parallel/layers.py": "tests/sharding_plan/test_sharding_spec.py",
    "hybridpp/tensor_parallel/sequence_block.py": "tests/plugins/test_apply_sp.py",
    "hybridpp/tensor_parallel/shard.py": "tests/tensor_parallel/test_parameter_sharding.py",
    "hybridpp/tensor_parallel/sharded_arguments.py": "tests/plan_search/test_auxiliary_params.py",
    "hybridpp/timeline/gantt.py": "tests/timeline/test_picture.py",
    "hybridpp/timeline/span.py": "tests/timeline/test_timeline.py",
    "hybridpp/tp_preview.py": "tests/cli/test_partition.py",
    "hybridpp/trainer/batches.py": "tests/trainer/test_trainer.py",
    "hybridpp/trainer/hook.py": "tests/trainer/test_trainer.py",
    "hybridpp/trainer/hooks/accuracy.py": "tests/trainer/test_hooks.py",
    "hybridpp/trainer/hooks/checkpoint.py": "tests/trainer/test_hooks.py",
    "hybridpp/trainer/hooks/early_stopping.py": "tests/trainer/test_hooks.py",
    "hybridpp/trainer/hooks/log_metrics.py": "tests/trainer/test_hooks.py",
    "hybridpp/trainer/hooks/loss.py": "tests/trainer/test_hooks.py",
    "hybridpp/trainer/hooks/lr_scheduler.py": "tests/trainer/test_hooks.py",
    "hybridpp/trainer/hooks/mean.py": "tests/trainer/test_hooks.py",
    "hybridpp/trainer/hooks/progress.py": "tests/trainer/test_hooks.py",
    "hybridpp/trainer/hooks/timing.py": "tests/trainer/test_hooks.py",
    "hybridpp/trainer/hooks/tracker.py": "tests/trainer/test_hooks.py",
    "hybridpp/trainer/state.py": "tests/trainer/test_trainer.py",
    "plugins/hybridpp_plugins/agreement.py": "tests/plugins/test_weights.py",
    "plugins/hybridpp_plugins/boosted_models.py": "tests/plugins/test_bad_input.py",
    "plugins/hybridpp_plugins/first_step_checks.py": "tests/plugins/test_bad_input.py",
    "plugins/hybridpp_plugins/folder_save.py": "tests/plugins/test_run_saves.py",
    "plugins/hybridpp_plugins/hybrid_parallel.py": "tests/plugins/test_bad_input.py",
    "plugins/hybridpp_plugins/key_value_cache.py": "tests/plugins/test_generate.py",
    "plugins/hybridpp_plugins/lr_scheduler.py": "tests/plugins/test_precision.py",
    "plugins/hybridpp_plugins/model_info.py": "tests/plugins/test_bad_input.py",
    "plugins/hybridpp_plugins/optimizer.py": "tests/plugins/test_precision.py",
    "plugins/hybridpp_plugins/optimizer_memory.py": "tests/partition/test_memory.py",
    "plugins/hybridpp_plugins/optimizer_part.py": "tests/plugins/test_part_saves.py",
    "plugins/hybridpp_plugins/preview_tp.py": "tests/cli/test_partition.py",
    "plugins/hybridpp_plugins/rank_shares.py": "tests/plugins/test_reshard_checkpoints.py",
    "plugins/hybridpp_plugins/run_resume.py": "tests/plugins/test_run_saves.py",
    "plugins/hybridpp_plugins/setup.py": "tests/plugins/test_parity.py",
    "plugins/hybridpp_plugins/timeline_recording.py": "tests/plugins/test_schedule_planner.py",
    "plugins/hybridpp_plugins/trained_weights.py": "tests/plugins/test_zero.py",
    "plugins/hybridpp_plugins/verified_folder.py": "tests/plugins/test_run_saves.py",
    "plugins/hybridpp_plugins/wrap_optimizer.py": "tests/plugins/test_gradients.py",
    "plugins/hybridpp_plugins/wrapped_optimizer.py": "tests/plugins/test_precision.py",
}


def expected_test(module: Path) -> Path:
    """Where the tests of a module are expected, by its path in the repository."""
    package = next(package for package in PACKAGES if module.is_relative_to(package))
    inner = module.relative_to(package)
    return Path(PACKAGES[package]) / inner.with_name(f"test_{inner.name}")


def modules() -> list[Path]:
    found = (path.relative_to(ROOT) for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    return [path for path in found if path.name not in ("__init__.py", "__main__.py")]


def test_every_module_has_a_test_file_of_its_name_or_a_reason():
    missing = [str(module) for module in modules() if not (ROOT / expected_test(module)).exists()]
    assert sorted(missing) == sorted(TESTED_THROUGH)


@pytest.mark.parametrize("path", sorted(set(TESTED_THROUGH.values()) - {TYPES_ONLY}))
def test_files_that_test_other_modules_too_exist(path):
    assert (ROOT / path).exists()
