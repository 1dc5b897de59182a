"""Tests of PyVelo, in the same folders as the package."""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's threads spin, on cores that other workers need
