"""Models and GPUs: their sizes, floating-point operations, parameters, times and memory; presets by name."""

from holmes.planning.model.gpt import Transformer
from holmes.planning.model.gpus import gpu_named
from holmes.planning.model.presets import load_model

__all__ = ["Transformer", "gpu_named", "load_model"]
