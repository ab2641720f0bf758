"""How the tests make arrays of each framework and look into them."""

from __future__ import annotations

from typing import Any, Optional

import numpy as np

from oracle import BF16, FP8


class Numpy:
    name = "numpy"

    @staticmethod
    def array(values: np.ndarray) -> Any:
        return values.copy()

    @staticmethod
    def to_numpy(array: Any) -> np.ndarray:
        assert isinstance(array, np.ndarray)
        return array

    @staticmethod
    def assign(destination: Any, source: Any) -> None:
        destination[...] = source


class Torch:
    name = "torch"
    device = "cpu"

    @classmethod
    def array(cls, values: np.ndarray) -> Any:
        import torch

        if values.dtype == BF16:
            tensor = torch.from_numpy(values.view(np.int16).copy()).view(torch.bfloat16)
        elif values.dtype == FP8:
            tensor = torch.from_numpy(values.view(np.uint8).copy()).view(torch.float8_e4m3fn)
        else:
            tensor = torch.from_numpy(values.copy())
        return tensor.to(cls.device)

    @classmethod
    def to_numpy(cls, array: Any) -> np.ndarray:
        import torch

        assert isinstance(array, torch.Tensor) and array.device.type == cls.device
        array = array.cpu()
        if array.dtype == torch.bfloat16:
            return array.view(torch.int16).numpy().view(BF16)
        if array.dtype == torch.float8_e4m3fn:
            return array.view(torch.uint8).numpy().view(FP8)
        return array.numpy()

    @staticmethod
    def assign(destination: Any, source: Any) -> None:
        destination[...] = source


class TorchCuda(Torch):
    name = "torch-cuda"
    device = "cuda"


class Cupy:
    name = "cupy"

    @staticmethod
    def array(values: np.ndarray) -> Any:
        """bf16 and fp8 as their bits, which are taken for them."""
        import cupy

        if values.dtype in (BF16, FP8):
            values = values.view(f"u{values.dtype.itemsize}")
        return cupy.asarray(np.ascontiguousarray(values))

    @staticmethod
    def to_numpy(array: Any) -> np.ndarray:
        import cupy

        assert isinstance(array, cupy.ndarray)
        size = array.dtype.itemsize
        if array.dtype in (np.int32, np.int64, np.float16, np.float32):
            return cupy.asnumpy(array)
        bits = array.view(f"u{size}")
        return cupy.asnumpy(bits).view(BF16 if size == 2 else FP8)

    @staticmethod
    def assign(destination: Any, source: Any) -> None:
        if destination.dtype != source.dtype:
            destination = destination.view(source.dtype)
        destination[...] = source


class Jax:
    name = "jax"

    @staticmethod
    def array(values: np.ndarray) -> Any:
        import jax.numpy as jnp

        return jnp.asarray(values)

    @staticmethod
    def to_numpy(array: Any) -> np.ndarray:
        import jax

        # int64 is not among JAX's types unless jax_enable_x64 is set.
        assert isinstance(array, np.ndarray if array.dtype == np.int64 else jax.Array)
        return np.asarray(array)


RESULTS = ("x", "scales", "counts", "offsets", "ranges", "source_tokens")


def to_numpy(framework: Any, result: Any) -> dict[str, Optional[np.ndarray]]:
    """A DispatchResult's arrays, looked into."""
    arrays = {name: getattr(result, name) for name in RESULTS}
    return {
        name: None if array is None else framework.to_numpy(array) for name, array in arrays.items()
    }
