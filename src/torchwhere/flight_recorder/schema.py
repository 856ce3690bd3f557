"""Names of collectives and dtypes: in dumps of the flight recorder, and in public."""

from __future__ import annotations

# The name of a collective in a dump: its public name. Names that are not listed are public.
PUBLIC_OPS = {
    "_all_gather_base": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "_broadcast_oop": "broadcast",
    "_reduce_oop": "reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "ALLGATHER_coalesced": "all_gather_into_tensor_coalesced",
    "REDUCE_SCATTER_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_v_single": "all_to_all_single",
    "all_reduce_barrier": "barrier",
    "recvAnySource": "recv",
}

# The reverse, only with names that every version of torchfrtrace knows: it fails on any other.
RECORDED_OPS = {
    "all_reduce": "all_reduce",
    "all_reduce_coalesced": "allreduce_coalesced",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "all_gather": "all_gather",
    "all_gather_coalesced": "all_gather_into_tensor_coalesced",
    "all_gather_into_tensor": "_all_gather_base",
    "all_gather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all": "all_to_all",
    "all_to_all_single": "all_to_all",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
    "monitored_barrier": "barrier",
}

# The two names of a dtype in PyTorch, and its size in bytes.
_DTYPES = (
    ("Bool", "bool", 1),
    ("Byte", "uint8", 1),
    ("Char", "int8", 1),
    ("Short", "int16", 2),
    ("UInt16", "uint16", 2),
    ("Int", "int32", 4),
    ("UInt32", "uint32", 4),
    ("Long", "int64", 8),
    ("UInt64", "uint64", 8),
    ("Half", "float16", 2),
    ("BFloat16", "bfloat16", 2),
    ("Float", "float32", 4),
    ("Double", "float64", 8),
    ("ComplexHalf", "complex32", 4),
    ("ComplexFloat", "complex64", 8),
    ("ComplexDouble", "complex128", 16),
    ("Float8_e4m3fn", "float8_e4m3fn", 1),
    ("Float8_e4m3fnuz", "float8_e4m3fnuz", 1),
    ("Float8_e5m2", "float8_e5m2", 1),
    ("Float8_e5m2fnuz", "float8_e5m2fnuz", 1),
    ("Float8_e8m0fnu", "float8_e8m0fnu", 1),
)
PUBLIC_DTYPES = {recorded: public for recorded, public, _ in _DTYPES}
RECORDED_DTYPES = {public: recorded for recorded, public, _ in _DTYPES}
DTYPE_BYTES = {public: size for _, public, size in _DTYPES}
