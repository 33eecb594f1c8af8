# The kernels of _scan.pyx, compiled for AVX-512 (x86-64-v4).
include "_scan.pyx"
