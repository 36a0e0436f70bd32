"""Continual learning for PyTorch models: no replay, no growth."""

from .benchmarks import stream
from .curvature import sampled
from .encoding import permutation
from .layers import LayerMatrix, register
from .projection import Projection
from .rgo import RGO

__version__ = "0.1.0"
__all__ = ["RGO", "LayerMatrix", "Projection", "permutation", "register", "sampled", "stream"]
