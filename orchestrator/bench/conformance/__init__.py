"""The protocol's conformance suite, for any TrainerWorker server, whatever engine or language."""
