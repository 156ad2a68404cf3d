"""The program `triptych`: one file a command."""
