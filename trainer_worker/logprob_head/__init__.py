"""Hidden states to per-token log-probs and entropy: three heads behind one function.

`token_logprobs` is the only way in. Importing this package initialises no jax backend.
"""

from trainer_worker.logprob_head.config import (
    HeadConfig,
    HeadConfigError,
    HeadMode,
    TokenLogprobs,
)
from trainer_worker.logprob_head.layout import head_param_spec, token_spec
from trainer_worker.logprob_head.select import token_logprobs

__all__ = [
    "HeadConfig",
    "HeadConfigError",
    "HeadMode",
    "TokenLogprobs",
    "head_param_spec",
    "token_logprobs",
    "token_spec",
]
