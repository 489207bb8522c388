"""What goes wrong when an engine is made."""


class EngineConfigError(Exception):
    """Engine flags that cannot be used; names the flag, its value and the fix."""
