"""`python -m lockstep` and `torchrun -m lockstep` are the command `lockstep`."""

from .cli import main

main()
