from collections.abc import Sequence
from typing import TypedDict

import numpy as np
import numpy.typing as npt

class Program:
    """Ops with their arguments, checked once and run many times.

    ``ops`` are (registry name, bytes of the argument struct); pointers in them must stay valid while the
    program runs. Raises ValueError for an unknown op, arguments of the wrong size, threads outside 1..1024,
    or an ISA level that this CPU lacks.
    """

    def __init__(self, ops: Sequence[tuple[str, bytes]], threads: int, isa: str) -> None: ...
    def run(self, begin: int = 0, end: int | None = None) -> None:
        """Run ops ``begin`` to ``end`` (exclusive) and return when they are done; the GIL is released.

        Runs of a process take turns. On the main thread Python's signals are looked at about every 50 ms, so
        that Ctrl-C raises KeyboardInterrupt after the op in progress. Raises IndexError for a range outside
        the program.
        """

    def __len__(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def isa(self) -> str: ...

class FpenvState(TypedDict):
    mxcsr: int
    rounding: str  # "nearest", "down", "up", "zero"
    flush_to_zero: bool
    denormals_are_zero: bool
    hostile_entries: int

class StructLayout(TypedDict):
    size: int
    members: dict[str, tuple[int, int]]

def isa_available() -> list[str]:
    """The levels that this CPU can run, lowest first: "scalar", "avx2", "avx512"."""

def use_vnni(enabled: bool | None = None) -> bool:
    """Whether the AVX-512 level multiplies bytes with VNNI: by default where the CPU has it.

    ``enabled`` changes it, for tests of the form that CPUs without VNNI take. Raises ValueError where the CPU
    has none.
    """

def default_threads() -> int:
    """CPUs in this process' affinity mask, at most the whole CPUs of its cgroup quota; at least 1."""

def fpenv_state() -> FpenvState:
    """The calling thread's MXCSR, and how many entries into native code found it set against the contract."""

def op_table() -> dict[str, StructLayout]:
    """Op name (and "Weight") to the size of its argument struct and each member's (offset, size) in bytes."""

def read_bandwidth(nbytes: int, threads: int) -> float:
    """GB/s of ``threads`` threads reading ``nbytes`` of memory together, the best of five passes."""

def exp_f64(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """exp in a fixed sequence of double operations: equal bits whatever the machine's math library."""

# ``form`` is an ISA level, or "scalar_fma": the scalar source with the fma instruction. All give equal bits.
def expf_ucrt(x: npt.NDArray[np.float32], form: str = ...) -> npt.NDArray[np.float32]: ...
def cosf_ucrt(x: npt.NDArray[np.float32], form: str = ...) -> npt.NDArray[np.float32]: ...
def sinf_ucrt(x: npt.NDArray[np.float32], form: str = ...) -> npt.NDArray[np.float32]: ...

class UcrtSweep(TypedDict):
    inputs: int
    different: int  # inputs where forms a and b differ
    first: int  # bits of the lowest such input
    nan_faults: int  # inputs where a breaks the NaN rule
    order_faults: int  # neighbouring inputs where a falls

def ucrt_sweep(
    function: str, a: str, b: str, step: int = 1, b_below: int = 0xFFFFFFFF, threads: int = 1
) -> UcrtSweep:
    """Compare two forms of "expf", "cosf" or "sinf" on every ``step``-th of the 2**32 float32 inputs.

    Where the magnitude's bits are ``b_below`` or more, form ``a`` is only evaluated and checked by itself.
    """
