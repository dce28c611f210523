"""The plan that a transformers model brings along: read, tried first, compared."""

import torch
from attention_blocks import WIDTH, Block, Gated
from torch import nn

from hybridpp.plan_search import infer_plan
from hybridpp.plan_search.candidates import CandidateGenerator
from hybridpp.plan_search.hf_tp_plan import OwnPlan, differences, hf_tp_plan
from hybridpp.sharding_plan import ShardKind


def with_plan(plan: dict[str, str], **parts: nn.Module) -> nn.Module:
    model = nn.Sequential(Block(**parts))
    model._tp_plan = plan
    return model


def infer(model: nn.Module):
    return infer_plan(model, ["0"], {"0": ((torch.randn(3, 5, WIDTH),), {})}, 2)


def test_stars_stand_for_numbers_and_other_styles_have_no_kind():
    plan = {"*.parts.mlp.gate": "colwise_gather_output", "0.parts.mlp.down": "rowwise", "*.parts.mlp.up": "sequence"}
    own = hf_tp_plan(with_plan(plan, mlp=Gated()))
    assert own.kinds == {"0.parts.mlp.gate": ShardKind.COLUMN, "0.parts.mlp.down": ShardKind.ROW}
    assert own.styles["0.parts.mlp.up"] == "sequence"
    assert own.of_block("0")["parts.mlp.down"] is ShardKind.ROW


def test_a_model_without_a_plan_has_an_empty_one():
    assert hf_tp_plan(nn.Linear(2, 2)) == OwnPlan()
    assert differences(OwnPlan(), ["0"], {"0.up": "column"}) == ()


def test_its_layers_are_tried_first(monkeypatch):
    """Two equal modules: without a plan, the one that runs first is tried first."""

    def tried(plan: dict[str, str]) -> list[str]:
        rows: list[str] = []
        candidates_of = CandidateGenerator.of

        def noting(self, group):
            rows.extend(group.rows)
            return candidates_of(self, group)

        with monkeypatch.context() as patch:
            patch.setattr(CandidateGenerator, "of", noting)
            infer(with_plan(plan, a=Gated(), b=Gated()))
        return rows

    own = {"*.parts.b.gate": "colwise", "*.parts.b.up": "colwise", "*.parts.b.down": "rowwise"}
    assert tried({})[0] == "parts.a.down"
    assert tried(own)[0] == "parts.b.down"


def test_a_wrong_plan_is_tried_rejected_and_told():
    model = with_plan({"*.parts.mlp.gate": "rowwise", "*.parts.mlp.up": "colwise"}, mlp=Gated())
    found = infer(model)
    assert found.styles == {"0.parts.mlp.gate": "column", "0.parts.mlp.up": "column", "0.parts.mlp.down": "row"}
    assert found.differences == ("0.parts.mlp.gate: rowwise in the model's own plan, column here",)
