"""The Triton kernels of the operators, a file for each job; `triton.py` beside this folder calls
them.

A tile of a program is ROWS x BLOCK_D: some rows, and the power of two that holds their D columns.
Addresses of rows are numbers in device memory, so that one launch serves many tables (`groups.py`).
A kernel is compiled for each D, row format and rule.

Every product and sum is rounded on its own (no fused multiply-add), and divisions and roots are
those of IEEE, so that rows get the bits of the reference.
"""

MX = ("mxint8", "mxfp8", "mxfp6", "mxfp4")
CODECS = (
    "fp32",
    "fp16",
    "bf16",
    "split_bf16",
    "int8",
    "int4",
    *MX,
    *(f"{name}_floor" for name in MX),
)
"""The row formats that they know."""
