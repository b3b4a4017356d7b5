"""python -m deltaproof: the command `deltaproof`."""

from .program import main

main()
