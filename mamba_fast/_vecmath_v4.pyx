# The functions of _vecmath.pyx, compiled for AVX-512 (x86-64-v4).
include "_vecmath.pyx"
