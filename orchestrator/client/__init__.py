"""For rollout producers: send trajectories to a running orchestrator, and hear what it wants."""
