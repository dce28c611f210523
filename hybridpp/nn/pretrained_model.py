"""Whether a model is transformers' own, without importing transformers: that takes 4 s on every rank."""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeGuard

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def is_pretrained_model(module: nn.Module) -> "TypeGuard[PreTrainedModel]":
    """Whether a module is a ``transformers.PreTrainedModel``; whoever has made one has imported transformers."""
    loaded = sys.modules.get("transformers.modeling_utils")
    return loaded is not None and isinstance(module, loaded.PreTrainedModel)


def has_cache_switch(module: nn.Module) -> bool:
    """Whether a module is a transformers model that caches keys and values if its config says so (``use_cache``)."""
    return is_pretrained_model(module) and "use_cache" in inspect.signature(type(module).forward).parameters


def attends_over_packed(module: nn.Module) -> bool:
    """Whether tokens of a packed row attend to those of other sequences.

    transformers makes no mask from the positions of a packed row where it makes a cache. Kernels that get the lengths
    of the sequences (flash attention) need none.
    """
    config = getattr(module, "config", None)
    implementation = str(getattr(config, "_attn_implementation", ""))
    return has_cache_switch(module) and bool(getattr(config, "use_cache", False)) and "flash" not in implementation


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """A context in which transformers shows no progress: of what it does on the meta device, and on every rank."""
    from transformers.utils import logging  # noqa: PLC0415  # see the first line

    is_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers
    try:
        yield
    finally:
        if is_shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]  # transformers
