# The kernels of _optim.pyx, compiled for AVX2 and FMA (x86-64-v3).
include "_optim.pyx"
