# The kernels of _optim.pyx, compiled for AVX-512 (x86-64-v4).
include "_optim.pyx"
