"""How a model is to be sharded over tensor-parallel ranks: the plan users write, and the spec it comes to."""

from hybridpp.sharding_plan.plan import FusedLayout, LayerStyle, Plan, ShardKind, parse_style
from hybridpp.sharding_plan.plan_patterns import plan_from_patterns
from hybridpp.sharding_plan.sharding_spec import DimShard, ShardingSpec
from hybridpp.sharding_plan.style_spec import fitting_sizes, spec_of_styles, styles_of_spec

__all__ = [
    "DimShard",
    "FusedLayout",
    "LayerStyle",
    "Plan",
    "ShardKind",
    "ShardingSpec",
    "fitting_sizes",
    "parse_style",
    "plan_from_patterns",
    "spec_of_styles",
    "styles_of_spec",
]
