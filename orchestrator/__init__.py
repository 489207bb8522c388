"""The orchestrator: packs micro-batches from rollout groups and drives a TrainerWorker."""
