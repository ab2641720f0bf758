"""Config: tuning of the high-throughput kernels, which are not here.

Programs ask it for sizes before they make a buffer; those kernels need no memory here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Config:
    """Accepted and kept; nothing reads it."""

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0: high-throughput kernels are not provided."""
        return 0

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0: high-throughput kernels are not provided."""
        return 0
