"""What Tandem needs to know of each array framework.

One small class each: how its arrays come in (`to_input`), how memory of a buffer goes out
(`from_view`), how a fresh array is made (`empty`), and which stream its GPU work is on. None is
imported before an array of it turns up. Frameworks that are not listed come in through DLPack and
get `View`s back, which are DLPack producers themselves.
"""

from __future__ import annotations

import sys
from typing import Any, Optional

from . import _tandem
from ._tandem import Dispatched, DType, Input, View

CPU_DEVICE = 1
CUDA_DEVICE = 2


LEGACY_STREAM = 1  # cudaStreamLegacy: the default stream, which frameworks number 0


def stream_handle(stream: Any) -> int:
    """A cudaStream_t as a number, from one or from a framework's stream object. Never 0, which the
    library takes for its own choice."""
    return _stream_number(stream) or LEGACY_STREAM


def _stream_number(stream: Any) -> int:
    if isinstance(stream, int):
        return stream
    for attribute in ("cuda_stream", "ptr", "handle"):  # torch, CuPy, Numba and cuda.core
        value = getattr(stream, attribute, None)
        if value is not None:
            return int(getattr(value, "value", value))
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return int(protocol()[1])
    raise TypeError(f"stream is {type(stream).__name__}, must be a number or a framework's stream")


class Framework:
    """Any framework with DLPack; the base of those known by name."""

    name = "dlpack"

    def to_input(self, array: Any, what: str, *, writable: bool = False, stream: int = 0) -> Input:
        """Describes `array` to the library, without a copy."""
        if not hasattr(array, "__dlpack__"):
            raise TypeError(f"{what} is {type(array).__name__}, which has no __dlpack__")
        # DLPack numbers the legacy default stream, 0 for CUDA, as 1.
        return _tandem.from_dlpack(array, what, None, writable, stream or 1)

    def from_view(self, view: View) -> Any:
        """An array over the view's memory (JAX: a copy, since its arrays never change)."""
        return view

    def empty(self, shape: tuple[int, ...], dtype: DType, like: Any) -> Any:
        """A fresh array on the device of `like`."""
        raise TypeError(
            f"cannot make arrays of {type(like).__module__}: give `out` (and `recv_x`) yourself"
        )

    def dtype_of(self, dtype: Any) -> Optional[DType]:
        """The library's name of one of the framework's dtypes, None if it has none."""
        return None

    def current_stream(self, device_id: int) -> int:
        """The stream that the framework's own work is queued on, for the caller's thread; 0 if it
        does not say."""
        return 0

    def settle(self, dispatched: Dispatched) -> None:
        """Called when an operation of this dispatch is queued: waits for it where the framework's
        own work would not."""


class Numpy(Framework):
    """numpy, with bf16 and fp8 from ml_dtypes. Host memory only."""

    name = "numpy"

    def __init__(self) -> None:
        import numpy

        self._numpy = numpy
        self._by_name = {
            "bfloat16": DType.BFLOAT16,
            "float16": DType.FLOAT16,
            "float32": DType.FLOAT32,
            "float8_e4m3fn": DType.FLOAT8_E4M3,
            "int32": DType.INT32,
            "int64": DType.INT64,
        }

    def numpy_dtype(self, dtype: DType) -> Any:
        names = {value: key for key, value in self._by_name.items()}
        if dtype in (DType.BFLOAT16, DType.FLOAT8_E4M3):
            try:
                import ml_dtypes
            except ImportError as error:
                raise ImportError("numpy needs the package ml_dtypes for bf16 and fp8") from error
            return self._numpy.dtype(getattr(ml_dtypes, names[dtype]))
        return self._numpy.dtype(names[dtype])

    def dtype_of(self, dtype: Any) -> Optional[DType]:
        try:
            return self._by_name.get(self._numpy.dtype(dtype).name)
        except TypeError:
            return None

    def to_input(self, array: Any, what: str, *, writable: bool = False, stream: int = 0) -> Input:
        array = self._numpy.asanyarray(array)
        if array.dtype.kind != "V" and array.dtype.isbuiltin == 1:
            return _tandem.from_buffer(array, what, None, writable)
        # bf16 and fp8 pass neither through DLPack nor through the buffer protocol: their bits do.
        dtype = self.dtype_of(array.dtype)
        if dtype is None:
            raise TypeError(f"{what} is {array.dtype}, which no operation takes")
        bits = array.view(f"u{array.dtype.itemsize}")
        return _tandem.from_buffer(bits, what, dtype, writable)

    def from_view(self, view: View) -> Any:
        array = self._numpy.asarray(view)
        if view.dtype in (DType.BFLOAT16, DType.FLOAT8_E4M3):
            array = array.view(self.numpy_dtype(view.dtype))
        return array

    def empty(self, shape: tuple[int, ...], dtype: DType, like: Any) -> Any:
        return self._numpy.empty(shape, self.numpy_dtype(dtype))


class Torch(Framework):
    """PyTorch, on the CPU and on the GPU."""

    name = "torch"

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._to_dtype = {
            torch.bfloat16: DType.BFLOAT16,
            torch.float16: DType.FLOAT16,
            torch.float32: DType.FLOAT32,
            torch.float8_e4m3fn: DType.FLOAT8_E4M3,
            torch.int32: DType.INT32,
            torch.int64: DType.INT64,
        }
        self._from_dtype = {value: key for key, value in self._to_dtype.items()}

    def dtype_of(self, dtype: Any) -> Optional[DType]:
        return self._to_dtype.get(dtype)

    def torch_dtype(self, dtype: DType) -> Any:
        return self._from_dtype[dtype]

    def to_input(self, array: Any, what: str, *, writable: bool = False, stream: int = 0) -> Input:
        # Asked for its facts rather than for a capsule: several times as fast, and no framework
        # version refuses a dtype, a device or a tensor that requires gradients.
        dtype = self._to_dtype.get(array.dtype)
        if dtype is None:
            raise TypeError(f"{what} is {array.dtype}, which no operation takes")
        device = array.device
        kind = {"cpu": CPU_DEVICE, "cuda": CUDA_DEVICE}.get(device.type)
        if kind is None:
            raise TypeError(f"{what} is on device {device.type}, must be on cpu or cuda")
        return _tandem.from_pointer(
            array, what, dtype, array.data_ptr(), tuple(array.shape), array.stride(),
            kind, device.index or 0,
        )  # fmt: skip

    def from_view(self, view: View) -> Any:
        if view.dtype == DType.FLOAT8_E4M3:  # not every version takes fp8 through DLPack
            return self._torch.from_dlpack(view.bits()).view(self._torch.float8_e4m3fn)
        return self._torch.from_dlpack(view)

    def empty(self, shape: tuple[int, ...], dtype: DType, like: Any) -> Any:
        return self._torch.empty(shape, dtype=self._from_dtype[dtype], device=like.device)

    def current_stream(self, device_id: int) -> int:
        return stream_handle(self._torch.cuda.current_stream(device_id))


class Cupy(Framework):
    """CuPy. GPU memory only. bf16 and fp8 are those of ml_dtypes where the version of CuPy knows
    them, else their bits as uint16 and uint8, which are taken for them on the way in too."""

    name = "cupy"

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        self._numpy = Numpy()

    def dtype_of(self, dtype: Any) -> Optional[DType]:
        bits = {"uint16": DType.BFLOAT16, "uint8": DType.FLOAT8_E4M3}
        known = self._numpy.dtype_of(dtype)
        return bits.get(getattr(dtype, "name", "")) if known is None else known

    def to_input(self, array: Any, what: str, *, writable: bool = False, stream: int = 0) -> Input:
        dtype = self.dtype_of(array.dtype)
        if dtype is None:
            raise TypeError(f"{what} is {array.dtype}, which no operation takes")
        size = array.dtype.itemsize
        strides = tuple(stride // size for stride in array.strides)
        return _tandem.from_pointer(
            array, what, dtype, array.data.ptr, array.shape, strides, CUDA_DEVICE, array.device.id
        )

    def _named(self, bits: Any, dtype: DType) -> Any:
        try:
            return bits.view(self._numpy.numpy_dtype(dtype))
        except (ImportError, KeyError, NotImplementedError, TypeError, ValueError):
            return bits

    def from_view(self, view: View) -> Any:
        if view.dtype in (DType.BFLOAT16, DType.FLOAT8_E4M3):
            return self._named(self._cupy.from_dlpack(view.bits()), view.dtype)
        return self._cupy.from_dlpack(view)

    def empty(self, shape: tuple[int, ...], dtype: DType, like: Any) -> Any:
        if dtype in (DType.BFLOAT16, DType.FLOAT8_E4M3):
            bits = "uint16" if dtype == DType.BFLOAT16 else "uint8"
            return self._named(self._cupy.empty(shape, bits), dtype)
        return self._cupy.empty(shape, self._numpy.numpy_dtype(dtype))

    def current_stream(self, device_id: int) -> int:
        return stream_handle(self._cupy.cuda.get_current_stream())


class Jax(Framework):
    """JAX. Its arrays never change, so results are copies and `next_combine_buffer` is not for it.
    int64 results are numpy arrays unless jax_enable_x64 is set.

    On the GPU, JAX does not say which streams it uses: inputs are waited for, and results too.
    """

    name = "jax"

    def __init__(self) -> None:
        import jax

        self._jax = jax
        self._numpy = Numpy()

    @staticmethod
    def _on_cpu(array: Any) -> bool:
        return bool(next(iter(array.devices())).platform == "cpu")

    def dtype_of(self, dtype: Any) -> Optional[DType]:
        return self._numpy.dtype_of(dtype)

    def to_input(self, array: Any, what: str, *, writable: bool = False, stream: int = 0) -> Input:
        array.block_until_ready()
        dtype = self.dtype_of(array.dtype)
        if dtype is None:
            raise TypeError(f"{what} is {array.dtype}, which no operation takes")
        if self._on_cpu(array):
            # `writable` only for arrays that `empty` made and nobody has seen yet.
            shape, data = array.shape, array.unsafe_buffer_pointer()
            return _tandem.from_pointer(
                array, what, dtype, data, shape, _dense_strides(shape), CPU_DEVICE, 0
            )
        device = next(iter(array.devices()))
        return _tandem.from_pointer(
            array, what, dtype, array.unsafe_buffer_pointer(), array.shape,
            _dense_strides(array.shape), CUDA_DEVICE, device.local_hardware_id,
        )  # fmt: skip

    def from_view(self, view: View) -> Any:
        # Without jax_enable_x64 JAX has no int64, and would cut the halves of `ranges` off.
        as_numpy = view.dtype == DType.INT64 and not self._jax.config.jax_enable_x64
        if view.__dlpack_device__()[0] == CPU_DEVICE:
            array = self._numpy.from_view(view)
            return array.copy() if as_numpy else self._jax.numpy.array(array, copy=True)
        to = self._numpy if as_numpy else self
        result = to.empty(view.shape, view.dtype, None)
        source = _tandem.from_pointer(
            view, "view", view.dtype, view.data, view.shape, view.strides,
            *view.__dlpack_device__(),
        )  # fmt: skip
        _tandem.copy_from_gpu(to.to_input(result, "copy", writable=True), source)
        return result

    def settle(self, dispatched: Dispatched) -> None:
        offsets = dispatched.offsets
        if offsets is not None and offsets.__dlpack_device__()[0] != CPU_DEVICE:
            self.from_view(offsets)  # a copy on the same stream, which is waited for

    def empty(self, shape: tuple[int, ...], dtype: DType, like: Any) -> Any:
        device = None if like is None else next(iter(like.devices()))
        with self._jax.default_device(device):
            # Not `empty`, which may be one constant shared by all who ask for it.
            result = self._jax.numpy.array(
                self._numpy.empty(shape, dtype, None), dtype=self._numpy.numpy_dtype(dtype)
            )
        return result.block_until_ready()


def _dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = []
    stride = 1
    for extent in reversed(shape):
        strides.append(stride)
        stride *= extent
    return tuple(reversed(strides))


_KNOWN = {"numpy": Numpy, "torch": Torch, "cupy": Cupy, "jax": Jax, "jaxlib": Jax}
_instances: dict[str, Framework] = {}


def framework_of(array: Any) -> Framework:
    """The framework that an array is of, by the module that its type is defined in."""
    root = type(array).__module__.partition(".")[0]
    instance = _instances.get(root)
    if instance is None:
        for base in type(array).__mro__:  # subclasses defined elsewhere (torch's Parameter, ...)
            root = base.__module__.partition(".")[0]
            if root in _KNOWN:
                break
        instance = _instances.setdefault(root, _KNOWN.get(root, Framework)())
    return instance


def parse_dtype(dtype: Any) -> DType:
    """A DType from one, from its name ("bf16", ...) or from a framework's dtype."""
    if isinstance(dtype, DType):
        return dtype
    if isinstance(dtype, str) and dtype in _tandem.DTYPES:
        named: DType = _tandem.DTYPES[dtype]
        return named
    roots = {type(dtype).__module__.partition(".")[0]}
    if isinstance(dtype, type):
        roots.add(dtype.__module__.partition(".")[0])
    for root in ("torch", "numpy"):
        if root == "torch" and root not in roots:
            continue
        if root in sys.modules:
            framework = _instances.setdefault(root, _KNOWN[root]())
            found = framework.dtype_of(dtype)
            if found is not None:
                return found
    raise ValueError(f"dtype is {dtype!r}, must be one of {', '.join(_tandem.DTYPES)}")
