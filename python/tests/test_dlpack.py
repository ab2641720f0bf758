"""A framework that Tandem has never heard of: DLPack alone carries its arrays in and out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tandem_ep
from oracle import BF16, Case, combined
from pair import buffer_options


class Foreign:
    """An array with nothing but DLPack."""

    def __init__(self, array: Any, old: bool = False) -> None:
        self.array = array
        self.shape = tuple(array.shape)
        self.old = old
        self.asked: list[dict[str, Any]] = []

    def __dlpack__(self, **options: Any) -> Any:
        self.asked.append(options)
        if self.old and "max_version" in options:
            raise TypeError("unexpected keyword argument 'max_version'")
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("old", [False, True], ids=["versioned", "unversioned"])
def test_unknown_framework(old: bool) -> None:
    case = Case([5, 3], 8, 96, 4, 2)

    def body(communicator: tandem_ep.Communicator) -> None:
        rank = communicator.rank
        with tandem_ep.Buffer(communicator, **buffer_options(case)) as buffer:
            x = torch.from_numpy(case.x[rank].view(np.int16)).view(torch.bfloat16)
            out = torch.empty_like(x)
            received = buffer.dispatch(Foreign(x, old), Foreign(torch.from_numpy(case.idx[rank])))
            assert isinstance(received.x, tandem_ep.View)
            assert received.x.shape == (2, 16, 96) and received.x.strides == (16 * 96, 96, 1)
            rows, counts = torch.from_dlpack(received.x), np.asarray(received.counts)
            y = torch.from_dlpack(buffer.next_combine_buffer(received.handle))
            for local, expert in enumerate(buffer.local_experts):
                filled = slice(0, int(counts[local]))
                y[local, filled] = rows[local, filled] * (1 + expert % 7)
            staged = Foreign(y, old)
            buffer.combine(staged, case.weights[rank], received.handle, Foreign(out, old))
            wanted = combined(case, rank, BF16)
            assert out.view(torch.int16).numpy().tobytes() == wanted.tobytes()
            with pytest.raises(TypeError, match="give `out`"):
                buffer.combine(staged, case.weights[rank], received.handle)
            with pytest.raises(TypeError, match="give `out` \\(and `recv_x`\\)"):
                buffer.dispatch(
                    Foreign(x), Foreign(torch.from_numpy(case.idx[rank])), return_hook=True
                )

    tandem_ep.run_threads(2, body)


def test_view_is_what_its_consumers_expect() -> None:
    def body(communicator: tandem_ep.Communicator) -> None:
        case = Case([4], 4, 64, 4, 2)
        with tandem_ep.Buffer(communicator, **buffer_options(case)) as buffer:
            received = buffer.dispatch(case.x[0], case.idx[0], format="fp8")
            views = {
                name: getattr(received.handle._inner, name)
                for name in ("x", "scales", "counts", "offsets", "ranges", "source_tokens")
            }
            kinds = {name: np.asarray(view).dtype.str for name, view in views.items()}
            assert kinds == {
                "x": "|u1",
                "scales": "<f4",
                "counts": "<i4",
                "offsets": "<i8",
                "ranges": "<i8",
                "source_tokens": "<i4",
            }
            for name, view in views.items():
                same = torch.from_dlpack(view.bits() if name == "x" else view)
                assert same.data_ptr() == view.data
                assert same.shape == view.shape and same.stride() == view.strides
                assert np.from_dlpack(view.bits()).__array_interface__["data"][0] == view.data
            assert np.from_dlpack(views["counts"]).flags.writeable

    tandem_ep.run_threads(1, body)
