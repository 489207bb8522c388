"""What both programs need to be operated: signals, liveness, a watchdog, folders and HTTP addresses."""
