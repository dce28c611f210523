import pytest
from torch.utils.data import DataLoader

from hybridpp.pipeline import ReadAheadIterator
from hybridpp.pipeline.read_ahead import PreparedItems


def test_an_item_that_was_looked_at_is_returned_next():
    items = ReadAheadIterator(iter("abc"))
    assert (items.peek(), items.peek(), next(items), next(items), items.peek()) == ("a", "a", "a", "b", "c")
    assert items.num_taken == 2
    assert list(items) == ["c"]


def test_an_error_is_raised_at_its_place_and_the_rest_follows():
    class Items:
        def __init__(self):
            self.number = 0

        def __next__(self):
            self.number += 1
            if self.number == 2:
                raise OSError("the disk is gone")
            return self.number

    items = ReadAheadIterator(Items())
    assert next(items) == 1
    for look in (items.peek, items.peek, lambda: next(items)):
        with pytest.raises(OSError, match="the disk is gone"):
            look()
    assert (items.num_taken, next(items)) == (2, 3)


def test_the_end_comes_again():
    items = ReadAheadIterator(iter("a"))
    assert items.peek() == "a"
    items.skip()
    for look in (items.peek, lambda: next(items), lambda: next(items)):
        with pytest.raises(StopIteration):
            look()


def test_an_interrupt_is_not_kept_for_later():
    class Items:
        def __next__(self):
            raise KeyboardInterrupt

    items = ReadAheadIterator(Items())
    with pytest.raises(KeyboardInterrupt):
        items.peek()
    assert items.num_taken == 0


def test_it_has_the_length_and_attributes_of_a_dataloaders_iterator():
    inner = iter(DataLoader([1, 2, 3], batch_size=2))
    items = ReadAheadIterator(inner)
    assert len(items) == 2
    assert items._index_sampler is inner._index_sampler
    with pytest.raises(AttributeError):
        items.no_such_thing  # noqa: B018


def prepared(uses):
    """Which items are prepared, of those that an iterator gives to uses one after another, and the log."""
    items, data, found = PreparedItems("the next step"), ReadAheadIterator(iter(range(len(uses) + 1))), []
    for use in uses:
        ahead = items.take(data, use)
        if ahead is None or not ahead[1]:
            next(data)
        found.append(ahead)
        if items.may_prepare(data):
            items.put(data, data.peek(), use)
    return found


def test_items_are_prepared_for_the_use_before():
    assert prepared("aaa") == [None, (1, True), (2, True)]


def test_one_other_use_is_no_reason_to_stop(caplog):
    assert prepared("aabbbaa") == [None, (1, True), (2, False), (3, True), (4, True), (5, False), (6, True)]
    assert caplog.messages == []


def test_two_other_uses_in_a_row_are_and_the_script_is_warned_once(caplog):
    assert prepared("ababaa") == [None, (1, False), (2, False), None, None, None]
    (message,) = caplog.messages
    assert message.endswith(
        "2 batches in a row were read ahead for the next step and then used otherwise: the script took them itself, or "
        "another model, criterion or gradient mode used the iterator. From this iterator, no more are read ahead, so "
        "every step waits until all ranks have read their batches. Make an iterator for each use: iter(dataloader)."
    )


def test_each_iterator_counts_for_itself_but_one_warning_is_enough(caplog):
    items, iterators = PreparedItems("the next step"), [ReadAheadIterator(iter(range(9))) for _ in range(3)]
    for data in iterators[:2]:
        for use in ("a", "b"):
            items.put(data, 0, use)
            items.take(data, None)
    assert [items.may_prepare(data) for data in iterators] == [False, False, True]
    assert len(caplog.messages) == 1
