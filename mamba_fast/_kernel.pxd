# What the kernels share: vector mathematics, pointers that promise not to alias, and the inner loops
# that several of them use. Everything is inline, so there is no module behind this file.

cdef extern from "_vecmath.h" nogil:
    # Pointers that do not alias any other: a loop over them needs no run-time overlap check.
    ctypedef float *mf_out
    ctypedef const float *mf_in
    float mf_exp(float) noexcept
    float mf_sigmoid(float) noexcept
    float mf_silu(float) noexcept


cdef enum:
    # Elements that one elementwise task handles: large enough to hide the cost of taking a task,
    # small enough to balance. Task boundaries depend on it and on shapes alone, never on threads.
    BLOCK = 16384
    # Independent partial sums of a reduction: they let it vectorise without reordering by the
    # compiler, and are combined in one fixed order.
    LANES = 8


cdef inline Py_ssize_t tasks_of(Py_ssize_t total, Py_ssize_t each) noexcept nogil:
    return (total + each - 1) // each


cdef inline double fold(const double *lane) noexcept nogil:
    """The sum of LANES values as a balanced tree."""
    cdef double t[LANES]
    cdef int j, half = LANES // 2
    for j in range(LANES):
        t[j] = lane[j]
    while half > 0:
        for j in range(half):
            t[j] += t[j + half]
        half = half // 2
    return t[0]


cdef inline double sum_run(mf_in x, Py_ssize_t n) noexcept nogil:
    """The sum of n contiguous elements in double precision."""
    cdef double lane[LANES]
    cdef Py_ssize_t i, whole = n - n % LANES
    cdef int j
    for j in range(LANES):
        lane[j] = 0.0
    i = 0
    while i < whole:
        for j in range(LANES):
            lane[j] += <double> x[i + j]
        i += LANES
    for i in range(whole, n):
        lane[i - whole] += <double> x[i]
    return fold(lane)


cdef inline double dot_run(mf_in x, mf_in y, Py_ssize_t n) noexcept nogil:
    """The scalar product of two contiguous runs in double precision."""
    cdef double lane[LANES]
    cdef Py_ssize_t i, whole = n - n % LANES
    cdef int j
    for j in range(LANES):
        lane[j] = 0.0
    i = 0
    while i < whole:
        for j in range(LANES):
            lane[j] += <double> x[i + j] * <double> y[i + j]
        i += LANES
    for i in range(whole, n):
        lane[i - whole] += <double> x[i] * <double> y[i]
    return fold(lane)


cdef inline void add_run(mf_out acc, mf_in x, Py_ssize_t n) noexcept nogil:
    """acc += x, both contiguous."""
    cdef Py_ssize_t i
    for i in range(n):
        acc[i] += x[i]


cdef inline void flush_run(double *total, mf_out acc, Py_ssize_t n) noexcept nogil:
    """Move float32 sums to the float64 ones."""
    cdef Py_ssize_t i
    for i in range(n):
        total[i] += <double> acc[i]
        acc[i] = 0.0
