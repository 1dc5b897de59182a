"""`python -m pyvelo`."""

from pyvelo.cli import main

main()
