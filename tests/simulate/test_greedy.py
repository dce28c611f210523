from covering import one_test_for

from hybridpp.schedule import check_program, looped, peak_activations, v_shaped
from hybridpp.simulate import Costs, simulate
from hybridpp.simulate.greedy import Order, Rules, greedy_schedule

UNEVEN = Costs(
    num_stages=6,
    forward_ms=(1.0, 0.7, 1.9, 0.4, 1.1, 0.8),
    input_gradient_ms=(0.9, 1.7, 0.6, 1.2, 0.5, 1.0),
    weight_gradient_ms=(0.3, 0.8, 0.7, 0.2, 1.4, 0.6),
    send_ms=0.3,
    post_ms=0.05,
    activation_bytes=(4.0, 3.0, 5.0, 2.0, 6.0, 1.0),
    weight_gradient_bytes=(1.0, 4.0, 2.0, 1.0, 2.0, 3.0),
)
# The sums of the stages of each rank, with what they hold until W.
TIGHTEST = {looped(3, 2): (6.0, 10.0, 8.0), v_shaped(3): (7.0, 10.0, 7.0)}


def rules(rank_of, **others):
    return Rules(**{"rank_of": rank_of, "in_flight": (99,) * 3, "num_unsplit": (0,) * 3} | others)


@one_test_for("rank_of", TIGHTEST)
@one_test_for("order", Order)
@one_test_for("num_unsplit", [(0, 0, 0), (1, 3, 0)])
@one_test_for("patience", [0.0, 1.0])
@one_test_for("times", [1.0, 1.5, 4.0])
def test_no_rank_blocks_or_exceeds_its_cap(rank_of, order, num_unsplit, patience, times):
    caps = tuple(times * cap for cap in TIGHTEST[rank_of])
    chosen = rules(rank_of, order=order, num_unsplit=num_unsplit, patience=patience)
    programs, end_ms = greedy_schedule(UNEVEN, 5, chosen, caps)
    check_program(programs, 6, 5)
    simulation = simulate(programs, UNEVEN)
    assert all(peak <= cap for peak, cap in zip(simulation.peak_bytes, caps, strict=True))
    assert simulation.timeline.makespan_ms <= end_ms + 1e-9


def test_a_rank_that_cannot_hold_split_backwards_does_not_split():
    programs, _ = greedy_schedule(UNEVEN, 3, rules(looped(3, 2)), (6.0, 9.0, 8.0))
    assert {action.kind for action in programs[1]} == {"F", "B"}
    assert {action.kind for action in programs[0]} == {"F", "I", "W"}


def test_forwards_in_flight_are_limited():
    programs, _ = greedy_schedule(
        Costs(num_stages=3), 6, rules(looped(3), in_flight=(3, 2, 1), num_unsplit=(6,) * 3), (1e9,) * 3
    )
    assert peak_activations(programs) == (3, 2, 1)
    assert simulate(programs, Costs(num_stages=3)).timeline.makespan_ms == 3 * (6 + 2)  # 1F1B's


def test_a_patient_rank_waits_for_the_next_gradient_before_w():
    costs = Costs(num_stages=2, forward_ms=(1.0, 0.5), input_gradient_ms=(1.0, 1.5), weight_gradient_ms=(3.0, 1.0))
    eager, patient = (
        greedy_schedule(costs, 3, Rules(rank_of=(0, 1), in_flight=(3, 1), num_unsplit=(0, 0), patience=share), (9, 9))[
            0
        ]
        for share in (0.0, 1.0)
    )
    gradients = [str(action) for action in patient[0] if action.kind != "F"]
    assert gradients[:2] == ["0I0", "0I1"]
    assert [str(action) for action in eager[0] if action.kind != "F"][:2] == ["0I0", "0W0"]
