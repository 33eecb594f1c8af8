# The functions of _vecmath.pyx, compiled for AVX2 and FMA (x86-64-v3).
include "_vecmath.pyx"
