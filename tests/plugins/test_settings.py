"""The signature of HybridParallelPlugin, and the dataclasses and tables that check what it is given."""

import inspect
import pydoc
import re
import subprocess
import sys
from dataclasses import MISSING, fields
from textwrap import dedent
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hybridpp_plugins.unsupported import CONVERTED, HINTS, SYNONYMS, UNSUPPORTED, OtherLibrarySettings
from support import ROOT

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import Loopback
from hybridpp.config import (
    CompileConfig,
    LossScaleConfig,
    OptimizerConfig,
    ParallelConfig,
    PartitionConfig,
    PipelineConfig,
    PrecisionConfig,
    ZeroConfig,
)
from hybridpp.errors import ConfigError

CONFIGS = (
    ParallelConfig,
    PipelineConfig,
    PartitionConfig,
    PrecisionConfig,
    OptimizerConfig,
    LossScaleConfig,
    CompileConfig,
    ZeroConfig,
)
FIELDS = {field.name: (cls, field) for cls in CONFIGS for field in fields(cls) if field.name != "loss_scale"}
PARAMETERS = {
    name: parameter
    for name, parameter in inspect.signature(HybridParallelPlugin).parameters.items()
    if parameter.kind is not parameter.VAR_KEYWORD
}
HINTED = get_type_hints(HybridParallelPlugin.__init__)


def test_the_plugin_takes_every_field_of_the_config_dataclasses():
    # The plugin has one setting of its own.
    assert sorted(PARAMETERS) == sorted([*FIELDS, "enable_all_optimization"])


@pytest.mark.parametrize("name", FIELDS)
def test_types_and_defaults_are_those_of_the_config_dataclasses(name):
    cls, field = FIELDS[name]
    default = field.default_factory() if field.default is MISSING else field.default
    assert PARAMETERS[name].default == default
    declared = get_type_hints(cls)[name]
    # The dataclasses know no torch, so they cannot name torch.dtype.
    assert declared is Any if name == "communication_dtype" else HINTED[name] == declared
    assert HINTED[name] is not Any


def test_help_has_a_line_for_every_keyword_with_type_and_default():
    text = pydoc.render_doc(HybridParallelPlugin, renderer=pydoc.plaintext)
    assert " |      num_microbatches: int | None = None,\n" in text
    assert " |      balance: Literal['flops', 'parameters', 'time'] = 'flops',\n" in text
    assert " |      max_norm: float = 0.0,\n" in text
    documented = re.findall(r"^        (\w+): ", HybridParallelPlugin.__doc__.split("Attributes:")[0], re.MULTILINE)
    assert documented == [*PARAMETERS, "other"]
    assert " |      shuffle: bool = False,\n" in text
    assert " |  ) -> DataLoader[Any]\n" in text
    assert " |      precision: Precision | Literal['fp32', 'fp16', 'bf16'] | None = 'fp32',\n" in text
    assert " |      **other: Unpack[OtherLibrarySettings],\n" in text


def test_a_subclass_has_the_signature_of_its_own_init():
    class Preset(HybridParallelPlugin):
        def __init__(self, stage: int = 1):
            super().__init__(zero_stage=stage)

    assert list(inspect.signature(Preset).parameters) == ["stage"]


def accepts(annotation: Any, value: Any) -> bool:
    if get_origin(annotation) is Literal:
        return any(type(value) is type(known) and value == known for known in get_args(annotation))
    if annotation is type(None) or annotation in (int, bool):
        return type(value) is (type(None) if annotation is type(None) else annotation)
    return any(accepts(each, value) for each in get_args(annotation))


def test_keywords_of_other_libraries_are_typed_as_they_are_checked():
    hints = get_type_hints(OtherLibrarySettings)
    assert set(hints) == {*SYNONYMS, *CONVERTED, *HINTS, *UNSUPPORTED}
    assert all(hints[name] is bool for name in HINTS)
    assert not set(hints) & set(PARAMETERS)
    for name, entry in UNSUPPORTED.items():
        assert all(accepts(hints[name], value) for value in entry.values), name
        if isinstance(entry.values[0], bool) and len(entry.values) == 1:
            assert not accepts(hints[name], not entry.values[0]), name


CONFIG_FILE = """
    [mypy]
    strict = true
    mypy_path = .:plugins
    explicit_package_bases = true
    follow_imports = skip
    [mypy-hybridpp_plugins,hybridpp_plugins.hybrid_parallel,hybridpp_plugins.unsupported,hybridpp_plugins.signature,hybridpp.config.*,hybridpp.config]
    follow_imports = silent
"""
SCRIPT = """
    from hybridpp_plugins import HybridParallelPlugin
    HybridParallelPlugin(1, 2, num_microbatches=4, precision="bf16", schedule="zb-v", max_norm=1, cpu_offload=False)
    HybridParallelPlugin(num_microbatch=4)
    HybridParallelPlugin(max_norm="1.0")
    HybridParallelPlugin(precision="fp8")
    HybridParallelPlugin(layers_per_stage=4)
    HybridParallelPlugin(use_fp8=True)
"""


def test_mypy_finds_wrong_keywords_and_wrong_types(tmp_path):
    pytest.importorskip("mypy")
    # Only the modules that the signature needs are read, so this takes less than a second.
    config, script = tmp_path / "mypy.ini", tmp_path / "script.py"
    config.write_text(dedent(CONFIG_FILE))
    script.write_text(dedent(SCRIPT))
    command = [sys.executable, "-m", "mypy", f"--config-file={config}", "--no-incremental", str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    errors = re.findall(r"script\.py:(\d+): error: (.*?)  \[", done.stdout)
    assert [int(line) for line, _ in errors] == [4, 5, 6, 7, 8], done.stdout + done.stderr
    assert 'Unexpected keyword argument "num_microbatch"' in errors[0][1]
    assert all("incompatible type" in text for _, text in errors[1:])


def test_precision_has_one_default():
    default = PrecisionConfig().precision
    assert default == HybridParallelPlugin().precision == Booster().plugin.precision
    assert default == Booster(plugin="hybrid_parallel").plugin.precision == "fp32"


def test_an_unknown_keyword_names_the_nearest():
    with pytest.raises(ConfigError, match=r"no setting 'num_microbatch'\. It takes: .*\. Did you mean num_microbatch"):
        HybridParallelPlugin(num_microbatch=4)
    # Before what its lack leads to: no number of micro-batches.
    with pytest.raises(ConfigError, match=r"no setting 'num_microbatch'"):
        HybridParallelPlugin(pp_size=2, num_microbatch=4)
    with pytest.raises(ConfigError, match=r"no setting 'colour'\. It takes: [^.]*\.$"):
        HybridParallelPlugin(colour="red")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"schedule": "1f1b", "pp_style": "zbv"}, "pp_style and schedule are one setting: got 'zbv' and '1f1b'."),
        (
            {"layers_per_stage": [1, 1], "num_layers_per_stage": [2, 0]},
            "num_layers_per_stage and layers_per_stage are one setting: got [2, 0] and [1, 1].",
        ),
    ],
)
def test_a_setting_is_not_given_two_values_by_two_names(given, text):
    def run():
        with pytest.raises(ConfigError, match=f"^{re.escape(text)} Give one of them.$"):
            HybridParallelPlugin(pp_size=2, num_microbatches=2, **given)

    Loopback(2).run(run)


def test_the_schedule_is_1f1b_unless_given():
    assert HybridParallelPlugin().settings.pipeline.schedule == "1f1b"
    assert HybridParallelPlugin(pp_style="gpipe").settings.pipeline.schedule == "gpipe"
