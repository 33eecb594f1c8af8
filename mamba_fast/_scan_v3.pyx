# The kernels of _scan.pyx, compiled for AVX2 and FMA (x86-64-v3).
include "_scan.pyx"
