"""Builds the engine from the factory that the user names. Imports it and nothing else of theirs."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Final, cast

from trainer_worker.engine import EngineParts
from trainer_worker.engines.errors import EngineConfigError
from trainer_worker.engines.maxtext.api import StagingTrainer, Trainer, TrainerFactory, TrainerSetup

SETTINGS_ENV: Final = "MAXTEXT_EXTRA_FLAGS"
"""The recipe's MaxText settings, `name=value`, separated by spaces."""


def load_factory(name: str) -> TrainerFactory:
    """`package.module:function`. Raises `EngineConfigError`."""
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise EngineConfigError(
            f"--trainer_factory is {name!r}: give package.module:function, which returns a"
            " TrainerSetup (docs/adapters.md)"
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise EngineConfigError(f"--trainer_factory {name}: {error}") from error
    found: object = vars(module).get(attribute)
    if not callable(found):
        raise EngineConfigError(f"--trainer_factory {name}: {module_name} has no such function")
    return cast(TrainerFactory, found)


def check_setup(name: str, setup: object) -> TrainerSetup:
    """What the factory says against what the trainer has. Raises `EngineConfigError`."""
    if not isinstance(setup, TrainerSetup):
        raise EngineConfigError(
            f"--trainer_factory {name} returned {type(setup).__name__}, not a TrainerSetup"
        )
    wanted = {"compile", "fwd_bwd", "update", "get_metrics", "close", "train_step"}
    trainer: object = setup.trainer
    if not isinstance(trainer, Trainer):
        lacks = sorted(wanted - set(dir(trainer)))
        raise EngineConfigError(f"--trainer_factory {name}: the trainer lacks {', '.join(lacks)}")
    if setup.can_stage and not isinstance(trainer, StagingTrainer):
        raise EngineConfigError(
            f"--trainer_factory {name} says can_stage, but the trainer lacks prepare_fwd_bwd_input"
            " or wait_for_device: use a MaxText that has them, or can_stage=False"
        )
    return setup


def create_maxtext(factory: str, environment: Mapping[str, str] | None = None) -> EngineParts:
    """Raises `EngineConfigError`."""
    environment = os.environ if environment is None else environment
    settings = environment.get(SETTINGS_ENV, "").split()
    if odd := [item for item in settings if "=" not in item]:
        raise EngineConfigError(f"{SETTINGS_ENV}: {odd[0]!r} is not name=value")
    setup = check_setup(factory, load_factory(factory)(settings))
    from trainer_worker.engines.maxtext.engine import MaxTextCheckpoints, MaxTextEngine

    engine = MaxTextEngine(setup)
    checkpoint = None if setup.checkpoints is None else MaxTextCheckpoints(engine, setup)
    return EngineParts(training=engine, checkpoint=checkpoint)
