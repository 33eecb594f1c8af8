# The kernels of _pointwise.pyx, compiled for AVX2 and FMA (x86-64-v3).
include "_pointwise.pyx"
