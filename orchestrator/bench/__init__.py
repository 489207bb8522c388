"""Benchmarks and proof tools: a leaf that no other package imports."""
