"""Recipes for tests: the shipped ones with stand-in digests, and the smallest one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from orchestrator.recipes.load import read_recipe
from orchestrator.recipes.resolve import Settings, resolve

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "deploy" / "recipes"
SHIPPED = ("cpu", "tpu-one-host", "gbs1024-submission")
IMAGES = {
    "orchestrator_image": f"registry.example/prestage@sha256:{'0' * 64}",
    "worker_image": f"registry.example/prestage@sha256:{'1' * 64}",
}
SMALLEST: Mapping[str, str] = {
    "name": "demo",
    "num_steps": "10",
    "rows": "4",
    "tokens_per_row": "640",
    "rollouts": "/var/lib/prestage/rollouts.parquet",
    **IMAGES,
}
TPU: Mapping[str, str] = {
    **SMALLEST,
    "engine": "maxtext",
    "trainer_factory": "team.trainer:make",
    "accelerator": "tpu",
    "tpu_topology": "2x2x1",
}


def shipped(name: str, **caller: str) -> Settings:
    return resolve(read_recipe(RECIPES / f"{name}.yaml"), {**IMAGES, **caller})


def demo(recipe: Mapping[str, str] | None = None, **caller: str) -> Settings:
    """The smallest recipe with more in it."""
    return resolve({**SMALLEST, **(recipe or {})}, caller)


def on_tpu(recipe: Mapping[str, str] | None = None, **caller: str) -> Settings:
    """The same with engine maxtext on one TPU host."""
    return resolve({**TPU, **(recipe or {})}, caller)
