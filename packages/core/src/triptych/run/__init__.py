"""Running commands: preflight, one command with inherited input and output, one trial with everything captured."""
