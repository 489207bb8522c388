"""The orchestrator as a service: pause, stop, liveness, the admin port, the status page."""
