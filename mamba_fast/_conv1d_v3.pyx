# The kernels of _conv1d.pyx, compiled for AVX2 and FMA (x86-64-v3).
include "_conv1d.pyx"
