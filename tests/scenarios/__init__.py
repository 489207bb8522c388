"""Scenario scripts: what happens to a run, and the full call log that must follow."""
