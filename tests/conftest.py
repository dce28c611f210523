"""One thread per process, set before torch loads: bit-equality needs equal kernels, and threads split sums."""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_collection_finish() -> None:
    """What was imported stays until the end; a tenth of the time went into looking for garbage among it."""
    gc.collect()
    gc.freeze()
