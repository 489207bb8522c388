"""Drives a MaxText or Tunix trainer that the user builds: the worker's engine `maxtext`."""
