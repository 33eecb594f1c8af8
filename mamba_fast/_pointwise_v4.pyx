# The kernels of _pointwise.pyx, compiled for AVX-512 (x86-64-v4).
include "_pointwise.pyx"
