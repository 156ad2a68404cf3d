"""One module an op; the module's name is the op's."""
