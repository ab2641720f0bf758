"""Tandem: expert parallelism for every array framework, on CPU and GPU ranks.

Dispatch carries each token to the ranks that own its experts, combine brings the weighted results
back. Arrays of torch, numpy (bf16 and fp8 through ml_dtypes), CuPy, JAX and whatever else speaks
DLPack go in without a copy; results come back in the caller's framework.

    import tandem_ep

    communicator = tandem_ep.Communicator.from_environment()
    buffer = tandem_ep.Buffer(communicator, num_experts=64, max_tokens=128, max_hidden=7168)
    received = buffer.dispatch(x, topk_idx)
    y = buffer.next_combine_buffer(received.handle)
    ...  # each local expert: its rows of received.x to the same rows of y
    out = buffer.combine(y, topk_weights, received.handle)

`python -m tandem_ep.info` says what this build can do on this machine.
"""

from ._buffer import Buffer
from ._communicator import Communicator, run_threads
from ._error import Error
from ._results import DispatchHandle, DispatchResult, Hook
from ._tandem import MAX_HIDDEN, MAX_RANKS, MAX_TOPK, BackendInfo, ErrorCode, View, backends
from ._tandem import version as _version

__version__ = _version()
__all__ = [
    "MAX_HIDDEN",
    "MAX_RANKS",
    "MAX_TOPK",
    "BackendInfo",
    "Buffer",
    "Communicator",
    "DispatchHandle",
    "DispatchResult",
    "Error",
    "ErrorCode",
    "Hook",
    "View",
    "backends",
    "run_threads",
]
