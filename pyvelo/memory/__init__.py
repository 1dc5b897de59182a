"""Sizes before anything is allocated: host memory, pool size, layers on GPUs."""
