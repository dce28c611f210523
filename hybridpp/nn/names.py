"""Dotted names of modules and of what they hold, and of packages."""

OWN_PACKAGES = ("hybridpp", "hybridpp_plugins")
LIBRARIES = (*OWN_PACKAGES, "torch")
"""Packages whose code is not the script's, nor of a library of models."""


def qualified(prefix: str, name: str) -> str:
    """``name`` inside the module ``prefix``; either may be empty: the module itself.

    Example:
        >>> qualified("layers.0", "weight"), qualified("", "weight"), qualified("layers.0", "")
        ('layers.0.weight', 'weight', 'layers.0')
    """
    return f"{prefix}.{name}" if prefix and name else prefix or name
