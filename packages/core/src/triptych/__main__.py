"""`python -m triptych` is the program `triptych`."""

from triptych.cli.app import main

main()
