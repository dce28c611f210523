"""What the packages of one row share about modules and tensors: they may not import each other, but this."""
