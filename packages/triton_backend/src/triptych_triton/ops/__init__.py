"""One module an op, named as the op."""
