"""The low-latency interface of DeepEP V1, carried out by Tandem; docs/from_deep_ep.md compares.

Ranks on CPUs (torch over gloo) work like ranks on GPUs.
"""

import torch

import tandem_ep

from .buffer import Buffer
from .config import Config
from .utils import EventHandle, EventOverlap

topk_idx_t = torch.int64

__version__ = f"1.2.1+tandem.{tandem_ep.__version__}"
__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "topk_idx_t"]
