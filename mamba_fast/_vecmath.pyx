# cython: language_level=3, boundscheck=False, wraparound=False, freethreading_compatible=True
"""The functions of _vecmath.h applied to arrays, so that tests can measure what the kernels use."""

cdef extern from "_vecmath.h" nogil:
    float mf_exp(float)
    float mf_exp2m1(float)
    float mf_log1p_unit(float)
    float mf_softplus(float)
    float mf_sigmoid(float)
    float mf_silu(float)
    float mf_phi_prime_near_zero(float)


def exp(const float[::1] x, float[::1] out):
    """out = e^x"""
    cdef Py_ssize_t i
    for i in range(x.shape[0]):
        out[i] = mf_exp(x[i])


def exp2m1(const float[::1] x, float[::1] out):
    """out = 2^x - 1"""
    cdef Py_ssize_t i
    for i in range(x.shape[0]):
        out[i] = mf_exp2m1(x[i])


def log1p_unit(const float[::1] x, float[::1] out):
    """out = log(1 + x), 0 <= x <= 1"""
    cdef Py_ssize_t i
    for i in range(x.shape[0]):
        out[i] = mf_log1p_unit(x[i])


def softplus(const float[::1] x, float[::1] out):
    """out = log(1 + e^x)"""
    cdef Py_ssize_t i
    for i in range(x.shape[0]):
        out[i] = mf_softplus(x[i])


def sigmoid(const float[::1] x, float[::1] out):
    """out = 1 / (1 + e^-x)"""
    cdef Py_ssize_t i
    for i in range(x.shape[0]):
        out[i] = mf_sigmoid(x[i])


def silu(const float[::1] x, float[::1] out):
    """out = x / (1 + e^-x)"""
    cdef Py_ssize_t i
    for i in range(x.shape[0]):
        out[i] = mf_silu(x[i])


def phi_prime_near_zero(const float[::1] x, float[::1] out):
    """out = phi'(x), |x| <= 0.3475"""
    cdef Py_ssize_t i
    for i in range(x.shape[0]):
        out[i] = mf_phi_prime_near_zero(x[i])
