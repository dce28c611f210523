"""How a model can be divided, found out by running copies of its blocks; checked by number."""
