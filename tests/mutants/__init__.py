"""Named mistakes, each caught by a stated check. `python -m tests.mutants` prints the report."""
