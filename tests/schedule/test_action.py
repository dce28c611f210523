from hybridpp.schedule import Action, ActionKind


def test_an_action_is_printed_as_stage_kind_and_microbatch():
    assert str(Action(2, ActionKind.FORWARD, 0)) == "2F0"
    assert str(Action(0, ActionKind.SEND_GRADIENT, 11)) == "0SEND_B11"
    assert str(Action(2, ActionKind.REDUCE_GRADIENTS)) == "2REDUCE_GRAD"


def test_the_kinds_that_compute_are_those_of_one_letter():
    assert [kind.value for kind in ActionKind if kind.computes] == ["F", "B", "I", "W"]
