"""Hidden states to per-token log-probs and entropy: three heads behind one function.

`token_logprobs` is the only way in. Importing this package initialises no jax backend.
"""

from trainer_worker.logprob_head.config import (
    HeadConfig,
    HeadConfigError,
    HeadMode,
    TokenLogprobs,
)
from trainer_worker.logprob_head.select import token_logprobs

__all__ = ["HeadConfig", "HeadConfigError", "HeadMode", "TokenLogprobs", "token_logprobs"]
