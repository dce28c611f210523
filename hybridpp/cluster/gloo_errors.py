"""Errors of gloo's communications. Gloo has no type for them: they are known by their text."""

# It names the source: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:533].
_SOURCES = "gloo/gloo/"
# Of all waits on a connection of which another one has timed out. It names nothing.
_CLOSED = "Application timeout caused pair closure"


def is_gloo_error(error: BaseException) -> bool:
    """Whether a communication of gloo failed."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in (_SOURCES, _CLOSED))


def is_gloo_timeout(error: RuntimeError) -> bool:
    """Whether it failed because nothing came in time."""
    return "imed out" in str(error) or _CLOSED in str(error)
