"""Every Triton kernel compiles for a Hopper GPU, though none is here.

The interpreter runs Python: it took a variable that was a number in one branch and a vector in the other, which the
compiler refuses.
"""

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

import cowbeam.kernels
from cowbeam.kernels import top_candidates_triton

HOPPER = GPUTarget("cuda", 90, 32)
# Where kernels are, by the names of their files.
MODULES = [
    importlib.import_module(f"cowbeam.kernels.{module.name}")
    for module in pkgutil.iter_modules(cowbeam.kernels.__path__)
    if module.name.endswith(("_triton", "_kernel", "_hopper"))
]
HALF = {"QUERY", "LOGITS", "KEYS", "VALUES", "OUT", "KEY", "VALUE", "KEY_CACHE", "VALUE_CACHE", "SINKS"}
SINGLE = {
    "PARTIAL_OUT", "PARTIAL_LSE", "MAXIMA", "SUMS", "PARTIAL_MAXIMA", "PARTIAL_SUMS", "RUNNING", "LOG_SUMS", "SCORES",
}  # fmt: skip
LONG = {
    "PARENTS", "TOKENS", "TOKEN_IDS", "POSITIONS", "SLOTS", "UPCOMING", "ROW_OF", "NEW_BLOCK", "COPY_SOURCES",
    "COPY_DESTINATIONS", "ROWS", "BEST_CHUNKS", "MERGED", "INDICES", "POINTERS", "SOURCES", "DESTINATIONS",
}  # fmt: skip

ATTENTION = dict(
    HEAD_DIM=128, HEAD_PAD=128, VALUE_DIM=128, VALUE_PAD=128, GROUP=4, HEADS=4, SPLITS=1, SLOTS=8, ENTRY_KEYS=16,
    TILE_KEYS=64, LINES=64, STAGES=3, SAME_OFFSETS=True, HAS_SOFTCAP=False, HAS_WINDOW=False, HAS_SINKS=False,
    UPCAST=False, MERGE_WAITS=True,
)  # fmt: skip
TEAM = dict(
    DIM=128, GROUP=4, HEADS=4, SPLITS=1, SLOTS=8, ENTRY_KEYS=16, TILE_KEYS=64, TEAMS=1, STAGES=6, HAS_WINDOW=False,
    HAS_SINKS=False,
)  # fmt: skip
PLAN = dict(ENTRY_KEYS=16, PARTS=1, PER_TILE=4, WINDOW_PAD=16, ROWS_PAD=64, CHUNK=64)
CONSTANTS: dict[str, list[dict[str, Any]]] = {
    "schedule_kernel": [
        dict(SLOTS=8, SLOTS_PAD=8, MIN_TILES=4, CHUNK=128, MASKED_COST=3, WINDOWS_PAD=pad) for pad in (0, 512)
    ],
    "attention_kernel": [
        ATTENTION,
        ATTENTION | dict(HAS_SOFTCAP=True, HAS_WINDOW=True, HAS_SINKS=True, SAME_OFFSETS=False),
        ATTENTION | dict(LINES=16, HEAD_DIM=80, MERGE_WAITS=False),
    ],
    "hopper_attention_kernel": [
        TEAM,
        TEAM | dict(TEAMS=2, STAGES=5),
        TEAM | dict(DIM=64, TEAMS=2, STAGES=10, ENTRY_KEYS=4, HAS_WINDOW=True, HAS_SINKS=True),
    ],
    "merge_kernel": [
        dict(GROUP=4, HEADS=4, SPLITS=1, SLOTS=8, VALUE_DIM=128, VALUE_PAD=128, LINES=64,
             HAS_SINKS=sinks, PARTIALS=16, WAITS=waits)
        for sinks, waits in ((False, False), (False, True), (True, True))
    ],
    "_write_kernel": [dict(BLOCK_SIZE=16, KV_HEADS=3, KV_HEADS_PAD=4, HEAD_DIM=80, VALUE_DIM=64, DIM_PAD=128)],
    "_copy_kernel": [dict(WORDS=2048, ALIGNED=aligned) for aligned in (False, True)],
    "advance_triton._rows_kernel": [dict(BLOCK_SIZE=16, ROWS_PAD=64, CHUNK=32)],
    "_tables_kernel": [dict(BLOCK_SIZE=16, COLUMNS=1024)],
    "plan_triton._rows_kernel": [PLAN | dict(HAS_WINDOW=window) for window in (False, True)],
    "_windows_kernel": [PLAN],
    "_tiles_kernel": [PLAN],
    "_entries_kernel": [PLAN],
    "partials_kernel": [dict(CHUNK=2048)],
    "_chunks_kernel": [dict(ROWS_PAD=16, CHUNKS_PAD=64, KEEP=32)],
    "_tokens_kernel": [dict(CHUNK=2048, KEEP=32)],
    "_merge_kernel": [dict(SIZE=1024, KEEP=32)],
    "_masses_kernel": [dict(CHUNK=1024, CHUNKS_PAD=128)],
    "_draw_kernel": [dict(CHUNK=1024, CHUNKS_PAD=128)],
    "_unpack_kernel": [dict(SIZE=1024, KEEP=32)],
}  # fmt: skip


def kernels() -> Iterator[Any]:
    for module in MODULES:
        for kernel in vars(module).values():
            if isinstance(kernel, triton.JITFunction) and kernel.fn.__module__ == module.__name__:
                short, long = kernel.fn.__name__, f"{module.__name__.rpartition('.')[2]}.{kernel.fn.__name__}"
                for number, constants in enumerate(CONSTANTS.get(long, CONSTANTS.get(short, []))):
                    yield pytest.param(kernel, constants, id=f"{long}-{number}")


def pointer(name: str, kernel: Any) -> str:
    if name in ("NUMBERS", "MASSES"):
        return "*fp64"
    is_sorted = name == "KEYS" and kernel.fn.__module__ == top_candidates_triton.__name__
    if name in HALF and not is_sorted:
        return "*bf16"
    if name in SINGLE:
        return "*fp32"
    return "*i64" if is_sorted or name in LONG else "*i32"


@pytest.mark.parametrize(("kernel", "constants"), list(kernels()))
def test_kernel_compiles_for_hopper(kernel: Any, constants: dict[str, Any]) -> None:
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = {
        name: "constexpr"
        if name in constants
        else pointer(name, kernel)
        if name.isupper()
        else "fp32"
        if name in ("scale", "cap")
        else "i32"
        for name in kernel.arg_names
    }
    if isinstance(kernel, GluonJITFunction):
        # As every launch finds them: tensors and strides are whole numbers of 16 bytes.
        aligned = {(at,): [["tt.divisibility", 16]] for at, kind in enumerate(signature.values()) if kind[0] in "*i"}
        source = GluonASTSource(kernel, signature, constants, aligned)
    else:
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=HOPPER, options={"num_warps": 4})
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= 227 * 1024


def test_no_kernel_is_forgotten() -> None:
    """A kernel without constants above would not be compiled; helpers without a program id are part of others."""
    compiled = {parameter.values[0].fn.__name__ for parameter in kernels()}
    for module in MODULES:
        for kernel in vars(module).values():
            if isinstance(kernel, triton.JITFunction) and kernel.fn.__module__ == module.__name__:
                name = kernel.fn.__name__
                assert not name.endswith("kernel") or name in compiled, f"{name} is not compiled here"
