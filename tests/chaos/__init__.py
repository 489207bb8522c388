"""Real processes, killed and disturbed at exact calls; every run must end as an undisturbed one."""
