"""The ten lines of docs/frameworks.md work as they stand."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import torch

import tandem_ep

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "frameworks.md"
E, M, H, K = 6, 16, 256, 2


def experts(x: torch.Tensor, counts: torch.Tensor, out: torch.Tensor) -> None:
    rows = torch.arange(x.shape[1]) < counts[:, None]
    out[rows] = x[rows] * 2


def test_integration_of_the_page() -> None:
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert code is not None
    # The test's ranks are threads, which no process group knows.
    program = code[1].replace("Communicator.from_torch(group)", "Communicator(group._inner)")

    def body(communicator: tandem_ep.Communicator) -> None:
        generator = torch.Generator().manual_seed(communicator.rank)
        x = torch.randn(10 + communicator.rank, H, generator=generator).bfloat16()
        topk_idx = torch.rand(len(x), E, generator=generator).topk(K).indices
        weights = torch.rand(len(x), K, generator=generator)
        names: dict[str, Any] = {"group": communicator, "x": x, "E": E, "M": M, "H": H, "K": K}
        exec(program, names)
        for _ in range(3):
            out = names["mixture_of_experts"](x, topk_idx, weights, experts)
            expected = x.float() * 2 * weights.sum(1, keepdim=True)
            torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=1e-2)

    tandem_ep.run_threads(3, body)
