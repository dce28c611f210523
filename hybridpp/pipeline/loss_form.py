"""Find what a loss is a mean over from the terms of the first one, and put losses together from weighted terms."""

import math
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from hybridpp.nn.half import HALF_DTYPES
from hybridpp.pipeline.loss_items import (
    MAX_COUNTS,
    Count,
    LossForm,
    Measured,
    NotCountedError,
    Product,
    TermKey,
    TooManyCountsError,
    not_counted,
    numbers,
    without_floor,
)
from hybridpp.pipeline.loss_trace import Term, TermFactor

ADVICE = (
    "write a term that may have no items without a branch, as (losses * mask).sum() / mask.sum().clamp(min=1) instead "
    "of if mask.any(): ..."
)


def loss_form_of(
    terms: Sequence[Term],
    inputs: Sequence[Any],
    twice: Callable[[Any, int], Any],
    sizes: Sequence[int],
    rows: Count | None = None,
    part_of: Callable[[Any, int, slice], Any] | None = None,
) -> LossForm:
    """The form of a loss whose terms are known.

    Args:
        terms: of the loss of one micro-batch.
        inputs: of all micro-batches.
        twice: the inputs of a micro-batch of some size, with its samples duplicated.
        sizes: samples of each micro-batch.
        rows: the number of samples, for terms that add up over samples, where the script says that they are means.
        part_of: the inputs of a micro-batch of some size, with some of its samples.

    Raises:
        NotCountedError: what it is divided by cannot be told from a batch.
    """
    kinds: dict[int, bool] = {}
    counts: list[Count] = []

    def adds_up(count: Count) -> bool:
        if id(count) not in kinds:
            kinds[id(count)] = _adds_up(count, inputs, twice, sizes)
            if kinds[id(count)] and part_of is not None and not count.is_of_row:
                _check_sum(count, inputs, part_of, sizes)
            if not kinds[id(count)] and not count.is_of_row:
                _check_constant(count, inputs, part_of, sizes)
        return kinds[id(count)]

    products: list[Product | None] = []
    keys: list[TermKey | None] = []
    for term in terms:
        powers: dict[int, int] = {}
        factors = [factor for factor in term.factors or () if adds_up(factor.count)]
        keys.append(None if term.factors is None else _key([one for one in factors if not one.count.is_of_row]))
        if not factors and rows is not None:
            factors = [TermFactor(rows, -1)]
        for factor in factors:
            if factor.count not in counts:
                counts.append(factor.count)
            index = counts.index(factor.count)
            powers[index] = powers.get(index, 0) + factor.power
        product = tuple(sorted((index, power) for index, power in powers.items() if power))
        products.append(None if term.factors is None else product)
    if len(counts) > MAX_COUNTS:
        raise TooManyCountsError(
            f"its terms are divided by {len(counts)} different numbers, of which {MAX_COUNTS} can be counted: divide "
            "the sum of all of them by one, as (losses * mask).sum() / mask.sum()"
        )
    # In an order that does not depend on which terms the first micro-batch of a replica has.
    order = sorted(range(len(counts)), key=lambda index: counts[index].signature)
    positions = {index: at for at, index in enumerate(order)}
    of_terms = [
        None if one is None else tuple(sorted((positions[index], power) for index, power in one)) for one in products
    ]
    known = {one.signature for one in counts}
    fixed = {one.count.signature for term in terms for one in term.factors or () if not one.count.is_of_row}
    return LossForm(
        counts=tuple(counts[index] for index in order),
        products=tuple(dict.fromkeys(one for one in of_terms if one is not None)) or ((),),
        of_terms=tuple(of_terms),
        keys=tuple(keys),
        fixed=frozenset(fixed - known),
        in_model=all(term.in_model for term in terms if term.factors is not None),
        of_parts=tuple(term.is_of_parts for term in terms),
        is_by_row=any(factor.count.is_of_row for term in terms for factor in term.factors or ()),
    )


def _adds_up(count: Count, inputs: Sequence[Any], twice: Callable[[Any, int], Any], sizes: Sequence[int]) -> bool:
    """Whether a number is a count of items; False: it stays the same for more samples."""
    plain = without_floor(count)
    try:
        for part, num_samples in zip(inputs, sizes, strict=True):
            ((once, doubled),) = numbers(
                [[plain.of(part, num_samples), plain.of(twice(part, num_samples), 2 * num_samples)]]
            )
            if once:
                break
        else:
            return True
    except Exception as error:  # any operation of the script's, on inputs of another form
        raise not_counted(error) from error
    if math.isclose(doubled, 2 * once, rel_tol=1e-3):
        return True
    if math.isclose(doubled, once, rel_tol=1e-3):
        return False
    raise NotCountedError(f"a number that it is divided by is {once:g}, and for twice the samples {doubled:g}")


def _check_sum(
    count: Count, inputs: Sequence[Any], part_of: Callable[[Any, int, slice], Any], sizes: Sequence[int]
) -> None:
    """Of a number that doubles if samples come twice, such as a sum of squares about the mean: it must add up."""
    plain = without_floor(count)
    for part, num_samples in zip(inputs, sizes, strict=True):
        middle = num_samples // 2
        if not middle:
            continue
        try:
            made = [
                plain.of(part_of(part, num_samples, one), one.stop - one.start)
                for one in (slice(0, middle), slice(middle, num_samples), slice(0, num_samples))
            ]
        except Exception:  # any operation of the script's, on fewer samples than it was made for
            return
        is_rounded = any(isinstance(one, Tensor) and one.dtype in HALF_DTYPES for one in made)
        ((first, second, full),) = numbers([made])
        if not math.isclose(first + second, full, rel_tol=1e-2 if is_rounded else 1e-5, abs_tol=1e-6):
            raise NotCountedError(
                f"a number that it is divided by is {full:g}, and of the samples' halves {first:g} and {second:g}"
            )


def _check_constant(
    count: Count, inputs: Sequence[Any], part_of: Callable[[Any, int, slice], Any] | None, sizes: Sequence[int]
) -> None:
    """Of a number that does not change if samples come twice, such as a maximum: it must be that of any samples."""
    parts = list(zip(inputs, sizes, strict=True))
    if part_of is not None and sizes[0] > 1:
        middle = sizes[0] // 2
        parts += [(part_of(inputs[0], sizes[0], one), 1) for one in (slice(0, middle), slice(middle, sizes[0]))]
    try:
        values = [one for (one,) in numbers([[count.of(part, num_samples)] for part, num_samples in parts])]
    except Exception as error:  # any operation of the script's, on inputs of another form
        raise not_counted(error) from error
    if not all(math.isclose(one, values[0], rel_tol=1e-3) for one in values):
        raise NotCountedError(f"a number that it is divided by is {values[0]:g} for some samples, and for others not")


def _key(factors: Iterable[TermFactor]) -> TermKey:
    powers: dict[int, int] = {}
    for factor in factors:
        signature = factor.count.signature
        powers[signature] = powers.get(signature, 0) + factor.power
    return frozenset((signature, power) for signature, power in powers.items() if power)


def key_of(term: Term, fixed: Set[int] = frozenset()) -> TermKey | None:
    """What tells a term apart, in any micro-batch; None: it does not depend on the batch.

    Args:
        term: of a loss.
        fixed: signatures of what is left out.
    """
    return None if term.factors is None else _key(_counted(term, fixed))


def _counted(term: Term, fixed: Set[int]) -> list[TermFactor]:
    factors = term.factors or ()
    return [one for one in factors if not one.count.is_of_row and one.count.signature not in fixed]


def united(lists: Iterable[Sequence[Term]]) -> list[Term]:
    """All different terms of several losses of one script, which leaves out those without items."""
    found: list[Term] = []
    known: set[TermKey | None] = set()
    for terms in lists:
        keys = [key_of(term) for term in terms]
        found += [term for term, key in zip(terms, keys, strict=True) if not found or key not in known]
        known.update(keys)
    return found


def with_unlike(terms: Sequence[Term], others: Iterable[Sequence[Term]]) -> list[Term]:
    """The terms with those of other losses that are divided by what none of them is divided by, in any product."""
    found = list(terms)
    known = {signature for term in terms for signature, _ in key_of(term) or ()}
    for term in (term for one in others for term in one):
        own = {signature for signature, _ in key_of(term) or ()}
        if own and not own & known:
            found.append(term)
            known |= own
    return found


def matched(
    form: LossForm, terms: Sequence[Term], own: Measured, value: Callable[[Count], Any]
) -> tuple[Product | None, ...]:
    """The product of each term of a micro-batch's loss.

    A script may leave out terms that have no items, so terms are told apart by what they are divided by.

    Args:
        form: of the loss.
        terms: of it.
        own: the counts of the micro-batch.
        value: of a count, for the micro-batch; asked for only if terms are made in another way than before.

    Raises:
        NotCountedError: the loss has other terms than the one whose form it is, or lacks one that has items.
    """
    keys = [key_of(term, form.fixed) for term in terms]
    if keys == list(form.keys):
        return form.of_terms
    needed = {one for one in form.of_terms if one and form.has_items(one, own)}
    found = _by_keys(form, keys, own)
    if found is not None and needed <= set(found):
        return tuple(found)
    # Plain numbers that are equal here may have been taken for each other.
    products: Sequence[Product | None] = form.of_terms
    if len(terms) != len(products):
        products = [one for one in products if one is None or form.has_items(one, own)]
    if len(terms) != len(products):
        raise NotCountedError(f"it has {len(terms)} terms, and had {len(form.of_terms)} before: {ADVICE}")
    for term, product in zip(terms, products, strict=True):
        factors = [(float(value(one.count)), -one.power) for one in _counted(term, form.fixed)]
        is_same = (product is None) is (term.factors is None) and (product is None or form.has_items(product, own))
        divisors = [one**power if one else 0.0 for one, power in factors]
        if not is_same or (product and not math.isclose(math.prod(divisors), form.divisor(product, own), rel_tol=1e-3)):
            raise NotCountedError(f"it has other terms than before: {ADVICE}")
    return tuple(products)


def _by_keys(form: LossForm, keys: Sequence[TermKey | None], own: Measured) -> list[Product | None] | None:
    """The products of terms with some keys; None: they do not tell."""
    known: dict[TermKey | None, list[Product | None]] = {}
    for key, product in zip(form.keys, form.of_terms, strict=True):
        known.setdefault(key, []).append(product)
    left: dict[TermKey | None, list[Product | None]] = {}
    for key in dict.fromkeys(keys):
        products, number = known.get(key, []), keys.count(key)
        if len(set(products)) == 1:
            left[key] = [products[0]] * number
            continue
        if len(products) != number:
            products = [one for one in products if one is None or form.has_items(one, own)]
        if len(products) != number:
            return None
        left[key] = list(products)
    return [left[key].pop(0) for key in keys]


def combined(
    form: LossForm, terms: Sequence[Term], products: Sequence[Product | None], shares: Callable[[Product], float]
) -> Tensor | None:
    """A loss with each of its terms times the share of its product; None: no term has items.

    Args:
        form: of the loss.
        terms: of it.
        products: of the terms; see :func:`matched`.
        shares: of a product.
    """
    total: Tensor | None = None
    for term, product in zip(terms, products, strict=True):
        share = shares(next(filter(None, form.products), ()) if product is None else product)
        if share:
            value = torch.as_tensor(term.make()) * share
            total = value if total is None else total + value
    return total


def observed(terms: Iterable[Term]) -> list[TermFactor]:
    """The factors whose numbers depend on what the model computed."""
    return [factor for term in terms for factor in term.factors or () if factor.is_observed]
