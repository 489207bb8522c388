"""Rollouts coming in over gRPC: the service, its flow control, and what samplers are told."""
