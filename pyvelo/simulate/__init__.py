"""Simulation without a model: workloads, the simulated engine, contiguous caches, metrics."""
