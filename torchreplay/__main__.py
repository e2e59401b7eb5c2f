"""`python -m torchreplay` is the command line."""

from torchreplay.cli import main

main(prog_name="torchreplay")
