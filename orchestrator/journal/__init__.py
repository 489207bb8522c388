"""The durable order of rollouts: what came in, in which order, and what each step was made of."""
