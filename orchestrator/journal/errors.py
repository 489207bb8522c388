"""What can go wrong with a journal. Every message names the folder or key, the value and the fix.

JournalError                 the journal cannot be used (any more)
|- JournalBusy               another live process holds it
|- JournalMismatch           it was written by a run with other settings
`- JournalDamaged            acknowledged data is missing or not what was written
"""

from __future__ import annotations


class JournalError(Exception):
    """The journal cannot be used (any more)."""


class JournalBusy(JournalError):
    """Another live process holds the journal."""


class JournalMismatch(JournalError):
    """The journal was written by a run with other settings."""


class JournalDamaged(JournalError):
    """Acknowledged data is missing, or is not what was written."""
