"""What the package tandem_ep stands on; not meant to be used directly."""

from collections.abc import Callable, Sequence
import enum


class ErrorCode(enum.Enum):
    """What kind of error a tandem_ep.Error is."""

    INVALID_ARGUMENT = 0
    """An argument is wrong; nothing was sent."""

    CAPACITY = 1
    """The rows of this operation do not fit; every rank gets the same error."""

    ORDER = 2
    """The call would wait for itself (a hook not run, both halves reserved)."""

    STALE_HANDLE = 3
    """The handle's half was used again by a later dispatch."""

    TIMEOUT = 4
    """A wait reached the buffer's timeout; `peer` is who was missing."""

    MISMATCH = 5
    """A peer calls another operation or with other arguments."""

    UNREACHABLE = 6
    """Peers cannot load from and store to each other's memory."""

    UNSUPPORTED = 7
    """Not available here (backend not built, no device)."""

    RESOURCE = 8
    """The system refused memory, a descriptor, a thread or a process."""

    PEER_LOST = 9
    """
    A peer has ended or destroyed its end: during set-up, or while waited for.
    """

    FAILED_BUFFER = 10
    """
    An earlier operation on this buffer failed; the message repeats its error.
    """

    MASKED = 11
    """This rank has been masked by its peers; recover() lets it back."""

class DType(enum.Enum):
    """Type of an array's elements."""

    BFLOAT16 = 0

    FLOAT16 = 1

    FLOAT32 = 2

    FLOAT8_E4M3 = 3

    INT32 = 4

    INT64 = 5

class Format(enum.Enum):
    """What a dispatched row looks like."""

    BFLOAT16 = 0

    FLOAT16 = 1

    FLOAT32 = 2

    FP8 = 3

    FP8_POW2 = 4

    FP8_UE8M0 = 5

class Placement(enum.Enum):
    """How a dispatched row finds its place."""

    AUTOMATIC = 0

    PACKED = 1

    SLOTTED = 2

class Layout(enum.Enum):
    """The shape of what dispatch hands to the experts."""

    PADDED = 0

    PACKED = 1

class Backend(enum.Enum):
    """Where ranks live."""

    CPU = 0

    CUDA = 1

class OnTimeout(enum.Enum):
    """What becomes of an operation that a rank misses."""

    FAIL = 0
    """It fails on every rank."""

    MASK = 1
    """The rank is masked, and the operation ends without it."""

DTYPES: dict = ...

FORMATS: dict = ...

PLACEMENTS: dict = ...

LAYOUTS: dict = ...

BACKENDS: dict = {'cpu' : Backend.CPU, 'cuda' : Backend.CUDA}

ON_TIMEOUT: dict = ...

MAX_HIDDEN: int = 65536

MAX_TOPK: int = 64

MAX_RANKS: int = 1024

class BackendInfo:
    """What this build can do with one backend here."""

    @property
    def name(self) -> str: ...

    @property
    def built(self) -> bool: ...

    @property
    def usable(self) -> bool: ...

    @property
    def why_not(self) -> str:
        """If not usable: the reason, in a sentence."""

    @property
    def details(self) -> list[str]:
        """Devices, instruction sets, ..."""

def version() -> str:
    """Version of the library."""

def backends() -> list[BackendInfo]:
    """One entry per backend that the library knows, built or not."""

class Input:
    """An array on its way into an operation."""

    @property
    def dtype(self) -> DType:
        """Type of the elements."""

    @property
    def device(self) -> tuple:
        """DLPack's (device type, device id)."""

def from_dlpack(array: object, what: str, dtype: DType | None = None, writable: bool = False, stream: int = -1) -> Input:
    """Reads an array through DLPack."""

def from_buffer(array: object, what: str, dtype: DType | None = None, writable: bool = False) -> Input:
    """Reads an array through the buffer protocol."""

def from_pointer(array: object, what: str, dtype: DType, data: int, shape: tuple, strides: tuple, device_type: int, device_id: int) -> Input:
    """Describes an array whose facts are known; strides in elements."""

def copy_from_gpu(destination: Input, source: Input) -> None:
    """
    Copies from a GPU array to one of its dtype and shape anywhere, and waits for it.
    """

class View:
    """
    Memory of a buffer, for any framework to take without a copy (numpy.asarray,
    torch.from_dlpack, ...). Keeps the buffer alive.
    """

    @property
    def dtype(self) -> DType:
        """Type of the elements."""

    @property
    def shape(self) -> tuple:
        """Extents, in elements."""

    @property
    def strides(self) -> tuple:
        """Strides, in elements."""

    @property
    def data(self) -> int:
        """Address of the first element."""

    def bits(self) -> View:
        """The same memory as unsigned integers of the elements' size."""

    def __dlpack__(self, *, stream: object | None = None, max_version: object | None = None, dl_device: object | None = None, copy: object | None = None) -> object:
        """
        A DLPack capsule. Streams are not ordered: the work that fills the view is on the
        stream of its operation.
        """

    def __dlpack_device__(self) -> tuple:
        """DLPack's (device type, device id)."""

    @property
    def __array_interface__(self) -> dict:
        """numpy's interface; bf16 and fp8 as unsigned integers."""

    @property
    def __cuda_array_interface__(self) -> dict:
        """Numba's interface; bf16 and fp8 as unsigned integers."""

class Communicator:
    """Which rank, of how many; see tandem_ep."""

    @staticmethod
    def from_environment(timeout: float = 30.0) -> Communicator: ...

    @staticmethod
    def connect(name: str, rank: int, size: int, timeout: float = 30.0) -> Communicator: ...

    @staticmethod
    def from_all_gather(rank: int, size: int, all_gather: Callable, timeout: float = 30.0) -> Communicator: ...

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_gather(self, message: bytes) -> list: ...

    def barrier(self) -> None: ...

def run_threads(num_ranks: int, body: Callable, timeout: float = 30.0) -> None: ...

class BufferOptions:
    """See tandem_ep.Buffer."""

    def __init__(self) -> None: ...

    @property
    def backend(self) -> Backend: ...

    @backend.setter
    def backend(self, arg: Backend, /) -> None: ...

    @property
    def num_experts(self) -> int: ...

    @num_experts.setter
    def num_experts(self, arg: int, /) -> None: ...

    @property
    def max_tokens(self) -> int: ...

    @max_tokens.setter
    def max_tokens(self, arg: int, /) -> None: ...

    @property
    def max_hidden(self) -> int: ...

    @max_hidden.setter
    def max_hidden(self, arg: int, /) -> None: ...

    @property
    def max_topk(self) -> int: ...

    @max_topk.setter
    def max_topk(self, arg: int, /) -> None: ...

    @property
    def widest_format(self) -> Format: ...

    @widest_format.setter
    def widest_format(self, arg: Format, /) -> None: ...

    @property
    def expert_owners(self) -> list[int]: ...

    @expert_owners.setter
    def expert_owners(self, arg: Sequence[int], /) -> None: ...

    @property
    def packed_placement(self) -> bool: ...

    @packed_placement.setter
    def packed_placement(self, arg: bool, /) -> None: ...

    @property
    def slotted_placement(self) -> bool: ...

    @slotted_placement.setter
    def slotted_placement(self, arg: bool, /) -> None: ...

    @property
    def combine(self) -> bool: ...

    @combine.setter
    def combine(self, arg: bool, /) -> None: ...

    @property
    def padded_layout(self) -> bool: ...

    @padded_layout.setter
    def padded_layout(self, arg: bool, /) -> None: ...

    @property
    def capacity_rows(self) -> int: ...

    @capacity_rows.setter
    def capacity_rows(self, arg: int, /) -> None: ...

    @property
    def timeout(self) -> float: ...

    @timeout.setter
    def timeout(self, arg: float, /) -> None: ...

    @property
    def on_timeout(self) -> OnTimeout: ...

    @on_timeout.setter
    def on_timeout(self, arg: OnTimeout, /) -> None: ...

    @property
    def door(self) -> str: ...

    @door.setter
    def door(self, arg: str, /) -> None: ...

    @property
    def door_address(self) -> str: ...

    @door_address.setter
    def door_address(self, arg: str, /) -> None: ...

    @property
    def max_ranks(self) -> int: ...

    @max_ranks.setter
    def max_ranks(self, arg: int, /) -> None: ...

    @property
    def num_threads(self) -> int: ...

    @num_threads.setter
    def num_threads(self, arg: int, /) -> None: ...

    @property
    def device(self) -> int: ...

    @device.setter
    def device(self, arg: int, /) -> None: ...

    @property
    def num_sms(self) -> int: ...

    @num_sms.setter
    def num_sms(self, arg: int, /) -> None: ...

    @property
    def first_epoch(self) -> int: ...

    @first_epoch.setter
    def first_epoch(self, arg: int, /) -> None: ...

class DispatchOptions:
    """See tandem_ep.Buffer.dispatch."""

    def __init__(self) -> None: ...

    @property
    def format(self) -> Format: ...

    @format.setter
    def format(self, arg: Format, /) -> None: ...

    @property
    def placement(self) -> Placement: ...

    @placement.setter
    def placement(self, arg: Placement, /) -> None: ...

    @property
    def layout(self) -> Layout: ...

    @layout.setter
    def layout(self, arg: Layout, /) -> None: ...

    @property
    def row_alignment(self) -> int: ...

    @row_alignment.setter
    def row_alignment(self, arg: int, /) -> None: ...

    @property
    def max_tokens(self) -> int: ...

    @max_tokens.setter
    def max_tokens(self, arg: int, /) -> None: ...

    @property
    def return_hook(self) -> bool: ...

    @return_hook.setter
    def return_hook(self, arg: bool, /) -> None: ...

    @property
    def num_sms(self) -> int: ...

    @num_sms.setter
    def num_sms(self, arg: int, /) -> None: ...

class Hook:
    """Runs an operation's receive phase, once."""

    def __call__(self) -> None: ...

    def __bool__(self) -> bool: ...

class Dispatched:
    """What a dispatch gave; see tandem_ep."""

    @property
    def x(self) -> View | None: ...

    @property
    def scales(self) -> View | None: ...

    @property
    def counts(self) -> View | None: ...

    @property
    def offsets(self) -> View | None: ...

    @property
    def ranges(self) -> View | None: ...

    @property
    def source_tokens(self) -> View | None: ...

    @property
    def hook(self) -> Hook: ...

    def active(self) -> list[bool]: ...

class Buffer:
    """See tandem_ep.Buffer."""

    def __init__(self, communicator: Communicator, options: BufferOptions) -> None: ...

    @staticmethod
    def size_bytes(options: BufferOptions, num_ranks: int) -> int: ...

    def destroy(self) -> None: ...

    @property
    def is_destroyed(self) -> bool: ...

    @property
    def options(self) -> BufferOptions: ...

    @property
    def rank(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    @property
    def local_experts(self) -> list[int]: ...

    @property
    def capacity_rows(self) -> int: ...

    def dispatch(self, x: Input, topk_idx: Input, options: DispatchOptions, topk_weights: Input | None = None, recv_x: Input | None = None, recv_scales: Input | None = None, stream: int = 0) -> Dispatched: ...

    def next_combine_buffer(self, dispatched: Dispatched, dtype: DType) -> View: ...

    def combine(self, y: Input, topk_weights: Input | None, dispatched: Dispatched, out: Input, return_hook: bool = False, stream: int = 0, num_sms: int = 0) -> Hook: ...

    def check(self) -> None: ...

    @staticmethod
    def join(rank: int, options: BufferOptions) -> Buffer: ...

    @staticmethod
    def join_across_hosts(address: str, secret: str, rank: int, options: BufferOptions) -> Buffer: ...

    def mask(self, rank: int) -> None: ...

    def unmask(self, rank: int) -> None: ...

    def recover(self) -> list[bool]: ...

    def active(self) -> list[bool]: ...

    def waiting(self) -> list[int]: ...

    def last_loss(self) -> object | None: ...
