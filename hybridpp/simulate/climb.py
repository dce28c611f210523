"""Hill climbing over the rules of the greedy scheduler."""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice, product

from hybridpp.simulate.greedy import Order, Rules

_NUM_KEPT = 3
_SHARE_OF_STARTS = 0.5
_PATIENCES = (0.0, 0.25, 0.5, 1.0)


def starts(placements: tuple[tuple[int, ...], ...], num_ranks: int, num_microbatches: int) -> Iterator[Rules]:
    """Rules to begin with, the likeliest first: warm-ups of the named schedules, nothing split to all split."""
    num_chunks = len(placements[0]) // num_ranks
    most = num_microbatches * num_chunks
    to_end = range(num_ranks, 0, -1)
    warm_ups = (
        (most,) * num_ranks,  # as far as memory allows
        tuple(num_chunks * (2 * ahead - 1) for ahead in to_end),  # ZB-H2
        tuple(num_chunks * ahead for ahead in to_end),  # 1F1B
        (num_chunks * num_ranks,) * num_ranks,  # ZB-V
        tuple(num_chunks * ahead + (num_chunks - 1) * num_ranks for ahead in to_end),  # interleaved
        (num_chunks * num_ranks // 2 + 2,) * num_ranks,  # V-Half
    )
    unsplit = dict.fromkeys((0, max(0, num_microbatches - 2 * (num_ranks - 1)), num_microbatches))
    for ahead, count, order, rank_of in product(warm_ups, unsplit, Order, placements):
        in_flight = tuple(min(most, max(number, num_chunks)) for number in ahead)
        yield Rules(rank_of=rank_of, in_flight=in_flight, num_unsplit=(count,) * num_ranks, order=order)


def climb(
    score: Callable[[Rules], float], begin: Iterator[Rules], num_microbatches: int, num_trials: int
) -> list[Rules]:
    """The best rules found, at most 3, the best first.

    Half of the trials are for rules to begin with. Then one change at a time is made to one of the best so far, in
    turn. The changes are drawn from a fixed seed, so the result depends on the arguments only.

    Args:
        score: of rules; the lower the better.
        begin: rules to begin with.
        num_microbatches: micro-batches per batch.
        num_trials: the most scores to compute.
    """
    first = dict.fromkeys(begin)
    scores = {rules: score(rules) for rules in islice(first, math.ceil(_SHARE_OF_STARTS * num_trials))}
    generator = random.Random(0)
    best = sorted(scores, key=scores.__getitem__)[:_NUM_KEPT]
    # A change may lead to rules that were tried; the number of attempts ends the search of small ones.
    for attempt in range(4 * num_trials):
        if len(scores) >= num_trials or not best:
            break
        changed = _changed(best[attempt % len(best)], num_microbatches, generator)
        if changed not in scores:
            scores[changed] = score(changed)
            best = sorted([*best, changed], key=scores.__getitem__)[:_NUM_KEPT]
    return best


def _changed(rules: Rules, num_microbatches: int, generator: random.Random) -> Rules:
    """The rules with one change: of one rank, or of all that come after one."""
    num_ranks = len(rules.in_flight)
    what = generator.choice(("in_flight", "in_flight", "num_unsplit", "num_unsplit", "order", "patience"))
    if what == "order":
        return replace(rules, order=generator.choice(list(Order)))
    if what == "patience":
        return replace(rules, patience=generator.choice(_PATIENCES))
    first = generator.randrange(num_ranks)
    last = generator.choice((first + 1, num_ranks))
    num_chunks = len(rules.rank_of) // num_ranks
    if what == "in_flight":
        values, least, most = rules.in_flight, num_chunks, num_chunks * num_microbatches
        by = generator.choice((-2, -1, 1, 2))
    else:
        values, least, most = rules.num_unsplit, 0, num_microbatches
        by = generator.choice((-1, 1)) * generator.choice((1, max(1, num_microbatches // 8), num_microbatches))
    changed = tuple(
        min(most, max(least, value + by)) if first <= rank < last else value for rank, value in enumerate(values)
    )
    return replace(rules, in_flight=changed) if what == "in_flight" else replace(rules, num_unsplit=changed)
