"""The Triton kernels compared with the reference, on a GPU or in Triton's interpreter.

compare_*.py    one comparison each, with its cases; on a GPU tests call `differences("cuda")`
interpreter.py  runs a comparison on a CPU, with a known mistake injected if it is named
mistakes/       the known mistakes of each comparison
compiling.py    compiles a kernel for a GPU that is not there
"""
