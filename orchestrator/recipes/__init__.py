"""Recipes: one typed file that becomes flags, environment and manifests. Pure until `main` writes.

Reads files and prints text; starts nothing, connects to nothing.
"""
