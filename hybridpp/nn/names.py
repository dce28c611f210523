"""Dotted names of modules and of what they hold."""


def qualified(prefix: str, name: str) -> str:
    """``name`` inside the module ``prefix``; either may be empty: the module itself.

    Example:
        >>> qualified("layers.0", "weight"), qualified("", "weight"), qualified("layers.0", "")
        ('layers.0.weight', 'weight', 'layers.0')
    """
    return f"{prefix}.{name}" if prefix and name else prefix or name
