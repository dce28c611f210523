import pytest
from torch.utils.data import DataLoader

from hybridpp.pipeline import ReadAheadIterator


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
