# The kernels of _conv1d.pyx, compiled for AVX-512 (x86-64-v4).
include "_conv1d.pyx"
