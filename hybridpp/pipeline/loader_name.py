"""What an iterator of batches is, in words, for whom it keeps waiting."""

import os
from types import GeneratorType
from typing import Any

from hybridpp.nn.torch_private import dataset_of, num_workers_of
from hybridpp.pipeline.read_ahead import ReadAheadIterator


def loader_name(iterator: Any) -> str:
    """For example ``a DataLoader of Subset of ImageFolder (4 workers)``, or ``the generator batches (train.py:31)``.

    Nothing is called that may change the iterator.
    """
    while isinstance(iterator, ReadAheadIterator):
        iterator = iterator.source
    if isinstance(iterator, GeneratorType):
        code = iterator.gi_code
        return f"the generator {code.co_qualname} ({os.path.relpath(code.co_filename)}:{code.co_firstlineno})"
    dataset = dataset_of(iterator)
    if dataset is None:
        return f"an iterator of class {type(iterator).__name__}"
    names: list[str] = []
    while dataset is not None and len(names) < 4:
        names.append(type(dataset).__name__)
        # As Subset and other datasets of datasets have it.
        dataset = vars(dataset).get("dataset") if hasattr(dataset, "__dict__") else None
    workers = num_workers_of(iterator)
    count = f" ({workers} worker{'s' if workers > 1 else ''})" if workers else ""
    return f"a DataLoader of {' of '.join(names)}{count}"
