"""Tests of PyVelo, in the same folders as the package."""

import os

for name, value in (("OPENBLAS_NUM_THREADS", "1"), ("OMP_WAIT_POLICY", "passive")):
    os.environ.setdefault(name, value)  # threads that spin take the cores of other workers
