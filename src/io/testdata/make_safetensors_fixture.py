#!/usr/bin/env python3
"""Writes hf_small.safetensors with Hugging Face's own library (pip install safetensors numpy; made with 0.7 or later)."""
import pathlib

import numpy as np
from safetensors.numpy import save_file

save_file(
    {
        "layers.0.weight": np.arange(6, dtype=np.float32).reshape(2, 3) / 4,
        "step": np.array([2**40 + 1], dtype=np.int64),
        "scalar": np.array(2.5, dtype=np.float32),
        "empty": np.zeros((0, 4), dtype=np.float32),
        "bytes": np.array([1, 2, 255], dtype=np.uint8),
        "half": np.array([1.0, -2.0], dtype=np.float16),
        'näme "quoted"\\': np.array([True, False], dtype=np.bool_),
    },
    pathlib.Path(__file__).resolve().parent / "hf_small.safetensors",
    metadata={"format": "np", "note": "line\nbreak"},
)
