"""`python -m pyvelo.cli`."""

from pyvelo.cli import main

main()
